"""LoRA for a batch whose rows use different adapters: y += (x A^T) B^T, with the A and B of each row's own adapter.

The torch lines define the result. On a GPU two kernels do it, whose grids depend on the number of rows only, so that
one CUDA graph serves whatever adapters a batch has. (nano-vllm-voxcpm's kernels take the number of active adapters as
a dimension of their grids, and add up parts of sums in an order that varies.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # without a GPU
    triton = None

TILE_ROWS = 16
"""The most rows in a tile: the fewest that tensor cores multiply at once."""
_MIN_RANK = 16
_BLOCK_K = 128
# Sums are cut into parts of at least so many terms, and columns into narrower blocks, while there are fewer programs
# than would fill a GPU.
_PART_K, _ENOUGH_PROGRAMS, _MOST_PARTS = 256, 256, 8
_WIDE_N, _NARROW_N = 128, 64


@dataclass(frozen=True)
class AdapterRows:
    """Which adapter each row of a matrix uses.

    Args:
        count: rows of the matrix.
        tiles: int64 [T, 3], on the matrix's device: first row, number of rows (0 to TILE_ROWS), and the slot of their
            adapter or -1 for none. Rows in no tile use no adapter.
    """

    count: int
    tiles: torch.Tensor

    @cached_property
    def by_slot(self) -> list[tuple[int, torch.Tensor]]:
        """Each slot that is used, and its rows, int64. Waits for the device."""
        rows: dict[int, list[int]] = {}
        for first, count, slot in self.tiles.tolist():
            if slot >= 0:
                rows.setdefault(slot, []).extend(range(first, first + count))
        return [(slot, torch.tensor(index, device=self.tiles.device)) for slot, index in rows.items()]


def equal_tiles(slots: torch.Tensor, rows: int) -> AdapterRows:
    """Of B streams with `rows` rows each, one after the other.

    Args:
        slots: integers [B], each stream's adapter slot or -1.
    """
    starts = torch.arange(0, rows, TILE_ROWS, device=slots.device)
    first = torch.arange(len(slots), device=slots.device)[:, None] * rows + starts
    count = (rows - starts).clamp(max=TILE_ROWS).expand_as(first)
    slot = slots.long()[:, None].expand_as(first)
    return AdapterRows(len(slots) * rows, torch.stack([first, count, slot], -1).view(-1, 3))


def prompt_tiles(
    tiles: torch.Tensor, per_tile: int, query_starts: torch.Tensor, slots: torch.Tensor, rows: int
) -> AdapterRows:
    """Of prompts of various lengths, cut up for `kernels.paged_attention` already.

    Args:
        tiles: int64 [T, 2] of `query_tiles`, each with at most `per_tile` queries; -1 where it is padding.
        query_starts: int64 [P + 1], where each prompt's rows begin.
        slots: integers [P], each prompt's adapter slot or -1.
        rows: of the matrix, padding included.
    """
    prompt, start = tiles.unbind(1)
    padding, prompt = prompt < 0, prompt.clamp(min=0)
    piece = torch.arange(0, per_tile, TILE_ROWS, device=tiles.device)
    begin = (query_starts[prompt] + start)[:, None] + piece
    left = torch.minimum(query_starts[prompt + 1][:, None] - begin, per_tile - piece)
    slot = torch.where(padding, -1, slots.long()[prompt])[:, None].expand_as(begin)
    return AdapterRows(rows, torch.stack([begin, left.clamp(0, TILE_ROWS), slot], -1).view(-1, 3))


def lora_add_torch(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], rows: AdapterRows
) -> None:
    """Add each row's adapter to a linear layer's output, in place.

    Args:
        y: [M, N], the layer's output; its columns are those of one projection after the other.
        x: [M, K], the layer's input.
        a: [slots, projections, R, K]; any stride between slots.
        b: [slots, N, R], the scaling in it; likewise.
        sizes: columns of each projection; their sum is N.
        rows: of the M rows.
    """
    for slot, index in rows.by_slot:
        hidden = torch.einsum("mk,prk->pmr", x[index], a[slot])
        parts = [h @ part.T for h, part in zip(hidden, b[slot].split(list(sizes)), strict=True)]
        y.index_add_(0, index, torch.cat(parts, dim=-1))


if triton is not None:

    @triton.jit(do_not_specialize=["parts"])
    def _shrink(
        x, a, tiles, h, k_size, rank, x_stride, a_slot, a_projection, h_part, h_projection, parts,
        ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One part of the sums x A^T of one tile and one projection, into h [parts, projections, M, rank]."""
        tile, projection, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        slot = tl.load(tiles + 3 * tile + 2)
        if slot >= 0:
            first, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
            r, lane = tl.arange(0, ROWS), tl.arange(0, RANK)
            inside, ranked = r < count, lane < rank
            row = first + r
            matrix = a + slot * a_slot + projection * a_projection + lane[:, None] * k_size
            sums = tl.zeros((ROWS, RANK), tl.float32)
            for start in range(part * BLOCK, k_size, parts * BLOCK):
                k = start + tl.arange(0, BLOCK)
                within = (k < k_size)[None, :]
                inputs = tl.load(x + row[:, None] * x_stride + k[None, :], inside[:, None] & within, other=0.0)
                weights = tl.load(matrix + k[None, :], ranked[:, None] & within, other=0.0)
                sums = tl.dot(inputs, tl.trans(weights), sums, input_precision=PRECISION)
            target = h + part * h_part + projection * h_projection + row[:, None] * rank + lane[None, :]
            tl.store(target, sums, inside[:, None] & ranked[None, :])

    @triton.jit(do_not_specialize=["parts"])
    def _expand(
        y, h, b, tiles, rank, y_stride, b_slot, h_part, h_projection, parts, size0, size1, size2,
        ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """A block of columns of one projection, for one tile."""
        tile, block = tl.program_id(0), tl.program_id(1)
        slot = tl.load(tiles + 3 * tile + 2)
        if slot >= 0:
            blocks0, blocks1 = tl.cdiv(size0, BLOCK), tl.cdiv(size1, BLOCK)
            second, third = block >= blocks0, block >= blocks0 + blocks1
            projection = second.to(tl.int32) + third.to(tl.int32)
            begin = tl.where(third, size0 + size1, tl.where(second, size0, 0))
            size = tl.where(third, size2, tl.where(second, size1, size0))
            block -= tl.where(third, blocks0 + blocks1, tl.where(second, blocks0, 0))
            first, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
            r, lane = tl.arange(0, ROWS), tl.arange(0, RANK)
            inside, ranked = r < count, lane < rank
            row = first + r
            column = block * BLOCK + tl.arange(0, BLOCK)
            present = column < size
            column += begin
            source = h + projection * h_projection + row[:, None] * rank + lane[None, :]
            hidden = tl.zeros((ROWS, RANK), tl.float32)
            for part in range(parts):
                hidden += tl.load(source + part * h_part, inside[:, None] & ranked[None, :], other=0.0)
            matrix = b + slot * b_slot + column[:, None] * rank + lane[None, :]
            weights = tl.load(matrix, present[:, None] & ranked[None, :], other=0.0)
            target = y + row[:, None] * y_stride + column[None, :]
            mask = inside[:, None] & present[None, :]
            total = tl.load(target, mask, other=0.0).to(tl.float32)
            total += tl.dot(hidden.to(weights.dtype), tl.trans(weights), input_precision=PRECISION)
            tl.store(target, total.to(y.dtype.element_ty), mask)


def lora_add(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], rows: AdapterRows
) -> None:
    """The same, by kernels where `y` is on a GPU: for up to three projections and ranks from 16 on."""
    if triton is None or not y.is_cuda or a.size(2) < _MIN_RANK or len(sizes) > 3:
        lora_add_torch(y, x, a, b, sizes, rows)
        return
    launch_lora_add(y, x, a, b, sizes, rows)


def launch_lora_add(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], rows: AdapterRows
) -> None:
    """The kernels alone; arguments as of `lora_add_torch`, columns of `x`, `y`, and matrices of a slot contiguous."""
    _, projections, rank, k_size = a.shape
    count = len(rows.tiles)
    parts = 1
    while parts < _MOST_PARTS and 2 * parts * _PART_K <= k_size and parts * count * projections < _ENOUGH_PROGRAMS:
        parts *= 2
    h = torch.empty(parts, projections, rows.count, rank, dtype=torch.float32, device=y.device)
    precision = "ieee" if y.dtype == torch.float32 else "tf32"
    shared = (TILE_ROWS, triton.next_power_of_2(rank))
    _shrink[(count, projections, parts)](
        x, a, rows.tiles, h, k_size, rank, x.stride(0), a.stride(0), a.stride(1), h.stride(0), h.stride(1), parts,
        *shared, _BLOCK_K, precision, num_warps=4, num_stages=3,
    )  # fmt: skip
    wide = count * sum(sizes) > 2 * _ENOUGH_PROGRAMS * _WIDE_N
    block = _WIDE_N if wide else _NARROW_N
    blocks = sum(triton.cdiv(size, block) for size in sizes)
    size0, size1, size2 = (*sizes, 0, 0)[:3]
    _expand[(count, blocks)](
        y, h, b, rows.tiles, rank, y.stride(0), b.stride(0), h.stride(0), h.stride(1), parts, size0, size1, size2,
        *shared, block, precision, num_warps=4,
    )  # fmt: skip
