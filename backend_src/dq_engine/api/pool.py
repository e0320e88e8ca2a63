"""What the asynchronous and the synchronous pool have in common: the workers, the stored prompts, the adapters."""

import atexit
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import numpy as np

from dq_engine.api.errors import InvalidRequestError, to_raise
from dq_engine.config import EngineConfig
from dq_engine.errors import RequestError, invalid
from dq_engine.request import Request
from dq_engine.serving.messages import Failed, Finished, Ready, StreamMessage
from dq_engine.serving.supervisor import Supervisor
from dq_engine.serving.worker_process import OnMessage

CALL_TIMEOUT_S = 600.0
"""Longest wait for a worker that encodes a recording or loads an adapter."""


@dataclass(frozen=True)
class _Prompt:
    latents: bytes
    text: str


class Pool:
    """Engine workers under a supervisor. Its methods may be called from any thread.

    Args:
        config: settings of the workers, one on each of its devices; they start at once.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._prompts: dict[str, _Prompt] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._supervisor = Supervisor(config.of_workers())
        self._supervisor.begin_start()
        atexit.register(self._supervisor.kill)
        self.ready: Future[Ready] = Future()
        """Done when all workers are ready; or with a WorkerStartError."""
        self._starter = threading.Thread(target=self._wait_until_ready, name="dq-pool-start", daemon=True)
        self._starter.start()

    def _wait_until_ready(self) -> None:
        try:
            self.ready.set_result(self._supervisor.wait_until_ready())
        except Exception as error:
            self.ready.set_exception(error)

    def stop(self) -> None:
        """End the workers, within some seconds; what runs in them ends with an error. Once more is no error."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        self._supervisor.begin_stop()
        self._starter.join()
        if self.ready.exception() is None:  # else there is nothing left to stop
            self._supervisor.stop()
        atexit.unregister(self._supervisor.kill)

    def model_info(self) -> dict:
        """What `get_model_info` returns; after `ready`."""
        model = self.ready.result()
        return {
            "sample_rate": model.sample_rate,
            "encoder_sample_rate": model.encoder_sample_rate,
            "output_sample_rate": model.sample_rate,
            "channels": 1,
            "feat_dim": model.feat_dim,
            "patch_size": model.patch_size,
            "model_path": self._config.model,
        }

    def encode(self, wav: bytes, purpose: str) -> bytes:
        """A recording to latents, float32 [frames, feat_dim] as bytes; after `ready`.

        Raises:
            InvalidRequestError, FailedRequestError: it cannot be encoded; says why.
        """
        if not isinstance(wav, bytes | bytearray | memoryview):
            raise InvalidRequestError("INVALID_ARG", f"wav: must be an audio file's bytes, got {type(wav).__name__}")
        try:
            return self._supervisor.call("encode", {"purpose": purpose}, bytes(wav), CALL_TIMEOUT_S).payload
        except RequestError as error:
            raise to_raise(error) from None

    # --- adapters; after `ready` ---

    def register_lora(self, name: str, path: str) -> dict:
        """Offer an adapter in all workers, and in those that replace them."""
        return self._change(self._supervisor.adapters.register, name, os.path.realpath(path))

    def unregister_lora(self, name: str) -> dict:
        """Take an adapter back from all workers; streams that use it finish."""
        return self._change(self._supervisor.adapters.unregister, name)

    def _change(self, change: Callable[..., list[dict]], name: str, *path: str) -> dict:
        try:
            change(name, *path)
        except RequestError as error:
            raise to_raise(error) from None
        return {"name": name}

    def list_loras(self) -> list[dict]:
        """The adapters that can be asked for, by name."""
        return [{"name": name} for name in self._supervisor.adapters.names]

    # --- stored prompts ---

    def add_prompt(self, latents: bytes, text: str) -> str:
        """Keep an encoded prompt; its id."""
        prompt_id = uuid.uuid4().hex
        self._prompts[prompt_id] = _Prompt(latents, text)
        return prompt_id

    def remove_prompt(self, prompt_id: str) -> None:
        """Forget a prompt.

        Raises:
            KeyError: there is none of this id.
        """
        del self._prompts[prompt_id]

    # --- streams; after `ready` ---

    def request(
        self,
        target_text: str,
        prompt_latents: bytes | None,
        prompt_text: str,
        prompt_id: str | None,
        max_generate_length: int | None,
        temperature: float,
        cfg_value: float,
        ref_audio_latents: bytes | None,
        lora_name: str | None,
        seed: int | None,
    ) -> Request:
        """The parameters of `generate` as the engine takes them.

        Raises:
            InvalidRequestError: one is of the wrong type, out of its limits, or does not go with another.
        """
        if prompt_id is not None:
            if prompt_latents is not None or prompt_text:
                raise InvalidRequestError(
                    "INVALID_ARG", "prompt_id: cannot be combined with prompt_latents or prompt_text"
                )
            if (prompt := self._prompts.get(prompt_id)) is None:
                raise InvalidRequestError("NOT_FOUND", f"prompt_id: there is no stored prompt {prompt_id!r}")
            prompt_latents, prompt_text = prompt.latents, prompt.text
        model = self.ready.result()
        numbers = {
            "max_generate_length": max_generate_length,
            "temperature": temperature,
            "cfg_value": cfg_value,
            "seed": seed,
        }
        fields = {
            "text": target_text,
            "prompt_text": prompt_text or None,
            "lora": lora_name,
            "prompt_latents": _frames("prompt_latents", prompt_latents, model.feat_dim),
            "reference_latents": _frames("ref_audio_latents", ref_audio_latents, model.feat_dim),
            **{name: value.item() if isinstance(value, np.generic) else value for name, value in numbers.items()},
        }
        try:
            request = msgspec.convert(fields, Request)
            request.validate(model.feat_dim, model.patch_size)
        except msgspec.ValidationError as error:  # a wrong type: "Expected `str`, got `int` - at `$.text`"
            what, _, path = str(error).rpartition(" - at ")
            raise to_raise(invalid(path.strip("`$."), what.lower())) from None
        except RequestError as error:
            raise to_raise(error) from None
        return request

    def submit(self, request: Request, on_message: OnMessage):
        """Hand a request to a worker; a handle to cancel it with.

        Args:
            on_message: called on the supervisor's thread, as in `Supervisor.submit`.

        Raises:
            FailedRequestError: no worker takes it.
        """
        try:
            return self._supervisor.submit(request, "f32", None, True, on_message)
        except RequestError as error:
            raise to_raise(error) from None

    def chunks(self, message: StreamMessage) -> Iterator[np.ndarray]:
        """The patches of audio in a message, float32 [patch_samples] each.

        Raises:
            InvalidRequestError, FailedRequestError: the message says that the stream broke off.
        """
        if isinstance(message, Failed):
            raise to_raise(RequestError(message.code, message.message))
        samples = np.frombuffer(message.audio, np.float32).copy()  # writable, as callers expect of their own audio
        step = self.ready.result().patch_samples
        for start in range(0, samples.size, step):
            yield samples[start : start + step]


def is_last(message: StreamMessage) -> bool:
    """Whether a stream ends with this message."""
    return isinstance(message, Finished)


def _frames(field: str, latents: bytes | None, feat_dim: int) -> np.ndarray | None:
    """float32 bytes as [frames, feat_dim]."""
    if latents is None:
        return None
    if not isinstance(latents, bytes | bytearray | memoryview):
        kind = type(latents).__name__
        raise InvalidRequestError("INVALID_ARG", f"{field}: must be bytes of float32 latents, got {kind}")
    if len(latents) % (4 * feat_dim):
        raise InvalidRequestError(
            "INVALID_ARG", f"{field}: must hold float32 frames of {feat_dim} values, got {len(latents)} bytes"
        )
    return np.frombuffer(latents, np.float32).reshape(-1, feat_dim)
