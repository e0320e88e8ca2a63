"""The attention kernels and SDPA give the same on a GPU, through the one interface; so do rotation and storing."""

import numpy as np
import pytest
import torch

from dq_engine.attention.base import BLOCK_SIZE, PagedMetadata
from dq_engine.attention.kernel import KernelBackend
from dq_engine.attention.sdpa import SdpaBackend
from dq_engine.kernels.paged_attention import queries_per_tile, query_tiles, takes
from dq_engine.kernels.rope_and_store import rope_and_store, rope_and_store_torch

pytestmark = pytest.mark.gpu

# bf16 has 8 bits of mantissa; outputs are averages of values of about 1.
TOLERANCE = 2e-2
SHAPES = [(16, 2, 128), (6, 2, 64), (4, 4, 32)]


def _both(heads: int, kv_heads: int, dim: int, contexts: list[int], queries: list[int] | None) -> list[torch.Tensor]:
    """The attention of both backends to the same cache, whose blocks are in a shuffled order."""
    torch.manual_seed(0)
    counts = [-(-c // BLOCK_SIZE) for c in contexts]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    tables = torch.zeros((len(contexts), max(counts) + 2), dtype=torch.int32, device="cuda")
    for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        tables[row, :count] = torch.from_numpy(order[end - count : end])
    shape = (sum(counts), BLOCK_SIZE, kv_heads, dim)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    lengths = queries or [1] * len(contexts)
    q = torch.randn(sum(lengths), heads, dim, device="cuda", dtype=torch.bfloat16)
    metadata = PagedMetadata(
        slots=torch.empty(0),
        block_tables=tables,
        context_lens=torch.tensor(contexts, device="cuda"),
        max_context=max(contexts),
    )
    if queries:
        tiles = query_tiles(queries, queries_per_tile(heads, kv_heads))
        metadata.query_starts = torch.tensor(np.cumsum([0, *queries]), device="cuda")
        metadata.tiles = torch.from_numpy(np.concatenate([tiles, [[-1, 0]]])).cuda()
        metadata.lengths = list(zip(queries, contexts, strict=True))
    return [b.paged(q, *caches, metadata, dim**-0.5).float() for b in (KernelBackend(), SdpaBackend())]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("contexts", [[1, 17, 255, 256, 257, 4000], [5 + 13 * n for n in range(70)]])
def test_decode(shape, contexts):
    ours, sdpa = _both(*shape, contexts, None)
    assert (ours - sdpa).abs().max() < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("contexts", "queries"), [([5, 300, 64], [5, 300, 64]), ([500, 300, 700], [100, 1, 444]), ([2100], [2100])]
)
def test_prompts(shape, contexts, queries):
    """Whole, and in later chunks."""
    ours, sdpa = _both(*shape, contexts, queries)
    assert (ours - sdpa).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_rope_and_store(heads, kv_heads, dim, rotated, dtype):
    torch.manual_seed(0)
    qkv = torch.randn(300, (heads + 2 * kv_heads) * dim, device="cuda", dtype=dtype)
    angles = torch.rand(500, dim // 2, device="cuda").repeat(1, 2) * 6
    rope = (angles.cos(), angles.sin()) if rotated else None
    positions, slots = (
        torch.randint(0, 500, (300,), device="cuda"),
        torch.randperm(40 * BLOCK_SIZE, device="cuda")[:300],
    )
    results = []
    for function in (rope_and_store, rope_and_store_torch):
        caches = [torch.zeros(40, BLOCK_SIZE, kv_heads, dim, device="cuda", dtype=dtype) for _ in range(2)]
        results.append([function(qkv, positions, rope, *caches, slots), *caches])
    for ours, exact in zip(*results, strict=True):
        assert (ours.float() - exact.float()).abs().max() < (TOLERANCE if dtype == torch.bfloat16 else 2e-6)
        assert exact.abs().max() > 1


def test_falls_back_where_the_kernels_do_not_go():
    cuda = torch.device("cuda")
    assert takes(cuda, torch.bfloat16, 16, 2, 128)
    assert not takes(cuda, torch.float32, 16, 2, 128)
    assert not takes(cuda, torch.bfloat16, 16, 2, 48)
    assert not takes(torch.device("cpu"), torch.bfloat16, 16, 2, 128)
