"""nano-vllm-voxcpm's Python interface on this engine: `VoxCPM.from_pretrained` and the two pools that it returns."""

from dq_engine.api.asynchronous import AsyncVoxCPM2ServerPool
from dq_engine.api.lora_config import LoRAConfig
from dq_engine.api.synchronous import SyncVoxCPM2ServerPool
from dq_engine.api.voxcpm import VoxCPM

__all__ = ["AsyncVoxCPM2ServerPool", "LoRAConfig", "SyncVoxCPM2ServerPool", "VoxCPM"]
