"""One life of one engine worker, as its supervisor sees it: the process, the sockets to it, and the streams it has."""

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # Python's own from 3.11 on
from dataclasses import dataclass
from pathlib import Path

import zmq

from dq_engine.child_process import start_module
from dq_engine.config import EngineConfig
from dq_engine.errors import RequestError
from dq_engine.serving import routing
from dq_engine.serving.messages import (
    Audio,
    Call,
    Cancel,
    Failed,
    Result,
    Shutdown,
    StreamMessage,
    Submit,
    encode,
)

logger = logging.getLogger(__name__)

MAX_STREAMS = 8192
"""Requests at one worker, its queue included; the engine's own limits are usually lower."""
SEND_TIMEOUT_MS = 1000
SEND_QUEUE_MESSAGES = 256

OnMessage = Callable[[StreamMessage | Result], None]
_generation = itertools.count()


def answer(on_message: OnMessage, message: StreamMessage | Result) -> None:
    """Hand a stream a message; what its callback raises must not reach the other streams."""
    try:
        on_message(message)
    except Exception:
        logger.exception("a stream's callback failed on %s", type(message).__name__)


@dataclass
class _Stream:
    on_message: OnMessage
    progress: routing.StreamProgress
    is_given_up: bool = False
    """Nobody waits for it, but its answer will still be heard."""


class WorkerProcess:
    """A started worker process. Making one starts it.

    Args:
        config: the engine's settings.
        index: the worker's number, from 0.
        folder: private directory for the ipc sockets.
        context: of the sockets.
    """

    def __init__(self, config: EngineConfig, index: int, folder: Path, context: zmq.Context) -> None:
        self.index = index
        self.ready = False
        self.start_error: str | None = None
        self._lock = threading.Lock()
        self.slots: int | None = None
        """Streams that its engine can have at once; None until it has said so."""
        self._streams: dict[int, _Stream] | None = {}
        """None once the process has ended."""
        self._send_lock = threading.Lock()
        generation = next(_generation)
        self._paths = [folder / f"{generation}.in", folder / f"{generation}.out"]
        self._inbox, self.outbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, path in zip((self._inbox, self.outbox), self._paths, strict=True):
            socket.set(zmq.LINGER, 0)
            socket.bind(f"ipc://{path}")
        self._inbox.set(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        self._inbox.set(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        # The settings are complete: the environment's part of them must not be applied once more.
        settings = {f"DQ_ENGINE_{name.upper()}" for name in type(config).model_fields}
        environment = {name: value for name, value in os.environ.items() if name not in settings}
        endpoints = [f"ipc://{path}" for path in self._paths]
        self.process = start_module("dq_engine.serving.worker", *endpoints, environment=environment)
        with contextlib.suppress(BrokenPipeError):  # it died already, which the pidfd tells as well
            self.process.stdin.write(config.model_dump_json().encode() + b"\n")
            self.process.stdin.flush()
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def load(self) -> tuple[bool, float]:
        """How busy it is; see `routing.load`."""
        with self._lock:
            progress = [s.progress for s in (self._streams or {}).values() if not s.is_given_up]
        return routing.load(progress, self.slots, time.monotonic())

    def submit(self, message: Submit | Call, on_message: OnMessage, expected_s: float = 0.0) -> None:
        """Hand it a request; a call counts as a stream until it is answered.

        Args:
            expected_s: see `routing.StreamProgress`.

        Raises:
            RequestError: UNAVAILABLE; then `on_message` is not called.
            ValueError: it holds text that is no Unicode; likewise.
        """
        data = encode(message)
        with self._lock:
            if self._streams is None:
                raise RequestError("UNAVAILABLE", "the engine worker has just ended; it is being restarted")
            if len(self._streams) >= MAX_STREAMS:
                raise RequestError("UNAVAILABLE", f"the engine worker has {MAX_STREAMS} requests already")
            self._streams[message.id] = _Stream(on_message, routing.StreamProgress(expected_s))
        if not self._send(data):
            with self._lock:
                answered = self._streams is None or self._streams.pop(message.id, None) is None
            if not answered:
                raise RequestError("UNAVAILABLE", f"the engine worker has taken nothing for {SEND_TIMEOUT_MS} ms")

    def call(
        self, message: Call, timeout_s: float, too_late: Callable[[Result | Failed], None] = lambda answer: None
    ) -> Result:
        """Have it do something other than speak, and wait for it.

        Args:
            too_late: gets an answer that comes later than `timeout_s`, on the supervisor's thread.

        Raises:
            RequestError: of the operation; UNAVAILABLE if it takes nothing, or has not answered within `timeout_s`.
        """
        answered: Future[Result | Failed] = Future()

        def on_answer(answer: Result | Failed) -> None:
            if answered.set_running_or_notify_cancel():
                answered.set_result(answer)
            else:
                too_late(answer)

        self.submit(message, on_answer)
        try:
            answer = answered.result(timeout_s)
        except FutureTimeoutError:
            if answered.cancel():
                self._give_up(message.id)
                what = f"{message.operation} was not answered within {timeout_s:.3g} s"
                raise RequestError("UNAVAILABLE", what) from None
            answer = answered.result()  # it comes just now
        if isinstance(answer, Failed):
            raise RequestError(answer.code, answer.message)
        return answer

    def cancel(self, id: int) -> None:
        """Have a stream ended; its last message still comes."""
        with self._lock:
            known = self._streams is not None and id in self._streams
        if known:
            self._send(encode(Cancel(id)))

    def _give_up(self, id: int) -> None:
        with self._lock:
            if (stream := (self._streams or {}).get(id)) is not None:
                stream.is_given_up = True

    def shut_down(self) -> None:
        """Ask it to end; streams that run are answered first."""
        self._send(encode(Shutdown()))

    def deliver(self, message: StreamMessage | Result, last: bool) -> None:
        """Give a message to its stream; one for a stream that is over is dropped."""
        with self._lock:
            streams = self._streams or {}
            stream = streams.pop(message.id, None) if last else streams.get(message.id)
        if stream is None:
            return
        if isinstance(message, Audio):
            stream.progress.delivered(message.seconds, time.monotonic())
        answer(stream.on_message, message)

    def close(self) -> dict[int, OnMessage]:
        """Forget a process that has ended (or end it); the streams that nobody has answered, each once."""
        with self._lock:
            unanswered, self._streams = self._streams or {}, None
        self.ready = False
        return {id: stream.on_message for id, stream in unanswered.items()}

    def dispose(self) -> None:
        """End the process if it still runs, and free everything; the streams must have been taken with `close`."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        os.close(self.pidfd)
        with self._send_lock:
            self._inbox.close()
        self.outbox.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _send(self, data: bytes) -> bool:
        with self._send_lock:
            try:
                self._inbox.send(data)
            except zmq.ZMQError:  # full for SEND_TIMEOUT_MS, or closed because the process ended
                return False
        return True
