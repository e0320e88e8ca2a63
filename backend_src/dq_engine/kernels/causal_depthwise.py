"""A depthwise causal convolution of streams, with the snake that follows it, in one pass over memory."""

import torch
from torch.nn.functional import conv2d

from dq_engine.kernels.snake import Activation, activate
from dq_engine.kernels.stream_state import with_past

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU installation
    triton = None


def causal_depthwise_torch(
    x: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dilation: int,
    activation: Activation | None,
) -> torch.Tensor:
    """Convolve the next inputs of some streams; their state is read only.

    Args:
        x: [B, T, C].
        slots: int64 [B].
        state: [slots, (K - 1) * dilation, C], what came before.
        weight: [K, C].
        bias: [C].
        activation: applied to the outputs, without scale and offset; None for none.

    Returns:
        [B, T, C]
    """
    # As an image of height 1 whose channels come last: there a CPU is fast, and nothing is transposed.
    image = with_past(x, slots, state).transpose(1, 2)[:, :, None]
    y = conv2d(image, weight.t()[:, None, None], bias, dilation=(1, dilation), groups=x.size(2))[:, :, 0].transpose(
        1, 2
    )
    return y if activation is None else activate(y, activation)


if triton is not None:

    @triton.jit(do_not_specialize=["frames", "dilation"])
    def _kernel(
        x, slots, state, slot_stride, weight, bias, alpha, inverse, out, frames, channels, dilation, snake,
        TAPS: tl.constexpr, FRAMES: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        stream = tl.program_id(0).to(tl.int64)
        first = tl.program_id(1) * FRAMES
        frame = first + tl.arange(0, FRAMES)[:, None]
        channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        past = (TAPS - 1) * dilation
        here = channel < channels
        inside = here & (frame < frames)
        x += stream * frames * channels + channel
        state += tl.load(slots + stream) * slot_stride + channel
        value = tl.zeros((FRAMES, CHANNELS), tl.float32) + tl.load(bias + channel, here, other=0.0).to(tl.float32)
        for tap in tl.static_range(TAPS):
            source = frame - (TAPS - 1 - tap) * dilation
            taken = tl.load(x + source * channels, inside & (source >= 0), other=0.0).to(tl.float32)
            if first < past:
                old = tl.load(state + (past + source) * channels, inside & (source < 0), other=0.0)
                taken += old.to(tl.float32)
            value += taken * tl.load(weight + tap * channels + channel, here, other=0.0).to(tl.float32)
        if snake:
            wave = tl.sin(tl.load(alpha + channel, here, other=0.0) * value)
            value += tl.load(inverse + channel, here, other=0.0) * wave * wave
        tl.store(out + (stream * frames + frame) * channels + channel, value.to(out.dtype.element_ty), inside)


def causal_depthwise(
    x: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dilation: int,
    activation: Activation | None,
) -> torch.Tensor:
    """The same, by a kernel where x is on a GPU. The slots of state may lie apart; each one is contiguous."""
    if triton is None or not x.is_cuda:
        return causal_depthwise_torch(x, slots, state, weight, bias, dilation, activation)
    batch, frames, channels = x.shape
    out = torch.empty_like(x)
    width = min(64, triton.next_power_of_2(channels))
    height = min(max(1, 2048 // width), triton.next_power_of_2(frames))
    unused = weight.new_empty(0, dtype=torch.float32)
    alpha, inverse = (unused, unused) if activation is None else (activation.alpha, activation.inverse)
    _kernel[(batch, triton.cdiv(frames, height), triton.cdiv(channels, width))](
        x, slots, state, state.stride(0), weight, bias, alpha, inverse, out, frames, channels, dilation,
        activation is not None, len(weight), height, width,
    )  # fmt: skip
    return out
