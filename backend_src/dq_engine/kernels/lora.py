"""LoRA for a batch whose rows use different adapters: y += (x A^T) B^T, with the A and B of each row's own adapter.

The torch lines define the result. On a GPU kernels do it whose grids depend on the number of rows only, so that one
CUDA graph serves whatever adapters a batch has. (nano-vllm-voxcpm's take the number of adapters as a dimension of
their grids, and add up parts of sums in an order that varies.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # without a GPU
    triton = None

TILE_ROWS = 16
"""The most rows in a tile: the fewest that tensor cores multiply at once."""
_MIN_RANK, _LARGE_RANK = 16, 64
# While there are fewer programs than would fill a GPU, sums are cut into parts, of at least so many terms.
_ENOUGH_PROGRAMS, _PART_K, _MOST_PARTS = 256, 256, 8
_EARLY_LAUNCH = 9
"""The compute capability from which on a kernel can be launched while the one before it still runs."""


@dataclass(frozen=True)
class AdapterRows:
    """Which adapter each row of a matrix uses.

    Args:
        count: rows of the matrix.
        tiles: int64 [T, 3], on the matrix's device: first row, number of rows (0 to TILE_ROWS), and the slot of their
            adapter or -1 for none. Rows in no tile use no adapter.
        copies: the matrix is so many parts of equal size, one below the other, and `tiles` holds for each of them.
    """

    count: int
    tiles: torch.Tensor
    copies: int = 1

    @cached_property
    def by_slot(self) -> list[tuple[int, torch.Tensor]]:
        """Each slot that is used, and its rows, int64. Waits for the device."""
        rows: dict[int, list[int]] = {}
        for copy in range(self.copies):
            start = copy * (self.count // self.copies)
            for first, count, slot in self.tiles.tolist():
                if slot >= 0:
                    rows.setdefault(slot, []).extend(range(start + first, start + first + count))
        return [(slot, torch.tensor(index, device=self.tiles.device)) for slot, index in rows.items()]


def equal_tiles(slots: torch.Tensor, rows: int, copies: int = 1) -> AdapterRows:
    """Of B streams with `rows` rows each, one after the other, and all of that `copies` times.

    Args:
        slots: integers [B], each stream's adapter slot or -1.
    """
    starts = torch.arange(0, rows, TILE_ROWS, device=slots.device)
    first = torch.arange(len(slots), device=slots.device)[:, None] * rows + starts
    count = (rows - starts).clamp(max=TILE_ROWS).expand_as(first)
    slot = slots.long()[:, None].expand_as(first)
    return AdapterRows(copies * len(slots) * rows, torch.stack([first, count, slot], -1).view(-1, 3), copies)


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

    @triton.jit
    def _rows(tiles, tile, distance, ROWS: tl.constexpr, COPIES: tl.constexpr):
        """Of a tile: its rows [COPIES * ROWS], which of them there are, and the slot of their adapter."""
        r = tl.arange(0, COPIES * ROWS)
        row = tl.load(tiles + 3 * tile) + r % ROWS + r // ROWS * distance
        return row, r % ROWS < tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)

    @triton.jit
    def _columns(block, size0, size1, size2, BLOCK: tl.constexpr):
        """Of the block-th block of columns: its projection, its columns [BLOCK], and which of them there are."""
        blocks0, blocks1 = tl.cdiv(size0, BLOCK), tl.cdiv(size1, BLOCK)
        second, third = block >= blocks0, block >= blocks0 + blocks1
        projection = second.to(tl.int32) + third.to(tl.int32)
        begin = tl.where(third, size0 + size1, tl.where(second, size0, 0))
        size = tl.where(third, size2, tl.where(second, size1, size0))
        block -= tl.where(third, blocks0 + blocks1, tl.where(second, blocks0, 0))
        column = block * BLOCK + tl.arange(0, BLOCK)
        return projection, begin + column, column < size

    @triton.jit(do_not_specialize=["parts", "distance"])
    def _shrink(
        x, a, tiles, h, k_size, rank, x_stride, a_slot, a_projection, h_part, h_projection, distance, parts,
        ROWS: tl.constexpr, COPIES: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        """One part of the sums x A^T of one tile and one projection, into h [parts, projections, M, rank]."""
        if EARLY:
            gdc_wait()
            gdc_launch_dependents()  # not before: so all that came before this kernel is done when the next one begins
        projection, part = tl.program_id(1), tl.program_id(2)
        row, inside, slot = _rows(tiles, tl.program_id(0), distance, ROWS, COPIES)
        if slot >= 0:
            matrix = a + slot * a_slot + projection * a_projection
            lane = tl.arange(0, RANK)
            sums = tl.zeros((COPIES * ROWS, RANK), tl.float32)
            for start in range(part * BLOCK, k_size, parts * BLOCK):
                k = start + tl.arange(0, BLOCK)
                within = (k < k_size)[None, :]
                inputs = tl.load(x + row[:, None] * x_stride + k[None, :], inside[:, None] & within, other=0.0)
                weights = tl.load(
                    matrix + lane[:, None] * k_size + k[None, :], (lane < rank)[:, None] & within, other=0.0
                )
                sums = tl.dot(inputs, tl.trans(weights), sums, input_precision=PRECISION)
            target = h + part * h_part + projection * h_projection + row[:, None] * rank + lane[None, :]
            tl.store(target, sums, inside[:, None] & (lane < rank)[None, :])

    @triton.jit(do_not_specialize=["parts", "distance"])
    def _expand(
        y, h, b, tiles, rank, y_stride, b_slot, h_part, h_projection, distance, parts, size0, size1, size2,
        ROWS: tl.constexpr, COPIES: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        """A block of columns of one projection, for one tile, from h."""
        row, inside, slot = _rows(tiles, tl.program_id(0), distance, ROWS, COPIES)
        projection, column, present = _columns(tl.program_id(1), size0, size1, size2, BLOCK)
        lane = tl.arange(0, RANK)
        ranks = (lane < rank)[None, :]
        there = present[:, None] & ranks & (slot >= 0)
        weights = tl.load(b + slot * b_slot + column[:, None] * rank + lane[None, :], there, other=0.0)
        if EARLY:
            gdc_wait()
        if slot >= 0:
            target, mask = y + row[:, None] * y_stride + column[None, :], inside[:, None] & present[None, :]
            # What the sums have nothing to do with is on its way while they are made.
            total = tl.load(target, mask, other=0.0).to(tl.float32)
            source = h + projection * h_projection + row[:, None] * rank + lane[None, :]
            hidden = tl.zeros((COPIES * ROWS, RANK), tl.float32)
            for part in range(parts):
                hidden += tl.load(source + part * h_part, inside[:, None] & ranks, other=0.0)
            total += tl.dot(hidden.to(weights.dtype), tl.trans(weights), input_precision=PRECISION)
            tl.store(target, total.to(target.dtype.element_ty), mask)


def lora_add(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], rows: AdapterRows
) -> None:
    """The same, by kernels where `y` is on a GPU: for up to three projections and ranks from 16 on.

    For them the columns of `x`, of `y`, and of a slot's matrices have to be contiguous.
    """
    _, projections, rank, k_size = a.shape
    if triton is None or not y.is_cuda or rank < _MIN_RANK or projections > 3:
        lora_add_torch(y, x, a, b, sizes, rows)
        return
    count, parts = len(rows.tiles), 1
    while parts < _MOST_PARTS and 2 * parts * _PART_K <= k_size and parts * count * projections < _ENOUGH_PROGRAMS:
        parts *= 2
    h = torch.empty(parts, projections, rows.count, rank, dtype=torch.float32, device=y.device)
    shape, distance = (TILE_ROWS, rows.copies, triton.next_power_of_2(rank)), rows.count // rows.copies
    precision = "ieee" if y.dtype == torch.float32 else "tf32"
    early = _launches_early(y.device)
    _shrink[(count, projections, parts)](
        x, a, rows.tiles, h, k_size, rank, x.stride(0), a.stride(0), a.stride(1), h.stride(0), h.stride(1),
        distance, parts, *shape, _block_k(rank, y.dtype), precision, early, num_warps=4, num_stages=4, launch_pdl=early,
    )  # fmt: skip
    block = 128 if rank <= _LARGE_RANK else 64
    _expand[(count, sum(triton.cdiv(size, block) for size in sizes))](
        y, h, b, rows.tiles, rank, y.stride(0), b.stride(0), h.stride(0), h.stride(1), distance, parts,
        *(*sizes, 0, 0)[:3], *shape, block, precision, early, num_warps=4, launch_pdl=early,
    )  # fmt: skip


def compile_kernels(a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int]) -> None:
    """Have all that `lora_add` may launch for such matrices compiled; arguments as of `lora_add_torch`."""
    x, y = a.new_empty(2, a.size(3)), a.new_empty(2, sum(sizes))
    nobody = torch.full((1, 3), -1, device=a.device)
    for copies in 1, 2:
        lora_add(y, x, a, b, sizes, AdapterRows(2, nobody, copies))


@cache
def _launches_early(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= _EARLY_LAUNCH


def _block_k(rank: int, dtype: torch.dtype) -> int:
    """Terms of a sum that are loaded at once: fewer where more would not fit the shared memory."""
    return 128 // (dtype.itemsize // 2) // (1 if rank <= _LARGE_RANK else 4)
