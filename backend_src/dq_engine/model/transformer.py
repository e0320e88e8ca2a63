"""The transformers of VoxCPM2 on nano-vllm-voxcpm's modules: their weights, our order of operations and kernels."""

import torch

from dq_engine.attention.paged import PagedAttention
from dq_engine.kernels.local_attention import local_attention
from dq_engine.kernels.rms_norm import add_rms_norm
from dq_engine.kernels.silu_and_mul import silu_and_mul
from dq_engine.nano import Cpm4Attention, Cpm4DecoderLayer, Cpm4Model


class Transformer:
    """Pre-norm layers of attention and a gated feed-forward network."""

    def __init__(self, model: Cpm4Model) -> None:
        self.layers: list[Cpm4DecoderLayer] = list(model.layers)
        # The norm after each layer: the next one's first, or the model's last.
        self._norms = [*(layer.input_layernorm for layer in self.layers[1:]), model.norm]

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Run all layers.

        Args:
            x: [..., hidden].
            positions: what `attend` wants to know of the tokens' places.

        Returns:
            The same shape, normalized.
        """
        residual, normed = x, self.layers[0].input_layernorm(x)
        for index, (layer, norm) in enumerate(zip(self.layers, self._norms, strict=True)):
            attended = layer.self_attn.o_proj(self.attend(index, layer.self_attn, normed, positions))
            inner = layer.post_attention_layernorm
            normed, residual = add_rms_norm(attended, residual, inner.weight, inner.eps)
            fed = layer.mlp.down_proj(silu_and_mul(layer.mlp.gate_up_proj(normed)))
            normed, residual = add_rms_norm(fed, residual, norm.weight, norm.eps)
        return normed

    def attend(
        self, index: int, attention: Cpm4Attention, x: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of one layer, before its output projection."""
        raise NotImplementedError


class LocalTransformer(Transformer):
    """LocEnc and LocDiT: all tokens of a row see each other. x is [B, T, hidden]."""

    def attend(self, index, attention, x, positions):
        rope = attention.rotary_emb
        return local_attention(
            attention.qkv_proj(x),
            rope.cos_cached,
            rope.sin_cached,
            attention.num_heads,
            attention.num_kv_heads,
            attention.scaling,
        )


class PagedTransformer(Transformer):
    """Base LM and residual LM: causal, over a KV cache. x is [N, hidden], positions int64 [N].

    Args:
        model: the layers.
        cache: the KV cache of both language models.
        first_layer: where this one's layers begin in it.
    """

    def __init__(self, model: Cpm4Model, cache: PagedAttention, first_layer: int) -> None:
        super().__init__(model)
        self.cache, self.first_layer = cache, first_layer

    def attend(self, index, attention, x, positions):
        return self.cache.attend(self.first_layer + index, attention.qkv_proj(x), positions)
