"""A request as the engine runs it: its tokens, its limits, how far it has come."""

import hashlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from dq_engine.errors import RequestError, invalid
from dq_engine.lora.lease import Lease
from dq_engine.request import Request
from dq_engine.stream import Stream

# The tokens that VoxCPM2 puts around audio (fixed by the trained model, in no tokenizer's vocabulary).
AUDIO_START, REFERENCE_START, REFERENCE_END = 101, 103, 104
# The official guard on length: 6 patches for each token of the target text, and 10.
GUARD_PATCHES_PER_TOKEN, GUARD_PATCHES = 6, 10
MAX_PATCHES = 2000
DEFAULT_MIN_LENGTH = 2
FOR_VOXCPM2 = "is for VoxCPM2; this model, a VoxCPM 0.5B or 1.5, has the voice of a prompt only"
# The official decoder of a continuation starts from the last patches of the prompt (of the reference too, if shorter).
CONTEXT_PATCHES, CONTEXT_PATCHES_OF_FIRST_GENERATION = 3, 2


@dataclass(frozen=True)
class StoredPrompt:
    """The prompt of a stored voice.

    Args:
        key: of the latents and the adapter: LocEnc's outputs are the same for equal keys.
        first, last: its patches are `Sequence.patches[first:last]`.
    """

    key: bytes
    first: int
    last: int


@dataclass(eq=False)
class Sequence:
    """One stream of the engine.

    Args:
        stream: where its audio goes.
        token_ids: int64 [n], the prompt; 0 where a patch stands.
        patches: float32 [a, patch_size, feat_dim], the prompt's patches.
        patch_rows: int64 [a], where in `token_ids` they stand, ascending.
        keys: of each full block of the prompt, what it and all before it hold (see `block_keys`).
        min_length: a stop is obeyed after patch i (from 0) if i > min_length.
        max_patches: most patches to generate.
        context_patches: of the prompt, those that the decoder has to have seen.
        adapter: the hold on the adapter that it uses.
        stored_prompt: the prompt, if a stored voice is used.
    """

    stream: Stream
    token_ids: np.ndarray
    patches: np.ndarray
    patch_rows: np.ndarray
    keys: list[bytes]
    seed: int
    cfg_value: float
    temperature: float
    min_length: int
    max_patches: int
    return_latents: bool
    context_patches: int = CONTEXT_PATCHES
    adapter: Lease | None = None
    stored_prompt: StoredPrompt | None = None
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    kept_tokens: int = 0
    """Tokens of the prompt, from its first, that belong to a stored voice."""
    cached_tokens: int = 0
    """Tokens of the prompt that did not have to be computed, at the first admission."""
    prefilled: int = 0
    launched: int = 0
    """Patches whose generation has been launched on the device."""
    generated: int = 0
    """Patches that have been generated and kept."""
    latents: list[np.ndarray] = field(default_factory=list)
    """float32 [patch_size, feat_dim] each, the patches that have been generated and kept."""
    vae_state: torch.Tensor | None = None
    """Of a preempted stream, its decoder's state."""
    admitted: float = 0.0
    first_patch_at: float = 0.0
    """When its first patch had been made, by time.monotonic()."""
    ended: bool = False

    @property
    def arrival(self) -> float:
        """When the request was submitted, by time.monotonic()."""
        return self.stream.created

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_length

    @property
    def adapter_slot(self) -> int:
        """Of its adapter on the device; -1 for none."""
        return -1 if self.adapter is None else self.adapter.slot

    @property
    def prompt_length(self) -> int:
        """Tokens to take in before the next patch can be generated."""
        return len(self.token_ids)

    @property
    def cache_length(self) -> int:
        """Tokens in the KV cache once everything launched so far has run: the last patch is not fed back."""
        return self.prefilled if self.prefilled < self.prompt_length else self.prompt_tokens + self.launched - 1

    @property
    def last_patch(self) -> np.ndarray | None:
        """float32 [patch_size, feat_dim], if the tokens end with a patch: a prompt's, or one that was generated."""
        ends_with_patch = len(self.patch_rows) and self.patch_rows[-1] == self.prompt_length - 1
        return self.patches[-1] if ends_with_patch else None

    @property
    def vae_context(self) -> np.ndarray | None:
        """float32 [patches, patch_size, feat_dim], what the decoder has to have seen before a continuation begins."""
        if self.last_patch is None:
            return None
        return self.patches[-self.context_patches :]

    def rewind(self, block_size: int, vae_state: torch.Tensor) -> None:
        """Prepare to be taken in again after a preemption: what was generated becomes part of the tokens.

        All launched patches must have been collected. Generated patches get opaque keys: nobody else can mean them.
        """
        new = self.latents[len(self.token_ids) - self.prompt_tokens :]
        start = self.prompt_length
        self.token_ids = np.concatenate([self.token_ids, np.zeros(len(new), np.int64)])
        self.patches = np.concatenate([self.patches, *(latents[None] for latents in new)])
        self.patch_rows = np.concatenate([self.patch_rows, np.arange(start, start + len(new))])
        opaque = [f"generated {self.stream.id} {index}".encode() for index in range(self.generated)]
        contents = token_contents(self.token_ids, self.patches, self.patch_rows)
        contents[self.prompt_tokens :] = opaque
        self.keys = block_keys(contents, block_size, _adapter_key(self.adapter))
        self.prefilled = 0
        self.vae_state = vae_state if self.generated else None


def token_contents(token_ids: np.ndarray, patches: np.ndarray, patch_rows: np.ndarray) -> list[bytes]:
    """What each token is: its id, or the bytes of its latents."""
    contents = [b"%d" % token for token in token_ids]
    for row, patch in zip(patch_rows, patches, strict=True):
        contents[row] = patch.tobytes()
    return contents


def _adapter_key(adapter: Lease | None) -> bytes:
    return b"" if adapter is None else adapter.adapter.key


def block_keys(contents: list[bytes], block_size: int, adapter: bytes = b"") -> list[bytes]:
    """A key for each full block: a digest of the adapter and of all tokens up to the block's end."""
    keys, key = [], b"adapter " + adapter
    for start in range(0, len(contents) - block_size + 1, block_size):
        block = b"".join(b"%d:%b" % (len(content), content) for content in contents[start : start + block_size])
        key = hashlib.blake2b(key + block, digest_size=16).digest()
        keys.append(key)
    return keys


class PromptBuilder:
    """Makes sequences out of requests whose recordings are encoded.

    Args:
        tokenizer: text -> token ids.
        patch_size: latent frames of a patch.
        feat_dim: channels of a frame.
        max_model_len: most tokens and patches of one stream.
        block_size: tokens of a KV block.
        vocab_size: token ids are below it.
        first_generation: of VoxCPM 0.5B or 1.5, which know neither references nor descriptions.
    """

    def __init__(
        self,
        tokenizer: Callable[[str], list[int]],
        patch_size: int,
        feat_dim: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        first_generation: bool = False,
    ) -> None:
        self._first_generation = first_generation
        self.patch_size, self.feat_dim, self.max_model_len = patch_size, feat_dim, max_model_len
        self.block_size, self.vocab_size = block_size, vocab_size
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # a tokenizer of the tokenizers library must not be used by two threads at once

    def tokenize(self, text: str) -> list[int]:
        with self._lock:
            return self._tokenizer(text)

    def check(self, request: Request) -> None:
        """Refuse what the model does not know.

        Raises:
            RequestError: INVALID_ARG, naming the field.
        """
        if not self._first_generation:
            return
        for name in ("control", "reference_audio", "reference_latents"):
            if getattr(request, name) is not None:
                raise invalid(name, FOR_VOXCPM2)

    def build(self, request: Request, stream: Stream, seed: int, adapter: Lease | None = None) -> Sequence:
        """Lay the request's tokens out: [reference] text [prompt].

        Args:
            adapter: the stream's hold on the adapter that the request names.

        Raises:
            RequestError: INVALID_ARG, the request does not fit max_model_len.
        """
        text = request.text if request.control is None else f"({request.control.strip()}){request.text}"
        text = re.sub(r"\s+", " ", text)
        ids = self.tokenize(text)
        target_tokens = len(ids)
        if request.prompt_text is not None:
            ids = self.tokenize(request.prompt_text + text)
        ids = [*ids, AUDIO_START]
        shape = (-1, self.patch_size, self.feat_dim)
        patches, rows, kept_tokens, stored_prompt = [np.zeros((0, *shape[1:]), np.float32)], [], 0, None
        if request.reference_latents is not None:
            reference = request.reference_latents.reshape(shape)
            ids = [REFERENCE_START, *[0] * len(reference), REFERENCE_END, *ids]
            patches.append(reference)
            kept_tokens = len(reference) + 2 if request.voice is not None else 0
            rows += range(1, len(reference) + 1)
        if request.prompt_latents is not None:
            prompt = request.prompt_latents.reshape(shape)
            rows += range(len(ids), len(ids) + len(prompt))
            ids += [0] * len(prompt)
            patches.append(prompt)
            if request.voice is not None:
                key = hashlib.blake2b(_adapter_key(adapter) + b" " + prompt.tobytes(), digest_size=16).digest()
                stored_prompt = StoredPrompt(key, len(rows) - len(prompt), len(rows))
        room = self.max_model_len - len(ids)
        low, high = request.min_generate_length, request.max_generate_length
        if room < max(1, low or 1):
            needed = f" and min_generate_length {low}" if low else ""
            raise invalid("text", f"the prompt has {len(ids)} tokens{needed}, max_model_len is {self.max_model_len}")
        if high is None:
            high = min(GUARD_PATCHES_PER_TOKEN * target_tokens + GUARD_PATCHES, MAX_PATCHES, room)
            high = max(high, low or 0)
        elif high > room:
            raise invalid(
                "max_generate_length",
                f"{high} and the prompt's {len(ids)} tokens exceed max_model_len ({self.max_model_len})",
            )
        if max(ids) >= self.vocab_size:  # would be read beyond the embedding's end, and take the whole step down
            raise RequestError("INTERNAL", f"the tokenizer gives the id {max(ids)}, the model has {self.vocab_size}")
        token_ids, patches, patch_rows = np.array(ids, np.int64), np.concatenate(patches), np.array(rows, np.int64)
        return Sequence(
            stream=stream,
            token_ids=token_ids,
            patches=patches,
            patch_rows=patch_rows,
            keys=block_keys(token_contents(token_ids, patches, patch_rows), self.block_size, _adapter_key(adapter)),
            seed=seed,
            cfg_value=request.cfg_value,
            temperature=request.temperature,
            min_length=DEFAULT_MIN_LENGTH if low is None else low,
            max_patches=high,
            return_latents=request.return_latents,
            kept_tokens=kept_tokens,
            context_patches=CONTEXT_PATCHES_OF_FIRST_GENERATION if self._first_generation else CONTEXT_PATCHES,
            adapter=adapter,
            stored_prompt=stored_prompt,
        )
