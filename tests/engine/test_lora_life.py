"""Adapters come and go while streams run: loaded, evicted, replaced, drained, and never taken for one another."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from reference.adapters import AdapterShape, adapter_sizes, random_weights, write_adapter
from reference.checkpoints import SHAPES
from reference.listening import Heard, hear

from dq_engine.engine import DqCoreEngine, EngineConfig, Request, RequestError
from dq_engine.lora import registry
from dq_engine.lora.loader import SlotLoader

SHAPE = SHAPES[0]
NAMES = "abcdef"
ADAPTER = AdapterShape(seed=0, rank=4)


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory) -> Path:
    """Six adapters, of which f is in a folder of its own."""
    folder = tmp_path_factory.mktemp("adapters")
    sizes = adapter_sizes(checkpoint(SHAPE)[0], ADAPTER)
    for seed, name in enumerate(NAMES):
        path = folder / ("more/f" if name == "f" else name)
        write_adapter(path, random_weights(sizes, AdapterShape(seed=seed, rank=4)), ADAPTER)
    return folder


@pytest.fixture
def open_engine(checkpoint, folder):
    engines = []

    def open(slots: int, names: str = NAMES[:5], **settings) -> DqCoreEngine:
        config = {"model": str(checkpoint(SHAPE)[0]), "device": "cpu", "threads": 1, "realtime": False} | settings
        engine = DqCoreEngine(EngineConfig(lora_max_loras=slots, lora_dir=str(folder), **config))
        engines.append(engine)
        engine.start()
        for name in names:
            engine.register_lora(name, name)
        return engine

    yield open
    for engine in engines:
        engine.stop()


def make_request(name: str | None, seed: int = 1, patches: int = 8, **fields) -> Request:
    lengths = {"min_generate_length": patches - 1, "max_generate_length": patches, "return_latents": True}
    return Request(**{"text": "oh no, so it is", "lora": name, "seed": seed} | lengths | fields)


@pytest.fixture(scope="module")
def alone(checkpoint, folder) -> dict[str | None, Heard]:
    """What a request makes with each adapter in an engine that has room for all, one after the other."""
    settings = {"lora_max_loras": 5, "lora_dir": str(folder), "device": "cpu", "threads": 1}
    with DqCoreEngine(EngineConfig(model=str(checkpoint(SHAPE)[0]), **settings)) as engine:
        for name in NAMES[:5]:
            engine.register_lora(name, name)
        heard = {name: hear(engine.submit(make_request(name))) for name in (None, *NAMES[:5])}
    for one in heard:
        for other in heard:
            difference = np.abs(heard[one].latents - heard[other].latents).max()
            assert one == other or difference > 0.1, f"{one} and {other} sound alike"
    return heard


def assert_speaks(heard: Heard, expected: Heard) -> None:
    np.testing.assert_allclose(heard.latents, expected.latents, atol=1e-4)


def states(engine: DqCoreEngine) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in engine.list_loras()}


def count(engine: DqCoreEngine, name: str) -> int:
    return engine.snapshot()[f"lora_{name}"]


class Held:
    """Loading that begins, and goes on only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        copy = SlotLoader._copy

        def held(loader, slot, load):
            self.begun.set()
            assert self.go_on.wait(60)
            return copy(loader, slot, load)

        monkeypatch.setattr(SlotLoader, "_copy", held)


def test_the_least_recently_used_makes_room(open_engine, alone):
    engine = open_engine(2)
    assert engine.snapshot()["loras_registered"] == 5 and count(engine, "slots") == 2
    began = count(engine, "loads"), count(engine, "evictions")
    for name in "abac":
        assert_speaks(hear(engine.submit(make_request(name))), alone[name])
    assert (count(engine, "loads") - began[0], count(engine, "evictions") - began[1]) == (3, 1)
    assert states(engine) == {"a": "ready", "b": "registered", "c": "ready", "d": "registered", "e": "registered"}
    assert_speaks(hear(engine.submit(make_request("a"))), alone["a"])
    assert count(engine, "loads") - began[0] == 3, "a was there still"
    assert_speaks(hear(engine.submit(make_request("b"))), alone["b"])
    assert count(engine, "loads") - began[0] == 4 and states(engine)["c"] == "registered"


def test_an_adapter_is_used_until_its_last_stream_ends(open_engine, alone):
    """b was asked for after a, but a was used longer: b makes room."""
    engine = open_engine(2, "abc")
    begun = begin(engine, make_request("a", patches=60))
    assert_speaks(hear(engine.submit(make_request("b"))), alone["b"])
    rest(begun)
    hear(engine.submit(make_request("c")))
    assert states(engine) == {"a": "ready", "b": "registered", "c": "ready"}


def test_adapters_are_loaded_while_others_speak(open_engine, alone):
    engine = open_engine(1, "a")
    begun = begin(engine, make_request(None, patches=120))
    assert_speaks(hear(engine.submit(make_request("a"))), alone["a"])
    assert engine.snapshot()["active"] == 1, "the one that spoke already was to go on for long"
    rest(begun)


def test_more_adapters_at_once_than_slots(open_engine, alone):
    """All come to their turn, each with its own adapter; those without one do not wait for them."""
    engine = open_engine(2)
    order = [*NAMES[:5], None, *NAMES[:5], None]
    ended = []
    streams = [engine.submit(make_request(name)) for name in order]
    threads = [
        threading.Thread(target=lambda n=name, s=stream: ended.append((n, hear(s))))
        for name, stream in zip(order, streams, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == len(order)
    for name, heard in ended:
        assert_speaks(heard, alone[name])
    # The first to end are the two with slots and those that need none.
    assert {name for name, _ in ended[:4]} == {"a", "b", None} or {name for name, _ in ended[:2]} == {None}


def test_a_load_holds_up_only_who_waits_for_it(open_engine, alone, monkeypatch):
    engine = open_engine(2, "ab")
    assert_speaks(hear(engine.submit(make_request("a"))), alone["a"])
    held = Held(monkeypatch)
    waiting = engine.submit(make_request("b"))
    assert held.begun.wait(60)
    assert states(engine)["b"] == "loading"
    for name in (None, "a"):
        assert_speaks(hear(engine.submit(make_request(name))), alone[name])
    assert engine.snapshot()["queued"] == 1
    held.go_on.set()
    assert_speaks(hear(waiting), alone["b"])


def test_a_stream_that_ends_while_its_adapter_is_loaded(open_engine, alone, monkeypatch):
    engine = open_engine(1, "ab", queue_timeout_s=0.5)
    held = Held(monkeypatch)
    cancelled, late = engine.submit(make_request("a")), engine.submit(make_request("a"))
    assert held.begun.wait(60)
    cancelled.cancel()
    assert [chunk.finish_reason for chunk in cancelled] == ["cancelled"]
    with pytest.raises(RequestError, match="^UNAVAILABLE: waited 0.5 s"):
        hear(late)
    held.go_on.set()
    assert_speaks(hear(engine.submit(make_request("b"))), alone["b"])
    assert {entry["streams"] for entry in engine.list_loras()} == {0}


def test_a_slot_that_is_given_away_while_it_is_loaded(open_engine, alone, monkeypatch):
    """What has come into the slot is not what the next stream wants."""
    engine = open_engine(1, "ab")
    turns = [threading.Event(), threading.Event()]
    waiting, copy = iter(turns), SlotLoader._copy

    def held(loader, slot, load):
        assert next(waiting).wait(60)
        return copy(loader, slot, load)

    monkeypatch.setattr(SlotLoader, "_copy", held)
    first = engine.submit(make_request("a"))
    while states(engine)["a"] != "loading":
        time.sleep(0.01)
    first.cancel()
    list(first)
    second = engine.submit(make_request("b"))
    while states(engine)["b"] != "loading":
        time.sleep(0.01)
    turns[0].set()
    hear(engine.submit(make_request(None)))
    assert states(engine) == {"a": "registered", "b": "loading"} and engine.snapshot()["queued"] == 1
    turns[1].set()
    assert_speaks(hear(second), alone["b"])


def test_requests_that_are_refused_hold_nothing(open_engine):
    engine = open_engine(1, "a")
    for fields in ({"max_generate_length": 5000, "min_generate_length": None}, {"text": "oh " * 1000}):
        with pytest.raises(RequestError, match="^INVALID_ARG"):
            engine.submit(make_request("a", **fields))
    broken = engine.submit(make_request("a", reference_audio=b"no recording"))
    with pytest.raises(RequestError, match="^INVALID_ARG: reference_audio"):
        hear(broken)
    assert [entry["streams"] for entry in engine.list_loras()] == [0]


def test_a_load_that_fails_costs_its_streams_only(open_engine, alone, monkeypatch):
    engine = open_engine(1, "ab")
    with monkeypatch.context() as broken:

        def fail(*_):
            raise MemoryError("no memory")

        broken.setattr(SlotLoader, "_copy", fail)
        with pytest.raises(RequestError, match='^INTERNAL: loading the adapter "a" failed: no memory'):
            hear(engine.submit(make_request("a")))
        assert_speaks(hear(engine.submit(make_request(None))), alone[None])
    for name in "aba":
        assert_speaks(hear(engine.submit(make_request(name))), alone[name])


def begin(engine: DqCoreEngine, request: Request) -> tuple:
    """A stream that has its first patch, and what is still to come of it."""
    stream = engine.submit(request)
    chunks = iter(stream)
    first = next(chunks)
    return first, chunks


def rest(begun: tuple) -> np.ndarray:
    chunks = list(begun[1])
    assert chunks[-1].error is None
    return chunks[-1].latents


def test_unregistered_while_it_is_used(open_engine, alone):
    engine = open_engine(1, "ab")
    begun = begin(engine, make_request("a", patches=60))
    assert engine.unregister_lora("a")["state"] == "draining"
    with pytest.raises(RequestError, match='^NOT_FOUND: lora: there is no registered adapter named "a"'):
        engine.submit(make_request("a"))
    with pytest.raises(RequestError, match='^NOT_FOUND: name: there is no registered adapter named "a"'):
        engine.unregister_lora("a")
    assert states(engine)["a"] == "draining"
    latents = rest(begun)
    np.testing.assert_allclose(latents[: len(alone["a"].latents)], alone["a"].latents, atol=1e-4)
    assert engine.unregister_lora("b")["state"] == "removed"
    assert engine.list_loras() == [] and engine.snapshot()["loras_registered"] == 0


def test_replaced_while_it_is_used(open_engine, alone):
    """The name "a" gets b's weights: the stream that runs keeps the old ones, the next has the new ones."""
    engine = open_engine(2, "a")
    assert [entry["version"] for entry in engine.list_loras()] == [1] and engine.snapshot()["lora_loads"] == 0
    begun = begin(engine, make_request("a", patches=60))
    assert engine.register_lora("b", "b")["version"] == 1
    assert engine.register_lora("a", "b")["version"] == 2
    assert [entry["state"] for entry in engine.list_loras()] == ["draining", "registered", "registered"]
    engine.unregister_lora("b")
    assert_speaks(hear(engine.submit(make_request("a"))), alone["b"])
    np.testing.assert_allclose(rest(begun)[: len(alone["a"].latents)], alone["a"].latents, atol=1e-4)
    assert [entry["state"] for entry in engine.list_loras()] == ["ready"]


def test_what_is_cached_of_a_prompt_is_the_adapters_own(open_engine):
    """The same long prompt under two adapters, under none, and under a name whose adapter was replaced meanwhile."""
    engine = open_engine(2, "ab")
    reference = np.random.default_rng(0).standard_normal((40 * SHAPE.patch_size, SHAPE.feat_dim)).astype(np.float32)
    heard = {}

    def speak(name, label):
        heard[label] = hear(engine.submit(make_request(name, reference_latents=reference)))
        return heard[label].stats["cached_tokens"]

    assert [speak("a", "a"), speak("b", "b"), speak(None, "none")] == [0, 0, 0]
    assert [speak("a", "a again"), speak(None, "none again")] == [48, 48]
    engine.register_lora("a", "b")
    assert [speak("a", "b as a"), speak("a", "b as a again")] == [0, 48]
    engine.unregister_lora("b")
    assert engine.register_lora("b", "a")["version"] == 1  # as the other one had
    assert speak("b", "a as b") == 0
    for label, same in [
        ("a again", "a"),
        ("none again", "none"),
        ("b as a", "b"),
        ("b as a again", "b"),
        ("a as b", "a"),
    ]:
        assert_speaks(heard[label], heard[same])


def test_keys_hold_adapter_and_version_after_a_preemption_too(open_engine, alone):
    """Blocks for one stream and a bit: some give way, and are taken in again with their own blocks and adapter."""
    engine = open_engine(3, "abc", num_kvcache_blocks=8)
    names = ["a", "b", "c", None]
    streams = [engine.submit(make_request(name, patches=45)) for name in names]
    for name, stream in zip(names, streams, strict=True):
        latents = hear(stream).latents
        np.testing.assert_allclose(latents[: len(alone[name].latents)], alone[name].latents, atol=1e-4)
    assert engine.snapshot()["preemptions"] > 0


@pytest.mark.timeout(60)  # if nobody noticed, it would wait for ever
def test_a_preload_that_fails_ends_the_start(open_engine, monkeypatch):
    copy = SlotLoader._copy

    def fail(loader, slot, load):
        if load.weights.rank == 1:  # the warm-up's
            return copy(loader, slot, load)
        raise MemoryError("no memory")

    monkeypatch.setattr(SlotLoader, "_copy", fail)
    with pytest.raises(ValueError, match='^lora_preload: loading the adapter "b" failed: no memory'):
        open_engine(2, "", lora_preload="b")


def test_preloaded(open_engine, alone):
    engine = open_engine(2, "", lora_preload="a, sixth=more/f, b")
    assert states(engine) == {"a": "ready", "sixth": "ready", "b": "registered"}
    loads = count(engine, "loads")
    assert_speaks(hear(engine.submit(make_request("a"))), alone["a"])
    assert count(engine, "loads") == loads
    assert_speaks(hear(engine.submit(make_request("b"))), alone["b"])


def test_settings_that_cannot_be(open_engine, checkpoint, folder):
    with pytest.raises(ValueError, match=r'^lora_preload: path: there is no file "nobody/lora_config.json"'):
        open_engine(2, "", lora_preload="nobody")
    config = {"model": str(checkpoint(SHAPE)[0]), "device": "cpu", "lora_max_loras": 1}
    with pytest.raises(ValueError, match="lora_dir is not set"):
        DqCoreEngine(EngineConfig(**config)).start()
    with pytest.raises(ValueError, match="/no/such is no folder, but lora_max_loras is 1"):
        EngineConfig(**config, lora_dir="/no/such")
    assert EngineConfig(**config | {"lora_max_loras": 0}, lora_dir="/no/such").lora_dir == "/no/such"  # nobody needs it


def test_the_folder_may_be_the_homes(checkpoint, folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    config = {"model": str(checkpoint(SHAPE)[0]), "device": "cpu", "threads": 1, "lora_max_loras": 1}
    with DqCoreEngine(EngineConfig(**config, lora_dir=f"~/{folder.name}")) as engine:
        assert engine.register_lora("x", "a")["state"] == "registered"


def test_without_room_for_adapters(open_case):
    engine = open_case(SHAPE).engine
    with pytest.raises(RequestError, match='^NOT_FOUND: lora: there is no registered adapter named "a"'):
        engine.submit(Request(text="oh", lora="a"))
    with pytest.raises(RequestError, match="^INVALID_ARG: name: .*lora_max_loras is 0"):
        engine.register_lora("a", "a")
    assert engine.list_loras() == [] and engine.snapshot()["lora_slots"] == 0


def test_two_operations_on_one_name(open_engine, monkeypatch):
    engine = open_engine(1, "")
    reading, go_on = threading.Event(), threading.Event()
    read = registry.read_adapter

    def slowly(*arguments):
        reading.set()
        assert go_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(registry, "read_adapter", slowly)
    thread = threading.Thread(target=engine.register_lora, args=("a", "a"))
    thread.start()
    assert reading.wait(60)
    for operation in (lambda: engine.register_lora("a", "b"), lambda: engine.unregister_lora("a")):
        with pytest.raises(RequestError, match='^UNAVAILABLE: name: "a" is being changed by another operation'):
            operation()
    go_on.set()
    thread.join()
    assert states(engine) == {"a": "registered"}


@pytest.mark.parametrize("name", ["", "a/b", "ä", "x" * 65, "a b", "a\n"])
def test_names(open_case, folder, name):
    engine = open_case(SHAPE, lora_max_loras=1, lora_dir=str(folder)).engine
    with pytest.raises(RequestError, match="^INVALID_ARG: name: must be 1 to 64 letters"):
        engine.register_lora(name, "a")


def test_as_many_as_may_be_registered(open_engine):
    engine = open_engine(1, "ab", lora_max_registered=2)
    with pytest.raises(RequestError, match="^INVALID_ARG: name: 2 adapters are registered or in use"):
        engine.register_lora("c", "c")
    engine.unregister_lora("a")
    engine.register_lora("c", "c")
    assert set(states(engine)) == {"b", "c"}


def test_everything_at_once(open_engine, alone):
    """Eight threads speak while two register and unregister: every stream is its adapter's, or is told NOT_FOUND."""
    engine = open_engine(2, "abc")
    until = time.monotonic() + 2
    faults, spoken, missing = [], [], []

    def speak(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while time.monotonic() < until:
            name = [*NAMES[:5], None][rng.integers(6)]
            try:
                stream = engine.submit(make_request(name))
                if rng.random() < 0.2:
                    stream.cancel()
                    list(stream)
                    continue
                assert_speaks(hear(stream), alone[name])
                spoken.append(name)
            except RequestError as error:
                missing.append(error) if error.code == "NOT_FOUND" else faults.append(error)
            except BaseException as error:
                faults.append(error)

    def change(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while time.monotonic() < until:
            name = NAMES[rng.integers(5)]
            try:
                engine.register_lora(name, name) if rng.random() < 0.6 else engine.unregister_lora(name)
            except RequestError as error:
                if error.code not in ("NOT_FOUND", "UNAVAILABLE"):
                    faults.append(error)
            time.sleep(0.2)

    threads = [threading.Thread(target=speak, args=(seed,)) for seed in range(8)]
    threads += [threading.Thread(target=change, args=(seed,)) for seed in (100, 101)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(set(spoken)) >= 4 and missing, "too little happened"
    for name in [entry["name"] for entry in engine.list_loras()]:
        assert engine.unregister_lora(name)["state"] == "removed"
    assert engine.list_loras() == [] and engine.snapshot()["active"] == 0
