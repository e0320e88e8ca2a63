"""The prompts of a step as the device wants them: one array of integers, and the patches among the tokens."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dq_engine.attention.base import BLOCK_SIZE
from dq_engine.kernels.paged_attention import query_tiles
from dq_engine.prompt_encodings import PromptEncodings
from dq_engine.scheduler import Prefill
from dq_engine.sequence import Sequence


class PrefillArrays(NamedTuple):
    """Parts of one int64 array, on the host or the device (P prompts, N tokens, T tiles; padding where more is room).

    Args:
        token_ids: [N]; 0 where a token is a patch.
        positions: [N], each token's place in its stream.
        cache_slots: [N], rows of the flattened KV cache.
        patch_index: [N], which of the step's patches a token is, from 1; 0 for a text token.
        slots: [P].
        context_lens: [P], tokens of each stream that are in the cache after this step.
        sample_rows: [P], the last token of each prompt.
        query_starts: [P + 1], where each prompt's tokens begin.
        tiles: [T, 2] of `query_tiles`.
    """

    token_ids: np.ndarray | torch.Tensor
    positions: np.ndarray | torch.Tensor
    cache_slots: np.ndarray | torch.Tensor
    patch_index: np.ndarray | torch.Tensor
    slots: np.ndarray | torch.Tensor
    context_lens: np.ndarray | torch.Tensor
    sample_rows: np.ndarray | torch.Tensor
    query_starts: np.ndarray | torch.Tensor
    tiles: np.ndarray | torch.Tensor


@dataclass(frozen=True)
class PrefillShape:
    """How many prompts, tokens and tiles an array of a prefill has room for."""

    prompts: int
    tokens: int
    tiles: int

    @property
    def size(self) -> int:
        return self._ends()[-1]

    def split(self, array: np.ndarray | torch.Tensor) -> PrefillArrays:
        """Views of the parts of an array [size]."""
        begins = [0, *self._ends()[:-1]]
        parts = [array[begin : begin + length] for begin, length in zip(begins, self._lengths(), strict=True)]
        return PrefillArrays(*parts[:-1], parts[-1].reshape(-1, 2))

    def _ends(self) -> list[int]:
        """Of each part, up to a multiple of 16 bytes: Triton compiles a kernel anew for an address that is none."""
        return np.cumsum([length + length % 2 for length in self._lengths()]).tolist()

    def _lengths(self) -> list[int]:
        return [*[self.tokens] * 4, *[self.prompts] * 3, self.prompts + 1, 2 * self.tiles]


class _Patches(NamedTuple):
    """Patches [first, last) of a sequence; `encoded`: LocEnc's outputs, where they are kept."""

    sequence: Sequence
    first: int
    last: int
    is_stored: bool
    encoded: torch.Tensor | None

    @property
    def count(self) -> int:
        return self.last - self.first


class PromptBatch:
    """The prompts of one step.

    Args:
        prefills: those that are completed in this step first.
        queries_per_tile: of the attention kernel.
        encodings: LocEnc's outputs that need not be computed again.
    """

    def __init__(self, prefills: list[Prefill], queries_per_tile: int, encodings: PromptEncodings) -> None:
        self.prefills = prefills
        self._tiles = query_tiles([p.length for p in prefills], queries_per_tile)
        self.shape = PrefillShape(len(prefills), sum(p.length for p in prefills), len(self._tiles))
        self.lengths = [(p.length, p.start + p.length) for p in prefills]
        """Of each prompt: its tokens in this step, and those that it has in the cache after it."""
        self._encodings = encodings
        self._patch_ranges = [
            np.searchsorted(p.sequence.patch_rows, (p.start, p.start + p.length)).tolist() for p in prefills
        ]
        ranges = zip(prefills, self._patch_ranges, strict=True)
        self._patches = [part for p, between in ranges for part in self._parts(p.sequence, *between)]
        self._new = [part for part in self._patches if part.encoded is None]

    @property
    def completed(self) -> int:
        """How many prompts end in this step."""
        return sum(p.completes for p in self.prefills)

    @property
    def num_patches(self) -> int:
        """All patches among the tokens."""
        return sum(part.count for part in self._patches)

    @property
    def num_new_patches(self) -> int:
        """Those that LocEnc has to encode."""
        return sum(part.count for part in self._new)

    def new_patches(self) -> np.ndarray:
        """float32 [new, patch_size, feat_dim], what LocEnc has to encode; there must be some."""
        return np.concatenate([part.sequence.patches[part.first : part.last] for part in self._new])

    def adapters(self) -> np.ndarray:
        """int64 [new], the adapter slot (or -1) of the prompt of each patch that LocEnc has to encode."""
        return np.repeat([part.sequence.adapter_slot for part in self._new], [part.count for part in self._new])

    def encoded(self, new: torch.Tensor) -> torch.Tensor:
        """LocEnc's outputs for all patches, [A, hidden], out of those for `new_patches`, [new, hidden]."""
        outputs, begin = [new[:0]], 0
        for part in self._patches:
            output = part.encoded
            if output is None:
                output = new[begin : begin + part.count]
                begin += part.count
                if part.is_stored:
                    prompt = part.sequence.stored_prompt
                    self._encodings.keep(prompt, part.first - prompt.first, output)
            outputs.append(output)
        return torch.cat(outputs)

    def _parts(self, sequence: Sequence, first: int, last: int) -> list[_Patches]:
        """Patches [first, last) of a sequence: before its stored prompt, within and behind it."""
        prompt = sequence.stored_prompt
        if prompt is None:
            return [_Patches(sequence, first, last, False, None)]
        begin, end = (min(max(cut, first), last) for cut in (prompt.first, prompt.last))
        kept = self._encodings.get(prompt, begin - prompt.first, end - prompt.first) if begin < end else None
        parts = (first, begin, False, None), (begin, end, True, kept), (end, last, False, None)
        return [_Patches(sequence, *part) for part in parts if part[0] < part[1]]

    def array(self, shape: PrefillShape, scratch_slot: int, scratch_row: int) -> np.ndarray:
        """The int64 array, padded to a shape.

        Args:
            scratch_slot, scratch_row: the slot, and the row of the cache, of padding.
        """
        array = np.zeros(shape.size, np.int64)
        parts = shape.split(array)
        parts.slots[:], parts.cache_slots[:], parts.tiles[:] = scratch_slot, scratch_row, -1
        begin = patch = 0
        for row, (p, (first, last)) in enumerate(zip(self.prefills, self._patch_ranges, strict=True)):
            s, end = p.sequence, begin + p.length
            place = np.arange(p.start, p.start + p.length)
            parts.token_ids[begin:end] = s.token_ids[p.start : p.start + p.length]
            parts.positions[begin:end] = place
            parts.cache_slots[begin:end] = np.array(s.blocks)[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            parts.patch_index[begin + s.patch_rows[first:last] - p.start] = np.arange(last - first) + patch + 1
            patch += last - first
            parts.slots[row], parts.context_lens[row] = s.slot, p.start + p.length
            parts.sample_rows[row] = end - 1
            parts.query_starts[row + 1] = begin = end
        parts.query_starts[len(self.prefills) + 1 :] = begin
        parts.tiles[: len(self._tiles)] = self._tiles
        return array
