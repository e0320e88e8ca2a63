"""What the server measures: every metric as data, and how snapshots and streams become their values. No Triton code."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from dq_engine.errors import ErrorCode

logger = logging.getLogger(__name__)

PREFIX = "voxcpm2_"
NO_WORKER = "none"
"""The label `worker` of requests that reached none."""
ERROR_CODES = tuple(code for code in get_args(ErrorCode) if code not in ("CANCELLED", "ALREADY_EXISTS"))
FINISH_REASONS = ("stop", "length")
# Of times that have not been observed yet; when the server falls behind by more, the oldest are not observed.
_MAX_WAITING = 100_000

_TIMES_S = (0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0)
_FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5, 2.0, 5.0)


@dataclass(frozen=True)
class Definition:
    """One metric. All have the labels model, version and worker.

    Args:
        name: without PREFIX.
        description: in one line.
        key: of `DqCoreEngine.snapshot()`, where the value comes from there.
        label: one more label, with its `values`.
        buckets: upper bounds of a histogram's.
    """

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    description: str
    key: str = ""
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


DEFINITIONS = (
    Definition("gauge", "worker_up", "1 while the engine worker serves, 0 while it does not"),
    Definition("gauge", "active_streams", "Streams that are being spoken", "active"),
    Definition("gauge", "queued_streams", "Requests that wait: for a slot, or for their recordings", "queued"),
    Definition("gauge", "preempted_streams", "Queued streams that had begun and lost their KV blocks", "preempted"),
    Definition("gauge", "slots", "Most streams at once", "slots"),
    Definition("gauge", "kv_blocks", "KV blocks that there are", "kv_blocks_total"),
    Definition("gauge", "kv_blocks_free", "KV blocks that no stream holds, cached ones too", "kv_blocks_free"),
    Definition("gauge", "kv_blocks_cached", "Free KV blocks whose tokens can be used again", "kv_blocks_cached"),
    Definition("gauge", "recordings_waiting", "Recordings that wait to be encoded", "recordings_waiting"),
    Definition("gauge", "loras_registered", "Adapters that requests can name", "loras_registered"),
    Definition("counter", "finished_streams_total", "Streams that ended well", label="reason", values=FINISH_REASONS),
    Definition("counter", "errors_total", "Requests refused or broken off", label="code", values=ERROR_CODES),
    Definition("counter", "cancelled_streams_total", "Streams whose client left before their end"),
    Definition("counter", "underruns_total", "Streams in which a player that began with the first chunk ran dry"),
    Definition("counter", "audio_seconds_total", "Seconds of audio made", "audio_seconds"),
    Definition("counter", "patches_total", "Patches made; with VoxCPM2 160 ms each", "patches"),
    Definition("counter", "prefill_tokens_total", "Tokens of prompts computed", "prefill_tokens"),
    Definition("counter", "cached_tokens_total", "Tokens of prompts found in the KV cache", "cached_tokens"),
    Definition("counter", "preemptions_total", "Times a stream lost its KV blocks to older ones", "preemptions"),
    Definition("counter", "steps_total", "Steps of the engine", "steps"),
    Definition("counter", "step_seconds_total", "Time of steps (on a CPU with the decoding)", "step_seconds"),
    Definition("counter", "prefill_seconds_total", "Time of the steps that took in a prompt", "prefill_seconds"),
    Definition("counter", "host_seconds_total", "Time of deciding on steps and launching them", "host_seconds"),
    Definition("counter", "idle_seconds_total", "Time between steps in which the device had none", "idle_seconds"),
    Definition("counter", "vae_seconds_total", "Time of decoding latents to audio", "vae_seconds"),
    Definition("counter", "delivery_seconds_total", "Time of handing audio to the streams", "delivery_seconds"),
    Definition("counter", "recordings_total", "Recordings encoded", "recordings"),
    Definition("counter", "decode_graph_hits_total", "Batches of patches run as a CUDA graph", "decode_graph_hits"),
    Definition("counter", "prefill_graph_hits_total", "Prompts' steps run as a CUDA graph", "prefill_graph_hits"),
    Definition("counter", "prefill_graph_fallbacks_total", "Prompts' steps run without", "prefill_graph_fallbacks"),
    Definition("counter", "prefill_padding_tokens_total", "Tokens that filled graphs up", "prefill_padding_tokens"),
    Definition("counter", "lora_loads_total", "Times an adapter was loaded into a slot", "lora_loads"),
    Definition("counter", "lora_evictions_total", "Times an adapter had to leave its slot", "lora_evictions"),
    Definition("counter", "worker_restarts_total", "Times the engine worker served again after it had ended"),
    Definition("histogram", "ttfb_seconds", "Request to first audio, at the server", buckets=_TIMES_S),
    Definition("histogram", "queue_seconds", "Request to slot", buckets=_TIMES_S),
    Definition("histogram", "largest_gap_seconds", "Longest time between two chunks of a stream", buckets=_TIMES_S),
    Definition("histogram", "rtf", "First to last chunk, divided by the seconds of audio", buckets=_FACTORS),
)


class Metric(Protocol):
    """One time series. Each call may be a round trip to a server."""

    def increment(self, value: float) -> None: ...
    def set(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...


class Playback:
    """One stream's chunks in time, as a player sees them that begins with the first. Not for several threads.

    Args:
        arrived: when the request came, by time.monotonic().
    """

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.first: float | None = None
        self.last = arrived
        self.largest_gap = 0.0
        self.audio_s = 0.0
        self.ran_dry = False

    def chunk(self, seconds: float, now: float) -> None:
        """A chunk with this much audio was sent."""
        if not seconds:
            return
        if self.first is None:
            self.first = now
        else:
            self.largest_gap = max(self.largest_gap, now - self.last)
            self.ran_dry |= now - self.first > self.audio_s
        self.last = now
        self.audio_s += seconds

    @property
    def ttfb(self) -> float:
        """Seconds to the first chunk, which must have been sent."""
        return self.first - self.arrived

    @property
    def rtf(self) -> float:
        """Seconds that a second of audio took after the first chunk, which must have been sent."""
        return (self.last - self.first) / self.audio_s


class Metrics:
    """Keeps the metrics. Calls return at once: a thread of its own makes the round trips, and what has gathered
    meanwhile is one of them a counter or gauge.

    Args:
        create: of a definition, what makes a metric of given labels.
        model, version: labels.
        workers: how many engine workers there are.
    """

    def __init__(
        self,
        create: Callable[[Definition], Callable[[dict[str, str]], Metric]],
        model: str,
        version: str,
        workers: int,
    ) -> None:
        self._metrics: dict[tuple[str, ...], Metric] = {}
        """By name, worker and the value of the label of its own, if there is one."""
        # In Triton, a family that is collected takes its metrics along.
        self._families = [create(definition) for definition in DEFINITIONS]
        for definition, make in zip(DEFINITIONS, self._families, strict=True):
            names = [*map(str, range(workers)), *([NO_WORKER] if definition.name == "errors_total" else [])]
            for worker in names:
                labels = {"model": model, "version": version, "worker": worker}
                for value in definition.values or ("",):
                    own = {definition.label: value} if value else {}
                    self._metrics[definition.name, worker, value] = make(labels | own)
        self._seen: list[Counter[str]] = [Counter() for _ in range(workers)]
        """Of each worker, what the present process's last snapshot said of what is counted."""
        self._ended = [False] * workers
        self._condition = threading.Condition()
        # These are guarded by _condition.
        self._increments: Counter[tuple[str, ...]] = Counter()
        self._values: dict[tuple[str, ...], float] = {}
        self._observations: deque[tuple[tuple[str, ...], float]] = deque(maxlen=_MAX_WAITING)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="dq-metrics", daemon=True)
        self._thread.start()

    def heartbeat(self, worker: int, snapshot: Mapping[str, object] | None) -> None:
        """A worker's snapshot, or None when its process has ended. From one thread at a time.

        A process counts from 0; what its counters have grown by is added, so that a new process takes nothing back.
        """
        up, seen = snapshot is not None, self._seen[worker]
        with self._condition:
            self._values["worker_up", str(worker), ""] = float(up)
            for definition in DEFINITIONS:
                key = (definition.name, str(worker), "")
                value = float((snapshot or {}).get(definition.key, 0))
                if definition.key and definition.kind == "gauge":
                    self._values[key] = value
                elif definition.key and up:
                    self._increments[key] += max(0.0, value - seen[definition.key])
                    seen[definition.key] = value
            if not up:
                seen.clear()
            elif self._ended[worker]:
                self._increments["worker_restarts_total", str(worker), ""] += 1
            self._ended[worker] = not up
            self._condition.notify()

    def first_audio(self, worker: int, playback: Playback) -> None:
        """A stream's first chunk was sent."""
        self._add(("ttfb_seconds", worker, playback.ttfb))

    def finished(self, worker: int, playback: Playback | None, reason: str, queue_s: float) -> None:
        """A stream ended well.

        Args:
            playback: None if all audio was sent at once.
            reason: one of FINISH_REASONS.
            queue_s: how long it waited for a slot.
        """
        observations = [("queue_seconds", worker, queue_s)]
        if playback is not None:
            observations += [("largest_gap_seconds", worker, playback.largest_gap), ("rtf", worker, playback.rtf)]
        ran_dry = playback is not None and playback.ran_dry
        increments = [("finished_streams_total", str(worker), reason)]
        self._add(*observations, increments=increments + [("underruns_total", str(worker), "")] * ran_dry)

    def failed(self, worker: int | None, code: str) -> None:
        """A request was refused, broke off, or its client left; `worker` is None if it reached none."""
        name = NO_WORKER if worker is None else str(worker)
        cancelled = code == "CANCELLED"
        self._add(increments=[("cancelled_streams_total", name, "") if cancelled else ("errors_total", name, code)])

    def stop(self) -> None:
        """Set what is known, then end the thread."""
        with self._condition:
            self._stopped = True
            self._condition.notify()
        self._thread.join()

    def _add(self, *observations: tuple[str, int, float], increments: Sequence[tuple[str, str, str]] = ()) -> None:
        with self._condition:
            self._increments.update(increments)
            self._observations.extend(((name, str(worker), ""), value) for name, worker, value in observations)
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._stopped or self._increments or self._values or self._observations
                )
                increments, self._increments = self._increments, Counter()
                values, self._values = self._values, {}
                observations, self._observations = self._observations, deque(maxlen=_MAX_WAITING)
                stopped = self._stopped
            try:
                self._tell(increments, values, observations)
            except Exception:  # of the server; the streams are not concerned
                logger.exception("metrics could not be set")
                time.sleep(1.0)
            if stopped:
                return

    def _tell(self, increments: Counter, values: dict, observations: deque) -> None:
        for key, value in values.items():
            self._metrics[key].set(value)
        for key, value in increments.items():
            if value:
                self._metrics[key].increment(value)
        for key, value in observations:
            self._metrics[key].observe(value)
