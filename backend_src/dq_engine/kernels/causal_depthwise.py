"""A depthwise causal convolution of a stream, with the snake that follows it, in one pass over memory.

The inputs that the next chunk's first outputs need are kept per slot; the kernel reads and replaces them in place.
"""

import torch

from dq_engine.kernels.snake import snake_torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU installation
    triton = None

_MAX_STATE = 128


def causal_depthwise_snake_torch(
    x: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dilation: int,
    alpha: torch.Tensor,
    inverse: torch.Tensor,
) -> torch.Tensor:
    """snake(conv(x)), after what the slots' state says came before x.

    Args:
        x: [B, C, T].
        slots: int64 [B], all different.
        state: [slots, C, (K - 1) * dilation], the last inputs of each slot; replaced for `slots`.
        weight: [C, 1, K].
        bias: [C].
        alpha, inverse: [1, C, 1], of the snake.

    Returns:
        [B, C, T]
    """
    padding = state.size(-1)
    x = torch.cat([state[slots], x], dim=-1)
    state[slots] = x[..., -padding:]
    y = torch.nn.functional.conv1d(x, weight, bias, dilation=dilation, groups=x.size(1))
    return snake_torch(y, alpha, inverse)


if triton is not None:

    @triton.jit
    def _kernel(
        x, slots, state, weight, bias, alpha, inverse, out, channels, length,
        TAPS: tl.constexpr, DILATION: tl.constexpr, STATE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        channel = row % channels
        padding = (TAPS - 1) * DILATION
        x += row.to(tl.int64) * length
        out += row.to(tl.int64) * length
        state += (tl.load(slots + row // channels) * channels + channel) * padding
        offset = tl.load(bias + channel).to(tl.float32)
        a, i = tl.load(alpha + channel).to(tl.float32), tl.load(inverse + channel).to(tl.float32)
        for start in range(0, length, BLOCK):
            time = start + tl.arange(0, BLOCK)
            inside = time < length
            value = tl.zeros((BLOCK,), tl.float32) + offset
            for tap in tl.static_range(TAPS):
                source = time - (TAPS - 1 - tap) * DILATION
                now = tl.load(x + source, inside & (source >= 0), other=0.0).to(tl.float32)
                past = tl.load(state + padding + source, inside & (source < 0), other=0.0).to(tl.float32)
                value += (now + past) * tl.load(weight + channel * TAPS + tap).to(tl.float32)
            wave = tl.sin(a * value)
            tl.store(out + time, value + i * wave * wave, inside)
        # The last inputs, old ones among them if x is shorter than the state; read by all before any is replaced.
        place = tl.arange(0, STATE_BLOCK)
        source = place - padding + length
        now = tl.load(x + source, (place < padding) & (source >= 0), other=0.0)
        past = tl.load(state + padding + source, (place < padding) & (source < 0), other=0.0)
        tl.debug_barrier()
        tl.store(state + place, now + past, place < padding)


def causal_depthwise_snake(
    x: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dilation: int,
    alpha: torch.Tensor,
    inverse: torch.Tensor,
) -> torch.Tensor:
    """The same, by a kernel where `x` is on a GPU."""
    padding, taps = state.size(-1), weight.size(-1)
    if triton is None or not x.is_cuda or padding > _MAX_STATE or padding != (taps - 1) * dilation:
        return causal_depthwise_snake_torch(x, slots, state, weight, bias, dilation, alpha, inverse)
    x = x.contiguous()
    batch, channels, length = x.shape
    out = torch.empty_like(x)
    block = min(1024, triton.next_power_of_2(length))
    _kernel[(batch * channels,)](
        x, slots, state, weight, bias, alpha, inverse, out, channels, length,
        taps, dilation, triton.next_power_of_2(padding), block, num_warps=1 if block < 256 else 4,
    )  # fmt: skip
    return out
