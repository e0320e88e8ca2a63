"""What the log says while a worker starts, and what the demo shows of it."""

import logging

from demo import STAGE

from dq_engine.config import EngineConfig
from dq_engine.serving import worker_slot
from dq_engine.serving.messages import Progress, encode
from dq_engine.serving.worker_slot import WorkerSlot


class Outbox:
    """Of a worker that says one thing and no more."""

    def __init__(self, message: Progress) -> None:
        self.messages = [encode(message)]

    def recv(self, flags: int) -> bytes:
        if not self.messages:
            raise worker_slot.zmq.Again
        return self.messages.pop()


def test_each_stage_is_named_when_it_begins_and_a_long_one_says_how_far_it_is(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "dq_engine")
    slot = WorkerSlot(0, EngineConfig(model="x"))
    slot.worker = type("Worker", (), {})()
    for wait_s, stage, fraction in [
        (9.0, "loading the tokenizer", 0.0),
        (9.0, "loading the weights", 0.0),
        (9.0, "loading the weights", 0.01),
        (0.0, "loading the weights", 0.43),
        (9.0, "loading the weights", 0.02),
        (0.0, "warming up", 0.0),
        (0.0, "warming up", 0.5),
    ]:
        slot._logged_at -= wait_s
        slot.worker.outbox = Outbox(Progress(stage, fraction))
        assert list(slot.receive()) == []
    assert caplog.messages == [
        "worker 0: loading the tokenizer",
        "worker 0: loading the weights",
        "worker 0: loading the weights, 1% done",
        "worker 0: loading the weights, 2% done",
        "worker 0: warming up",
    ]
    shown = [STAGE.search(f"2026-11-30T16:29:22.423+00:00 INFO dq_engine: {line}")[1] for line in caplog.messages]
    assert shown[1:3] == ["loading the weights", "loading the weights, 1% done"]
