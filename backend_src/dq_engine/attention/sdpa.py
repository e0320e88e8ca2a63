"""Attention by torch.nn.functional.scaled_dot_product_attention: any device, dtype and head size."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from dq_engine.attention.base import BLOCK_SIZE, AttentionBackend, PagedMetadata


class SdpaBackend(AttentionBackend):
    graphs_prefill = False

    def paged(self, q, k_cache, v_cache, metadata, scale):
        if metadata.query_starts is None:
            return self._decode(q, k_cache, v_cache, metadata, scale)
        outputs = []
        start = 0
        for row, (length, context) in enumerate(metadata.lengths):
            blocks = metadata.block_tables[row, : -(-context // BLOCK_SIZE)]
            k, v = (cache[blocks].flatten(0, 1)[:context] for cache in (k_cache, v_cache))
            outputs.append(self._causal(q[start : start + length], k, v, scale))
            start += length
        return torch.cat(outputs)

    @staticmethod
    def _causal(q, k, v, scale):
        """One stream: q [T, heads, dim] are the last T of the tokens of k and v [context, kv_heads, dim]."""
        length, context = q.size(0), k.size(0)
        mask = None
        if length < context:
            mask = torch.ones(length, context, dtype=torch.bool, device=q.device).tril(context - length)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    def _decode(self, q, k_cache, v_cache, metadata: PagedMetadata, scale):
        blocks = metadata.block_tables[:, : -(-metadata.max_context // BLOCK_SIZE)]
        k, v = (cache[blocks].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        mask = torch.arange(k.size(2), device=q.device) < metadata.context_lens[:, None]
        out = scaled_dot_product_attention(q[:, :, None], k, v, mask[:, None, None], scale=scale, enable_gqa=True)
        return out[:, :, 0]
