"""`VoxCPM.from_pretrained`: a checkpoint to a pool of engine workers."""

import asyncio
import json
from collections.abc import Sequence

from dq_engine.api.asynchronous import AsyncVoxCPM2ServerPool
from dq_engine.api.lora_config import LoRAConfig
from dq_engine.api.pool import Pool
from dq_engine.api.synchronous import SyncVoxCPM2ServerPool
from dq_engine.config import EngineConfig, resolve_checkpoint
from dq_engine.errors import CheckpointError

# Who calls from Python waits on purpose; the defaults of a server are for clients that will not.
_QUEUE_SIZE = 8192
_QUEUE_TIMEOUT_S = 24 * 3600.0


class VoxCPM:
    """The way in; it is never instantiated."""

    @staticmethod
    def from_pretrained(
        model: str,
        inference_timesteps: int = 10,
        max_num_batched_tokens: int = 16384,
        max_num_seqs: int | None = None,
        max_model_len: int = 4096,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        devices: Sequence[int | str] = (),
        lora_config: LoRAConfig | None = None,
        **settings: object,
    ) -> AsyncVoxCPM2ServerPool | SyncVoxCPM2ServerPool:
        """Start an engine worker, a process, on each device. The parameters are nano-vllm-voxcpm's.

        Inside a running event loop this returns at once, with an `AsyncVoxCPM2ServerPool` (`await wait_for_ready()`);
        elsewhere it returns a `SyncVoxCPM2ServerPool` when all workers are ready.

        Args:
            model: checkpoint directory, or the id of a repository on the Hugging Face hub, downloaded here.
            inference_timesteps: Euler steps of the diffusion, per patch.
            max_num_batched_tokens: most tokens in one step of a worker.
            max_num_seqs: streams at once in a worker; 512 on a GPU, 16 on a CPU.
            max_model_len: most tokens and patches of one stream; lowered to what the checkpoint was trained for.
            gpu_memory_utilization: share of a GPU's memory to fill.
            enforce_eager: run a GPU without CUDA graphs.
            devices: GPU numbers, which mean the CPU where there is no GPU, or names such as "cpu" and "cuda:1"; none
                is GPU 0.
            lora_config: room for adapters.
            settings: other settings of `EngineConfig`. The environment's DQ_ENGINE_<NAME> win over all of these.

        Raises:
            CheckpointError: there is no such checkpoint.
            ValueError: a setting is unknown or out of its limits.
            WorkerStartError: (outside an event loop) a worker could not start; says why.
        """
        path = resolve_checkpoint(model)
        if isinstance(devices, str):
            raise ValueError(f"devices: must be a list of devices, got {devices!r}")
        names = [f"auto:{device}" if isinstance(device, int) else device for device in devices]
        settings = {"queue_size": _QUEUE_SIZE, "queue_timeout_s": _QUEUE_TIMEOUT_S, **settings}
        if lora_config is not None:
            settings |= lora_config.settings()
        config = EngineConfig.from_parameters(
            {
                "model": str(path),
                "inference_timesteps": inference_timesteps,
                "max_num_batched_tokens": max_num_batched_tokens,
                "max_num_seqs": max_num_seqs,
                "max_model_len": min(max_model_len, _trained_length(path)),
                "gpu_memory_utilization": gpu_memory_utilization,
                "enforce_eager": enforce_eager,
                "devices": ",".join(names or ["auto:0"]),
                **settings,
            }
        )
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return SyncVoxCPM2ServerPool(Pool(config))
        return AsyncVoxCPM2ServerPool(Pool(config))


def _trained_length(path) -> int:
    """The longest stream that a checkpoint allows, in tokens and patches."""
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        longest = raw.get("max_length", 8192 if raw.get("architecture") == "voxcpm2" else 4096)
        return min(longest, raw["lm_config"]["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not the configuration of a VoxCPM checkpoint ({error!r})") from None
