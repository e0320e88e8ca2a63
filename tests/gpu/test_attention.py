"""flash-attn and SDPA give the same attention on a GPU, through the one interface."""

import numpy as np
import pytest
import torch

from dq_engine.attention.base import AttentionBackend, PagedMetadata
from dq_engine.attention.flash import FlashBackend
from dq_engine.attention.sdpa import SdpaBackend

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM = 16, 2, 128
SCALE = DIM**-0.5
# bf16 has 8 bits of mantissa; outputs are averages of values of about 1.
TOLERANCE = 2e-2


@pytest.fixture(scope="module")
def backends() -> tuple[AttentionBackend, AttentionBackend]:
    assert FlashBackend.takes(torch.device("cuda"), torch.bfloat16, DIM), "flash-attn is not usable on this GPU"
    return FlashBackend(), SdpaBackend()


def _caches(
    backend: AttentionBackend, keys: torch.Tensor, values: torch.Tensor, contexts: list[int], order: np.ndarray
):
    """Paged caches of a backend's own block size, holding the same tokens, their blocks in a shuffled order."""
    size = backend.block_size
    counts = [-(-c // size) for c in contexts]
    blocks = np.argsort(order[: sum(counts)])
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32, device="cuda")
    caches = [torch.zeros(sum(counts), size, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    start = taken = 0
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        tables[row, :count] = torch.from_numpy(blocks[taken : taken + count].astype(np.int32))
        for cache, source in zip(caches, (keys, values), strict=True):
            padded = torch.zeros(count * size, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
            padded[:context] = source[start : start + context]
            cache[tables[row, :count].long()] = padded.view(count, size, KV_HEADS, DIM)
        start, taken = start + context, taken + count
    return caches, tables


def _both(backends, contexts: list[int], queries: list[int] | None):
    torch.manual_seed(0)
    tokens = sum(contexts)
    keys, values = (torch.randn(tokens, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    count = sum(queries) if queries else len(contexts)
    q = torch.randn(count, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    order = np.random.default_rng(0).random(4096)
    outputs = []
    for backend in backends:
        (k_cache, v_cache), tables = _caches(backend, keys, values, contexts, order)
        metadata = PagedMetadata(
            slots=torch.empty(0),
            block_tables=tables,
            context_lens=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
            max_context=max(contexts),
            query_lens=queries,
            query_starts=torch.tensor(np.cumsum([0, *queries]), dtype=torch.int32, device="cuda") if queries else None,
            context_lens_host=contexts if queries else None,
        )
        outputs.append(backend.paged(q, k_cache, v_cache, metadata, SCALE).float())
    return outputs


def test_decode(backends):
    flash, sdpa = _both(backends, [1, 17, 255, 256, 257, 900], None)
    assert (flash - sdpa).abs().max() < TOLERANCE


def test_whole_prompts(backends):
    flash, sdpa = _both(backends, [5, 300, 64], [5, 300, 64])
    assert (flash - sdpa).abs().max() < TOLERANCE


def test_later_chunks_of_prompts(backends):
    flash, sdpa = _both(backends, [500, 300, 700], [100, 1, 444])
    assert (flash - sdpa).abs().max() < TOLERANCE


def test_falls_back_where_flash_attention_does_not_go():
    cuda = torch.device("cuda")
    assert not FlashBackend.takes(cuda, torch.float32, DIM)
    assert not FlashBackend.takes(torch.device("cpu"), torch.bfloat16, DIM)
