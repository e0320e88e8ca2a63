"""The engines under load behind one small interface. What an engine needs is imported when its driver is started.

| name | what | where the engine runs |
|---|---|---|
| nano | stock nano-vllm-voxcpm, its own async pool | its worker process |
| engine | dq_engine.engine.DqCoreEngine | a thread of this process: it and the client share an interpreter |
| triton | a running tritonserver with this repository's models | elsewhere |

`nano` and `engine` never run in one process: dq_engine replaces parts of nano-vllm-voxcpm while it imports it.
"""

import abc
import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

import numpy as np
from speaking import check_ready
from workload import Job

if TYPE_CHECKING:
    from tritonclient.grpc import InferResult


class Refused(Exception):
    """The engine said that it has no room for the request (now)."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the caller decides about an engine that a driver starts; None is the engine's own default."""

    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.6
    max_num_batched_tokens: int = 8192
    realtime: bool = True
    lora_max_loras: int = 0
    lora_dir: str | None = None


class Driver(abc.ABC):
    """One engine, started for one run."""

    cached_tokens: int | None = None
    """Prompt tokens that came from a cache, over all streams so far; None where the engine does not tell."""
    prefills: tuple[int, int] | None = None
    """Steps of prompts that ran in a CUDA graph, and that did not; likewise."""
    lora_loads: int | None = None
    """Adapters loaded onto the device so far; likewise."""

    @abc.abstractmethod
    async def start(self) -> dict:
        """Returns when requests may come: the engine's settings, for the record."""

    @abc.abstractmethod
    def speak(self, job: Job) -> AsyncIterator[float]:
        """Seconds of audio of each chunk, as it comes. Closing the iterator early gives the stream up.

        Raises:
            Refused: no room.
        """

    async def register(self, name: str, path: str) -> None:
        """Offer an adapter, where the engine was started with room for any."""
        raise NotImplementedError

    @abc.abstractmethod
    async def stop(self) -> None:
        """End the engine."""


async def seconds_of(stream: AsyncGenerator[np.ndarray, None], sample_rate: int) -> AsyncIterator[float]:
    """Seconds of audio of each chunk of a pool's stream, float32 [n]; the stream is closed with this."""
    async with contextlib.aclosing(stream):
        async for samples in stream:
            yield len(samples) / sample_rate


class NanoDriver(Driver):
    def __init__(self, model: str, settings: Settings) -> None:
        self._model, self._settings = model, settings

    async def start(self) -> dict:
        from nanovllm_voxcpm import VoxCPM, __version__

        settings = {
            "max_num_batched_tokens": self._settings.max_num_batched_tokens,
            "gpu_memory_utilization": self._settings.gpu_memory_utilization,
        }
        if self._settings.max_num_seqs is not None:
            settings["max_num_seqs"] = self._settings.max_num_seqs
        if self._settings.lora_max_loras:
            from adapters import RANK
            from nanovllm_voxcpm.models.voxcpm2.config import LoRAConfig

            settings["lora_config"] = LoRAConfig(max_loras=self._settings.lora_max_loras, max_lora_rank=RANK)
        self._pool = VoxCPM.from_pretrained(model=self._model, devices=[0], **settings)
        await self._pool.wait_for_ready()
        self._sample_rate = (await self._pool.get_model_info())["sample_rate"]
        settings.pop("lora_config", None)
        return {"version": __version__, **settings}

    async def register(self, name: str, path: str) -> None:
        await self._pool.register_lora(name, path)

    def speak(self, job: Job) -> AsyncIterator[float]:
        latents = job.reference_latents
        stream = self._pool.generate(
            target_text=job.text,
            max_generate_length=job.patches,
            cfg_value=2.0,
            ref_audio_latents=None if latents is None else latents.tobytes(),
            lora_name=job.lora,
        )
        return seconds_of(stream, self._sample_rate)

    async def stop(self) -> None:
        await self._pool.stop()


class EngineDriver(Driver):
    def __init__(self, model: str, settings: Settings) -> None:
        self._model, self._settings = model, settings

    async def start(self) -> dict:
        from dq_engine.engine import DqCoreEngine, EngineConfig

        self._engine = DqCoreEngine(EngineConfig(model=self._model, **dataclasses.asdict(self._settings)))
        last_stage, began = "", time.monotonic()

        def progress(stage: str, fraction: float) -> None:
            nonlocal last_stage
            if stage != last_stage:
                print(f"  {time.monotonic() - began:.1f} s: {stage}", flush=True)
            last_stage = stage

        sys.setswitchinterval(0.001)  # as in the server's worker
        await asyncio.to_thread(self._engine.start, progress)
        self.cached_tokens = 0
        snapshot = self._engine.snapshot()
        shown = ("slots", "kv_blocks_total", "max_model_len")
        return {**self._engine.config.model_dump(exclude={"model"}), **{name: snapshot[name] for name in shown}}

    async def speak(self, job: Job) -> AsyncIterator[float]:
        from dq_engine.engine import Request, RequestError

        stream = None
        try:
            stream = self._engine.submit(
                Request(
                    text=job.text,
                    max_generate_length=job.patches,
                    reference_latents=job.reference_latents,
                    lora=job.lora,
                )
            )
            async for chunk in stream:
                yield len(chunk.samples) / self._engine.sample_rate
                if chunk.is_last:
                    self.cached_tokens += chunk.stats["cached_tokens"]
                    stream = None
        except RequestError as error:
            stream = None
            raise failure(str(error)) from error
        finally:
            if stream is not None:  # the client gave it up
                stream.cancel()

    async def register(self, name: str, path: str) -> None:
        await asyncio.to_thread(self._engine.register_lora, name, path)

    @property
    def prefills(self) -> tuple[int, int]:
        snapshot = self._engine.snapshot()
        return snapshot.get("prefill_graph_hits", 0), snapshot.get("prefill_graph_fallbacks", 0)

    @property
    def lora_loads(self) -> int:
        return self._engine.snapshot()["lora_loads"]

    async def stop(self) -> None:
        await asyncio.to_thread(self._engine.stop)


BYTES_PER_S = {"pcm16": 96_000, "mp3": 16_000}
"""Output formats of as many bytes for each second of a 48 kHz stream (mp3: 128 kbit/s), beside f32."""


class TritonDriver(Driver):
    """`connections` HTTP/2 connections share the streams; each stream is a gRPC call of its own."""

    def __init__(self, url: str, output_format: str = "f32", connections: int = 8) -> None:
        self._url, self._format, self._connections = url, output_format, connections

    async def start(self) -> dict:
        import tritonclient.grpc.aio as grpc_aio

        alone = [("grpc.use_local_subchannel_pool", 1)]  # otherwise gRPC joins them into one connection
        self._clients = [
            grpc_aio.InferenceServerClient(self._url, channel_args=alone) for _ in range(self._connections)
        ]
        await check_ready(self._clients[0], self._url)
        self.cached_tokens, self._sent = 0, 0
        return {"url": self._url, "connections": self._connections, "output_format": self._format}

    async def speak(self, job: Job) -> AsyncIterator[float]:
        import json

        from tritonclient.grpc import InferInput
        from tritonclient.utils import InferenceServerException

        tensors = {
            "text": ("BYTES", np.array([job.text.encode()], np.object_)),
            "max_generate_length": ("INT32", np.array([job.patches], np.int32)),
            "output_format": ("BYTES", np.array([self._format.encode()], np.object_)),
        }
        if job.reference_latents is not None:
            tensors["reference_latents"] = ("FP32", job.reference_latents)
        inputs = []
        for name, (kind, array) in tensors.items():
            inputs.append(InferInput(name, list(array.shape), kind))
            inputs[-1].set_data_from_numpy(array)

        async def requests():
            yield {"model_name": "voxcpm2", "inputs": inputs}

        self._sent += 1
        stream = self._clients[self._sent % len(self._clients)].stream_infer(requests())
        try:
            async for result, error in stream:
                if error is not None:
                    raise error
                yield self._seconds(result)
                if result.as_numpy("finish_reason") is not None:
                    self.cached_tokens += json.loads(result.as_numpy("stats")[0])["cached_tokens"]
                    return
        except InferenceServerException as error:
            raise failure(error.message()) from error
        finally:
            stream.cancel()

    def _seconds(self, result: "InferResult") -> float:
        """Of the audio in a response."""
        audio = result.as_numpy("audio" if self._format == "f32" else "audio_bytes")
        if audio is None:
            return 0.0
        if self._format == "f32":
            return len(audio) / int(result.as_numpy("sample_rate")[0])
        return len(audio[0]) / BYTES_PER_S[self._format]

    async def stop(self) -> None:
        for client in self._clients:
            await client.close()


def failure(message: str) -> Exception:
    """The exception for what a server or an engine of ours answered."""
    return Refused(message) if "UNAVAILABLE" in message else RuntimeError(message)


def make_driver(engine: str, target: str, settings: Settings, output_format: str = "f32") -> Driver:
    """Args: engine: nano, engine or triton. target: a checkpoint directory, for triton host:port of its gRPC."""
    if engine == "triton":
        return TritonDriver(target, output_format)
    return {"nano": NanoDriver, "engine": EngineDriver}[engine](target, settings)
