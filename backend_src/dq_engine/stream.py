"""The caller's end of a stream of audio."""

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator

from dq_engine.request import Chunk


class Stream:
    """Chunks of one request: by a callback, or by iterating, synchronously or asynchronously.

    What has not been read yet waits here; a request's longest audio bounds it.

    Args:
        id: the engine's number for it.
        on_chunk: called with each chunk on the engine's delivery thread; must not block. Without it, iterate.
        on_cancel: tells the engine that the caller has left.
    """

    def __init__(
        self, id: int, on_chunk: Callable[[Chunk], None] | None, on_cancel: Callable[["Stream"], None]
    ) -> None:
        self.id = id
        self.created = time.monotonic()
        self.cancelled = False
        self._ended = False
        self._on_chunk, self._on_cancel = on_chunk, on_cancel
        self._chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def deliver(self, chunk: Chunk) -> None:
        """Hand the next chunk to the caller (the engine's side). After the last one nothing more is handed over."""
        if self._ended:
            return
        self._ended = chunk.is_last
        if self._on_chunk is not None:
            self._on_chunk(chunk)
            return
        self._chunks.put(chunk)
        if (waiter := self._waiter) is not None:
            loop, event = waiter
            loop.call_soon_threadsafe(event.set)

    def cancel(self) -> None:
        """Stop generating; the stream ends with finish_reason "cancelled", unless it has ended already."""
        self.cancelled = True
        self._on_cancel(self)

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks to the last.

        Raises:
            RequestError: the stream broke off.
        """
        while True:
            chunk = self._chunks.get()
            if chunk.error is not None:
                raise chunk.error
            yield chunk
            if chunk.is_last:
                return

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        event = asyncio.Event()
        self._waiter = (asyncio.get_running_loop(), event)
        while True:
            try:
                chunk = self._chunks.get_nowait()
            except queue.Empty:
                await event.wait()
                event.clear()
                continue
            if chunk.error is not None:
                raise chunk.error
            yield chunk
            if chunk.is_last:
                return
