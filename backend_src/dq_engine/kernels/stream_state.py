"""The last inputs of each stream that a causal convolution needs with its next ones, kept per slot."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU installation
    triton = None

_CHANNELS = 32


def with_past(x: torch.Tensor, slots: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """x [B, T, C] behind what state [slots, P, C] says came before it in each of the slots, [B, P + T, C]."""
    return torch.cat([state[slots], x], dim=1) if state.size(1) else x


def shift_in_torch(x: torch.Tensor, slots: torch.Tensor, state: torch.Tensor) -> None:
    """Let x [B, T, C] be the latest of what state [slots, P, C] holds for int64 slots [B], all different."""
    state[slots] = with_past(x, slots, state)[:, x.size(1) :]


if triton is not None:

    @triton.jit(do_not_specialize=["frames", "past"])
    def _kernel(
        x, slots, state, slot_stride, frames, channels, past, ROWS: tl.constexpr, CHANNELS: tl.constexpr
    ):  # fmt: skip
        stream = tl.program_id(0).to(tl.int64)
        row = tl.arange(0, ROWS)[:, None]
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        inside = (row < past) & (channel < channels)
        state += tl.load(slots + stream) * slot_stride + channel
        source = row + frames - past  # in x; what is before it is in the state
        new = tl.load(x + (stream * frames + source) * channels + channel, inside & (source >= 0), other=0.0)
        old = tl.load(state + (row + frames) * channels, inside & (source < 0), other=0.0)
        tl.debug_barrier()  # read by all before any is replaced
        tl.store(state + row * channels, new + old, inside)


def shift_in(x: torch.Tensor, slots: torch.Tensor, state: torch.Tensor) -> None:
    """The same, by a kernel where x is on a GPU. The slots of state may lie apart; each one is contiguous."""
    past = state.size(1)
    if triton is None or not x.is_cuda:
        shift_in_torch(x, slots, state)
        return
    batch, frames, channels = x.shape
    _kernel[(batch, triton.cdiv(channels, _CHANNELS))](
        x, slots, state, state.stride(0), frames, channels, past, triton.next_power_of_2(past), _CHANNELS
    )
