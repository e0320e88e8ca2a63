"""What the tests of this folder do with a supervisor: collect a stream's messages, wait for a state."""

import queue
import time
from collections.abc import Callable
from pathlib import Path

from dq_engine.config import EngineConfig
from dq_engine.request import Request
from dq_engine.serving.messages import Audio, StreamMessage
from dq_engine.serving.supervisor import RoutedStream, Supervisor

SMALL = Path(__file__).parents[2] / "models" / "small"
TEXT = "peter sells nine green toys"


def config(**settings) -> EngineConfig:
    return EngineConfig(model=str(SMALL), device="cpu", threads=1, **settings)


class Collector:
    """One request and its messages, each with the time of its arrival."""

    def __init__(self, supervisor: Supervisor, request: Request, output_format="f32", rate=None, stream=True) -> None:
        self._messages: queue.SimpleQueue[tuple[float, StreamMessage]] = queue.SimpleQueue()
        self.routed: RoutedStream = supervisor.submit(
            request, output_format, rate, stream, lambda m: self._messages.put((time.monotonic(), m))
        )

    def next(self, timeout: float = 20) -> tuple[float, StreamMessage]:
        return self._messages.get(timeout=timeout)

    def rest(self, timeout: float = 60) -> list[tuple[float, StreamMessage]]:
        """All messages that have not been read, to the last of the stream."""
        messages = [self.next(timeout)]
        while isinstance(messages[-1][1], Audio):
            messages.append(self.next(timeout))
        assert self._messages.empty(), "a message after the last one"
        return messages


def long_request(**fields) -> Request:
    """One that goes on for some 10 s, unless it is stopped."""
    return Request(text=TEXT, min_generate_length=200, max_generate_length=400, **fields)


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Returns how long it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - begun
