"""Recordings to latents, several at a time."""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from dq_engine.nano import AudioVAEV2


class VaeEncoder:
    """The AudioVAE's encoder.

    Args:
        vae: its weights, in float32.
        patch_size: latent frames of a patch.
    """

    def __init__(self, vae: AudioVAEV2, patch_size: int) -> None:
        self.vae = vae
        self.sample_rate = vae.sample_rate
        self.patch_samples = patch_size * vae.encoder_chunk_size
        self.device = next(vae.parameters()).device
        # On the engine's own stream its steps would wait until a whole batch of recordings has been encoded.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @torch.inference_mode()
    def encode(self, recordings: Sequence[np.ndarray], pad_left: Sequence[bool]) -> list[np.ndarray]:
        """Encode a batch.

        Args:
            recordings: float32 [n] each, mono, at `sample_rate`.
            pad_left: for each, where silence fills its last patch up: at the left for a prompt, whose end is continued,
                at the right for a reference. The official model does the same.

        Returns:
            For each, float32 [frames, feat_dim], frames a multiple of the patch size.
        """
        with torch.cuda.stream(self._stream):  # nothing on a CPU
            return self._encode(recordings, pad_left)

    def _encode(self, recordings: Sequence[np.ndarray], pad_left: Sequence[bool]) -> list[np.ndarray]:
        padded = []
        for samples, left in zip(recordings, pad_left, strict=True):
            wave = torch.from_numpy(samples).to(self.device)
            missing = -len(wave) % self.patch_samples
            padded.append(pad(wave, (missing, 0) if left else (0, missing)))
        # The encoder is causal: what fills the shorter recordings up at the end does not reach their own frames.
        longest = max(len(wave) for wave in padded)
        batch = torch.stack([pad(wave, (0, longest - len(wave))) for wave in padded])
        latents = self.vae.encode(batch, self.sample_rate).transpose(1, 2).float().cpu().numpy()
        frames = [len(wave) // self.vae.encoder_chunk_size for wave in padded]
        return [np.ascontiguousarray(latents[row, :count]) for row, count in enumerate(frames)]
