"""Attention by this package's Triton kernels, on NVIDIA GPUs from compute capability 8.0 on."""

from dq_engine.attention.base import AttentionBackend
from dq_engine.kernels.paged_attention import decode_attention, prefill_attention


class KernelBackend(AttentionBackend):
    graphs_prefill = True

    def paged(self, q, k_cache, v_cache, metadata, scale):
        arguments = (q, k_cache, v_cache, metadata.block_tables, metadata.context_lens)
        if metadata.query_starts is None:
            return decode_attention(*arguments, scale)
        return prefill_attention(*arguments, metadata.query_starts, metadata.tiles, scale)
