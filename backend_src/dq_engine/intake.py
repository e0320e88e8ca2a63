"""A request's way to the loop: how many are accepted is bounded, recordings are encoded first, adapters are held."""

import dataclasses
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np

from dq_engine.audio.encode_stage import Encoded, EncodeStage, Recording
from dq_engine.errors import RequestError
from dq_engine.loop import EngineLoop
from dq_engine.lora.lease import Lease
from dq_engine.request import MAX_DRAWN_SEED, Chunk, Request
from dq_engine.sequence import PromptBuilder
from dq_engine.stream import Stream

logger = logging.getLogger(__name__)

_NOTHING = np.zeros(0, np.float32)


class Intake:
    """Streams from their submission to their end.

    Args:
        prompts: makes sequences of requests.
        encode: makes latents of recordings.
        max_num_seqs, queue_size: streams that run and that wait; no more are accepted.
        release: called with a stream's hold on an adapter when the stream has ended.
    """

    loop: EngineLoop
    """Where sequences go; set before the first request comes."""

    def __init__(
        self,
        prompts: PromptBuilder,
        encode: EncodeStage,
        max_num_seqs: int,
        queue_size: int,
        release: Callable[[Lease], None],
    ) -> None:
        self._prompts, self._encode, self._release = prompts, encode, release
        self._most, self._queue_size = max_num_seqs + queue_size, queue_size
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._accepted: dict[Stream, Lease | None] = {}
        """Streams that have not ended, and their holds on adapters; guarded by _lock."""

    @property
    def accepted(self) -> int:
        """Streams that have not ended."""
        return len(self._accepted)

    def submit(self, request: Request, on_chunk: Callable[[Chunk], None] | None, lease: Lease | None) -> Stream:
        """Queue a request whose fields have been checked.

        Args:
            lease: its hold on an adapter, which stays the caller's if this raises.

        Raises:
            RequestError: UNAVAILABLE when the queue is full or the loop takes nothing any more; INVALID_ARG for what is
                seen only when its sequence is made.
        """
        stream = Stream(next(self._ids), on_chunk, self.loop.cancel)
        seed = secrets.randbelow(MAX_DRAWN_SEED) if request.seed is None else request.seed
        recordings = [
            Recording(audio, f"{kind}_audio", is_prompt=kind == "prompt")
            for kind in ("prompt", "reference")
            if (audio := getattr(request, f"{kind}_audio")) is not None
        ]
        sequence = None if recordings else self._prompts.build(request, stream, seed, lease)
        with self._lock:
            if self.loop.closed is not None:
                raise RequestError("UNAVAILABLE", self.loop.closed.message)
            if len(self._accepted) >= self._most:
                raise RequestError("UNAVAILABLE", f"the queue is full ({self._queue_size} requests wait)")
            self._accepted[stream] = lease
        if sequence is None:
            try:
                self._encode.submit(
                    recordings, lambda result: self._encoded(request, recordings, result, stream, seed, lease)
                )
            except RequestError:
                self._take_out(stream)
                raise
        elif (closed := self.loop.add(sequence)) is not None:
            self._refuse(stream, closed)
        return stream

    def forget(self, stream: Stream) -> None:
        """A stream has ended."""
        if (lease := self._take_out(stream)) is not None:
            self._release(lease)

    def _encoded(
        self,
        request: Request,
        recordings: Sequence[Recording],
        result: list[Encoded] | RequestError,
        stream: Stream,
        seed: int,
        lease: Lease | None,
    ) -> None:
        """A request's recordings have been encoded (on the encode stage's thread)."""
        try:
            if isinstance(result, RequestError):
                raise result
            changes: dict = {recording.field: None for recording in recordings}
            for recording, encoded in zip(recordings, result, strict=True):
                changes["prompt_latents" if recording.is_prompt else "reference_latents"] = encoded.latents
            sequence = self._prompts.build(dataclasses.replace(request, **changes), stream, seed, lease)
        except RequestError as error:
            self._refuse(stream, error)
            return
        except Exception as error:
            logger.exception("a request could not be built")
            self._refuse(stream, RequestError("INTERNAL", f"the request could not be built: {error}"))
            return
        if (closed := self.loop.add(sequence)) is not None:
            self._refuse(stream, closed)

    def _refuse(self, stream: Stream, error: RequestError) -> None:
        self.forget(stream)
        stream.deliver(Chunk(_NOTHING, error=error))

    def _take_out(self, stream: Stream) -> Lease | None:
        with self._lock:
            return self._accepted.pop(stream, None)
