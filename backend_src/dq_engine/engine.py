"""The engine: requests from any thread in, audio out through callbacks or iterators, one thread that runs the steps.

with DqCoreEngine(EngineConfig(model="models/small")) as engine:
    for chunk in engine.submit(Request(text="peter sells nine green toys")):
        play(chunk.samples)
"""

import itertools
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import torch

from dq_engine.audio.encode_stage import EncodeStage
from dq_engine.config import EngineConfig, resolve_checkpoint
from dq_engine.delivery import Delivered, Delivery
from dq_engine.errors import RequestError
from dq_engine.kv_cache import BlockPool
from dq_engine.loading import Parts, load
from dq_engine.pacing import Pacer
from dq_engine.request import MAX_DRAWN_SEED, Chunk, Request
from dq_engine.runner import StepOutput
from dq_engine.scheduler import Prefill, Scheduler, Step
from dq_engine.sequence import PromptBuilder, Sequence
from dq_engine.stream import Stream
from dq_engine.vae.stage import DecodedStep

__all__ = ["Chunk", "DqCoreEngine", "EngineConfig", "Request", "RequestError", "Stream"]

logger = logging.getLogger(__name__)

_NOTHING = np.zeros(0, np.float32)


class DqCoreEngine:
    """A continuous-batching engine for one VoxCPM2 checkpoint on one device."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._ids = itertools.count()
        self._wake = threading.Condition()
        # All below are guarded by _wake.
        self._arrived: deque[Sequence] = deque()
        self._cancelled: deque[Stream] = deque()
        self._accepted: set[Stream] = set()
        self._closed: RequestError | None = None
        """Why nothing is taken any more: stopped (UNAVAILABLE) or broken (INTERNAL)."""
        self.counters: Counter[str] = Counter(steps=0, patches=0, prefill_tokens=0, cached_tokens=0, preemptions=0)

    # --- from any thread ---

    def start(self, progress: Callable[[str, float], None] | None = None) -> "DqCoreEngine":
        """Load the checkpoint and begin to serve; returns when a first patch has been made.

        Args:
            progress: told what is being done and how far it is (0 to 1).

        Raises:
            CheckpointError: the checkpoint cannot be served.
            ValueError: the settings do not go together, or do not fit the device.
        """
        progress = progress or (lambda stage, fraction: None)
        parts: Parts = load(self.config, resolve_checkpoint(self.config.model), progress)
        checkpoint, self._limits, self._runner, self._vae = parts.checkpoint, parts.limits, parts.runner, parts.vae
        self.sample_rate = checkpoint.vae.out_sample_rate
        self.patch_size, self.feat_dim = checkpoint.model.patch_size, checkpoint.model.feat_dim
        self._prompts = PromptBuilder(
            checkpoint.tokenizer,
            self.patch_size,
            self.feat_dim,
            min(self._limits.max_model_len, self._limits.kv_tokens),
            self._runner.block_size,
            checkpoint.config.lm_config.vocab_size,
        )
        self._scheduler = Scheduler(
            BlockPool(self._limits.num_kv_blocks, self._runner.block_size),
            self._limits.max_num_seqs,
            self.config.max_num_batched_tokens,
            self.config.max_prefill_tokens,
            self.config.max_prefill_seqs,
        )
        self._pacer = Pacer(
            self.patch_size * checkpoint.vae.decoder_chunk_size / self.sample_rate,
            self._limits.max_num_seqs,
            self.config.max_num_batched_tokens,
            self.config.realtime,
        )
        self._last_step_end = 0.0
        self._encode, self._delivery = EncodeStage(parts.encoder), Delivery(self.sample_rate)
        # Where the device is asynchronous the host launches a step before it knows whom the last one stopped.
        self._run_ahead = 0 if self._runner.device.type == "cpu" else 1
        self._in_flight: deque[tuple[Step, StepOutput, DecodedStep]] = deque()
        self._thread = threading.Thread(target=self._run, name="dq-engine", daemon=True)
        self._thread.start()
        progress("warm up", 0.0)
        try:
            for _ in self.submit(Request(text="warm up", max_generate_length=2)):
                pass
        except RequestError as error:
            self.stop()
            raise ValueError(f"the model does not run on this device: {error.message}") from error
        progress("warm up", 1.0)
        return self

    def submit(self, request: Request, on_chunk: Callable[[Chunk], None] | None = None) -> Stream:
        """Speak a request.

        Args:
            on_chunk: called with every chunk on the engine's delivery thread; must not block. Without it, iterate over
                the stream.

        Raises:
            RequestError: INVALID_ARG for a field that can be seen to be wrong, UNAVAILABLE when the queue is full or
                the engine is not serving. What turns out later (a broken recording, say) ends the stream.
        """
        request.validate(self.feat_dim, self.patch_size)
        stream = Stream(next(self._ids), on_chunk, self._cancel)
        seed = secrets.randbelow(MAX_DRAWN_SEED) if request.seed is None else request.seed
        has_audio = request.prompt_audio is not None or request.reference_audio is not None
        sequence = None if has_audio else self._prompts.build(request, stream, seed)
        with self._wake:
            if self._closed is not None:
                raise RequestError("UNAVAILABLE", self._closed.message)
            if len(self._accepted) >= self._limits.max_num_seqs + self.config.queue_size:
                raise RequestError("UNAVAILABLE", f"the queue is full ({self.config.queue_size} requests wait)")
            self._accepted.add(stream)
            if sequence is not None:
                self._arrived.append(sequence)
                self._wake.notify()
        if sequence is None:
            self._encode.submit(request, lambda result: self._encoded(result, stream, seed))
        return stream

    def snapshot(self) -> dict:
        """What the engine holds right now."""
        with self._wake:
            accepted, closed = len(self._accepted), self._closed
        pool, active = self._scheduler.pool, len(self._scheduler.running)
        return {
            "active": active,
            "queued": max(0, accepted - active),
            "slots": self._limits.max_num_seqs,
            "kv_blocks_total": pool.num_blocks,
            "kv_blocks_free": pool.num_available,
            "kv_blocks_cached": pool.num_cached,
            "max_model_len": self._limits.max_model_len,
            "closed": closed and str(closed),
            **self.counters,
        }

    def stop(self) -> None:
        """End the engine; streams that still run end with UNAVAILABLE."""
        with self._wake:
            self._closed = self._closed or RequestError("UNAVAILABLE", "the engine was stopped")
            self._wake.notify()
        self._thread.join()
        self._encode.stop()
        for stream in list(self._accepted):  # their recordings were still to be encoded
            self._refuse(stream, self._closed)
        self._delivery.stop()

    def __enter__(self) -> "DqCoreEngine":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _cancel(self, stream: Stream) -> None:
        with self._wake:
            self._cancelled.append(stream)
            self._wake.notify()

    def _encoded(self, result: Request | RequestError, stream: Stream, seed: int) -> None:
        """A request's recordings have been encoded (on the encode stage's thread)."""
        try:
            if isinstance(result, RequestError):
                raise result
            sequence = self._prompts.build(result, stream, seed)
        except RequestError as error:
            self._refuse(stream, error)
            return
        with self._wake:
            if (closed := self._closed) is None:
                self._arrived.append(sequence)
                self._wake.notify()
        if closed is not None:
            self._refuse(stream, closed)

    def _refuse(self, stream: Stream, error: RequestError) -> None:
        with self._wake:
            self._accepted.discard(stream)
        stream.deliver(Chunk(_NOTHING, error=error))

    # --- on the engine's thread ---

    def _run(self) -> None:
        try:
            while self._take_arrivals():
                step = self._schedule()
                if step is not None:
                    self._launch(step)
                while len(self._in_flight) > (self._run_ahead if step is not None else 0):
                    self._collect(*self._in_flight.popleft())
        except Exception as error:
            logger.exception("the engine failed")
            with self._wake:
                self._closed = RequestError("INTERNAL", f"the engine failed: {error}")
        for sequence in [*self._arrived, *self._scheduler.waiting, *self._scheduler.running]:
            self._delivery.end(sequence, Chunk(_NOTHING, error=self._closed))
            self._accepted.discard(sequence.stream)

    def _take_arrivals(self) -> bool:
        """Take in what the other threads brought; sleeps when there is nothing to do. False when it is time to end."""
        with self._wake:
            while not (self._arrived or self._cancelled or self._closed or self._in_flight or self._scheduler.busy):
                self._wake.wait()
            if self._closed:
                return False
            arrived, cancelled = list(self._arrived), list(self._cancelled)
            self._arrived.clear()
            self._cancelled.clear()
        for sequence in arrived:
            self._scheduler.add(sequence)
        gone = {*cancelled, *(s.stream for s in arrived if s.stream.cancelled)}
        if gone:
            for sequence in [s for s in (*self._scheduler.waiting, *self._scheduler.running) if s.stream in gone]:
                self._end(sequence, Chunk(_NOTHING, finish_reason="cancelled"))
        return True

    def _schedule(self) -> Step | None:
        now = time.monotonic()
        for sequence in self._expired(now):
            message = f"waited {self._limits.queue_timeout_s:g} s for a free slot (queue_timeout_s)"
            self._end(sequence, Chunk(_NOTHING, error=RequestError("UNAVAILABLE", message)))
        plan = self._pacer.plan(self._scheduler.running, now)
        for sequence in self._scheduler.admit(plan.admissions):
            self._start(sequence, now)
        while self._scheduler.short_of_blocks():
            if self._in_flight:  # what is under way may end a stream, and what was generated must be known
                self._collect(*self._in_flight.popleft())
            else:
                self._scheduler.preempt_youngest(self._save)
                self.counters["preemptions"] += 1
        return self._scheduler.schedule(plan.prefill_tokens, plan.postponed)

    def _expired(self, now: float) -> list[Sequence]:
        """Who has waited too long; a preempted stream waits at the head of the queue as long as it takes."""
        limit = now - self._limits.queue_timeout_s
        late = itertools.takewhile(lambda s: s.admitted or s.arrival < limit, self._scheduler.waiting)
        return [sequence for sequence in late if not sequence.admitted]

    def _start(self, sequence: Sequence, now: float) -> None:
        """Set up the slot of a sequence that was admitted."""
        if not sequence.admitted:
            sequence.admitted, sequence.cached_tokens = now, sequence.prefilled
            self.counters["cached_tokens"] += sequence.cached_tokens
        self._runner.start(sequence)
        if sequence.vae_state is None:
            self._vae.start(sequence.slot, sequence.vae_context)
        else:
            self._vae.restore(sequence.slot, sequence.vae_state)
            sequence.vae_state = None

    def _save(self, sequence: Sequence) -> None:
        sequence.rewind(self._runner.block_size, self._vae.save(sequence.slot))

    def _launch(self, step: Step) -> None:
        try:
            output = self._runner.run(step)
            decoded = None if output is None else self._vae.decode(output.slots, output.latents)
        except Exception as error:
            self._isolate(step, error)
            return
        self._scheduler.publish(step.prefills)
        self.counters["steps"] += 1
        self.counters["prefill_tokens"] += sum(p.length for p in step.prefills)
        if output is not None:
            self._in_flight.append((step, output, decoded))

    def _isolate(self, step: Step, error: Exception) -> None:
        """A step raised: run its halves, until it is known whose fault it was; only that stream ends."""
        parts = [*step.prefills, *step.decodes]
        if len(parts) == 1:
            sequence = parts[0].sequence if step.prefills else parts[0]
            logger.error("a step of one stream failed", exc_info=error)
            self._end(sequence, Chunk(_NOTHING, error=RequestError("INTERNAL", f"the step failed: {error}")))
            if self._runner.device.type == "cuda":
                torch.cuda.synchronize()  # raises if the device itself is broken, which ends the engine
            return
        half = len(parts) // 2
        for some in (parts[:half], parts[half:]):
            prefills = [p for p in some if isinstance(p, Prefill)]
            decodes = [s for s in some if isinstance(s, Sequence)]
            self._launch(Step(prefills, decodes, [s for s in step.grown if s in decodes]))

    def _collect(self, step: Step, output: StepOutput, decoded: DecodedStep) -> None:
        """Read a step's stop flags, hand its audio on, end the streams that are done."""
        rows = []
        stops, latents = output.wait()
        now = time.monotonic()
        # A step begins when it is launched or, if the device was busy then, when the one before it ends.
        self._pacer.costs.observe(
            len(stops), sum(p.length for p in step.prefills), now - max(output.launched_at, self._last_step_end)
        )
        self._last_step_end = now
        finite = np.isfinite(latents).all(axis=(1, 2))
        for row, (sequence, stop) in enumerate(zip(step.sampled, stops, strict=True)):
            if sequence.ended:  # it stopped in the step before; this one's patch is thrown away
                continue
            if not finite[row]:
                message = f"patch {sequence.generated} has values that are not finite"
                self._end(sequence, Chunk(_NOTHING, error=RequestError("INTERNAL", message)))
                continue
            index = sequence.generated
            sequence.generated += 1
            sequence.latents.append(latents[row].copy())
            sequence.first_patch_at = sequence.first_patch_at or now
            reason = None
            if stop and index > sequence.min_length:
                reason = "stop"
            elif sequence.generated == sequence.max_patches:
                reason = "length"
            rows.append(Delivered(sequence, row, reason))
            if reason is not None:
                self._release(sequence)
        self.counters["patches"] += len(rows)
        self._delivery.put(decoded, rows)

    def _end(self, sequence: Sequence, chunk: Chunk) -> None:
        self._release(sequence)
        self._delivery.end(sequence, chunk)

    def _release(self, sequence: Sequence) -> None:
        sequence.ended = True
        self._scheduler.remove(sequence)
        with self._wake:
            self._accepted.discard(sequence.stream)
