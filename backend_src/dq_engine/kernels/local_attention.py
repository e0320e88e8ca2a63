"""Rotary embedding and attention among the few tokens of a patch (LocEnc: 5, LocDiT: 11), in one kernel.

Attention kernels for long sequences leave most of a GPU idle on these; here one program does one head of one row.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU installation
    triton = None

_MAX_TOKENS = 64


def local_attention_torch(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int, scale: float
) -> torch.Tensor:
    """Full attention among the tokens of each row, after rotating queries and keys.

    Args:
        qkv: [B, T, (heads + 2 * kv_heads) * dim], queries, keys and values of each token.
        cos, sin: float32 [>= T, dim], of the positions 0, 1, ...; both halves of a row are equal.
        scale: of the scores.

    Returns:
        [B, T, heads * dim]
    """
    batch, tokens, width = qkv.shape
    dim = width // (heads + 2 * kv_heads)
    q, k, v = qkv.view(batch, tokens, -1, dim).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    q, k = (rotate(x, cos[:tokens], sin[:tokens]) for x in (q, k))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).reshape(batch, tokens, heads * dim)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [..., dim] by float32 cos and sin of a shape that broadcasts to its."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


if triton is not None:

    @triton.jit
    def _kernel(
        qkv, cos, sin, out, scale, TOKENS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
        HALF: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        kv_head = head // (HEADS // KV_HEADS)
        token, lane = tl.arange(0, BLOCK)[:, None], tl.arange(0, HALF)[None, :]
        inside = token < TOKENS
        width = (HEADS + 2 * KV_HEADS) * 2 * HALF
        base = qkv + (row * TOKENS + token) * width + lane
        c = tl.load(cos + token * 2 * HALF + lane, inside, other=0.0)
        s = tl.load(sin + token * 2 * HALF + lane, inside, other=0.0)
        dtype = out.dtype.element_ty

        q = base + head * 2 * HALF
        q1, q2 = tl.load(q, inside, other=0.0).to(tl.float32), tl.load(q + HALF, inside, other=0.0).to(tl.float32)
        k = base + (HEADS + kv_head) * 2 * HALF
        k1, k2 = tl.load(k, inside, other=0.0).to(tl.float32), tl.load(k + HALF, inside, other=0.0).to(tl.float32)
        v = base + (HEADS + KV_HEADS + kv_head) * 2 * HALF
        v1, v2 = tl.load(v, inside, other=0.0), tl.load(v + HALF, inside, other=0.0)

        r1, r2 = (q1 * c - q2 * s).to(dtype), (q2 * c + q1 * s).to(dtype)
        t1, t2 = (k1 * c - k2 * s).to(dtype), (k2 * c + k1 * s).to(dtype)
        scores = tl.dot(r1, tl.trans(t1), input_precision=PRECISION)
        scores = tl.dot(r2, tl.trans(t2), scores, input_precision=PRECISION) * scale
        scores = tl.where(tl.arange(0, BLOCK)[None, :] < TOKENS, scores, float("-inf"))
        weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        weights = (weights / tl.sum(weights, axis=1)[:, None]).to(dtype)
        target = out + (row * TOKENS + token) * HEADS * 2 * HALF + head * 2 * HALF + lane
        tl.store(target, tl.dot(weights, v1, input_precision=PRECISION).to(dtype), inside)
        tl.store(target + HALF, tl.dot(weights, v2, input_precision=PRECISION).to(dtype), inside)


def local_attention(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int, scale: float
) -> torch.Tensor:
    """The same, by a kernel where `qkv` is on a GPU and the head's width is a power of two from 32 to 256."""
    batch, tokens, width = qkv.shape
    dim = width // (heads + 2 * kv_heads)
    if triton is None or not qkv.is_cuda or tokens > _MAX_TOKENS or dim not in (32, 64, 128, 256):
        return local_attention_torch(qkv, cos, sin, heads, kv_heads, scale)
    qkv = qkv.contiguous()
    out = qkv.new_empty(batch, tokens, heads * dim)
    _kernel[(batch, heads)](
        qkv, cos, sin, out, scale, tokens, heads, kv_heads, dim // 2, max(16, triton.next_power_of_2(tokens)),
        "ieee" if qkv.dtype == torch.float32 else "tf32", num_warps=2,
    )  # fmt: skip
    return out
