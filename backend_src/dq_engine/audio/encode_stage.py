"""Recordings are decoded and encoded here, off the callers' threads and off the engine's."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dq_engine.audio.input import decode_audio
from dq_engine.errors import RequestError
from dq_engine.request import MAX_AUDIO_SECONDS
from dq_engine.vae.encoder import VaeEncoder

logger = logging.getLogger(__name__)

_MAX_BATCH = 8
MAX_WAITING_BYTES = 1 << 30
"""Audio files that may wait here, all callers' together."""


@dataclass(frozen=True)
class Recording:
    """A recording to be encoded.

    Args:
        data: an audio file, or base64 of one.
        field: named in errors.
        is_prompt: True for a recording that is to be continued, False for a reference: they are padded differently.
    """

    data: bytes
    field: str
    is_prompt: bool


@dataclass(frozen=True)
class Encoded:
    """What a recording became: float32 [frames, feat_dim], frames a multiple of the patch size; and its length."""

    latents: np.ndarray
    seconds: float


Done = Callable[[list[Encoded] | RequestError], None]


@dataclass(eq=False)
class _Job:
    recordings: Sequence[Recording]
    done: Done
    waves: list[np.ndarray] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(len(recording.data) for recording in self.recordings)

    def tell(self, result: list[Encoded] | RequestError) -> None:
        """Hand the caller its result; what goes wrong there must not end the thread that serves the others."""
        try:
            self.done(result)
        except Exception:
            logger.exception("encoded recordings were not taken")


class EncodeStage:
    """A thread that turns recordings into latents, those of several callers at a time.

    Args:
        encoder: the AudioVAE's encoder.
    """

    def __init__(self, encoder: VaeEncoder) -> None:
        self.encoder = encoder
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.encoded = 0
        """Recordings encoded so far."""
        self._lock = threading.Lock()
        # These are guarded by _lock.
        self.waiting = 0
        """Recordings that wait, or are being encoded."""
        self._waiting_bytes = 0
        self._stopped: RequestError | None = None
        self._thread = threading.Thread(target=self._run, name="dq-encode", daemon=True)
        self._thread.start()

    def submit(self, recordings: Sequence[Recording], done: Done) -> None:
        """Encode recordings that belong together.

        Args:
            done: called on the stage's thread with as many results in the same order, or with what is wrong.

        Raises:
            RequestError: UNAVAILABLE, MAX_WAITING_BYTES of audio wait already; or the stage has been stopped.
        """
        job = _Job(recordings, done)
        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            if self._waiting_bytes + job.size > MAX_WAITING_BYTES:
                limit = MAX_WAITING_BYTES >> 20
                raise RequestError("UNAVAILABLE", f"recordings of {limit} MiB wait to be encoded; try again later")
            self._waiting_bytes += job.size
            self.waiting += len(recordings)
            self._jobs.put(job)

    def stop(self, reason: RequestError) -> None:
        """End the thread; jobs that wait fail with `reason`."""
        with self._lock:
            self._stopped = reason
            self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self.encoder.device.type == "cuda":
            torch.cuda.set_device(self.encoder.device)  # each thread has its own
        while (job := self._jobs.get()) is not None and self._stopped is None:
            batch = [job]
            while len(batch) < _MAX_BATCH and not self._jobs.empty():
                if (job := self._jobs.get()) is None:
                    self._jobs.put(None)
                    break
                batch.append(job)
            with self._lock:
                self._waiting_bytes -= sum(job.size for job in batch)
            self._encode([job for job in batch if self._decode(job)])
            with self._lock:
                self.waiting -= sum(len(job.recordings) for job in batch)
        while job is not None:
            job.tell(self._stopped)
            job = self._jobs.get()

    def _decode(self, job: _Job) -> bool:
        """Decode a job's files; False if that failed, and the caller has been told."""
        try:
            job.waves = [decode_audio(r.data, r.field, self.encoder.sample_rate) for r in job.recordings]
        except RequestError as error:
            job.tell(error)
        except Exception:
            logger.exception("decoding a recording failed")
            job.tell(RequestError("INTERNAL", "decoding the recording failed"))
        else:
            return True
        return False

    def _encode(self, jobs: list[_Job]) -> None:
        """Encode the recordings of all jobs; batches hold a minute of audio at most, which bounds the memory."""
        items = [item for job in jobs for item in zip(job.recordings, job.waves, strict=True)]
        latents: list[np.ndarray] = []
        limit = int(MAX_AUDIO_SECONDS * self.encoder.sample_rate)
        try:
            while items:
                batch = [items.pop(0)]
                while items and (len(batch) + 1) * max(len(wave) for _, wave in [*batch, items[0]]) <= limit:
                    batch.append(items.pop(0))
                waves = [wave for _, wave in batch]
                latents += self.encoder.encode(waves, [recording.is_prompt for recording, _ in batch])
        except Exception:
            logger.exception("encoding recordings failed")
            for job in jobs:
                job.tell(RequestError("INTERNAL", "encoding the recording failed"))
            return
        self.encoded += len(latents)
        rate, of_all = self.encoder.sample_rate, iter(latents)
        for job in jobs:
            job.tell([Encoded(next(of_all), len(wave) / rate) for wave in job.waves])
