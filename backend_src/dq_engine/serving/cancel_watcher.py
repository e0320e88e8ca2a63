"""Notices clients that leave, by asking for each stream in turn."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

ROUND_S = 0.1
"""Every stream is asked for once in this time, spread evenly; a stream that came in mid-round waits for the next."""


class Watched(Protocol):
    """A stream that can be asked whether its client has left. `closed` is True once it has been answered in full.

    `keep_alive` is called before each question.
    """

    closed: bool

    def keep_alive(self) -> None: ...

    def is_cancelled(self) -> bool: ...


class CancelWatcher:
    """One thread asks all streams, because each question is a round trip that takes the whole process's attention."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._watched: dict[Watched, Callable[[], None]] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="dq-cancel-watcher", daemon=True)
        self._thread.start()

    def watch(self, stream: Watched, on_cancelled: Callable[[], None]) -> None:
        """Call `on_cancelled` once, on the watcher's thread, if the stream's client leaves before it is closed."""
        with self._condition:
            self._watched[stream] = on_cancelled
            self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._watched or self._stopped)
                if self._stopped:
                    return
                streams = list(self._watched.items())
            begun = time.monotonic()
            for number, (stream, on_cancelled) in enumerate(streams, start=1):
                if stream.closed or self._ask(stream, on_cancelled):
                    with self._condition:
                        del self._watched[stream]
                due = begun + ROUND_S * number / len(streams)
                with self._condition:
                    if self._condition.wait_for(lambda: self._stopped, max(0.0, due - time.monotonic())):
                        return

    @staticmethod
    def _ask(stream: Watched, on_cancelled: Callable[[], None]) -> bool:
        try:
            stream.keep_alive()
            if not stream.is_cancelled():
                return False
            on_cancelled()
        except Exception:
            logger.exception("asking whether a client has left failed")
        return True
