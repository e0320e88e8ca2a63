"""What a worker does for its supervisor besides speaking: each operation's name, and what it calls of the engine."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dq_engine.errors import RequestError, invalid
from dq_engine.serving.messages import Call, Failed, FromWorker, Result

logger = logging.getLogger(__name__)

THREADS = 16
"""Calls that run at once; two batches of the encode stage."""
MAX_CALLS = 64
"""Calls that run or wait."""

Answer = tuple[dict, bytes | None]


class Operations:
    """Runs calls on threads of its own, so that neither the inbox nor each other waits for them.

    Args:
        engine: a started `DqCoreEngine`.
        post: sends the answers.
    """

    def __init__(self, engine, post: Callable[[FromWorker], None]) -> None:
        self._engine, self._post = engine, post
        self._threads = ThreadPoolExecutor(THREADS, "dq-operation")
        self._room = threading.Semaphore(MAX_CALLS)
        self._table: dict[str, Callable[..., dict | Answer]] = {
            "encode": self._encode,
            "register_voice": self._register_voice,
            "list_voices": lambda payload: {"voices": self._voices.describe_all()},
            "get_voice": lambda payload, name: self._voices.describe(name),
            "delete_voice": lambda payload, name: self._voices.delete(name) or {"deleted": name},
            "register_lora": lambda payload, name, path, digest=None: self._engine.register_lora(name, path, digest),
            "load_loras": lambda payload, names: self._engine.load_loras(names) or {"loaded": names},
            "unregister_lora": lambda payload, name: self._engine.unregister_lora(name),
            "list_loras": lambda payload: {"adapters": self._engine.list_loras()},
            "snapshot": lambda payload: self._engine.snapshot(),
            "information": self._information,
        }

    def handle(self, call: Call) -> None:
        """Begin with a call; its answer is posted later."""
        if not self._room.acquire(blocking=False):
            self._post(Failed(call.id, "UNAVAILABLE", f"the engine worker has {MAX_CALLS} calls already"))
            return
        self._threads.submit(self._run, call)

    def _run(self, call: Call) -> None:
        try:
            if (function := self._table.get(call.operation)) is None:
                raise invalid("operation", f'there is none named "{call.operation}"')
            answer = function(call.payload, **call.arguments)
            message = Result(call.id, *(answer if isinstance(answer, tuple) else (answer,)))
        except RequestError as error:
            message = Failed(call.id, error.code, error.message)
        except Exception as error:
            logger.exception("%s failed", call.operation)
            message = Failed(call.id, "INTERNAL", f"{call.operation} failed: {error}")
        self._room.release()
        self._post(message)

    @property
    def _voices(self):
        if self._engine.voices is None:
            raise RequestError("UNAVAILABLE", "no voices are stored here: voices_dir is not set")
        return self._engine.voices

    def _encode(self, payload: bytes | None, purpose: str) -> Answer:
        """A recording to latents: the answer's payload is float32 [frames, feat_dim]."""
        latents, seconds = self._engine.encode(payload or b"", purpose)
        return {"seconds": seconds}, latents.tobytes()

    def _register_voice(
        self, payload: bytes | None, name: str, given_as_payload: str, prompt_text: str | None = None, **fields
    ) -> dict:
        """`fields`: (reference|prompt)_audio as base64, (reference|prompt)_latents as raw float32."""
        voices = self._voices
        voices.check_new(name)
        if payload is not None:
            if given_as_payload in fields:
                raise invalid(given_as_payload, "is given twice, as an argument and as the payload")
            fields[given_as_payload] = payload
        latents = {}
        for kind in ("reference", "prompt"):
            audio, raw = fields.get(f"{kind}_audio"), fields.get(f"{kind}_latents")
            if audio is not None and raw is not None:
                raise invalid(f"{kind}_latents", f"cannot be combined with {kind}_audio")
            if kind == "reference" and (audio or raw):
                voices.check_reference("reference_audio" if raw is None else "reference_latents")
            if audio is not None:
                data = audio.encode() if isinstance(audio, str) else audio
                latents[f"{kind}_latents"], _ = self._engine.encode(data, kind, f"{kind}_audio")
            if raw is not None:
                latents[f"{kind}_latents"] = self._frames(f"{kind}_latents", raw)
        return voices.register(name, prompt_text=prompt_text, **latents)

    def _frames(self, field: str, raw: bytes) -> np.ndarray:
        width = self._engine.feat_dim
        if len(raw) % 4:
            raise invalid(field, f"must hold float32 numbers, got {len(raw)} bytes")
        array = np.frombuffer(raw, "<f4")
        if array.size % width:
            raise invalid(field, f"must hold {width} numbers a frame, got {array.size}")
        return array.reshape(-1, width)

    def _information(self, payload: bytes | None) -> dict:
        from dq_engine.information import information  # imports the engine

        return information(self._engine)
