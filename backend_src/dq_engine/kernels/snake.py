"""The AudioVAE's activation: a scale and an offset, where there are any, then snake, x + sin(alpha x)^2 / alpha."""

import math
from typing import NamedTuple

import torch

_FRAMES_A_ROW = 64


class Activation(NamedTuple):
    """snake(x * scale + offset), per channel.

    Args:
        scale, offset: float32 [C]; None for neither.
        alpha: float32 [C].
        inverse: float32 [C], 1 / alpha.
    """

    scale: torch.Tensor | None
    offset: torch.Tensor | None
    alpha: torch.Tensor
    inverse: torch.Tensor


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of x [..., C]."""
    # Several frames a row: with few channels the rows would be too short for a CPU's vector instructions.
    frames = math.gcd(x.numel() // x.size(-1), _FRAMES_A_ROW)
    scale, offset, alpha, inverse = (None if t is None else t.to(x.dtype).repeat(frames) for t in activation)
    rows = x.reshape(-1, frames * x.size(-1))
    if scale is not None:
        rows = torch.addcmul(offset, rows, scale)
    return torch.addcmul(rows, inverse, torch.sin(alpha * rows).square_()).view(x.shape)
