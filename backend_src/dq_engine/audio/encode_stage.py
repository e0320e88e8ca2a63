"""Recordings of requests are decoded and encoded here, off the callers' threads and off the engine's."""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable

import numpy as np

from dq_engine.audio.input import decode_audio
from dq_engine.errors import RequestError
from dq_engine.request import MAX_AUDIO_SECONDS, Request
from dq_engine.vae.encoder import VaeEncoder

logger = logging.getLogger(__name__)

_MAX_BATCH = 8
MAX_WAITING_BYTES = 1 << 30
"""Audio files that may wait here, all requests together."""


@dataclasses.dataclass
class _Job:
    request: Request
    done: Callable[[Request | RequestError], None]
    recordings: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return len(self.request.prompt_audio or b"") + len(self.request.reference_audio or b"")


class EncodeStage:
    """A thread that turns `prompt_audio` and `reference_audio` into latents, recordings of several requests at a time.

    Args:
        encoder: the AudioVAE's encoder.
    """

    def __init__(self, encoder: VaeEncoder) -> None:
        self.encoder = encoder
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._thread = threading.Thread(target=self._run, name="dq-encode", daemon=True)
        self._thread.start()

    def submit(self, request: Request, done: Callable[[Request | RequestError], None]) -> None:
        """Encode what `request` brings as audio.

        Args:
            done: called on the stage's thread with the request, audio replaced by latents, or with what is wrong.

        Raises:
            RequestError: UNAVAILABLE, MAX_WAITING_BYTES of audio wait already.
        """
        job = _Job(request, done)
        with self._lock:
            if self._waiting_bytes + job.size > MAX_WAITING_BYTES:
                limit = MAX_WAITING_BYTES >> 20
                raise RequestError("UNAVAILABLE", f"recordings of {limit} MiB wait to be encoded; try again later")
            self._waiting_bytes += job.size
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread; jobs that wait are forgotten."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch = [job]
            while len(batch) < _MAX_BATCH and not self._jobs.empty():
                job = self._jobs.get()
                if job is None:
                    return
                batch.append(job)
            with self._lock:
                self._waiting_bytes -= sum(job.size for job in batch)
            self._encode([job for job in batch if self._decode(job)])

    def _decode(self, job: _Job) -> bool:
        """Decode a job's files; False if that failed, and the caller has been told."""
        try:
            for kind in ("prompt", "reference"):
                data = getattr(job.request, f"{kind}_audio")
                if data is not None:
                    job.recordings[kind] = decode_audio(data, f"{kind}_audio", self.encoder.sample_rate)
        except RequestError as error:
            job.done(error)
        except Exception:
            logger.exception("decoding a recording failed")
            job.done(RequestError("INTERNAL", "decoding the recording failed"))
        else:
            return True
        return False

    def _encode(self, jobs: list[_Job]) -> None:
        """Encode the recordings of all jobs; batches hold a minute of audio at most, which bounds the memory."""
        items = [(job, kind, wave) for job in jobs for kind, wave in job.recordings.items()]
        latents: dict[tuple[int, str], np.ndarray] = {}
        limit = int(MAX_AUDIO_SECONDS * self.encoder.sample_rate)
        try:
            while items:
                batch = [items.pop(0)]
                while items and (len(batch) + 1) * max(len(w) for _, _, w in [*batch, items[0]]) <= limit:
                    batch.append(items.pop(0))
                waves = [wave for _, _, wave in batch]
                encoded = self.encoder.encode(waves, [kind == "prompt" for _, kind, _ in batch])
                latents |= {(id(job), kind): z for (job, kind, _), z in zip(batch, encoded, strict=True)}
        except Exception:
            logger.exception("encoding recordings failed")
            for job in jobs:
                job.done(RequestError("INTERNAL", "encoding the recording failed"))
            return
        for job in jobs:
            changes = {}
            for kind in job.recordings:
                changes |= {f"{kind}_audio": None, f"{kind}_latents": latents[id(job), kind]}
            job.done(dataclasses.replace(job.request, **changes))
