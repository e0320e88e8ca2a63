"""The engines behind the three bench_*.py: a pool of processes of this machine, or a running tritonserver."""

import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from drivers import Driver, failure, seconds_of
from safetensors import safe_open
from speaking import TritonSpeaking
from workload import Job

if TYPE_CHECKING:
    from bench_common import Common


class PoolDriver(Driver):
    """nano-vllm-voxcpm's Python interface, its own or ours: engines in processes of their own."""

    def __init__(self, common: "Common") -> None:
        self._common = common

    async def start(self) -> dict:
        common = self._common
        if common.engine.value == "nano":
            from nanovllm_voxcpm import VoxCPM
            from nanovllm_voxcpm.models.voxcpm2.config import LoRAConfig
        else:
            from dq_engine import LoRAConfig, VoxCPM
        names = (
            "inference_timesteps max_num_batched_tokens max_num_seqs max_model_len gpu_memory_utilization enforce_eager"
        )
        self._pool = VoxCPM.from_pretrained(
            model=common.model,
            devices=[int(device) if device.isdecimal() else device for device in common.devices.split(",")],
            lora_config=LoRAConfig(
                max_loras=common.max_loras, max_lora_rank=common.max_lora_rank, **lora_targets(Path(common.lora_path))
            )
            if common.max_loras
            else None,
            **{name: getattr(common, name) for name in names.split()},
        )
        await self._pool.wait_for_ready()
        self._sample_rate = common.sample_rate or (await self._pool.get_model_info())["sample_rate"]
        return {}

    async def register(self, name: str, path: str) -> None:
        await self._pool.register_lora(name, path)

    def speak(self, job: Job) -> AsyncIterator[float]:
        stream = self._pool.generate(
            target_text=job.text,
            max_generate_length=job.patches,
            temperature=self._common.temperature,
            cfg_value=self._common.cfg_value,
            seed=self._common.seed,
            lora_name=job.lora,
        )
        return seconds_of(stream, self._sample_rate)

    async def stop(self) -> None:
        await self._pool.stop()


class ServerDriver(Driver):
    """A running tritonserver; what it was started with is its own affair, and its adapters are as before in the end."""

    def __init__(self, common: "Common") -> None:
        self._common = common
        self._registered: list[str] = []

    async def start(self) -> dict:
        self._speaking = TritonSpeaking(self._common.url)
        await self._speaking.start()
        return {}

    async def register(self, name: str, path: str) -> None:
        await self._administer("register_lora", {"name": name, "path": path})
        self._registered.append(name)

    async def speak(self, job: Job) -> AsyncIterator[float]:
        from tritonclient.utils import InferenceServerException

        fields = {
            "text": job.text,
            "max_generate_length": job.patches,
            "temperature": self._common.temperature,
            "cfg_value": self._common.cfg_value,
            "seed": self._common.seed,
            "lora": job.lora,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            async with contextlib.aclosing(self._speaking.chunks(given)) as chunks:
                async for samples, sample_rate, *_ in chunks:
                    yield len(samples) / (self._common.sample_rate or sample_rate)
        except InferenceServerException as error:
            raise failure(error.message()) from error

    async def stop(self) -> None:
        await self._speaking.close()
        for name in self._registered:
            try:
                await self._administer("unregister_lora", {"name": name})
            except RuntimeError as error:  # what was measured is more important
                print(error, file=sys.stderr)

    async def _administer(self, operation: str, arguments: dict[str, str]) -> None:
        from tritonclient.grpc import InferInput
        from tritonclient.grpc.aio import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        fields = {"operation": operation, "arguments": json.dumps(arguments)}
        if token := os.environ.get("DQ_ENGINE_ADMIN_TOKEN"):
            fields["token"] = token
        inputs = [InferInput(field, [1], "BYTES") for field in fields]
        for tensor, value in zip(inputs, fields.values(), strict=True):
            tensor.set_data_from_numpy(np.array([value.encode()], np.object_))
        async with InferenceServerClient(self._common.url) as client:
            try:
                await client.infer("voxcpm2_admin", inputs)
            except InferenceServerException as error:
                raise RuntimeError(f"{operation} {arguments}: {error.message()}") from None


def lora_targets(adapter: Path) -> dict[str, object]:
    """Of a LoRAConfig: the projections that an adapter's lora_weights.safetensors changes, and no others.

    Raises:
        OSError, safetensors.SafetensorError: it cannot be read.
    """
    with safe_open(adapter / "lora_weights.safetensors", "np") as tensors:
        layers = {name.rpartition(".lora_")[0] for name in tensors.keys()}  # noqa: SIM118  it is no dictionary
    inner = {layer for layer in layers if ".layers." in layer}
    dit = {layer.rpartition(".")[2] for layer in inner if layer.startswith("feat_decoder.")}
    lm = {layer.rpartition(".")[2] for layer in inner if not layer.startswith("feat_decoder.")}
    between = sorted(layers - inner)
    return {
        "enable_lm": bool(lm),
        "enable_dit": bool(dit),
        "enable_proj": bool(between),
        "target_modules_lm": sorted(lm),
        "target_modules_dit": sorted(dit),
        "target_proj_modules": between,
    }
