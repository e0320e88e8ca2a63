"""Causal attention to a KV cache of small blocks: many queries of a prompt, or one of each stream.

All queries that share a key head are rows of one matrix product. The prompts of a pass are cut into tiles of queries
whose list is made on the host, so that a CUDA graph of a given number of tiles serves any prompts that fit into it.
"""

import numpy as np
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU installation
    triton = None

_TILE_ROWS = 128
# A prompt's tile and its keys stay within the registers of one program.
_PREFILL_KEYS, _DECODE_KEYS = 32, 64
# With few streams each one's keys are shared out among several programs, of at least so many keys each.
_SPLITS, _SPLIT_KEYS = 8, 128
_SPLIT_BELOW_STREAMS = 32


def takes(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether the kernels can attend on this device, in this dtype, with heads of this shape."""
    return (
        triton is not None
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] >= 8
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (32, 64, 128)
        and heads // kv_heads <= _TILE_ROWS
    )


def queries_per_tile(heads: int, kv_heads: int) -> int:
    return _TILE_ROWS // (heads // kv_heads)


def query_tiles(query_lens: list[int], per_tile: int) -> np.ndarray:
    """Cut prompts into tiles: int64 [T, 2], the prompt's number, and the tile's first query counted within it."""
    return np.array([(row, start) for row, n in enumerate(query_lens) for start in range(0, n, per_tile)], np.int64)


if triton is not None:

    @triton.jit
    def _attend(
        q, k_cache, v_cache, table, kv_head, begin, end, last_key, scale, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
        PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ):  # fmt: skip
        """Rows of q [ROWS, DIM] attend to keys [begin, end), each row to those up to last_key; unnormalized."""
        lane = tl.arange(0, DIM)
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        out = tl.zeros((ROWS, DIM), tl.float32)
        for start in range(begin, end, KEYS):
            key = start + tl.arange(0, KEYS)
            inside = key < end
            block = tl.load(table + key // PAGE, inside, other=0).to(tl.int64)
            place = ((block * PAGE + key % PAGE) * KV_HEADS + kv_head) * DIM
            k = tl.load(k_cache + place[:, None] + lane[None, :], inside[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k)) * scale
            seen = inside[None, :] & (key[None, :] <= last_key[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, axis=1))
            # A row that has seen no key yet: its weights are all 0, and -inf - -inf must not be formed.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - shift[:, None])
            keep = tl.exp(best - shift)
            total = total * keep + tl.sum(weights, axis=1)
            v = tl.load(v_cache + place[:, None] + lane[None, :], inside[:, None], other=0.0)
            out = tl.dot(weights.to(v.dtype), v, out * keep[:, None])
            best = higher
        return out, best, total

    @triton.jit
    def _prefill_kernel(
        q, k_cache, v_cache, tables, table_width, contexts, query_starts, tiles, result, scale, GROUP: tl.constexpr,
        KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ):  # fmt: skip
        prompt = tl.load(tiles + 2 * tl.program_id(0))
        if prompt < 0:
            return
        kv_head = tl.program_id(1)
        first = tl.load(query_starts + prompt)
        count = tl.load(query_starts + prompt + 1) - first
        context = tl.load(contexts + prompt)
        row = tl.arange(0, ROWS)
        query = tl.load(tiles + 2 * tl.program_id(0) + 1) + row // GROUP
        inside = (query < count) & (row < ROWS // GROUP * GROUP)
        place = ((first + query) * GROUP * KV_HEADS + kv_head * GROUP + row % GROUP) * DIM
        lane = tl.arange(0, DIM)[None, :]
        queries = tl.load(q + place[:, None] + lane, inside[:, None], other=0.0)
        last_key = context - count + query
        end = tl.minimum(context, tl.max(tl.where(inside, last_key, 0)) + 1)
        out, _, total = _attend(
            queries, k_cache, v_cache, tables + prompt * table_width, kv_head, 0, end, last_key, scale, KV_HEADS, DIM,
            PAGE, ROWS, KEYS,
        )  # fmt: skip
        out = out / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(result + place[:, None] + lane, out.to(result.dtype.element_ty), inside[:, None])

    @triton.jit
    def _decode_kernel(
        q, k_cache, v_cache, tables, table_width, contexts, result, partial, totals, scale, SPLITS: tl.constexpr,
        SPLIT_KEYS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
        ROWS: tl.constexpr, KEYS: tl.constexpr,
    ):  # fmt: skip
        stream, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        context = tl.load(contexts + stream)
        span = tl.maximum(tl.cdiv(tl.cdiv(context, SPLITS), KEYS) * KEYS, SPLIT_KEYS)
        if SPLITS == 1:
            span = context
        row = tl.arange(0, ROWS)
        inside = row < GROUP
        head = (stream * KV_HEADS + kv_head) * GROUP + row
        lane = tl.arange(0, DIM)[None, :]
        queries = tl.load(q + head[:, None] * DIM + lane, inside[:, None], other=0.0)
        begin = split * span
        out, best, total = _attend(
            queries, k_cache, v_cache, tables + stream * table_width, kv_head, begin, tl.minimum(begin + span, context),
            tl.full((ROWS,), 0, tl.int64) + context, scale, KV_HEADS, DIM, PAGE, ROWS, KEYS,
        )  # fmt: skip
        if SPLITS == 1:
            out = out / tl.where(total > 0.0, total, 1.0)[:, None]
            tl.store(result + head[:, None] * DIM + lane, out.to(result.dtype.element_ty), inside[:, None])
        else:
            part = head * SPLITS + split
            tl.store(partial + part[:, None] * DIM + lane, out, inside[:, None])
            tl.store(totals + 2 * part, best, inside)
            tl.store(totals + 2 * part + 1, total, inside)

    @triton.jit
    def _join_kernel(partial, totals, result, SPLITS: tl.constexpr, DIM: tl.constexpr):
        head = tl.program_id(0).to(tl.int64)
        part = head * SPLITS + tl.arange(0, SPLITS)
        best, total = tl.load(totals + 2 * part), tl.load(totals + 2 * part + 1)
        weight = tl.exp(best - tl.max(best, axis=0))
        lane = tl.arange(0, DIM)
        parts = tl.load(partial + part[:, None] * DIM + lane[None, :])
        out = tl.sum(parts * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
        tl.store(result + head * DIM + lane, out.to(result.dtype.element_ty))


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The last queries of each of B prompts attend to it.

    Args:
        q: [N, heads, dim].
        k_cache, v_cache: [blocks, block_size, kv_heads, dim], the queries' own keys and values included.
        block_tables: integers [B, max_blocks].
        context_lens: integers [B], keys of each prompt.
        query_starts: integers [B + 1], where each prompt's queries begin in q.
        tiles: integers [T, 2] of `query_tiles`; a prompt's number of -1 is no tile.

    Returns:
        As q; what is in no tile is undefined.
    """
    _, page, kv_heads, dim = k_cache.shape
    q = q.contiguous()
    result = torch.empty_like(q)
    _prefill_kernel[(len(tiles), kv_heads)](
        q, k_cache, v_cache, block_tables, block_tables.stride(0), context_lens, query_starts, tiles, result, scale,
        q.size(1) // kv_heads, kv_heads, dim, page, _TILE_ROWS, _PREFILL_KEYS, num_warps=4,
    )  # fmt: skip
    return result


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One query of each of B streams attends to all its keys; q [B, heads, dim], the others as for a prefill."""
    streams, heads, dim = q.shape
    _, page, kv_heads, _ = k_cache.shape
    q = q.contiguous()
    result = torch.empty_like(q)
    splits = _SPLITS if streams < _SPLIT_BELOW_STREAMS else 1
    partial = q.new_empty(streams * heads * splits, dim, dtype=torch.float32) if splits > 1 else result
    totals = q.new_empty(streams * heads * splits, 2, dtype=torch.float32) if splits > 1 else result
    group = heads // kv_heads
    _decode_kernel[(streams, kv_heads, splits)](
        q, k_cache, v_cache, block_tables, block_tables.stride(0), context_lens, result, partial, totals, scale,
        splits, _SPLIT_KEYS, group, kv_heads, dim, page, max(16, triton.next_power_of_2(group)), _DECODE_KEYS,
        num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(streams * heads,)](partial, totals, result, splits, dim, num_warps=1)
    return result
