"""The loop of the engine: one thread that takes requests in, runs steps, and hands their audio on."""

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import torch

from dq_engine.attention.base import BLOCK_SIZE
from dq_engine.delivery import Delivered, Delivery
from dq_engine.errors import RequestError
from dq_engine.pacing import Pacer
from dq_engine.request import Chunk
from dq_engine.runner import Runner
from dq_engine.scheduler import Prefill, Scheduler, Step
from dq_engine.sequence import Sequence
from dq_engine.step_clock import StepClock
from dq_engine.step_output import StepOutput
from dq_engine.stream import Stream
from dq_engine.timing import StepTimes
from dq_engine.vae.stage import DecodedStep, VaeStage

logger = logging.getLogger(__name__)

_NOTHING = np.zeros(0, np.float32)
# Where the host runs ahead it looks this often whether the device is done earlier than was expected.
_DONE_LOOK_S = 0.001
_LOOK_S = 0.1
"""How often the deadlines of streams are looked at that wait for their adapters, when nobody else runs."""


class EngineLoop:
    """Runs sequences to their ends.

    Args:
        scheduler: who runs; used by this loop's thread only.
        pacer: how much at once.
        runner: the language models and LocDiT.
        vae: the decoding stage.
        times: told of each step.
        delivery: where audio and ends of streams go.
        queue_timeout_s: longest wait for a slot.
        on_end: called on the loop's thread when a stream is over and its slot and blocks are free.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pacer: Pacer,
        runner: Runner,
        vae: VaeStage,
        times: StepTimes,
        delivery: Delivery,
        queue_timeout_s: float,
        on_end: Callable[[Stream], None],
    ) -> None:
        self.scheduler, self._pacer, self._runner, self._vae, self._delivery = scheduler, pacer, runner, vae, delivery
        self._times, self._queue_timeout_s, self._on_end = times, queue_timeout_s, on_end
        self.counters: Counter[str] = Counter()
        """What has been done: how often, and for how many seconds (see `count_anew`)."""
        self.count_anew()
        self._wake = threading.Condition()
        # These three are guarded by _wake.
        self._arrived: deque[Sequence] = deque()
        self._cancelled: deque[Stream] = deque()
        self.closed: RequestError | None = None
        """Why nothing is taken any more: stopped (UNAVAILABLE) or broken (INTERNAL)."""
        # Where the device is asynchronous the host launches a step before it knows whom the last one stopped.
        self._run_ahead = 0 if runner.device.type == "cpu" else 1
        self._in_flight: deque[tuple[Step, StepOutput, DecodedStep]] = deque()
        self._clock = StepClock()
        self._turn_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="dq-engine", daemon=True)
        self._thread.start()

    @property
    def turn_seconds(self) -> float:
        """How long the loop has been at the step it is working on; 0 while it waits for work."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    def count_anew(self) -> None:
        """Set the counters to 0, while nothing runs."""
        for name in ("steps", "patches", "prefill_tokens", "cached_tokens", "preemptions"):
            self.counters[name] = 0
        for name in ("step_seconds", "prefill_seconds", "host_seconds", "idle_seconds"):
            self.counters[name] = 0.0

    def add(self, sequence: Sequence) -> RequestError | None:
        """Queue a sequence; the reason if the loop takes none any more."""
        with self._wake:
            if self.closed is None:
                self._arrived.append(sequence)
                self._wake.notify()
            return self.closed

    def cancel(self, stream: Stream) -> None:
        """End a stream, wherever it is, before the next step."""
        with self._wake:
            self._cancelled.append(stream)
            self._wake.notify()

    def wake(self) -> None:
        """Have the loop look at who waits: an adapter has been loaded."""
        with self._wake:
            self._wake.notify()

    def stop(self) -> RequestError:
        """End the thread and with it every stream; the error that they ended with."""
        with self._wake:
            self.closed = self.closed or RequestError("UNAVAILABLE", "the engine was stopped")
            self._wake.notify()
        self._thread.join()
        return self.closed

    def _run(self) -> None:
        if self._runner.device.type == "cuda":
            torch.cuda.set_device(self._runner.device)  # each thread has its own
        try:
            while self._take_arrivals():
                self._times.step_begins()
                self._turn_began = time.monotonic()
                if self._in_flight and self._in_flight[0][1].done:  # its audio does not wait for the next launch
                    self._collect(*self._in_flight.popleft())
                began = time.monotonic()
                step = self._schedule()
                if step is not None:
                    self._launch(step)
                    seconds = time.monotonic() - began
                    self.counters["host_seconds"] += seconds
                    if self._in_flight and self._in_flight[-1][0] is step:  # one of prompts alone is not waited for
                        self._in_flight[-1][1].host_seconds = seconds
                    self._clock.launched(seconds)
                while len(self._in_flight) > (self._run_ahead if step is not None else 0):
                    self._collect(*self._in_flight.popleft())
                self._turn_began = None
        except Exception as error:
            logger.exception("the engine failed")
            with self._wake:
                self.closed = RequestError("INTERNAL", f"the engine failed: {error}")
        for sequence in [*self._arrived, *self.scheduler.waiting, *self.scheduler.running]:
            self._delivery.end(sequence, Chunk(_NOTHING, error=self.closed))
            self._on_end(sequence.stream)

    def _take_arrivals(self) -> bool:
        """Take in what the other threads brought; sleeps when there is nothing to do. False when it is time to end."""
        with self._wake:
            while not (self._arrived or self._cancelled or self.closed or self._in_flight or self.scheduler.busy):
                self._clock.rest()
                self._wake.wait(_LOOK_S if self.scheduler.waiting else None)
                if self.scheduler.waiting:
                    break
            running = self._in_flight[0][1] if self._in_flight else None
            while running and not self.closed and (spare := self._clock.spare_seconds(running)) > 0.0:
                self._wake.wait(min(spare, _DONE_LOOK_S))
            if self.closed:
                return False
            arrived, cancelled = list(self._arrived), list(self._cancelled)
            self._arrived.clear()
            self._cancelled.clear()
        for sequence in arrived:
            self.scheduler.add(sequence)
        gone = {*cancelled, *(s.stream for s in arrived if s.stream.cancelled)}
        if gone:
            for sequence in [s for s in (*self.scheduler.waiting, *self.scheduler.running) if s.stream in gone]:
                self._end(sequence, Chunk(_NOTHING, finish_reason="cancelled"))
        return True

    def _schedule(self) -> Step | None:
        now = time.monotonic()
        for sequence in self._expired(now):
            message = f"waited {self._queue_timeout_s:g} s for a free slot (queue_timeout_s)"
            self._end(sequence, Chunk(_NOTHING, error=RequestError("UNAVAILABLE", message)))
        for sequence in [s for s in self.scheduler.waiting if s.adapter is not None and s.adapter.error is not None]:
            self._end(sequence, Chunk(_NOTHING, error=sequence.adapter.error))
        self.scheduler.reserve_adapters()
        running, waiting = self.scheduler.running, len(self.scheduler.waiting)
        if admitted := self.scheduler.admit(self._pacer.admissions(len(running), waiting)):
            self._start(admitted, now)
        while self.scheduler.short_of_blocks():
            if self._in_flight:  # what is under way may end a stream, and what was generated must be known
                self._collect(*self._in_flight.popleft())
            else:
                self.scheduler.preempt_youngest(self._save)
                self.counters["preemptions"] += 1
        plan = self._pacer.plan(running, now)
        return self.scheduler.schedule(plan.prefill_tokens, plan.postponed)

    def _expired(self, now: float) -> list[Sequence]:
        """Who has waited too long; a preempted stream waits at the head of the queue as long as it takes."""
        limit = now - self._queue_timeout_s
        late = itertools.takewhile(lambda s: s.admitted or s.arrival < limit, self.scheduler.waiting)
        return [sequence for sequence in late if not sequence.admitted]

    def _start(self, sequences: list[Sequence], now: float) -> None:
        """Set up the slots of sequences that were admitted."""
        for sequence in sequences:
            if not sequence.admitted:
                sequence.admitted, sequence.cached_tokens = now, sequence.prefilled
                self.counters["cached_tokens"] += sequence.cached_tokens
        self._runner.start(sequences)
        if fresh := {s.slot: s.vae_context for s in sequences if s.vae_state is None}:
            self._vae.start(fresh)
        for sequence in sequences:
            if sequence.vae_state is not None:
                self._vae.restore(sequence.slot, sequence.vae_state)
                sequence.vae_state = None

    def _save(self, sequence: Sequence) -> None:
        sequence.rewind(BLOCK_SIZE, self._vae.save(sequence.slot))

    def _launch(self, step: Step) -> None:
        began = time.monotonic()
        try:
            output = self._runner.run(step)
        except Exception as error:
            if not self._runner.isolates_faults:
                raise
            self._isolate(step, error)
            return
        self.scheduler.publish(step.prefills)
        self.counters["steps"] += 1
        self.counters["prefill_tokens"] += sum(p.length for p in step.prefills)
        if output is None:
            self._count_time(step, time.monotonic() - began)
        else:
            self._in_flight.append((step, output, self._vae.decode(output.slots, output.latents)))

    def _count_time(self, step: Step, seconds: float) -> None:
        self.counters["step_seconds"] += seconds
        if step.prefills:
            self.counters["prefill_seconds"] += seconds

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
        seconds, idle = self._clock.ended(output.launched_at, now)
        prefill_tokens = sum(p.length for p in step.prefills)
        self._pacer.costs.observe(len(stops), prefill_tokens, seconds)
        self._count_time(step, seconds)
        self.counters["idle_seconds"] += idle
        self._times.step_ended(len(stops), prefill_tokens, output.host_seconds, seconds, output.prefill_seconds, idle)
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
        self.scheduler.remove(sequence)
        self._on_end(sequence.stream)
