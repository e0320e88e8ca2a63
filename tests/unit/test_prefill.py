"""A step's prompts as arrays: what each token is and where it goes, and padding that touches nobody."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit.sequences import make_sequence

from dq_engine.attention.base import BLOCK_SIZE
from dq_engine.kernels.paged_attention import queries_per_tile, query_tiles
from dq_engine.prefill import PrefillShape, PromptBatch
from dq_engine.prefill_buckets import own_buckets, parse_buckets, patch_buckets
from dq_engine.prompt_encodings import PromptEncodings
from dq_engine.scheduler import Prefill

PER_TILE, SCRATCH_SLOT, SCRATCH_ROW = 16, 99, 10_000


def chunk(length: int, start: int, taken: int, slot: int, patch_rows: list[int]) -> Prefill:
    """Tokens [start, start + taken) of a prompt in blocks slot * 100, slot * 100 + 1, ..."""
    sequence = make_sequence(length, 8)
    sequence.token_ids = np.arange(length) + 1000 * slot
    sequence.patch_rows = np.array(patch_rows, np.int64)
    sequence.patches = np.array(patch_rows, np.float32)[:, None, None] + np.zeros((1, 4, 64), np.float32) + 1000 * slot
    sequence.slot, sequence.blocks = slot, [100 * slot + n for n in range(-(-length // BLOCK_SIZE))]
    return Prefill(sequence, start, taken)


def test_each_token_is_where_it_belongs():
    prefills = [chunk(20, 0, 20, 1, [3, 4]), chunk(60, 30, 10, 2, [29, 30, 35, 40])]
    batch = PromptBatch(prefills, PER_TILE, PromptEncodings())
    assert (batch.completed, batch.num_patches, batch.lengths) == (1, 4, [(20, 20), (10, 40)])
    assert batch.new_patches()[:, 0, 0].tolist() == [1003, 1004, 2030, 2035], "those of this chunk only"
    parts = batch.shape.split(batch.array(batch.shape, SCRATCH_SLOT, SCRATCH_ROW))
    assert parts.token_ids.tolist() == [*range(1000, 1020), *range(2030, 2040)]
    assert parts.positions.tolist() == [*range(20), *range(30, 40)]
    assert parts.cache_slots.tolist() == [
        *(100 * BLOCK_SIZE + n for n in range(20)),
        *(200 * BLOCK_SIZE + n for n in range(30, 40)),
    ]
    assert np.flatnonzero(parts.patch_index).tolist() == [3, 4, 20, 25]
    assert parts.patch_index[[3, 4, 20, 25]].tolist() == [1, 2, 3, 4]
    assert (parts.slots.tolist(), parts.context_lens.tolist()) == ([1, 2], [20, 40])
    assert (parts.sample_rows.tolist(), parts.query_starts.tolist()) == ([19, 29], [0, 20, 30])
    assert parts.tiles.tolist() == [[0, 0], [0, 16], [1, 0]]


def test_padding_is_nobodys():
    batch = PromptBatch([chunk(20, 0, 20, 1, [3])], PER_TILE, PromptEncodings())
    shape = PrefillShape(4, 64, 8)
    parts = shape.split(batch.array(shape, SCRATCH_SLOT, SCRATCH_ROW))
    exact = batch.shape.split(batch.array(batch.shape, SCRATCH_SLOT, SCRATCH_ROW))
    for name, values in exact._asdict().items():
        assert np.array_equal(getattr(parts, name)[: len(values)], values), name
    assert set(parts.cache_slots[20:]) == {SCRATCH_ROW} and set(parts.slots[1:]) == {SCRATCH_SLOT}
    assert not parts.patch_index[20:].any() and not parts.context_lens[1:].any()
    assert set(parts.query_starts[2:]) == {20}, "no prompt has more tokens"
    assert (parts.tiles[2:] == -1).all()


@given(st.integers(1, 9), st.integers(1, 99), st.integers(1, 20))
def test_parts_of_an_array_begin_at_16_bytes(prompts, tokens, tiles):
    shape = PrefillShape(prompts, tokens, tiles)
    array = torch.arange(shape.size)
    parts = shape.split(array)
    assert [len(part) for part in parts] == [tokens] * 4 + [prompts] * 3 + [prompts + 1, tiles]
    places = [place for part in parts for place in part.flatten().tolist()]
    assert len(places) == len(set(places)), "parts overlap"
    assert not any(part.data_ptr() % 16 for part in parts), "Triton would compile its kernels anew for these addresses"


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 128))
def test_tiles_hold_every_query_once(lengths, per_tile):
    tiles = query_tiles(lengths, per_tile)
    held = [(row, start + n) for row, start in tiles.tolist() for n in range(per_tile) if start + n < lengths[row]]
    assert held == [(row, query) for row, length in enumerate(lengths) for query in range(length)]
    assert len(tiles) <= sum(lengths) // per_tile + len(lengths), "a bucket has room for so many"


def test_queries_per_tile():
    assert queries_per_tile(16, 2) == 16 and queries_per_tile(4, 4) == 128


def test_buckets_of_the_setting():
    assert parse_buckets("1:320, 2:640,8:2176") == [(1, 320), (2, 640), (8, 2176)]
    assert parse_buckets("") == []
    own = own_buckets(8192, 512)
    assert own[0] == (2, 16) and own[-1] == (512, 8192), "the largest takes whatever a step can hold"
    assert all(prompts <= max(1, tokens // 8) for prompts, tokens in own)
    assert own_buckets(300, 16)[-1] == (16, 300)
    for wrong in ("320", "1:x", "0:10", "11:10", "1:320,,2:640"):
        with pytest.raises(ValueError, match=r"is not requests:tokens, as in 1:320"):
            parse_buckets(wrong)


@pytest.mark.parametrize("limit", [5, 8, 100, 8192])
def test_patch_buckets_waste_a_third_at_most(limit):
    buckets = patch_buckets(limit)
    assert buckets[-1] >= limit and buckets == sorted(set(buckets))
    assert all(after <= max(before + 8, before * 1.5) for before, after in zip(buckets, buckets[1:], strict=False))
