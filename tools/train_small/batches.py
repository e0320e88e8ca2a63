"""Training batches of the language models: sentences as latents on the device, laid out as the official model does.

A row is [103 reference 104] (control)text 101 audio 102, each latent patch in one position. Every batch of a kind has
the same shapes, so that its step can be a CUDA graph.
"""

from dataclasses import dataclass

import numpy as np
import torch

from train_small.corpus import Corpus
from train_small.official import AudioVAE
from train_small.tokenizer import AUDIO_END, AUDIO_START, REFERENCE_END, REFERENCE_START, tokens
from train_small.trainer import Batch

PATCH = 2560
"""Samples at 16 kHz of one patch: 4 latent frames."""
FRAMES, CHANNELS = 4, 64
SHORT_PATCHES, LONG_PATCHES, PAIR_PATCHES, REFERENCE_PATCHES = 18, 30, 36, 20
SHORT_TEXT, LONG_TEXT, PAIR_TEXT = 46, 80, 92
"""Most tokens."""
_JOINTS = [" ", " ", "", ". "]
"""What stands between a prompt's words and those that follow."""
_CONTROL_SHARE, _WRITTEN_SHARE = 0.6, 0.3
_ENCODED_AT_ONCE = 96


@dataclass(frozen=True)
class Layout:
    """A kind of batch.

    Args:
        rows: of a batch.
        patches, text: most patches and text tokens of a row.
        reference: most patches of the reference; 0 is none.
        controlled: some rows name their voice as control; not those with a reference or a prompt.
        pairs: rows continue a prompt; otherwise they are sentences, `long` ones or short ones.
    """

    rows: int
    patches: int
    text: int
    reference: int = 0
    controlled: bool = True
    pairs: bool = False
    long: bool = False

    @property
    def has_control(self) -> bool:
        return self.controlled and not self.reference and not self.pairs

    @property
    def positions(self) -> int:
        markers = 2 + (2 if self.reference else 0)
        control = len(tokens("(slt)")) if self.has_control else 1
        return self.reference + control + self.text + self.patches + markers


@dataclass
class _Rows:
    """Texts with their audio: token table, token counts, latents, patch counts, first patches to learn, voices."""

    body: torch.Tensor
    body_length: torch.Tensor
    latents: torch.Tensor
    patches: torch.Tensor
    start: torch.Tensor
    voice: torch.Tensor


class Encoded:
    """A corpus, encoded once and kept on the device.

    Args:
        corpus: sentences that are too long are left out.
        voices: their names; a control text is a voice's name.
        pairs: number of continuations to make: two sentences of one voice, the second to be learned.
        max_patches: the longest sentence.
    """

    def __init__(
        self, corpus: Corpus, vae: AudioVAE, voices: list[str], pairs: int, device: torch.device, seed: int
    ) -> None:
        self._device, self._vae = device, vae
        self._audio = torch.from_numpy(corpus.audio).to(device)
        lengths, rng = np.diff(corpus.offsets), np.random.RandomState(seed)
        fits = [
            index
            for index, (text, _) in enumerate(corpus.items)
            if lengths[index] <= LONG_PATCHES * PATCH and len(tokens(text)) <= LONG_TEXT - 2
        ]
        texts, voice = [corpus.items[i][0] for i in fits], np.array([voices.index(corpus.items[i][1]) for i in fits])
        pieces = [(int(corpus.offsets[i]), int(lengths[i])) for i in fits]
        patches = np.array([-(-length // PATCH) for _, length in pieces])
        latents = self._encode([(0, [piece]) for piece in pieces], LONG_PATCHES)
        # Row u + N is sentence u with a capital and a full stop.
        written = [text[0].upper() + text[1:] + "." for text in texts]
        self._sentences = self._rows(texts + written, latents, patches, np.zeros(len(fits), int), voice)
        self._by_voice = [torch.from_numpy(np.flatnonzero(voice == v)).to(device) for v in range(len(voices))]
        is_long = np.logical_or(patches > SHORT_PATCHES, [len(tokens(text)) > SHORT_TEXT - 2 for text in texts])
        self._pools = {long: torch.from_numpy(np.flatnonzero(is_long == long)).to(device) for long in (False, True)}
        self._pairs = self._make_pairs(texts, pieces, voice, pairs, rng) if pairs else None
        self._controls = torch.tensor([tokens(f"({name})") for name in voices], device=device)
        del self._audio, self._vae

    def batch(self, layout: Layout) -> Batch:
        """tokens, text_mask [B, T]; audio_at, audio_mask [B, R + A] (positions of patches, 1 where there is one);
        latents [B, R + A, 4, 64]; learned, stops [B, A]."""
        device, B, T, A = self._device, layout.rows, layout.positions, layout.patches
        rows = self._pairs if layout.pairs else self._sentences
        pool = torch.arange(len(rows.patches), device=device) if layout.pairs else self._pools[layout.long]
        if not len(pool):
            raise ValueError("the corpus has no sentence of a kind that is trained: short ones and long ones")
        chosen = pool[torch.randint(0, len(pool), (B,), device=device)]
        form = chosen
        if not layout.pairs:
            form = chosen + len(rows.patches) * (torch.rand(B, device=device) < _WRITTEN_SHARE)
        body, body_length = rows.body[form], rows.body_length[form]
        patches, start, voice = rows.patches[chosen], rows.start[chosen], rows.voice[chosen]
        latents = rows.latents[chosen, :A].float()
        controlled = torch.rand(B, device=device) < (_CONTROL_SHARE if layout.has_control else 0.0)
        references = torch.zeros_like(chosen)
        if layout.reference:
            other = torch.stack([own[torch.randint(0, len(own), (B,), device=device)] for own in self._by_voice])
            other = other[voice, torch.arange(B, device=device)]
            shortest = 6 + torch.randint(0, layout.reference, (B,), device=device)
            references = torch.minimum(self._sentences.patches[other], shortest).clamp(max=layout.reference)
            reference_latents = self._sentences.latents[other, : layout.reference].float()

        place = torch.arange(T, device=device)[None]
        text_at = torch.where(references > 0, references + 2, 0)
        body_at = text_at + torch.where(controlled, self._controls.shape[1], 1)
        audio_at = body_at + body_length + 1
        spoken = {
            "reference_start": (references > 0)[:, None] & (place == 0),
            "reference_end": (references > 0)[:, None] & (place == references[:, None] + 1),
            "control": (place >= text_at[:, None]) & (place < body_at[:, None]),
            "body": (place >= body_at[:, None]) & (place < audio_at[:, None] - 1),
            "audio_start": place == audio_at[:, None] - 1,
            "audio_end": place == (audio_at + patches)[:, None],
        }
        # A text without a control begins with the first token of a control's table, the space.
        control = self._controls[voice].gather(1, (place - text_at[:, None]).clamp(0, self._controls.shape[1] - 1))
        ids = {
            "reference_start": REFERENCE_START,
            "reference_end": REFERENCE_END,
            "control": control,
            "body": body.gather(1, (place - body_at[:, None]).clamp(0, body.shape[1] - 1)),
            "audio_start": AUDIO_START,
            "audio_end": AUDIO_END,
        }
        table = torch.zeros(B, T, dtype=torch.long, device=device)
        for name, where in spoken.items():
            table = torch.where(where, ids[name], table)

        number = torch.arange(A, device=device)[None]
        present = number < patches[:, None]
        at = torch.where(present, audio_at[:, None] + number, T - 1)
        mask = present.float()
        learned = (present & (number >= start[:, None])).float()
        if layout.reference:
            number_r = torch.arange(layout.reference, device=device)[None]
            present_r = number_r < references[:, None]
            at = torch.cat([torch.where(present_r, 1 + number_r, T - 1), at], 1)
            mask = torch.cat([present_r.float(), mask], 1)
            latents = torch.cat([reference_latents, latents], 1)
        return {
            "tokens": table,
            "text_mask": torch.stack(list(spoken.values())).any(0).float(),
            "audio_at": at,
            "audio_mask": mask,
            "latents": latents * mask[..., None, None],
            "learned": learned,
            "stops": (number == (patches - 1)[:, None]).long(),
        }

    def _make_pairs(self, texts, pieces, voice, count: int, rng: np.random.RandomState) -> _Rows:
        by_voice = [np.flatnonzero(voice == v) for v in range(voice.max() + 1)]
        segments, bodies, start, patches, whose = [], [], [], [], []
        while len(segments) < count:
            v = rng.randint(len(by_voice))
            first, second = rng.choice(by_voice[v], 2)
            lengths = pieces[first][1], pieces[second][1]
            padding = -lengths[0] % PATCH  # a prompt is padded on the left
            total = -(-(padding + sum(lengths)) // PATCH)
            text = texts[first] + _JOINTS[rng.randint(len(_JOINTS))] + texts[second]
            if total > PAIR_PATCHES or len(tokens(text)) > PAIR_TEXT:
                continue
            segments.append((padding, [pieces[first], pieces[second]]))
            bodies.append(text)
            start.append((padding + lengths[0]) // PATCH)
            patches.append(total)
            whose.append(v)
        return self._rows(bodies, self._encode(segments, PAIR_PATCHES), *map(np.array, (patches, start, whose)))

    def _rows(self, texts: list[str], latents: torch.Tensor, patches, start, voice) -> _Rows:
        bodies = [tokens(text)[1:] for text in texts]
        body = torch.zeros(len(bodies), max(map(len, bodies)), dtype=torch.long)
        for row, ids in enumerate(bodies):
            body[row, : len(ids)] = torch.tensor(ids)
        numbers = [torch.as_tensor(x, device=self._device) for x in (patches, start, voice)]
        return _Rows(
            body.to(self._device), torch.tensor([len(b) for b in bodies], device=self._device), latents, *numbers
        )

    @torch.no_grad()
    def _encode(self, segments: list[tuple[int, list[tuple[int, int]]]], patches: int) -> torch.Tensor:
        """Latents of segments, float16 [n, patches, 4, 64].

        Args:
            segments: samples of silence, then pieces (begin, length) of the audio.
        """
        latents = torch.zeros(len(segments), patches, FRAMES, CHANNELS, dtype=torch.float16, device=self._device)
        ends = [-(-(place + sum(length for _, length in pieces)) // PATCH) for place, pieces in segments]
        order = np.argsort(ends, kind="stable")
        at_once = _ENCODED_AT_ONCE if self._device.type == "cuda" else 1
        for first in range(0, len(order), at_once):
            group = order[first : first + at_once]
            longest = ends[group[-1]]
            audio = torch.zeros(len(group), 1, longest * PATCH, device=self._device)
            for row, index in enumerate(group):
                place, pieces = segments[index]
                for begin, length in pieces:
                    audio[row, 0, place : place + length] = self._audio[begin : begin + length].float() / 32768
                    place += length
            # The encoder is causal: what follows a segment changes nothing in it.
            frames = self._vae.encode(audio, 16000).unflatten(-1, (longest, FRAMES)).permute(0, 2, 3, 1)
            beyond = torch.arange(longest)[None] >= torch.tensor([ends[index] for index in group])[:, None]
            frames = frames.masked_fill(beyond.to(self._device)[..., None, None], 0)
            latents[torch.from_numpy(group).to(self._device), :longest] = frames.half()
        return latents
