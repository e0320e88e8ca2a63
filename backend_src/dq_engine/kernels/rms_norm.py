"""Adding to the residual stream and normalizing it, in one pass over memory."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU installation
    triton = None


def add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm(x + residual) * weight, and x + residual, both [..., width]."""
    total = x + residual
    return torch.nn.functional.rms_norm(total, (total.size(-1),), weight, eps), total


if triton is not None:

    @triton.jit
    def _kernel(x, residual, weight, normed, total, width, eps, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        place = row * width + column
        added = tl.load(x + place, inside, other=0.0).to(tl.float32)
        added += tl.load(residual + place, inside, other=0.0).to(tl.float32)
        # Rounded before it is normalized, as torch does.
        rounded = added.to(total.dtype.element_ty)
        tl.store(total + place, rounded, inside)
        value = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value) / width + eps)
        tl.store(normed + place, value * scale * tl.load(weight + column, inside, other=0.0).to(tl.float32), inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, by a kernel where `x` is on a GPU."""
    if triton is None or not x.is_cuda:
        return add_rms_norm_torch(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    width = x.size(-1)
    block = triton.next_power_of_2(width)
    warps = 4 if block <= 2048 else 8
    _kernel[(x.numel() // width,)](x, residual, weight, normed, total, width, eps, block, num_warps=warps)
    return normed, total
