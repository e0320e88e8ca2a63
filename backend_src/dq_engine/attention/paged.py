"""The KV cache of the language models, and attention to it by the backend that suits the device."""

import torch

from dq_engine.attention.base import BLOCK_SIZE, AttentionBackend, PagedMetadata
from dq_engine.attention.kernel import KernelBackend
from dq_engine.attention.sdpa import SdpaBackend
from dq_engine.kernels import paged_attention
from dq_engine.kernels.rope_and_store import rope_and_store
from dq_engine.nano import Cpm4Attention


class PagedAttention:
    """Causal attention of all layers. Before a pass, `metadata` is set to that pass's.

    Args:
        layers: the attention layers that use the cache, in order.
        setting: "auto" (the kernels where they take the device, the dtype and the heads, else SDPA) or "sdpa".
    """

    def __init__(self, layers: list[Cpm4Attention], setting: str) -> None:
        self._layers = layers
        self._weight = layers[0].qkv_proj.weight
        device, dtype = self._weight.device, self._weight.dtype
        fits = all(paged_attention.takes(device, dtype, a.num_heads, a.num_kv_heads, a.head_dim) for a in layers)
        self.backend: AttentionBackend = KernelBackend() if setting == "auto" and fits else SdpaBackend()
        self.queries_per_tile = min(paged_attention.queries_per_tile(a.num_heads, a.num_kv_heads) for a in layers)
        self.metadata: PagedMetadata | None = None
        self.kv_cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def bytes_per_block(self) -> int:
        """Memory of one KV block over all layers, in bytes."""
        width = sum(layer.num_kv_heads * layer.head_dim for layer in self._layers)
        return 2 * BLOCK_SIZE * self._weight.element_size() * width

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache: per layer, keys and values of [num_blocks, BLOCK_SIZE, kv_heads, head_dim]."""
        self.kv_cache = [
            tuple(self._weight.new_zeros(num_blocks, BLOCK_SIZE, a.num_kv_heads, a.head_dim) for _ in range(2))
            for a in self._layers
        ]

    def attend(self, layer: int, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate, store the new keys and values, and attend to all.

        Args:
            layer: which.
            qkv: [N, (heads + 2 * kv_heads) * head_dim].
            positions: int64 [N], the tokens' places in their streams.

        Returns:
            [N, heads * head_dim]
        """
        attention, rope = self._layers[layer], self._layers[layer].rotary_emb
        tables = None if rope is None else (rope.cos_cached, rope.sin_cached)
        q = rope_and_store(qkv, positions, tables, *self.kv_cache[layer], self.metadata.slots)
        return self.backend.paged(q, *self.kv_cache[layer], self.metadata, attention.scaling).flatten(1)
