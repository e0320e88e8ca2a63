"""The attention of a model's layers: chooses the backend, owns the KV cache, takes the place of nano-vllm-voxcpm's."""

import torch
from torch import nn

from dq_engine.attention.base import AttentionBackend, PagedMetadata
from dq_engine.attention.flash import FlashBackend
from dq_engine.attention.sdpa import SdpaBackend
from dq_engine.nano import VoxCPM2Model, attention_layers


def choose_backend(setting: str, device: torch.device, dtype: torch.dtype, head_dims: set[int]) -> AttentionBackend:
    """flash-attn where it is importable and takes this device, dtype and all head sizes; else, or if forced, SDPA."""
    if setting == "auto" and all(FlashBackend.takes(device, dtype, dim) for dim in head_dims):
        return FlashBackend()
    return SdpaBackend()


class LocalAttention(nn.Module):
    """Attention within the few tokens of a patch (LocEnc, LocDiT)."""

    def __init__(self, backend: AttentionBackend, scale: float) -> None:
        super().__init__()
        self.backend, self.scale = backend, scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.backend.local(q, k, v, self.scale).contiguous()


class PagedAttention(nn.Module):
    """Causal attention over the KV cache (base LM, residual LM); stores the new keys and values first."""

    def __init__(self, backend: AttentionBackend, scale: float, owner: "ModelAttention", layer: int) -> None:
        super().__init__()
        self.backend, self.scale, self.owner, self.layer = backend, scale, owner, layer

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k_cache, v_cache = self.owner.kv_cache[self.layer]
        metadata = self.owner.metadata
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, metadata.slots, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, metadata.slots, v)
        return self.backend.paged(q, k_cache, v_cache, metadata, self.scale).contiguous()


class ModelAttention:
    """All attention of one model. Before a pass, `metadata` is set to that pass's.

    Args:
        model: its attention layers are replaced.
        setting: "auto" or "sdpa".
    """

    def __init__(self, model: VoxCPM2Model, setting: str) -> None:
        weight = model.lm_to_dit_proj.weight
        layers = list(attention_layers(model))
        self.backend = choose_backend(setting, weight.device, weight.dtype, {m.head_dim for m in layers})
        self.metadata: PagedMetadata | None = None
        self.kv_cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._causal = [m for lm in (model.base_lm, model.residual_lm) for m in attention_layers(lm)]
        for module in layers:
            module.attn = LocalAttention(self.backend, module.scaling)
        for index, module in enumerate(self._causal):
            module.attn = PagedAttention(self.backend, module.scaling, self, index)

    @property
    def bytes_per_block(self) -> int:
        """Memory of one KV block over all layers, in bytes."""
        element = self._causal[0].qkv_proj.weight.element_size()
        return 2 * self.backend.block_size * element * sum(m.num_kv_heads * m.head_dim for m in self._causal)

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache: per layer, keys and values of [num_blocks, block_size, kv_heads, head_dim]."""
        weight = self._causal[0].qkv_proj.weight
        self.kv_cache = [
            tuple(weight.new_zeros(num_blocks, self.backend.block_size, m.num_kv_heads, m.head_dim) for _ in range(2))
            for m in self._causal
        ]
