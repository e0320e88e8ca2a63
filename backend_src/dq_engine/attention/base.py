"""The interface of an attention backend, and what a pass tells it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass
class PagedMetadata:
    """Where the streams of one pass have their keys and values (B streams, N tokens in all).

    Args:
        slots: int64 [N], the row of the flattened cache that each token's key and value go to.
        block_tables: int32 [B, max_blocks], each stream's blocks in order.
        context_lens: int32 [B], tokens of each stream, this pass's included.
        max_context: the largest of them.
        query_lens: this pass's tokens of each stream, on the host; None when every stream has one (decode).
        query_starts: int32 [B + 1], running sum of `query_lens`; None when they are.
        context_lens_host: `context_lens` on the host; None in a decode.
    """

    slots: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    max_context: int
    query_lens: list[int] | None = None
    query_starts: torch.Tensor | None = None
    context_lens_host: list[int] | None = None


class AttentionBackend(ABC):
    """Computes attention; stateless, shared by all layers."""

    block_size: int
    """Tokens in one block of the KV cache."""

    @abstractmethod
    def paged(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, metadata: PagedMetadata, scale: float
    ) -> torch.Tensor:
        """Causal attention of q [N, heads, dim] to the cached [blocks, block_size, kv_heads, dim], already written."""
