"""Attention by flash-attn 2, on NVIDIA GPUs from compute capability 8.0 on."""

import torch

from dq_engine.attention.base import AttentionBackend


class FlashBackend(AttentionBackend):
    block_size = 256  # flash-attn 2 takes pages of multiples of 256 tokens only

    def __init__(self) -> None:
        import flash_attn

        self._varlen = flash_attn.flash_attn_varlen_func
        self._kvcache = flash_attn.flash_attn_with_kvcache

    @classmethod
    def takes(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether flash-attn is there and can attend on this device, in this dtype, with heads of this size."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
            return False
        try:
            backend = cls()
        except ImportError:
            return False
        # A build may hold a part of the kernels only: the one way to know is to call it.
        try:
            x = torch.zeros(1, cls.block_size, 1, head_dim, device=device, dtype=dtype)
            length, table = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([1], [[0]]))
            backend._kvcache(x[:, :1], x, x, cache_seqlens=length, block_table=table, causal=True)
            torch.cuda.synchronize(device)
        except RuntimeError:
            return False
        return True

    def paged(self, q, k_cache, v_cache, metadata, scale):
        if metadata.query_lens is None:
            return self._kvcache(
                q[:, None],
                k_cache,
                v_cache,
                cache_seqlens=metadata.context_lens,
                block_table=metadata.block_tables,
                softmax_scale=scale,
                causal=True,
            )[:, 0]
        starts_k = torch.nn.functional.pad(metadata.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return self._varlen(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=metadata.query_starts,
            cu_seqlens_k=starts_k,
            max_seqlen_q=max(metadata.query_lens),
            max_seqlen_k=metadata.max_context,
            block_table=metadata.block_tables,
            softmax_scale=scale,
            causal=True,
        )
