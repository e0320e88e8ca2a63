"""Audio on its way out of a worker: encoded, joined while the road is busy, and bounded."""

import logging
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from dq_engine.audio.output import OutputEncoder
from dq_engine.errors import RequestError
from dq_engine.request import Chunk
from dq_engine.serving.messages import Audio, Failed, Finished, FromWorker, Result, StreamMessage

logger = logging.getLogger(__name__)

_NOTHING = np.zeros(0, np.float32)
MAX_WAITING_BYTES = 1 << 30
"""Samples that may wait here, all streams together: 95 minutes of 48 kHz audio."""


class OutgoingStream:
    """One stream's chunks that have not been sent yet.

    Args:
        id: its number in messages.
        encoder: of its audio; used by one thread of the outbox at a time.
        sample_rate: of the encoded audio, in Hz.
        whole: True to send everything in one message at the end.
        on_give_up: called when the rest of the stream is of no use any more.
    """

    def __init__(
        self, id: int, encoder: OutputEncoder, sample_rate: int, whole: bool, on_give_up: Callable[[], None]
    ) -> None:
        self.id = id
        self.encoder, self.sample_rate, self.whole = encoder, sample_rate, whole
        self.on_give_up = on_give_up
        self.samples: list[np.ndarray] = []
        self.last: Chunk | None = None
        self.in_hand = False
        """Whether it stands in line, or a thread is at it."""
        self.first_sent = False


class Outbox:
    """Takes chunks on the engine's delivery thread and never blocks it; sends messages from threads of its own.

    A stream's first chunk goes out by itself; then whatever it has gathered when its turn comes is one message, so
    chunks grow where the supervisor is slow. Samples are joined before they are encoded: encoded pieces (base64, say)
    cannot always be.

    Args:
        send: sends one message, called by any of the threads; may block for as long as the receiver is busy.
        threads: how many encode and send; each stream is one thread's at a time.
    """

    def __init__(self, send: Callable[[FromWorker], None], threads: int = 1) -> None:
        self._send = send
        self._condition = threading.Condition()
        # All below are guarded by _condition.
        self._line: deque[OutgoingStream | FromWorker] = deque()
        self._waiting_bytes = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"dq-outbox-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, message: FromWorker) -> None:
        """Send a message that belongs to no chunk."""
        with self._condition:
            self._line.append(message)
            self._condition.notify()

    def put(self, stream: OutgoingStream, chunk: Chunk) -> None:
        """Send a stream's next chunk, later and with its neighbours if need be."""
        overflow = None
        with self._condition:
            if stream.last is not None:
                return  # it was given up before
            if self._waiting_bytes + chunk.samples.nbytes > MAX_WAITING_BYTES:
                message = f"over {MAX_WAITING_BYTES >> 20} MiB of audio wait to be sent; this stream was given up"
                overflow = stream.on_give_up
                chunk = Chunk(_NOTHING, error=RequestError("UNAVAILABLE", message))
            if chunk.samples.size:
                stream.samples.append(chunk.samples)
                self._waiting_bytes += chunk.samples.nbytes
            if chunk.is_last:
                stream.last = chunk
            if not stream.in_hand and (chunk.is_last or not stream.whole):
                stream.in_hand = True
                self._line.append(stream)
                self._condition.notify()
        if overflow is not None:
            overflow()

    def close(self) -> None:
        """Send what waits, then end the threads."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._line or self._closed)
                if not self._line:
                    return
                item = self._line.popleft()
                if isinstance(item, OutgoingStream):
                    samples, last = self._take(item)
            if not isinstance(item, OutgoingStream):
                self._send_or_fail(item)
                continue
            message = self._message(item, samples, last)
            self._send(message)
            with self._condition:
                item.in_hand = isinstance(message, Audio) and bool(item.samples or item.last)
                if item.in_hand:
                    self._line.append(item)
                    self._condition.notify()

    def _send_or_fail(self, message: FromWorker) -> None:
        """Send a message or, if it is the answer to a call and holds what cannot be sent, that."""
        try:
            self._send(message)
        except (ValueError, TypeError, OverflowError, RuntimeError):  # no Unicode, a number beyond 64 bits, ...
            if not isinstance(message, Result):
                raise
            logger.exception("an answer cannot be sent")
            self._send(Failed(message.id, "INTERNAL", "the answer cannot be sent; the log tells why"))

    def _take(self, stream: OutgoingStream) -> tuple[list[np.ndarray], Chunk | None]:
        """What a stream's next message holds: all that waits, but the first chunk by itself."""
        count = 1 if not stream.first_sent and not stream.whole and len(stream.samples) > 1 else len(stream.samples)
        samples, stream.samples = stream.samples[:count], stream.samples[count:]
        stream.first_sent = True
        self._waiting_bytes -= sum(piece.nbytes for piece in samples)
        return samples, None if stream.samples else stream.last

    def _message(self, stream: OutgoingStream, samples: list[np.ndarray], last: Chunk | None) -> StreamMessage:
        if last is not None and last.error is not None:
            return Failed(stream.id, last.error.code, last.error.message)
        if last is not None and last.finish_reason == "cancelled":
            return Failed(stream.id, "CANCELLED", "the client left")
        try:
            joined = samples[0] if len(samples) == 1 else np.concatenate([_NOTHING, *samples])
            audio = stream.encoder.encode(joined) if last is None else stream.encoder.finish(joined)
        except Exception as error:  # of the libraries that encode; one stream's trouble, not the worker's
            logger.exception("encoding stream %d failed", stream.id)
            stream.last = Chunk(_NOTHING, error=RequestError("INTERNAL", str(error)))  # what still comes is dropped
            stream.on_give_up()
            return Failed(stream.id, "INTERNAL", f"encoding the audio failed: {error}")
        seconds = joined.size / stream.encoder.model_rate
        if last is None:
            return Audio(stream.id, audio, stream.sample_rate, seconds)
        reason, stats = last.finish_reason, last.stats or {}
        return Finished(stream.id, audio, stream.sample_rate, reason, stats, last.latents, seconds)
