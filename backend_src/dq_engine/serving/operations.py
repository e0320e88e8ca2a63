"""What a worker does for its supervisor besides speaking: each operation's name, and what it calls of the engine."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dq_engine.errors import RequestError
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
        self._table: dict[str, Callable[[dict, bytes | None], Answer]] = {
            "encode": self._encode,
            "snapshot": lambda arguments, payload: (self._engine.snapshot(), None),
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
                raise RequestError("INVALID_ARG", f'operation: there is none named "{call.operation}"')
            answer = Result(call.id, *function(call.arguments, call.payload))
        except RequestError as error:
            answer = Failed(call.id, error.code, error.message)
        except Exception as error:
            logger.exception("%s failed", call.operation)
            answer = Failed(call.id, "INTERNAL", f"{call.operation} failed: {error}")
        self._room.release()
        self._post(answer)

    def _encode(self, arguments: dict, payload: bytes | None) -> Answer:
        """A recording to latents: the payload is float32 [frames, feat_dim]."""
        latents, seconds = self._engine.encode(payload or b"", **arguments)
        return {"seconds": seconds}, latents.tobytes()
