"""What every stream carries from step to step: on the device, in tensors indexed by slot."""

import numpy as np
import torch

from dq_engine.attention.base import BLOCK_SIZE
from dq_engine.sequence import Sequence


class SlotState:
    """The tensors, and how a stream gets into them.

    Args:
        max_num_seqs: slots of streams.
        max_model_len: most tokens of a stream.
        patch_size, feat_dim: shape of a patch.
        device, dtype: the model's.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        patch_size: int,
        feat_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.scratch_slot = max_num_seqs
        """A slot more than there are streams: the rows that fill a graph's batch up read and write it."""

        def state(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(max_num_seqs + 1, *shape, dtype=dtype, device=device)

        self.condition = state(patch_size, feat_dim, dtype=dtype)
        """The patch before: LocDiT's condition, and the language models' next input."""
        # Four numbers of each stream: its step; the place in it of the token that is fed back at step 0; the key of its
        # noise; its adapter's slot, or -1.
        self._numbers = state(4)
        self.steps, self.offset, self.seeds, self.adapters = self._numbers.unbind(1)
        self.adapters.fill_(-1)
        self.cfg_value, self.temperature = state(dtype=dtype), state(dtype=torch.float32)
        self.block_tables = state(-(-max_model_len // BLOCK_SIZE), dtype=torch.int32)

    @torch.inference_mode()
    def start(self, sequences: list[Sequence]) -> None:
        """Put the state of sequences that were admitted, or are back after a preemption, into their slots."""
        # One upload for all of it: the slot, the four numbers, two scales as the bits of doubles, the blocks.
        array = np.zeros((len(sequences), 7 + max(len(s.blocks) for s in sequences)), np.int64)
        for row, s in zip(array, sequences, strict=True):
            # The patch that comes out of the prompt is fed back, after the prompt, at the step after it.
            row[:5] = s.slot, s.generated, s.prompt_length - (s.generated + 1), s.seed, s.adapter_slot
            row[5:7].view(np.float64)[:] = s.cfg_value, s.temperature
            row[7 : 7 + len(s.blocks)] = s.blocks
        array = self._upload(array)
        slots, scales = array[:, 0], array[:, 5:7].view(torch.float64)
        self._numbers[slots] = array[:, 1:5]
        self.cfg_value[slots], self.temperature[slots] = scales[:, 0].to(self.dtype), scales[:, 1].float()
        self.block_tables[slots, : array.size(1) - 7] = array[:, 7:].int()
        self.condition.index_fill_(0, slots, 0)
        if back := [s for s in sequences if s.last_patch is not None]:
            slots = self._upload(np.array([s.slot for s in back]))
            self.condition[slots] = self._upload(np.stack([s.last_patch for s in back])).to(self.dtype)

    def extend_block_tables(self, grown: list[Sequence]) -> None:
        """Note the last block of streams that got one more."""
        rows, columns, blocks = zip(*((s.slot, len(s.blocks) - 1, s.blocks[-1]) for s in grown), strict=True)
        index = self._upload(np.array([rows, columns], np.int64))
        self.block_tables[index[0], index[1]] = self._upload(np.array(blocks, np.int32))

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array as a tensor there; on a GPU the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
