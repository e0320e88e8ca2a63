"""Audio on its way out of a worker: encoded, joined while the road is busy, and bounded."""

import logging
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from dq_engine.audio.output import NOTHING, OutputEncoder
from dq_engine.errors import RequestError
from dq_engine.request import Chunk
from dq_engine.serving.encoder_process import RemoteEncoder
from dq_engine.serving.messages import Audio, Failed, Finished, FromWorker, Result, StreamMessage

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 1 << 30
"""Samples that may wait here, all streams together: 95 minutes of 48 kHz audio."""


class OutgoingStream:
    """One stream's chunks that have not been sent yet.

    Args:
        id: its number in messages.
        encoder: of its audio; used by its lane's thread.
        sample_rate: of the encoded audio, in Hz.
        whole: True to send everything in one message at the end.
        on_give_up: called when the rest of the stream is of no use any more.
        lane: the number of the outbox's thread that encodes and sends it.
    """

    def __init__(
        self,
        id: int,
        encoder: OutputEncoder | RemoteEncoder,
        sample_rate: int,
        whole: bool,
        on_give_up: Callable[[], None],
        lane: int = 0,
    ) -> None:
        self.id = id
        self.encoder, self.sample_rate, self.whole = encoder, sample_rate, whole
        self.on_give_up, self.lane = on_give_up, lane
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
        lanes: how many threads encode and send.
    """

    def __init__(self, send: Callable[[FromWorker], None], lanes: int = 1) -> None:
        self._send = send
        self._lock = threading.Lock()
        # All below are guarded by _lock.
        self._lines: list[deque[OutgoingStream | FromWorker]] = [deque() for _ in range(lanes)]
        self._wake = [threading.Condition(self._lock) for _ in range(lanes)]
        self._waiting_bytes = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"dq-outbox-{lane}", daemon=True)
            for lane in range(lanes)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, message: FromWorker) -> None:
        """Send a message that belongs to no chunk."""
        with self._lock:
            self._append(0, message)

    def put(self, stream: OutgoingStream, chunk: Chunk) -> None:
        """Send a stream's next chunk, later and with its neighbours if need be."""
        overflow = None
        with self._lock:
            if stream.last is not None:
                return  # it was given up before
            if self._waiting_bytes + chunk.samples.nbytes > MAX_WAITING_BYTES:
                message = f"over {MAX_WAITING_BYTES >> 20} MiB of audio wait to be sent; this stream was given up"
                overflow = stream.on_give_up
                chunk = Chunk(NOTHING, error=RequestError("UNAVAILABLE", message))
            if chunk.samples.size:
                stream.samples.append(chunk.samples)
                self._waiting_bytes += chunk.samples.nbytes
            if chunk.is_last:
                stream.last = chunk
            if not stream.in_hand and (chunk.is_last or not stream.whole):
                stream.in_hand = True
                self._append(stream.lane, stream)
        if overflow is not None:
            overflow()

    def close(self) -> None:
        """Send what waits, then end the threads."""
        with self._lock:
            self._closed = True
            for wake in self._wake:
                wake.notify()
        for thread in self._threads:
            thread.join()

    def _append(self, lane: int, item: OutgoingStream | FromWorker) -> None:
        self._lines[lane].append(item)
        self._wake[lane].notify()

    def _run(self, lane: int) -> None:
        line, wake = self._lines[lane], self._wake[lane]
        while True:
            with self._lock:
                wake.wait_for(lambda: line or self._closed)
                if not line:
                    return
                item = line.popleft()
                if isinstance(item, OutgoingStream):
                    samples, last = self._take(item)
            if not isinstance(item, OutgoingStream):
                self._send_or_fail(item)
                continue
            message = self._message(item, samples, last)
            self._send(message)
            with self._lock:
                item.in_hand = isinstance(message, Audio) and bool(item.samples or item.last)
                if item.in_hand:
                    line.append(item)

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
            stream.encoder.close()
            return Failed(stream.id, last.error.code, last.error.message)
        if last is not None and last.finish_reason == "cancelled":
            stream.encoder.close()
            return Failed(stream.id, "CANCELLED", "the client left")
        try:
            joined = samples[0] if len(samples) == 1 else np.concatenate([NOTHING, *samples])
            audio = stream.encoder.encode(joined) if last is None else stream.encoder.finish(joined)
        except Exception as error:  # of the libraries that encode; one stream's trouble, not the worker's
            logger.exception("encoding stream %d failed", stream.id)
            stream.last = Chunk(NOTHING, error=RequestError("INTERNAL", str(error)))  # what still comes is dropped
            stream.on_give_up()
            return Failed(stream.id, "INTERNAL", f"encoding the audio failed: {error}")
        seconds = joined.size / stream.encoder.model_rate
        if last is None:
            return Audio(stream.id, audio, stream.sample_rate, seconds)
        reason, stats = last.finish_reason, last.stats or {}
        return Finished(stream.id, audio, stream.sample_rate, reason, stats, last.latents, seconds)
