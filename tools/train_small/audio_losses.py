"""What the AudioVAE is trained towards: the spectrum at several resolutions, its phases, and the waveform."""

import math

import torch
from torch import nn
from torch.nn.functional import conv1d, conv_transpose1d, pad

RATIO = 3
"""The decoder's rate, 48 kHz, over the recordings', 16 kHz."""
HALF_FILTER = 96
"""Samples at 48 kHz on either side that resampling looks at."""
_WINDOWS_AND_MELS = [(2048, 128), (1024, 96), (512, 64), (256, 32), (128, 16)]
_PHASE_WINDOWS = (1024, 512)
_HIGHEST_MEL_HZ = 12000.0
_WEIGHTS = {"mel": 1.0, "linear": 0.3, "complex": 0.2, "wave": 0.2}


def low_pass(device: torch.device) -> torch.Tensor:
    """A windowed sinc at 48 kHz that cuts at 7.6 kHz, [1, 1, 2 * HALF_FILTER + 1], of sum 1."""
    n = torch.arange(-HALF_FILTER, HALF_FILTER + 1, device=device, dtype=torch.float64)
    window = torch.special.i0(9 * torch.sqrt(1 - (n / (HALF_FILTER + 1)) ** 2))
    taps = torch.special.sinc(2 * 7600 / 48000 * n) * window
    return (taps / taps.sum()).float()[None, None]


def upsample(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """16 kHz [B, 1, n] to 48 kHz [B, 1, 3 n], aligned."""
    y = conv_transpose1d(x, RATIO * taps, stride=RATIO)
    return y[..., HALF_FILTER : HALF_FILTER + RATIO * x.shape[-1]]


def downsample(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """48 kHz [B, 1, 3 n] to 16 kHz [B, 1, n], aligned."""
    return conv1d(pad(x, (HALF_FILTER, HALF_FILTER)), taps, stride=RATIO)


def mel_filters(window: int, count: int, rate: int = 48000) -> torch.Tensor:
    """Triangular filters of sum 1, [count, window // 2 + 1]."""
    hz = torch.linspace(0, rate / 2, window // 2 + 1)
    highest = 2595 * math.log10(1 + _HIGHEST_MEL_HZ / 700)
    edges = 700 * (10 ** (torch.linspace(0, highest, count + 2) / 2595) - 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    filters = torch.minimum((hz - low) / (middle - low), (high - hz) / (high - middle)).clamp(min=0)
    for row in torch.nonzero(filters.sum(1) == 0)[:, 0]:
        filters[row, (hz - middle[row]).abs().argmin()] = 1  # narrower than a bin
    return filters / filters.sum(1, keepdim=True)


class ReconstructionLoss(nn.Module):
    """The distance of 48 kHz audio from what it should be, both [B, 1, n]."""

    def __init__(self) -> None:
        super().__init__()
        for window, mels in _WINDOWS_AND_MELS:
            self.register_buffer(f"window{window}", torch.hann_window(window))
            self.register_buffer(f"mel{window}", mel_filters(window, mels))

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts, and their weighted sum as "loss"."""
        y, x = y[:, 0], x[:, 0]
        parts = dict.fromkeys(_WEIGHTS, 0.0)
        for size, _ in _WINDOWS_AND_MELS:
            window, filters = getattr(self, f"window{size}"), getattr(self, f"mel{size}")
            spectra = [torch.stft(a, size, size // 4, window=window, return_complex=True) * (2 / size) for a in (y, x)]
            ours = torch.sqrt(spectra[0].real ** 2 + spectra[0].imag ** 2 + 1e-12)  # smooth at zero
            theirs = spectra[1].abs()
            scale = theirs.mean()
            logs = [torch.log10((filters @ magnitude).clamp(min=1e-5)) for magnitude in (ours, theirs)]
            parts["mel"] = parts["mel"] + (logs[0] - logs[1]).abs().mean()
            parts["linear"] = parts["linear"] + (ours - theirs).abs().mean() / scale
            if size in _PHASE_WINDOWS:
                real = (spectra[0].real - spectra[1].real).abs()
                imaginary = (spectra[0].imag - spectra[1].imag).abs()
                parts["complex"] = parts["complex"] + (real + imaginary).mean() / scale
        parts["wave"] = (y - x).abs().mean() / x.abs().mean()
        parts["loss"] = sum(weight * parts[name] for name, weight in _WEIGHTS.items())
        return parts
