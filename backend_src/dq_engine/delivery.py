"""Chunks to callers, on a thread of their own, so that a copy or a slow callback never holds the engine up."""

import dataclasses
import logging
import queue
import threading
import time

import numpy as np

from dq_engine.errors import RequestError
from dq_engine.joining import Joiner
from dq_engine.request import Chunk
from dq_engine.sequence import Sequence
from dq_engine.timing import StepTimes
from dq_engine.vae.stage import DecodedStep

logger = logging.getLogger(__name__)

_NOTHING = np.zeros(0, np.float32)
# Steps that may wait here; when callbacks are slower than the device for this long, the engine waits for them.
_MAX_STEPS = 64


@dataclasses.dataclass
class Delivered:
    """One row of a decoded step: whose it is, and how the stream ends if it ends with it."""

    sequence: Sequence
    row: int
    finish_reason: str | None


class Delivery:
    """Waits for decoded steps and hands each stream its chunk.

    Args:
        sample_rate: of the audio, in Hz.
        times: told of each step's decoding and delivery.
    """

    def __init__(self, sample_rate: int, times: StepTimes) -> None:
        self.sample_rate, self._times = sample_rate, times
        self.vae_seconds = 0.0
        """Time that decoding has taken."""
        self.delivery_seconds = 0.0
        """Time that handing audio to the streams has taken."""
        self._items: queue.Queue = queue.Queue(maxsize=_MAX_STEPS)
        self._joiner = Joiner(sample_rate)
        self._thread = threading.Thread(target=self._run, name="dq-delivery", daemon=True)
        self._thread.start()

    def put(self, decoded: DecodedStep, rows: list[Delivered]) -> None:
        """Deliver a step's audio; `rows` are those of its rows that somebody still wants."""
        self._items.put((decoded, rows))

    def end(self, sequence: Sequence, chunk: Chunk) -> None:
        """End a stream with `chunk`, after all that was put before."""
        self._items.put((sequence, chunk))

    def count_anew(self) -> None:
        """Set the times to 0, once everything has been delivered."""
        done = threading.Event()
        self._items.put(done)
        done.wait()

    def stop(self) -> None:
        """End the thread once everything has been delivered."""
        self._items.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if isinstance(item, threading.Event):
                self.vae_seconds = self.delivery_seconds = 0.0
                item.set()
            elif isinstance(item[1], Chunk):
                self._end(*item)
            else:
                self._deliver(*item)

    def _deliver(self, decoded: DecodedStep, rows: list[Delivered]) -> None:
        try:
            audio = decoded.wait()
            seconds = decoded.seconds
            self.vae_seconds += seconds
        except Exception as error:  # the device failed after the launch
            logger.exception("a decoded step did not arrive")
            for item in rows:
                self._break_off(item.sequence, f"the device failed: {error}")
            return
        now = time.monotonic()
        for item in rows:
            try:
                self._deliver_row(item, audio[item.row], now, len(rows))
            except Exception as error:  # no memory for the latents, say; the thread must live on for the others
                logger.exception("delivering a chunk failed")
                self._break_off(item.sequence, f"delivering the audio failed: {error}")
        for sequence, samples in self._joiner.overdue(now):
            self._call(sequence, Chunk(samples))
        delivery_seconds = time.monotonic() - now
        self.delivery_seconds += delivery_seconds
        self._times.delivered(len(audio), seconds, delivery_seconds)

    def _deliver_row(self, item: Delivered, patch: np.ndarray, now: float, crowd: int) -> None:
        sequence = item.sequence
        samples = self._joiner.take(sequence, patch, now, crowd, item.finish_reason is not None)
        if item.finish_reason is None:
            if samples is not None:
                self._call(sequence, Chunk(samples))
            return
        stats = self._stats(sequence, patch.size)
        latents = np.concatenate(sequence.latents) if sequence.return_latents else None
        self._joiner.end(sequence)
        self._call(sequence, Chunk(samples, finish_reason=item.finish_reason, stats=stats, latents=latents))

    def _break_off(self, sequence: Sequence, message: str) -> None:
        """End a stream with an error, and have nothing more generated for it."""
        self._end(sequence, Chunk(_NOTHING, error=RequestError("INTERNAL", message)))
        sequence.stream.cancel()

    def _end(self, sequence: Sequence, chunk: Chunk) -> None:
        """End a stream before its time; what was held back of it goes out first."""
        if (held := self._joiner.end(sequence)).size:
            self._call(sequence, Chunk(held))
        self._call(sequence, chunk)

    def _stats(self, sequence: Sequence, patch_samples: int) -> dict:
        return {
            "seed": sequence.seed,
            "patches": sequence.generated,
            "audio_s": round(sequence.generated * patch_samples / self.sample_rate, 3),
            "ttfb_ms": round(1e3 * (self._joiner.first_chunk_at(sequence) - sequence.arrival), 2),
            "queue_ms": round(1e3 * (sequence.admitted - sequence.arrival), 2),
            "prompt_tokens": sequence.prompt_tokens,
            "cached_tokens": sequence.cached_tokens,
        }

    def _call(self, sequence: Sequence, chunk: Chunk) -> None:
        try:
            sequence.stream.deliver(chunk)
        except Exception:
            logger.exception("a caller's on_chunk raised; its stream goes on without it")
