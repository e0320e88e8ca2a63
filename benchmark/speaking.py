"""Requests to an engine in this process or to a running server, each from its first chunk to its last."""

import abc
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np

_NUMBERS = {
    "seed": ("INT64", np.int64),
    "min_generate_length": ("INT32", np.int32),
    "max_generate_length": ("INT32", np.int32),
    "temperature": ("FP32", np.float32),
    "cfg_value": ("FP32", np.float32),
}


@dataclass(frozen=True)
class Spoken:
    """What came back.

    Args:
        samples: float32 [n].
        finish_reason: "stop" or "length".
        stats: of the last response.
    """

    samples: np.ndarray
    sample_rate: int
    finish_reason: str
    stats: dict


async def check_ready(client, url: str) -> None:
    """See that a tritonserver serves voxcpm2.

    Args:
        client: tritonclient's, for asyncio.
        url: of the client.

    Raises:
        ConnectionError: it does not.
    """
    from tritonclient.utils import InferenceServerException

    try:
        ready = await client.is_model_ready("voxcpm2", client_timeout=10)
    except InferenceServerException as error:
        raise ConnectionError(f"no gRPC from {url} (8001 by default): {error.message()}") from None
    if not ready:
        raise ConnectionError(f"the model voxcpm2 is not ready on {url}")


class Speaking(abc.ABC):
    """Where requests go."""

    @abc.abstractmethod
    def chunks(self, fields: dict) -> AsyncIterator[tuple[np.ndarray, int, str | None, dict | None]]:
        """(samples, sample rate, finish reason, stats) of each chunk; the last two with the last chunk only.

        Closing the iterator early cancels the request.
        """

    async def speak(self, fields: dict) -> Spoken:
        """One request to its end."""
        async with contextlib.aclosing(self.chunks(fields)) as chunks:
            parts = [part async for part in chunks]
        _, sample_rate, reason, stats = parts[-1]
        return Spoken(np.concatenate([samples for samples, *_ in parts]), sample_rate, reason, stats)

    async def leave(self, fields: dict, after: int) -> None:
        """One request that is cancelled after some chunks, if it has so many."""
        async with contextlib.aclosing(self.chunks(fields)) as chunks:
            async for _ in chunks:
                after -= 1
                if after == 0:
                    return


class EngineSpeaking(Speaking):
    """A DqCoreEngine that was started in this process."""

    def __init__(self, engine) -> None:
        self._engine = engine

    async def chunks(self, fields: dict):
        from dq_engine.engine import Request

        stream = self._engine.submit(Request(**fields))
        try:
            async for chunk in stream:
                yield chunk.samples, self._engine.sample_rate, chunk.finish_reason, chunk.stats
                if chunk.is_last:
                    stream = None
        finally:
            if stream is not None:
                stream.cancel()
                async for _ in stream:  # to its end: what comes later would find no event loop
                    pass


class TritonSpeaking(Speaking):
    """A running tritonserver with this repository's models.

    Args:
        url: host:port of its gRPC.
    """

    def __init__(self, url: str) -> None:
        from tritonclient.grpc.aio import InferenceServerClient

        self._client, self._url = InferenceServerClient(url), url

    async def start(self) -> None:
        """Raises ConnectionError: there is no such server, or its model is not ready."""
        await check_ready(self._client, self._url)

    async def chunks(self, fields: dict):
        from tritonclient.grpc import InferInput

        inputs = []
        for name, value in fields.items():
            kind, dtype = _NUMBERS.get(name, ("BYTES", np.object_))
            inputs.append(InferInput(name, [1], kind))
            value = value.encode() if isinstance(value, str) else value
            inputs[-1].set_data_from_numpy(np.array([value], dtype))

        async def requests():
            yield {"model_name": "voxcpm2", "inputs": inputs}

        stream = self._client.stream_infer(requests())
        ended = False
        try:
            async for result, error in stream:
                if error is not None:
                    ended = True
                    raise error
                audio, reason = result.as_numpy("audio"), result.as_numpy("finish_reason")
                ended = reason is not None
                samples = np.zeros(0, np.float32) if audio is None else audio
                end = (reason[0].decode(), json.loads(result.as_numpy("stats")[0])) if ended else (None, None)
                yield samples, int(result.as_numpy("sample_rate")[0]), *end
                if ended:
                    return
        finally:
            if not ended:
                stream.cancel()

    async def close(self) -> None:
        await self._client.close()
