"""The adversaries of the AudioVAE's decoder, at 16 kHz: waveforms folded by several periods, several spectra.

After HiFi-GAN (Kong and others, 2020) and Encodec (Défossez and others, 2022), with fewer channels.
"""

import torch
from torch import nn
from torch.nn.functional import leaky_relu, pad
from torch.nn.utils.parametrizations import weight_norm

_PERIODS = (2, 3, 5, 7, 11)
_WINDOWS = (1024, 512, 256)
_SLOPE = 0.1
Judgement = tuple[torch.Tensor, list[torch.Tensor]]
"""What a discriminator thinks of each place, and its layers' outputs."""


def _conv(inputs: int, outputs: int, kernel: tuple[int, int], stride: tuple[int, int] = (1, 1)) -> nn.Module:
    padding = ((kernel[0] - 1) // 2, (kernel[1] - 1) // 2)
    return weight_norm(nn.Conv2d(inputs, outputs, kernel, stride, padding))


class _Layers(nn.Module):
    def __init__(self, layers: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(layers), last

    def forward(self, x: torch.Tensor) -> Judgement:
        features = []
        for layer in self.layers:
            x = leaky_relu(layer(x), _SLOPE)
            features.append(x)
        return self.last(x), features


class PeriodDiscriminator(nn.Module):
    """Sees every `period`-th sample in a row."""

    def __init__(self, period: int, channels: tuple[int, ...] = (16, 64, 128, 256)) -> None:
        super().__init__()
        self.period = period
        sizes = [1, *channels]
        layers = [_conv(a, b, (5, 1), (3, 1)) for a, b in zip(sizes[:-1], sizes[1:], strict=True)]
        layers.append(_conv(sizes[-1], sizes[-1], (5, 1)))
        self.net = _Layers(layers, _conv(sizes[-1], 1, (3, 1)))

    def forward(self, x: torch.Tensor) -> Judgement:
        x = pad(x, (0, -x.shape[-1] % self.period), "reflect")
        return self.net(x.unflatten(-1, (-1, self.period)))


class SpectrumDiscriminator(nn.Module):
    """Sees the complex spectrum, its magnitudes compressed."""

    def __init__(self, window: int, channels: int = 32) -> None:
        super().__init__()
        self.size = window
        self.register_buffer("window", torch.hann_window(window))
        layers = [_conv(2, channels, (3, 9))]
        layers += [_conv(channels, channels, (3, 9), (1, 2)) for _ in range(3)]
        layers.append(_conv(channels, channels, (3, 3)))
        self.net = _Layers(layers, _conv(channels, 1, (3, 3)))

    def forward(self, x: torch.Tensor) -> Judgement:
        with torch.autocast(x.device.type, enabled=False):
            spectrum = torch.stft(x[:, 0].float(), self.size, self.size // 4, window=self.window, return_complex=True)
            parts = torch.stack([spectrum.real, spectrum.imag], dim=1)
            parts = parts * (parts.square().sum(1, keepdim=True) + 1e-5).pow(-0.35)
        return self.net(parts.transpose(2, 3))


class Discriminators(nn.Module):
    """All of them. Audio is [B, 1, n] at 16 kHz."""

    def __init__(self) -> None:
        super().__init__()
        parts = [PeriodDiscriminator(period) for period in _PERIODS]
        self.parts = nn.ModuleList([*parts, *(SpectrumDiscriminator(window) for window in _WINDOWS)])

    def forward(self, x: torch.Tensor) -> list[Judgement]:
        return [part(x) for part in self.parts]


def discriminators_loss(real: list[Judgement], made: list[Judgement]) -> torch.Tensor:
    """Least squares: 1 for what is real, 0 for what was made."""
    return sum(
        (1 - r.float()).square().mean() + m.float().square().mean() for (r, _), (m, _) in zip(real, made, strict=True)
    ) / len(real)


def decoders_losses(real: list[Judgement], made: list[Judgement]) -> tuple[torch.Tensor, torch.Tensor]:
    """What fooling them is worth, and how far their features of the two are apart (relative, averaged)."""
    fooling = sum((1 - m.float()).square().mean() for m, _ in made) / len(made)
    distances = [
        (m.float() - r.detach().float()).abs().mean() / r.detach().float().abs().mean().clamp(min=1e-4)
        for (_, ours), (_, theirs) in zip(made, real, strict=True)
        for m, r in zip(ours, theirs, strict=True)
    ]
    return fooling, sum(distances) / len(distances)
