"""The interface of an attention backend, and what a pass tells it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

BLOCK_SIZE = 16
"""Tokens in one block of the KV cache: what streams share is found and kept in these steps."""


@dataclass
class PagedMetadata:
    """Where the streams of one pass have their keys and values (B streams, N tokens in all).

    Args:
        slots: int64 [N], the row of the flattened cache that each token's key and value go to.
        block_tables: int32 [B, max_blocks], each stream's blocks in order.
        context_lens: integers [B], tokens of each stream, this pass's included.
        max_context: no stream has more tokens.
        query_starts: int64 [B + 1], where each stream's tokens of this pass begin; None when each has one (decode).
        tiles: int64 [T, 2], the same tokens in tiles (see `kernels.paged_attention`); None in a decode.
        lengths: this pass's and all tokens of each stream, on the host; None in a decode and inside a CUDA graph.
    """

    slots: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    max_context: int
    query_starts: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    lengths: list[tuple[int, int]] | None = None


class AttentionBackend(ABC):
    """Computes attention; stateless, shared by all layers."""

    graphs_prefill: bool
    """Whether a pass over prompts needs nothing of them on the host, so that a CUDA graph can hold it."""

    @abstractmethod
    def paged(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, metadata: PagedMetadata, scale: float
    ) -> torch.Tensor:
        """Causal attention of q [N, heads, dim] to the cached [blocks, BLOCK_SIZE, kv_heads, dim], already written."""
