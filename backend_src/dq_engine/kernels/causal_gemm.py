"""Convolutions of the AudioVAE that are matrix products, with all that surrounds them, in one pass over memory.

Those over all channels, and transposed ones whose kernel is twice their stride: output frame t * stride + j of the
latter is a product of input frames t - 1 and t. The kernel adds bias and residual, and applies the next activation.
"""

import torch

from dq_engine.kernels.snake import Activation, activate
from dq_engine.kernels.stream_state import with_past

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU installation
    triton = None


def causal_gemm_torch(
    x: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dilation: int,
    residual: torch.Tensor | None,
    activation: Activation | None,
    keep_raw: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Multiply the next inputs of some streams; their state is read only.

    Args:
        x: [B, T, C].
        slots: int64 [B].
        state: [slots, (taps - 1) * dilation, C], what came before.
        weight: [taps, C, stride * D], the last tap is of the input frame itself.
        bias: [D].
        dilation: frames from tap to tap.
        residual: [B, T * stride, D], added.
        activation: the next one; None for none.
        keep_raw: whether the outputs before the activation are wanted.

    Returns:
        The outputs before and after the activation, [B, T * stride, D] each; None for what is not there.
    """
    batch, frames, _ = x.shape
    x = with_past(x, slots, state)
    if len(weight) > 1:
        x = torch.cat([x[:, tap * dilation :][:, :frames] for tap in range(len(weight))], dim=-1)
    raw = torch.matmul(x, weight.flatten(0, 1)).view(batch, -1, len(bias)) + bias
    if residual is not None:
        raw += residual
    return raw if keep_raw else None, None if activation is None else activate(raw, activation)


if triton is not None:

    @triton.jit(do_not_specialize=["rows", "frames", "dilation"])
    def _kernel(
        x, slots, state, slot_stride, weight, bias, residual, scale, offset, alpha, inverse, raw, activated, rows,
        frames, K, N, channels, dilation, with_residual, with_affine, with_raw, with_activation, TAPS: tl.constexpr,
        PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ):  # fmt: skip
        # What differs from layer to layer, or with the batch, is no constant and not specialized: a start would compile
        # a kernel for each of them.
        m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        frame, here = m % frames, m < rows
        total = tl.zeros((BM, BN), tl.float32)
        for tap in tl.static_range(TAPS):
            back = (TAPS - 1 - tap) * dilation
            source = frame - back
            now = here & (source >= 0)
            if tap < TAPS - 1:
                before = here & (source < 0)
                slot = tl.load(slots + m // frames, here, other=0)
                past = state + slot * slot_stride + (source + (TAPS - 1) * dilation) * K
            for start in range(0, K, BK):
                k = start + tl.arange(0, BK)
                a = tl.load(x + (m - back)[:, None] * K + k[None, :], now[:, None] & (k < K)[None, :], other=0.0)
                if tap < TAPS - 1:
                    a += tl.load(past[:, None] + k[None, :], before[:, None] & (k < K)[None, :], other=0.0)
                w = tl.load(
                    weight + (tap * K + k)[:, None] * N + n[None, :], (k < K)[:, None] & (n < N)[None, :], other=0.0
                )
                total = tl.dot(a, w, total, input_precision=PRECISION)
        inside = here[:, None] & (n < N)[None, :]
        place = m[:, None] * N + n[None, :]
        channel = n % channels
        total += tl.load(bias + channel).to(tl.float32)[None, :]
        if with_residual:
            total += tl.load(residual + place, inside, other=0.0).to(tl.float32)
        if with_raw:
            tl.store(raw + place, total.to(raw.dtype.element_ty), inside)
        if with_activation:
            if with_affine:
                total = total * tl.load(scale + channel)[None, :] + tl.load(offset + channel)[None, :]
            wave = tl.sin(tl.load(alpha + channel)[None, :] * total)
            total += tl.load(inverse + channel)[None, :] * wave * wave
            tl.store(activated + place, total.to(activated.dtype.element_ty), inside)


def causal_gemm(
    x: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dilation: int,
    residual: torch.Tensor | None,
    activation: Activation | None,
    keep_raw: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The same, by a kernel where x is on a GPU. The slots of state may lie apart; each one is contiguous."""
    if triton is None or not x.is_cuda:
        return causal_gemm_torch(x, slots, state, weight, bias, dilation, residual, activation, keep_raw)
    (batch, frames, _), (taps, k, n) = x.shape, weight.shape
    rows, channels = batch * frames, len(bias)
    shape = (batch, frames * n // channels, channels)
    raw = x.new_empty(shape) if keep_raw else None
    activated = None if activation is None else x.new_empty(shape)
    unused = bias.new_empty(0, dtype=torch.float32)  # of the activation's dtype: else there would be one more kernel
    scale, offset, alpha, inverse = activation or (None,) * 4
    bn = min(128, max(16, triton.next_power_of_2(n)))
    bm = 128 if rows >= 4096 else 32
    bk = min(64, max(16, triton.next_power_of_2(k)))
    scales = (unused if t is None else t for t in (scale, offset, alpha, inverse))
    tensors = (x if residual is None else residual, *scales, *(x if t is None else t for t in (raw, activated)))
    _kernel[(triton.cdiv(rows, bm), triton.cdiv(n, bn))](
        x, slots, state, state.stride(0), weight, bias, *tensors, rows, frames, k, n, channels, dilation,
        residual is not None, scale is not None, keep_raw, activation is not None, taps,
        "ieee" if x.dtype == torch.float32 else "tf32", bm, bn, bk, num_warps=8 if bm * bn >= 16384 else 4,
    )  # fmt: skip
    return raw, activated
