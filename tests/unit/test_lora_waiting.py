"""Who waits for an adapter, and whom that holds up: nobody else."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from sequences import make_sequence

from dq_engine.kv_cache import BlockPool
from dq_engine.scheduler import Scheduler


@dataclass
class Device:
    """Slots for adapters, of a stand-in registry."""

    free: int
    loaded: set = field(default_factory=set)


@dataclass(eq=False)
class StandInLease:
    name: str
    device: Device
    slot: int = -1
    error: None = None

    @property
    def loaded(self) -> bool:
        return self.slot >= 0 and self.name in self.device.loaded

    @property
    def loading(self) -> bool:
        return self.slot >= 0 and not self.loaded

    def reserve(self) -> bool:
        if self.slot < 0 and self.name in self.device.loaded:
            self.slot = 0
        if self.slot < 0 and self.device.free:
            self.device.free -= 1
            self.slot = self.device.free
        return self.slot >= 0


def make_waiting(device: Device, names: str) -> tuple[Scheduler, list]:
    """A scheduler, and a sequence waiting for each letter's adapter, "-" for none."""
    scheduler = Scheduler(BlockPool(64, 16), 8, 256, 0, 0)
    sequences = [make_sequence(20, 5) for _ in names]
    for name, sequence in zip(names, sequences, strict=True):
        sequence.adapter = None if name == "-" else StandInLease(name, device)
        scheduler.add(sequence)
    return scheduler, sequences


def test_who_waits_for_an_adapter_is_passed_by():
    device = Device(free=2)
    scheduler, (a, none, b) = make_waiting(device, "a-b")
    scheduler.reserve_adapters()
    assert scheduler.admit(8) == [none]
    device.loaded = {"b"}
    assert scheduler.admit(8) == [b]
    assert list(scheduler.waiting) == [a]
    device.loaded = {"a", "b"}
    assert scheduler.admit(8) == [a]


def test_slots_go_to_those_who_came_first():
    """The third gets no slot; then the fourth must not get one before it."""
    device = Device(free=2)
    scheduler, (a, b, c, d) = make_waiting(device, "abcd")
    scheduler.reserve_adapters()
    assert [s.adapter.slot >= 0 for s in (a, b, c, d)] == [True, True, False, False]
    device.free = 1
    scheduler.reserve_adapters()
    assert [s.adapter.slot >= 0 for s in (c, d)] == [True, False]


def test_nobody_waits_for_ever_for_a_slot_that_others_keep_using():
    """a has the only slot. Those who want it after b came do not get it before b."""
    device = Device(free=0, loaded={"a"})
    scheduler, (a, b, again) = make_waiting(device, "aba")
    scheduler.reserve_adapters()
    assert [s.adapter.slot >= 0 for s in (a, b, again)] == [True, False, False]


def test_the_loop_sleeps_only_while_all_that_wait_are_being_loaded():
    device = Device(free=1)
    scheduler, (a, b) = make_waiting(device, "ab")
    assert scheduler.busy, "nothing has been asked for yet"
    scheduler.reserve_adapters()
    assert scheduler.busy, "b has to ask again"
    scheduler.remove(b)
    assert not scheduler.busy
    device.loaded = {"a"}
    assert scheduler.busy
    assert scheduler.admit(8) == [a] and scheduler.busy


def test_keys_are_the_adapters_own_after_a_preemption_too():
    """Two streams with the same text under different adapters, and one without."""
    keys = []
    for key in (b"1 a", b"2 a", None):
        sequence = make_sequence(20, 40, tokens=7)
        sequence.adapter = None if key is None else SimpleNamespace(adapter=SimpleNamespace(key=key), slot=0)
        sequence.generated, sequence.latents = 30, [np.zeros((4, 64), np.float32)] * 30
        sequence.rewind(16, [])
        keys.append(sequence.keys)
    assert [len(k) for k in keys] == [3, 3, 3]
    assert not set(keys[0]) & set(keys[1]) and not set(keys[0]) & set(keys[2])
    # Without an adapter the text's own block is known to whoever asks for the same text.
    assert keys[2][0] == make_sequence(20, 5, tokens=7).keys[0]
