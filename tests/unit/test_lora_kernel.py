"""What LoRA adds, row by row, and which rows are whose."""

import numpy as np
import pytest
import torch

from dq_engine.kernels.lora import TILE_ROWS, AdapterRows, equal_tiles, lora_add_torch, prompt_tiles
from dq_engine.kernels.paged_attention import query_tiles


def slots_by_row(rows: AdapterRows) -> list[int]:
    result = [-1] * rows.count
    for slot, index in rows.by_slot:
        for row in index.tolist():
            assert result[row] == -1, f"row {row} is in two tiles"
            result[row] = slot
    return result


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("rows", [1, 11, TILE_ROWS, 40])
def test_tiles_of_equal_streams(rows, copies):
    slots = [2, -1, 0, 2]
    tiles = equal_tiles(torch.tensor(slots), rows, copies)
    assert slots_by_row(tiles) == copies * [slot for slot in slots for _ in range(rows)]
    assert tiles.tiles[:, 1].max() <= TILE_ROWS


@pytest.mark.parametrize("per_tile", [8, 16, 24, 64])
def test_tiles_of_prompts(per_tile):
    lengths, slots = [5, 40, 1, 33], [2, -1, 4, 0]
    tiles = np.concatenate([query_tiles(lengths, per_tile), np.full((3, 2), -1)])
    # Room for six prompts and 90 tokens, as in a CUDA graph.
    starts = torch.tensor([0, 5, 45, 46, 79, 79, 79])
    rows = prompt_tiles(torch.from_numpy(tiles), per_tile, starts, torch.tensor([*slots, 3, 3]), 90)
    expected = [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
    assert slots_by_row(rows) == expected + [-1] * 11
    assert rows.tiles[:, 1].min() >= 0 and rows.tiles[:, 1].max() <= TILE_ROWS


def test_each_row_gets_its_own_adapter():
    torch.manual_seed(0)
    sizes, rank, inputs = [6, 4, 2], 3, 5
    a, b = torch.randn(4, 3, rank, inputs), torch.randn(4, 12, rank)
    slots = [3, -1, 0, 3]
    rows = equal_tiles(torch.tensor(slots), 2)
    x, y = torch.randn(8, inputs), torch.randn(8, 12)
    result = y.clone()
    lora_add_torch(result, x, a, b, sizes, rows)
    for row in range(8):
        slot, expected = slots[row // 2], y[row].clone()
        if slot >= 0:
            begin = 0
            for projection, size in enumerate(sizes):
                expected[begin : begin + size] += b[slot, begin : begin + size] @ (a[slot, projection] @ x[row])
                begin += size
        torch.testing.assert_close(result[row], expected)
