"""Sequences that need no model."""

import itertools

import numpy as np

from dq_engine.sequence import Sequence, block_keys, token_contents
from dq_engine.stream import Stream

unique = itertools.count(1)


def make_sequence(prompt: int, patches: int, tokens: int = 0, stream_id: int = 0) -> Sequence:
    """A text of `prompt` tokens, all equal to `tokens`, or of its own if 0, to be continued by `patches` patches."""
    token_ids = np.full(prompt, tokens or next(unique), np.int64)
    empty = np.zeros((0, 4, 64), np.float32), np.zeros(0, np.int64)
    return Sequence(
        stream=Stream(stream_id, lambda chunk: None, lambda stream: None),
        token_ids=token_ids,
        patches=empty[0],
        patch_rows=empty[1],
        keys=block_keys(token_contents(token_ids, *empty), 16),
        seed=0,
        cfg_value=2.0,
        temperature=1.0,
        min_length=2,
        max_patches=patches,
        return_latents=False,
    )
