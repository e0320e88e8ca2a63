"""silu(gate) * up, in one pass over memory."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU installation
    triton = None


def silu_and_mul_torch(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of a [..., 2 * width] tensor whose halves are gate and up; [..., width]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


if triton is not None:

    @triton.jit
    def _kernel(x, out, width, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x + row * 2 * width + column, inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, inside, other=0.0).to(tl.float32)
        # Rounded between the two operations, as torch does.
        activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + row * width + column, activated * up, inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """The same, by a kernel where `x` is on a GPU and contiguous."""
    if triton is None or not x.is_cuda or not x.is_contiguous():
        return silu_and_mul_torch(x)
    width = x.size(-1) // 2
    out = x.new_empty(*x.shape[:-1], width)
    block = min(1024, triton.next_power_of_2(width))
    _kernel[(out.numel() // width, triton.cdiv(width, block))](x, out, width, block)
    return out
