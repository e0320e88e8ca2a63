"""From snapshots and streams to the values of metrics, against a stand-in for the server's registry."""

import threading
from typing import get_args

import pytest

from dq_engine.errors import ErrorCode
from dq_engine.metrics import DEFINITIONS, Definition, Metrics, Playback


class Registry:
    """What the server would show: (name, worker, the metric's own label's value) -> its value or its observations."""

    def __init__(self) -> None:
        self.shown: dict[tuple[str, str, str], float | list[float]] = {}
        self.calls = 0
        self.open = threading.Event()
        self.open.set()

    def create(self, definition: Definition):
        def make(labels: dict[str, str]) -> "Series":
            assert labels.pop("model") == "voxcpm2"
            assert labels.pop("version") == "1"
            key = (definition.name, labels.pop("worker"), labels.pop(definition.label, ""))
            assert labels == {}
            assert key not in self.shown
            self.shown[key] = [] if definition.kind == "histogram" else 0.0
            return Series(self, key)

        return make


class Series:
    def __init__(self, registry: Registry, key: tuple[str, str, str]) -> None:
        self.registry, self.key = registry, key

    def _wait(self) -> None:
        assert self.registry.open.wait(10)
        self.registry.calls += 1

    def increment(self, value: float) -> None:
        self._wait()
        assert value > 0
        self.registry.shown[self.key] += value

    def set(self, value: float) -> None:
        self._wait()
        self.registry.shown[self.key] = value

    def observe(self, value: float) -> None:
        self._wait()
        self.registry.shown[self.key].append(value)


@pytest.fixture
def registry():
    return Registry()


def metrics(registry: Registry, workers: int = 1) -> Metrics:
    return Metrics(registry.create, "voxcpm2", "1", workers)


SNAPSHOT = {"active": 3, "queued": 2, "preempted": 1, "patches": 10, "prefill_tokens": 100, "step_seconds": 0.5}


def test_everything_is_there_from_the_start(registry):
    metrics(registry, workers=2).stop()
    names = {name for name, _, _ in registry.shown}
    assert names == {definition.name for definition in DEFINITIONS}
    assert len(names) == len(DEFINITIONS)
    for worker in ("0", "1", "none"):
        assert ("errors_total", worker, "UNAVAILABLE") in registry.shown
    assert ("patches_total", "none", "") not in registry.shown
    codes = {value for name, _, value in registry.shown if name == "errors_total"}
    # Those that requests to speak end with.
    assert codes == set(get_args(ErrorCode)) - {"CANCELLED", "ALREADY_EXISTS"}


def test_snapshots_become_gauges_and_increments_and_a_new_process_takes_nothing_back(registry):
    kept = metrics(registry, workers=2)
    for snapshot in (
        SNAPSHOT,
        SNAPSHOT | {"patches": 14, "active": 0},
        None,
        {"patches": 3, "active": 1},
        {"patches": 5, "active": 1},
    ):
        kept.heartbeat(1, snapshot)
    kept.stop()
    assert registry.shown["patches_total", "1", ""] == 14 + 5
    assert registry.shown["prefill_tokens_total", "1", ""] == 100
    assert registry.shown["step_seconds_total", "1", ""] == 0.5
    assert registry.shown["active_streams", "1", ""] == 1
    assert registry.shown["preempted_streams", "1", ""] == 0
    assert registry.shown["worker_up", "1", ""] == 1
    assert registry.shown["worker_restarts_total", "1", ""] == 1
    assert registry.shown["patches_total", "0", ""] == registry.shown["worker_up", "0", ""] == 0


def test_a_dead_worker_shows(registry):
    kept = metrics(registry)
    kept.heartbeat(0, SNAPSHOT)
    kept.heartbeat(0, None)
    kept.stop()
    assert registry.shown["worker_up", "0", ""] == registry.shown["active_streams", "0", ""] == 0
    assert registry.shown["patches_total", "0", ""] == 10
    assert registry.shown["worker_restarts_total", "0", ""] == 0, "not yet"


def test_streams(registry):
    kept = metrics(registry)
    smooth, dry = Playback(100.0), Playback(200.0)
    for seconds, now in ((0.16, 100.25), (0.0, 100.3), (0.32, 100.35), (0.16, 100.65)):
        smooth.chunk(seconds, now)
    for seconds, now in ((0.16, 201.0), (0.16, 201.17), (0.16, 201.2)):
        dry.chunk(seconds, now)
    for playback in (smooth, dry):
        kept.first_audio(0, playback)
    kept.finished(0, smooth, "stop", 0.125)
    kept.finished(0, dry, "length", 0.5)
    kept.finished(0, None, "stop", 0.0)
    kept.failed(0, "CANCELLED")
    kept.failed(0, "INTERNAL")
    kept.failed(None, "INVALID_ARG")
    kept.stop()
    shown = registry.shown
    assert shown["ttfb_seconds", "0", ""] == pytest.approx([0.25, 1.0])
    assert shown["queue_seconds", "0", ""] == [0.125, 0.5, 0.0]
    assert shown["largest_gap_seconds", "0", ""] == pytest.approx([0.3, 0.17])
    assert shown["rtf", "0", ""] == pytest.approx([0.4 / 0.64, 0.2 / 0.48])
    assert (smooth.ran_dry, dry.ran_dry) == (False, True)
    assert shown["underruns_total", "0", ""] == 1
    assert shown["finished_streams_total", "0", "stop"] == 2
    assert shown["finished_streams_total", "0", "length"] == 1
    assert shown["cancelled_streams_total", "0", ""] == 1
    assert shown["errors_total", "0", "INTERNAL"] == shown["errors_total", "none", "INVALID_ARG"] == 1
    assert sum(shown["errors_total", w, c] for n, w, c in shown if n == "errors_total") == 2


def test_a_slow_server_holds_up_nobody_and_gets_sums(registry):
    kept = metrics(registry)
    registry.open.clear()
    for count in range(1, 201):
        kept.heartbeat(0, {"patches": count, "active": count})
        kept.failed(0, "UNAVAILABLE")
    registry.open.set()
    kept.stop()
    assert registry.shown["patches_total", "0", ""] == registry.shown["errors_total", "0", "UNAVAILABLE"] == 200
    assert registry.shown["active_streams", "0", ""] == 200
    assert registry.calls < 100, "of 600 changes"


def test_a_server_that_refuses_does_not_end_the_thread(registry, monkeypatch):
    kept = metrics(registry)
    monkeypatch.setattr("dq_engine.metrics.time.sleep", lambda seconds: None)
    raised = threading.Event()

    def refuse(self, value: float) -> None:
        raised.set()
        raise RuntimeError("no such metric")

    monkeypatch.setattr(Series, "increment", refuse)
    kept.failed(0, "INTERNAL")
    assert raised.wait(10)
    monkeypatch.undo()
    kept.failed(0, "INTERNAL")
    kept.stop()
    assert registry.shown["errors_total", "0", "INTERNAL"] == 1
