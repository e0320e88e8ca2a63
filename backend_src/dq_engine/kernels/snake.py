"""The snake activation of the AudioVAE, x + sin(alpha x)^2 / alpha, in one pass over memory."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU installation
    triton = None


def snake_torch(x: torch.Tensor, alpha: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """x + inverse * sin(alpha * x)^2 of x [B, C, T] with alpha and inverse [1, C, 1]."""
    return torch.addcmul(x, inverse, torch.sin(alpha * x).square_())


if triton is not None:

    @triton.jit
    def _kernel(x, alpha, inverse, out, channels, length, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        time = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = time < length
        place = row.to(tl.int64) * length + time
        channel = row % channels
        value = tl.load(x + place, inside, other=0.0).to(tl.float32)
        wave = tl.sin(tl.load(alpha + channel).to(tl.float32) * value)
        tl.store(out + place, value + tl.load(inverse + channel).to(tl.float32) * wave * wave, inside)


def snake(x: torch.Tensor, alpha: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """The same, by a kernel (in float32 within) where `x` is on a GPU."""
    if triton is None or not x.is_cuda:
        return snake_torch(x, alpha, inverse)
    x = x.contiguous()
    batch, channels, length = x.shape
    out = torch.empty_like(x)
    block = min(1024, triton.next_power_of_2(length))
    _kernel[(batch * channels, triton.cdiv(length, block))](x, alpha, inverse, out, channels, length, block)
    return out
