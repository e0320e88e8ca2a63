"""LocEnc's outputs for the prompts of stored voices, kept on the device.

A reference comes first in a sequence, so that what the language models compute of it is shared as KV blocks. A prompt
comes after the text, which differs: LocEnc's outputs are the last thing that all streams of the voice have in common.
"""

from collections import OrderedDict

import torch

from dq_engine.sequence import StoredPrompt

MAX_BYTES = 64 * 2**20
"""Of all prompts together: 40 of a minute, with VoxCPM2's own sizes in bfloat16."""


class PromptEncodings:
    """Rows of LocEnc's outputs, a prompt's by its key; those used least recently make room.

    Args:
        max_bytes: of all rows.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, tuple[torch.Tensor, int]] = OrderedDict()
        """[patches, hidden], and how many of the rows, from the first, have been filled."""

    def get(self, prompt: StoredPrompt, first: int, last: int) -> torch.Tensor | None:
        """The outputs for the prompt's patches [first, last), [last - first, hidden], if they are kept."""
        rows, filled = self._kept.get(prompt.key, (None, 0))
        if last > filled:
            return None
        self._kept.move_to_end(prompt.key)
        return rows[first:last]

    def keep(self, prompt: StoredPrompt, first: int, encoded: torch.Tensor) -> None:
        """Keep the outputs for the prompt's patches from `first` on, [n, hidden].

        Not beyond a gap: of a prompt whose beginning was found in the KV cache there is nothing to keep.
        """
        rows, filled = self._kept.get(prompt.key, (None, 0))
        if first > filled:
            return
        if rows is None:
            rows = encoded.new_empty(prompt.last - prompt.first, encoded.size(1))
        rows[first : first + len(encoded)] = encoded
        self._kept[prompt.key] = rows, max(filled, first + len(encoded))
        self._kept.move_to_end(prompt.key)
        while sum(kept.nbytes for kept, _ in self._kept.values()) > self._max_bytes:
            self._kept.popitem(last=False)
