"""The adapters that requests can name, and who holds which slot. Any thread may call."""

import datetime
import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from dq_engine.errors import RequestError, invalid
from dq_engine.lora.adapter_file import read_adapter
from dq_engine.lora.layers import AdapterWeights, LoraLayers
from dq_engine.lora.lease import Adapter, Lease
from dq_engine.lora.loader import SlotLoader
from dq_engine.nano import LoRARuntime, LoRARuntimeEntry

NO_ADAPTERS = {"loras_registered": 0, "lora_slots": 0, "lora_loads": 0, "lora_evictions": 0}
"""What an engine without room for adapters counts, in the place of `AdapterRegistry.snapshot`."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class AdapterRegistry:
    """Registers adapters by name. Which adapter has a slot, and which loses it, is nano-vllm-voxcpm's manager's to say.

    Args:
        layers: the model's LoRA layers.
        folder: adapters are read from files in it only.
        max_registered: adapters that may be registered, those included that only running streams still use.
        on_loaded: called, on some other thread, when an adapter has been loaded.
    """

    def __init__(self, layers: LoraLayers, folder: Path, max_registered: int, on_loaded: Callable[[], None]) -> None:
        self._layers, self._folder, self._max_registered = layers, folder, max_registered
        self._on_loaded = on_loaded
        self._reading = threading.Lock()  # one file in memory at a time
        self._lock = threading.Condition()
        """Guards all below, and the state of adapters and leases; notified when an adapter has been loaded."""
        self._runtime = LoRARuntime(layers.num_slots, layers.max_rank)
        self._current: dict[str, Adapter] = {}
        self._adapters: dict[int, Adapter] = {}
        """Those that are registered or still in use, by runtime_id."""
        self._changing: set[str] = set()
        """Names of which a file is being read."""
        self._owners: dict[int, Adapter] = {}
        """Whose matrices a slot has, or will have."""
        self._counters: Counter[str] = Counter(lora_loads=0, lora_evictions=0)
        self._loader = SlotLoader(layers, self._done)

    def register(self, name: str, path: str | Path, digest: str | None = None) -> dict:
        """Read an adapter from the folder and offer it under a name, from now on in the place of one that has it.

        Args:
            name: 1 to 64 letters, digits, and _ . -
            path: see `read_adapter`.
            digest: what its files must have, see `list`; None for any.

        Returns:
            As of `list`.

        Raises:
            RequestError: see `read_adapter`; INVALID_ARG for the name, another digest, or when there are too many
                adapters; UNAVAILABLE while the same name is being changed.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid("name", "must be 1 to 64 letters, digits, and _ . -")
        with self._lock:
            self._begin(name)
        try:
            with self._reading:
                weights, found = read_adapter(self._folder, str(path), self._layers)
            if digest not in (None, found):
                raise invalid("path", f'"{path}" has been changed since it was registered')
            return self._add(name, weights, found)
        finally:
            with self._lock:
                self._changing.discard(name)

    def unregister(self, name: str) -> dict:
        """Take an adapter back: no new request gets it; streams that use it finish.

        Returns:
            As of `list`; its state is "draining" while streams use it, else "removed".

        Raises:
            RequestError: NOT_FOUND, UNAVAILABLE while the same name is being changed.
        """
        with self._lock:
            if name in self._changing:
                raise _busy(name)
            if (adapter := self._current.pop(name, None)) is None:
                raise RequestError("NOT_FOUND", f'name: there is no registered adapter named "{name}"')
            self._retire(adapter)
            return self._describe(adapter)

    def list(self) -> list[dict]:
        """Every adapter that is registered or still in use, in the order of registration.

        Each with `name`, `version` (1, or one more than that of the adapter it replaced), `rank`, `alpha`, `bytes` on
        the host, `state` ("ready": on the device, "registered": would be loaded, "loading", "draining": unregistered or
        replaced, but in use), `streams` that use it, when it was `created`: UTC, ISO 8601, and the `digest` of its
        files: the same in all processes that have read the same.
        """
        with self._lock:
            return [self._describe(adapter) for adapter in self._adapters.values()]

    def lease(self, name: str) -> Lease:
        """Hold an adapter for a stream.

        Raises:
            RequestError: NOT_FOUND.
        """
        with self._lock:
            if (adapter := self._current.get(name)) is None:
                raise RequestError("NOT_FOUND", f'lora: there is no registered adapter named "{name}"')
            self._runtime.on_sequence_enqueued(adapter.runtime_id)
            return Lease(self._get_slot, adapter)

    def release(self, lease: Lease) -> None:
        """A stream is over."""
        with self._lock:
            if lease.released:
                return
            lease.released = True
            runtime_id, holds_slot = lease.adapter.runtime_id, lease.slot >= 0
            if holds_slot:
                self._touch(runtime_id)
            self._runtime.on_sequence_finished(runtime_id, was_running=holds_slot)
            self._forget_removed(lease.adapter)

    def preload(self, adapters: dict[str, str]) -> None:
        """Register adapters, name -> path, and load as many as there are slots; returns when they are loaded.

        Raises:
            RequestError: see `register`.
        """
        for name, path in adapters.items():
            self.register(name, path)
        self.load(adapters)

    def load(self, names: Iterable[str]) -> None:
        """Load the first of these adapters, one a slot, while no stream runs; returns when they are loaded.

        Raises:
            RequestError: NOT_FOUND; INTERNAL if one cannot be loaded.
        """
        leases = []
        try:
            for name in itertools.islice(names, self._layers.num_slots):
                leases.append(self.lease(name))
                leases[-1].reserve()
            with self._lock:
                while any(lease.loading for lease in leases):
                    self._lock.wait()
            for lease in leases:
                if lease.error is not None:
                    raise lease.error
        finally:
            for lease in leases:
                self.release(lease)

    def warm_up_lease(self) -> Lease:
        """An adapter that changes nothing and that nobody can name, for the first steps; gone with its lease."""
        with self._lock:
            adapter = self._enter("", self._layers.pack(1, 1.0, {}, {}))
            self._runtime.on_sequence_enqueued(adapter.runtime_id)
            self._retire(adapter)
            return Lease(self._get_slot, adapter)

    def snapshot(self) -> dict[str, int]:
        """Adapters that requests can name, slots, and the loads into slots and evictions from them so far."""
        return {"loras_registered": len(self._current), "lora_slots": self._layers.num_slots, **self._counters}

    def stop(self) -> None:
        """End the loader's thread."""
        self._loader.stop()

    def _begin(self, name: str) -> None:
        if name in self._changing:
            raise _busy(name)
        # The adapter that is replaced may stay in use for a while: it counts.
        if len(self._adapters) + len(self._changing) >= self._max_registered:
            message = f"{self._max_registered} adapters are registered or in use, the limit (lora_max_registered)"
            raise invalid("name", message)
        self._changing.add(name)

    def _add(self, name: str, weights: AdapterWeights, digest: str) -> dict:
        with self._lock:
            adapter = self._enter(name, weights, digest)
            if (replaced := self._current.get(name)) is not None:
                self._retire(replaced)
            self._current[name] = adapter
            return self._describe(adapter)

    def _enter(self, name: str, weights: AdapterWeights, digest: str = "") -> Adapter:
        version = 1 + max((a.version for a in self._adapters.values() if a.name == name), default=0)
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        adapter = Adapter(name, version, weights, created, digest)
        # The manager knows versions by names of their own: one may drain while another takes its name.
        adapter.runtime_id = self._runtime.register_lora(f"{name}@{adapter.version}", weights)
        self._adapters[adapter.runtime_id] = adapter
        return adapter

    def _retire(self, adapter: Adapter) -> None:
        self._runtime.unregister_lora(f"{adapter.name}@{adapter.version}")
        self._forget_removed(adapter)

    def _forget_removed(self, adapter: Adapter) -> None:
        """Let go of an adapter that the manager has let go of, with its host memory."""
        if self._entry(adapter) is None:
            del self._adapters[adapter.runtime_id]
            for slot in [slot for slot, owner in self._owners.items() if owner is adapter]:
                del self._owners[slot]

    def _entry(self, adapter: Adapter) -> LoRARuntimeEntry | None:
        """What the manager knows of an adapter; None if it has let go of it."""
        try:
            return self._runtime.get_entry(adapter.runtime_id)
        except KeyError:
            return None

    def _get_slot(self, lease: Lease) -> bool:
        with self._lock:
            adapter, runtime_id = lease.adapter, lease.adapter.runtime_id
            running = {a.runtime_id for a in self._owners.values() if self._entry(a).gpu_running_ref_count}
            if not self._runtime.can_schedule(running, runtime_id):
                return False
            self._runtime.on_sequence_started(runtime_id)
            lease.slot = self._touch(runtime_id)
            if adapter.error is not None:  # its slot holds nothing, though it is the adapter's
                adapter.error = None
                self._loader.load(lease.slot, adapter.weights)
            return True

    def _touch(self, runtime_id: int) -> int:
        """The slot of an adapter, loaded if it is not there, which counts as used now."""
        plan = self._runtime.build_batch_plan([runtime_id], [1], lambda slot, weights: self._load(slot, runtime_id))
        return plan.adapter_to_slot[runtime_id]

    def _load(self, slot: int, runtime_id: int) -> None:
        adapter = self._adapters[runtime_id]
        if (owner := self._owners.get(slot)) is not None:
            owner.loaded = False
            self._counters["lora_evictions"] += 1
        self._owners[slot] = adapter
        adapter.loaded, adapter.error = False, None
        self._counters["lora_loads"] += bool(adapter.name)  # the warm-up's is nobody's
        self._loader.load(slot, adapter.weights)

    def _done(self, slot: int, weights: AdapterWeights, error: Exception | None) -> None:
        """On the loader's thread."""
        with self._lock:
            adapter = self._owners.get(slot)
            if adapter is None or adapter.weights is not weights:  # the slot has been given to another since
                return
            if error is None:
                adapter.loaded = True
            else:
                adapter.error = RequestError("INTERNAL", f'loading the adapter "{adapter.name}" failed: {error}')
            self._lock.notify_all()
        self._on_loaded()

    def _describe(self, adapter: Adapter) -> dict:
        entry = self._entry(adapter)
        if entry is None:
            state = "removed"
        elif self._current.get(adapter.name) is not adapter:
            state = "draining"
        elif adapter.loaded:
            state = "ready"
        else:
            state = "registered" if entry.slot_id is None else "loading"
        return {
            "name": adapter.name,
            "version": adapter.version,
            "rank": adapter.weights.rank,
            "alpha": adapter.weights.alpha,
            "bytes": adapter.weights.nbytes,
            "state": state,
            "streams": entry.cpu_ref_count if entry else 0,
            "created": adapter.created,
            "digest": adapter.digest,
        }


def _busy(name: str) -> RequestError:
    return RequestError("UNAVAILABLE", f'name: "{name}" is being changed by another operation; try again')
