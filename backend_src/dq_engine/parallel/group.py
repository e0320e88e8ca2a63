"""The processes of a tensor-parallel engine as torch.distributed sees them."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dq_engine.errors import CheckpointError
from dq_engine.nano import VoxCPM2Config

TIMEOUT_S = 600.0
"""Longest wait for the others, while the checkpoint is loaded too."""


@dataclass(frozen=True)
class Rank:
    """One of the processes.

    Args:
        index: from 0, the one with the engine.
        size: how many there are.
        folder: private directory in which they find each other.
    """

    index: int
    size: int
    folder: str

    def join(self, device: torch.device) -> None:
        """Wait for the others; from then on nano-vllm-voxcpm's layers are made and loaded in parts."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.FileStore(f"{self.folder}/store", self.size)
        limit = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(backend, store=store, rank=self.index, world_size=self.size, timeout=limit)


def agree_on_least(value: float, device: torch.device) -> float:
    """The smallest of what all processes give, so that they decide alike; without any others, the value itself."""
    if not dist.is_initialized():
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return tensor.item()


def check_divisible(config: VoxCPM2Config, size: int) -> None:
    """Refuse a number of processes that the model's layers cannot be shared out to.

    Raises:
        CheckpointError: names the number and what it does not divide.
    """
    lm, local = config.lm_config, (config.encoder_config, config.dit_config)
    parts = {
        "KV heads": lm.num_key_value_heads,
        "heads": lm.num_attention_heads,
        "intermediate_size": lm.intermediate_size,
        "vocab_size": lm.vocab_size,
        "heads of LocEnc": local[0].num_heads,
        "ffn_dim of LocEnc": local[0].ffn_dim,
        "heads of LocDiT": local[1].num_heads,
        "ffn_dim of LocDiT": local[1].ffn_dim,
    }
    for name, number in parts.items():
        if number % size:
            raise CheckpointError(f"tensor_parallel_size ({size}) does not divide the checkpoint's {name} ({number})")
