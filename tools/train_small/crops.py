"""What the AudioVAE is trained on: pieces of a corpus's audio, from where sentences begin and from anywhere."""

import time
from pathlib import Path

import torch

from train_small.audio_losses import HALF_FILTER, RATIO
from train_small.corpus import load_corpus
from train_small.trainer import Batch

FRAME = 640
"""Samples at 16 kHz of one latent frame."""
MARGIN = HALF_FILTER // RATIO * 2
"""Samples at 16 kHz on either side of a crop that resampling needs."""
LEAD = 8
"""Frames before a crop that begins anywhere, which are decoded but not judged: only a stream's beginning has nothing
before it, and what the decoder makes of nothing is to be its silence."""
_RELOAD_S = 30.0


class Crops:
    """Random crops of a corpus that may still be growing.

    Args:
        folder: of the corpus.
        batch: crops in a batch.
        frames: latent frames in a crop, those before it aside.
        device: where they are.
    """

    def __init__(self, folder: Path, batch: int, frames: int, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._batch, self._frames = batch, frames
        self._complete, self._looked = False, 0.0
        self._reload()

    def begins(self) -> Batch:
        """Crops from where a sentence begins; audio: [B, 1, crop and the margins on both sides], 1 is full scale."""
        self._look_again()
        sentence = torch.randint(0, len(self._begins), (self._batch,), device=self._device)
        return self._cut(self._begins[sentence] - MARGIN, 0)

    def middles(self) -> Batch:
        """Crops from anywhere, of one shape: audio as above, with LEAD frames more before the crop."""
        self._look_again()
        begin = torch.randint(0, len(self._audio), (self._batch,), device=self._device)
        return self._cut(begin, LEAD)

    def _cut(self, begin: torch.Tensor, lead: int) -> Batch:
        length = (lead + self._frames) * FRAME + 2 * MARGIN
        begin = begin.clamp(0, len(self._audio) - length)
        index = begin[:, None] + torch.arange(length, device=self._device)
        return {"audio": self._audio[index].float()[:, None] / 32768}

    def _look_again(self) -> None:
        if not self._complete and time.monotonic() - self._looked > _RELOAD_S:
            self._reload()

    def _reload(self) -> None:
        longest = (LEAD + self._frames) * FRAME + 2 * MARGIN
        while True:
            corpus, self._complete = load_corpus(self._folder)
            self._looked = time.monotonic()
            if len(corpus.audio) > longest:
                break
            if self._complete:
                raise ValueError(f"{self._folder} has less audio than one crop")
            time.sleep(1)
        self._audio = torch.from_numpy(corpus.audio).to(self._device)
        self._begins = torch.from_numpy(corpus.offsets[:-1]).to(self._device)
