"""The KV cache of the language models, and attention to it by the backend that suits the device."""

import torch

from dq_engine.attention.base import AttentionBackend, PagedMetadata
from dq_engine.attention.flash import FlashBackend
from dq_engine.attention.sdpa import SdpaBackend
from dq_engine.nano import Cpm4Attention


def choose_backend(setting: str, device: torch.device, dtype: torch.dtype, head_dims: set[int]) -> AttentionBackend:
    """flash-attn where it is importable and takes this device, dtype and all head sizes; else, or if forced, SDPA."""
    if setting == "auto" and all(FlashBackend.takes(device, dtype, dim) for dim in head_dims):
        return FlashBackend()
    return SdpaBackend()


class PagedAttention:
    """Causal attention of all layers. Before a pass, `metadata` is set to that pass's.

    Args:
        layers: the attention layers that use the cache, in order.
        setting: "auto" or "sdpa".
    """

    def __init__(self, layers: list[Cpm4Attention], setting: str) -> None:
        self._layers = layers
        self._weight = layers[0].qkv_proj.weight
        dims = {layer.head_dim for layer in layers}
        self.backend = choose_backend(setting, self._weight.device, self._weight.dtype, dims)
        self.metadata: PagedMetadata | None = None
        self.kv_cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def bytes_per_block(self) -> int:
        """Memory of one KV block over all layers, in bytes."""
        width = sum(layer.num_kv_heads * layer.head_dim for layer in self._layers)
        return 2 * self.backend.block_size * self._weight.element_size() * width

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache: per layer, keys and values of [num_blocks, block_size, kv_heads, head_dim]."""
        size = self.backend.block_size
        self.kv_cache = [
            tuple(self._weight.new_zeros(num_blocks, size, a.num_kv_heads, a.head_dim) for _ in range(2))
            for a in self._layers
        ]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Store the new keys and values, [N, kv_heads, head_dim], and attend to all; [N, heads, head_dim] as q."""
        k_cache, v_cache = self.kv_cache[layer]
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, self.metadata.slots, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, self.metadata.slots, v)
        return self.backend.paged(q, k_cache, v_cache, self.metadata, scale)
