"""Adapters of workers that are started after the others, that fail, or that answer too late."""

import threading

import pytest

from dq_engine.config import EngineConfig
from dq_engine.errors import RequestError
from dq_engine.serving.adapters import Adapters
from dq_engine.serving.messages import Result


class Workers:
    """Engine workers that read adapters from `files`, what lies at each path. `digests`: of each one's adapters.

    Their calls are those of `Supervisor.call`; a worker in `slow` answers a registration only when it is asked to.
    """

    def __init__(self, count: int, files: dict[str, str]) -> None:
        self.files, self.serving = files, list(range(count))
        self.digests: list[dict[str, str]] = [{} for _ in range(count)]
        self.slow: dict[int, threading.Event] = {}
        self.done: list[tuple[str, str, int]] = []
        self.loaded: list[str] = []

    def call(self, operation, arguments, payload, timeout_s, worker, too_late=None) -> Result:
        self.done.append((operation, arguments.get("name"), worker))
        if operation == "list_loras":
            adapters = [{"name": name, "digest": d, "state": "ready"} for name, d in self.digests[worker].items()]
            return Result(1, {"adapters": adapters})
        if operation == "load_loras":
            self.loaded += arguments["names"]
            return Result(1, {})
        if worker in self.slow and operation == "register_lora":
            threading.Thread(target=self._answer_late, args=(worker, arguments, too_late)).start()
            raise RequestError("UNAVAILABLE", "register_lora was not answered within 1 s")
        return self._change(operation, arguments, worker)

    def _answer_late(self, worker, arguments, too_late) -> None:
        assert self.slow.pop(worker).wait(20)
        too_late(self._change("register_lora", arguments, worker))

    def _change(self, operation, arguments, worker) -> Result:
        name, has = arguments["name"], self.digests[worker]
        if operation == "unregister_lora":
            if has.pop(name, None) is None:
                raise RequestError("NOT_FOUND", "name: nobody")
            return Result(1, {})
        if (digest := self.files.get(arguments["path"])) is None:
            raise RequestError("NOT_FOUND", "path: there is no file")
        if arguments["digest"] not in (None, digest):
            raise RequestError("INVALID_ARG", "path: has been changed")
        has[name] = digest
        return Result(1, {"digest": digest})

    def restart(self, adapters: Adapters, worker: int, **preloaded: str) -> None:
        self.digests[worker] = preloaded
        if worker in self.serving:
            self.serving.remove(worker)
        adapters.restore(
            worker,
            lambda operation, arguments, timeout_s: self.call(operation, arguments, None, timeout_s, worker),
            lambda: self.serving.append(worker),
        )


@pytest.fixture
def workers() -> Workers:
    return Workers(2, {"old": "1", "new": "2"})


@pytest.fixture
def adapters(workers) -> Adapters:
    return Adapters(workers.call, lambda: sorted(workers.serving), {})


def test_a_worker_that_starts_meanwhile_gets_what_is_being_registered(workers, adapters):
    reading, read = threading.Event(), threading.Event()

    def call(operation, *arguments) -> Result:
        reading.set()
        assert read.wait(20)
        return workers.call(operation, *arguments)

    adapters = Adapters(call, lambda: [0], {})
    registering = threading.Thread(target=adapters.register, args=("ann", "old"))
    restoring = threading.Thread(target=workers.restart, args=(adapters, 1))
    registering.start()
    assert reading.wait(20)
    restoring.start()
    restoring.join(0.1)
    assert restoring.is_alive() and workers.digests[1] == {}
    read.set()
    registering.join(20)
    restoring.join(20)
    assert workers.digests == [{"ann": "1"}] * 2


def test_what_is_changed_while_a_worker_begins_to_serve_reaches_it_too(workers, adapters):
    adapters.register("gone", "old")
    changes = [
        threading.Thread(target=adapters.register, args=("ann", "new")),
        threading.Thread(target=adapters.unregister, args=("gone",)),
    ]
    workers.serving.remove(1)

    def serve() -> None:
        for change in changes:
            change.start()
            change.join(0.1)  # time enough to pass it by
        workers.serving.append(1)

    adapters.restore(1, lambda operation, arguments, s: workers.call(operation, arguments, None, s, 1), serve)
    for change in changes:
        change.join(20)
    assert workers.digests == [{"ann": "2"}] * 2


def test_a_worker_that_starts_again_gets_what_is_registered_then_not_what_was_preloaded(workers):
    config = EngineConfig(model="m", lora_max_loras=1, lora_dir="/", lora_preload="kept, gone=files/gone , new = old")
    preloaded = {"kept": "kept", "gone": "files/gone", "new": "old"}
    assert dict(config.adapters_to_preload) == preloaded
    workers.files |= {"kept": "3", "files/gone": "4"}
    workers.digests = [{"kept": "3", "gone": "4", "new": "1"} for _ in range(2)]
    adapters = Adapters(workers.call, lambda: sorted(workers.serving), preloaded)
    adapters.unregister("gone")
    adapters.register("new", "new")
    adapters.register("more", "old")
    workers.restart(adapters, 1)
    assert workers.digests == [{"kept": "3", "new": "2", "more": "1"}] * 2
    assert adapters.names == ["kept", "more", "new"]


def test_what_it_gets_is_loaded_onto_its_device(workers, adapters):
    adapters.register("ann", "old")
    adapters.register("bob", "new")
    workers.restart(adapters, 1, ann="1")
    assert workers.loaded == ["bob"]


def test_at_the_first_start_nothing_is_registered_twice(workers):
    adapters = Adapters(workers.call, lambda: workers.serving, {"ann": "old"})
    workers.restart(adapters, 1, ann="1")
    assert workers.done == [("list_loras", None, 1)]


def test_a_worker_whose_adapter_is_another_by_now_goes_without(workers, adapters):
    """The others go on with what was registered; requests go to them."""
    adapters.register("ann", "old")
    adapters.register("bob", "new")
    workers.files["old"] = "3"
    del workers.files["new"]
    workers.restart(adapters, 1)
    assert workers.digests == [{"ann": "1", "bob": "2"}, {}]
    for name in "ann", "bob":
        assert adapters.is_missing(1, name) and not adapters.is_missing(0, name)
    adapters.register("ann", "old")
    adapters.unregister("bob")
    assert workers.digests == [{"ann": "3"}] * 2
    assert not any(adapters.is_missing(1, name) for name in ("ann", "bob"))


def test_where_no_worker_has_it_any_more_what_lies_there_now_is_taken_by_all(workers, adapters):
    adapters.register("ann", "old")
    workers.files["old"] = "3"
    workers.serving.clear()
    workers.restart(adapters, 1)
    workers.restart(adapters, 0)
    assert workers.digests == [{"ann": "3"}] * 2
    assert not any(adapters.is_missing(worker, "ann") for worker in (0, 1))


def test_files_that_change_before_all_have_read_them(workers, adapters):
    def call(operation, arguments, *rest) -> Result:
        result = workers.call(operation, arguments, *rest)
        workers.files["new"] = "3"
        return result

    adapters = Adapters(call, lambda: [0, 1], {})
    with pytest.raises(RequestError, match="^INVALID_ARG: path: has been changed"):
        adapters.register("ann", "new")
    assert workers.digests == [{}, {}]


@pytest.mark.parametrize("had", [{}, {"ann": "1"}])
def test_a_registration_that_ends_too_late_is_undone(workers, adapters, had):
    for name in had:
        adapters.register(name, "old")
    answer = workers.slow[1] = threading.Event()
    with pytest.raises(RequestError, match="^UNAVAILABLE: register_lora was not answered"):
        adapters.register("ann", "new")
    assert workers.digests == [had, had]
    undone, change = threading.Event(), workers._change

    def watched(operation, arguments, worker) -> Result:
        result = change(operation, arguments, worker)
        if workers.digests[1] == had and (operation, arguments.get("path")) != ("register_lora", "new"):
            undone.set()
        return result

    workers._change = watched
    answer.set()
    assert undone.wait(20)
    assert workers.digests == [had, had]
    adapters.register("ann", "new")
    assert workers.digests == [{"ann": "2"}] * 2


def test_a_worker_that_answers_nothing_does_not_serve(workers, adapters):
    adapters.register("ann", "old")

    def dead(*_) -> Result:
        raise RequestError("INTERNAL", "the engine worker 1 died; its streams are lost")

    with pytest.raises(RequestError, match="^INTERNAL: the engine worker 1 died"):
        adapters.restore(1, dead, lambda: pytest.fail("it must not serve"))


def test_a_preloaded_adapter_that_could_not_be_replaced_is_put_back(workers):
    workers.digests = [{"ann": "1"}, {"ann": "1"}]

    def call(operation, arguments, payload, timeout_s, worker, too_late) -> Result:
        if worker == 1 and arguments["path"] == "new":
            raise RequestError("INVALID_ARG", "path: is damaged")
        return workers.call(operation, arguments, payload, timeout_s, worker)

    with pytest.raises(RequestError, match="is damaged"):
        Adapters(call, lambda: [0, 1], {"ann": "old"}).register("ann", "new")
    assert workers.done == [("register_lora", "ann", 0)] * 2
    assert workers.digests == [{"ann": "1"}] * 2


def test_a_worker_that_fails_does_not_keep_the_others_from_unregistering():
    asked = []

    def call(operation, arguments, payload, timeout_s, worker, too_late) -> Result:
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
    assert asked == [0, 1, 2] and adapters.names == []
    adapters.restore(3, lambda *_: pytest.fail("the new worker must not have it"), lambda: None)
    workers.remove(0)
    with pytest.raises(RequestError, match="^NOT_FOUND"):
        adapters.unregister("ann")


def test_a_worker_that_dies_while_it_is_asked_has_unregistered(workers, adapters):
    adapters.register("ann", "old")

    def dies(operation, arguments, worker) -> Result:
        workers.serving.remove(worker)
        raise RequestError("INTERNAL", f"the engine worker {worker} died; its streams are lost")

    workers._change = dies
    assert adapters.unregister("ann") == [] and adapters.names == []
    workers.serving = [0, 1]
    with pytest.raises(RequestError, match="^INTERNAL: the engine worker 0 died"):
        adapters.unregister("ann")
