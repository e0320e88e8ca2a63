"""The AudioVAE's last convolution: all channels of a few frames to one sample, and tanh."""

import torch
from torch.nn.functional import conv1d

from dq_engine.kernels.stream_state import with_past

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU installation
    triton = None

_FRAMES = 128


def causal_output_torch(
    x: torch.Tensor, slots: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Samples of some streams; their state is read only.

    Args:
        x: [B, T, C].
        slots: int64 [B].
        state: [slots, K - 1, C], what came before.
        weight: [K, C].
        bias: [1].

    Returns:
        float32 [B, T]
    """
    x = with_past(x, slots, state).transpose(1, 2)
    return torch.tanh(conv1d(x, weight.t()[None], bias)[:, 0].float())


if triton is not None:

    @triton.jit(do_not_specialize=["frames"])
    def _kernel(
        x, slots, state, slot_stride, weight, bias, out, frames, channels, TAPS: tl.constexpr, FRAMES: tl.constexpr,
        CHANNELS: tl.constexpr,
    ):  # fmt: skip
        stream = tl.program_id(0).to(tl.int64)
        frame = tl.program_id(1) * FRAMES + tl.arange(0, FRAMES)
        channel = tl.arange(0, CHANNELS)[None, :]
        here = channel < channels
        x += stream * frames * channels
        state += tl.load(slots + stream) * slot_stride
        value = tl.zeros((FRAMES,), tl.float32) + tl.load(bias).to(tl.float32)
        for tap in tl.static_range(TAPS):
            source = (frame - (TAPS - 1 - tap))[:, None]
            inside = here & (frame < frames)[:, None]
            taken = tl.load(x + source * channels + channel, inside & (source >= 0), other=0.0).to(tl.float32)
            old = tl.load(state + (TAPS - 1 + source) * channels + channel, inside & (source < 0), other=0.0)
            taken += old.to(tl.float32)
            factor = tl.load(weight + tap * channels + channel, here, other=0.0).to(tl.float32)
            value += tl.sum(taken * factor, axis=1)
        value = 2.0 / (1.0 + tl.exp(-2.0 * value)) - 1.0  # tanh
        tl.store(out + stream * frames + frame, value, frame < frames)


def causal_output(
    x: torch.Tensor, slots: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """The same, by a kernel where x is on a GPU. The slots of state may lie apart; each one is contiguous."""
    if triton is None or not x.is_cuda:
        return causal_output_torch(x, slots, state, weight, bias)
    batch, frames, channels = x.shape
    out = x.new_empty(batch, frames, dtype=torch.float32)
    _kernel[(batch, triton.cdiv(frames, _FRAMES))](
        x, slots, state, state.stride(0), weight, bias, out, frames, channels, len(weight), _FRAMES,
        triton.next_power_of_2(channels),
    )  # fmt: skip
    return out
