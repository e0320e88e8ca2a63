"""Rotating queries and keys by their positions and putting keys and values into the KV cache, in one pass."""

import torch

from dq_engine.kernels.local_attention import rotate

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU installation
    triton = None


def rope_and_store_torch(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Take N tokens in.

    Args:
        qkv: [N, (heads + 2 * kv_heads) * dim], queries, keys and values of each token.
        positions: int64 [N].
        rope: cosines and sines, float32 [> max(positions), dim], both halves of a row equal; None = no rotation.
        k_cache, v_cache: [blocks, block_size, kv_heads, dim]; written.
        slots: int64 [N], the row of the flattened cache that each token goes to.

    Returns:
        The queries, [N, heads, dim].
    """
    kv_heads, dim = k_cache.shape[2:]
    heads = qkv.size(1) // dim - 2 * kv_heads
    q, k, v = qkv.view(len(qkv), -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if rope is not None:
        cos, sin = (table[positions][:, None] for table in rope)
        q, k = (rotate(x, cos, sin) for x in (q, k))
    k_cache.view(-1, kv_heads, dim).index_copy_(0, slots, k)
    v_cache.view(-1, kv_heads, dim).index_copy_(0, slots, v)
    return q


if triton is not None:

    @triton.jit
    def _kernel(
        qkv, positions, cos, sin, k_cache, v_cache, slots, out, ROTATE: tl.constexpr, GROUP: tl.constexpr,
        KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One token's queries of one group of heads, and the key and value that they share."""
        token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        lane, row = tl.arange(0, HALF)[None, :], tl.arange(0, BLOCK)[:, None]
        heads = GROUP * KV_HEADS
        base = qkv + token * (heads + 2 * KV_HEADS) * 2 * HALF + lane
        inside = (row < GROUP) & (lane < HALF)
        q = base + (kv_head * GROUP + row) * 2 * HALF
        q1, q2 = tl.load(q, inside, other=0.0), tl.load(q + HALF, inside, other=0.0)
        k = base + (heads + kv_head) * 2 * HALF
        k1, k2 = tl.load(k), tl.load(k + HALF)
        v = base + (heads + KV_HEADS + kv_head) * 2 * HALF
        v1, v2 = tl.load(v), tl.load(v + HALF)
        if ROTATE:
            place = tl.load(positions + token) * 2 * HALF + lane
            c, s = tl.load(cos + place), tl.load(sin + place)
            dtype = out.dtype.element_ty
            q1, q2 = q1.to(tl.float32), q2.to(tl.float32)
            q1, q2 = (q1 * c - q2 * s).to(dtype), (q2 * c + q1 * s).to(dtype)
            k1, k2 = k1.to(tl.float32), k2.to(tl.float32)
            k1, k2 = (k1 * c - k2 * s).to(dtype), (k2 * c + k1 * s).to(dtype)
        target = out + token * heads * 2 * HALF + (kv_head * GROUP + row) * 2 * HALF + lane
        tl.store(target, q1, inside)
        tl.store(target + HALF, q2, inside)
        cache = (tl.load(slots + token) * KV_HEADS + kv_head) * 2 * HALF + lane
        tl.store(k_cache + cache, k1)
        tl.store(k_cache + cache + HALF, k2)
        tl.store(v_cache + cache, v1)
        tl.store(v_cache + cache + HALF, v2)


def rope_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """The same, by a kernel where `qkv` is on a GPU and the head's width is a power of two from 32 on."""
    kv_heads, dim = k_cache.shape[2:]
    if triton is None or not qkv.is_cuda or dim < 32 or dim & (dim - 1):
        return rope_and_store_torch(qkv, positions, rope, k_cache, v_cache, slots)
    qkv = qkv.contiguous()
    heads = qkv.size(1) // dim - 2 * kv_heads
    out = qkv.new_empty(len(qkv), heads, dim)
    cos, sin = rope or (qkv, qkv)  # not read then
    group = heads // kv_heads
    _kernel[(len(qkv), kv_heads)](
        qkv, positions, cos, sin, k_cache, v_cache, slots, out, rope is not None, group, kv_heads, dim // 2,
        triton.next_power_of_2(group), num_warps=2,
    )  # fmt: skip
    return out
