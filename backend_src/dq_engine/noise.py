"""The noise that every patch starts from: counter-based, so a stream's noise depends on nothing but its seed.

Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with
key = the request's seed and counter = (index within the patch, step); Box-Muller turns its words into normals. The
same values on every device, for every batch size, and after any interruption of a stream.
"""

import math

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def _multiply(constant: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of constant * word; 16 bits at a time, so that nothing leaves a signed 64-bit integer."""
    low = constant * (word & 0xFFFF)
    high = constant * (word >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Philox 4x32-10.

    Args:
        counter: four int64 tensors with values below 2^32, broadcastable against each other and the key.
        key: two such tensors.

    Returns:
        Four int64 tensors of random 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def patch_noise(seeds: torch.Tensor, steps: torch.Tensor, patch_size: int, feat_dim: int) -> torch.Tensor:
    """Standard normal noise for one patch of each stream.

    Args:
        seeds: int64 [B], not negative.
        steps: int64 [B], which patch of the stream this is; the first is 0.

    Returns:
        float32 [B, feat_dim, patch_size].
    """
    count = patch_size * feat_dim
    blocks = torch.arange((count + 3) // 4, device=seeds.device)
    seeds, steps = seeds[:, None], steps[:, None]
    zero = torch.zeros_like(blocks)
    words = philox([blocks, steps & _MASK, steps >> 32, zero], [seeds & _MASK, seeds >> 32])
    # In double precision the logarithm and the cosine round to the same float32 on every device.
    u = (torch.stack(words, dim=-1).to(torch.float64) + 0.5) * 2.0**-32
    radius = torch.sqrt(-2.0 * torch.log(u[..., 0::2]))
    angle = 2.0 * math.pi * u[..., 1::2]
    normal = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)
    return normal.flatten(1)[:, :count].to(torch.float32).view(-1, feat_dim, patch_size)
