"""Adapters of workers that are started after the others, or that fail. (With real workers: tests/api.)"""

import threading

import pytest

from dq_engine.config import EngineConfig
from dq_engine.errors import RequestError
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

    adapters = Adapters(call, lambda: [0], {})
    registering = threading.Thread(target=adapters.register, args=("ann", "ann"))
    restoring = threading.Thread(target=adapters.restore, args=(lambda *done: restored.append(done), {}))
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


def test_a_worker_that_starts_again_gets_what_is_registered_then_not_what_was_preloaded():
    config = EngineConfig(model="m", lora_max_loras=1, lora_preload="kept, gone=files/gone , new = old/path")
    assert config.adapters_to_preload == {"kept": "kept", "gone": "files/gone", "new": "old/path"}
    preloaded = {"kept": "kept", "gone": "files/gone", "new": "old"}
    adapters = Adapters(lambda *_: Result(1, {}), lambda: [0], preloaded)
    adapters.unregister("gone")
    adapters.register("new", "other")
    adapters.register("more", "more")
    registered: dict[str, str] = {}
    adapters.restore(lambda _, arguments: registered.update({arguments["name"]: arguments["path"]}), {})
    assert registered == {"kept": "kept", "new": "other", "more": "more"}


def test_at_the_first_start_nothing_is_registered_twice():
    adapters = Adapters(lambda *_: Result(1, {}), lambda: [0], {"ann": "ann"})
    adapters.restore(lambda *_: pytest.fail("it has been preloaded"), {"ann": "ann"})


def test_a_preloaded_adapter_that_could_not_be_replaced_is_put_back():
    done = []

    def call(operation, arguments, payload, timeout_s, worker) -> Result:
        if worker == 1 and arguments["path"] == "new":
            raise RequestError("INVALID_ARG", "path: is damaged")
        done.append((operation, arguments, worker))
        return Result(1, {})

    with pytest.raises(RequestError, match="is damaged"):
        Adapters(call, lambda: [0, 1], {"ann": "old"}).register("ann", "new")
    assert done == [("register_lora", {"name": "ann", "path": path}, 0) for path in ("new", "old")]


def test_a_worker_that_fails_does_not_keep_the_others_from_unregistering():
    asked = []

    def call(operation, arguments, payload, timeout_s, worker) -> Result:
        asked.append(worker)
        if worker == 0:
            raise RequestError("INTERNAL", "the engine worker 0 died; its streams are lost")
        if asked.count(worker) > 1:
            raise RequestError("NOT_FOUND", "name: nobody")
        return Result(1, {})

    workers = [0, 1, 2]
    adapters = Adapters(call, lambda: workers, {"ann": "ann"})
    with pytest.raises(RequestError, match="^INTERNAL: the engine worker 0 died"):
        adapters.unregister("ann")
    assert asked == [0, 1, 2]
    adapters.restore(lambda *_: pytest.fail("the new worker must not have it"), {})
    workers.remove(0)
    with pytest.raises(RequestError, match="^NOT_FOUND"):
        adapters.unregister("ann")
