"""Adapters of workers that are started while others register one. (With real workers: tests/api.)"""

import threading

from dq_engine.serving.adapters import Adapters
from dq_engine.serving.messages import Result


def test_a_worker_that_starts_meanwhile_gets_what_is_being_registered():
    calls, restored = [], []
    reading, read = threading.Event(), threading.Event()

    def call(operation, arguments, payload, timeout_s, worker) -> Result:
        calls.append((operation, arguments["name"], worker))
        reading.set()
        assert read.wait(20)
        return Result(1, {"name": arguments["name"]})

    adapters = Adapters(call, lambda: [0])
    registering = threading.Thread(target=adapters.register, args=("ann", "ann"))
    restoring = threading.Thread(target=adapters.restore, args=(lambda *done: restored.append(done),))
    registering.start()
    assert reading.wait(20)
    restoring.start()
    restoring.join(0.1)
    assert restoring.is_alive() and restored == []
    read.set()
    registering.join(20)
    restoring.join(20)
    assert calls == [("register_lora", "ann", 0)]
    assert restored == [("register_lora", {"name": "ann", "path": "ann"})]
