"""A version of an adapter, and a stream's hold on it. Their registry makes them, and guards what changes in them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from dq_engine.errors import RequestError
from dq_engine.lora.layers import AdapterWeights


@dataclass(eq=False)
class Adapter:
    """One version of an adapter: what was registered under a name at one time.

    Args:
        name: as requests give it.
        version: tells it from what else is there, or drains, under its name.
        created: UTC, ISO 8601.
        digest: of the files that it was read from; see `read_adapter`.
        runtime_id: its number in nano-vllm-voxcpm's LoRA manager, which gives none twice.
        loaded: it is in its slot on the device.
    """

    name: str
    version: int
    weights: AdapterWeights
    created: str
    digest: str = ""
    runtime_id: int = -1
    loaded: bool = False
    error: RequestError | None = None
    """Why it could not be loaded, the last time."""

    @property
    def key(self) -> bytes:
        """What tells its KV blocks from all others'."""
        return b"%d %s" % (self.runtime_id, self.name.encode())


@dataclass(eq=False)
class Lease:
    """A stream's hold on an adapter, from its submission to its end. The adapter stays as it is meanwhile.

    Args:
        get_slot: gives a lease a slot, or says that none is free.
        slot: the adapter's on the device, which stays there while a lease has it; -1 before `reserve`.
    """

    get_slot: Callable[["Lease"], bool] = field(repr=False)
    adapter: Adapter
    slot: int = -1
    released: bool = False

    @property
    def loaded(self) -> bool:
        """Whether the adapter is in `slot`, so that steps may use it."""
        return self.slot >= 0 and self.adapter.loaded

    @property
    def loading(self) -> bool:
        """Whether it is on its way there."""
        return self.slot >= 0 and not self.adapter.loaded and self.error is None

    @property
    def error(self) -> RequestError | None:
        """Why it could not be loaded."""
        return self.adapter.error if self.slot >= 0 else None

    def reserve(self) -> bool:
        """Get a slot and have the adapter loaded into it; False while all slots are in use by others.

        To be called on the thread that launches steps.
        """
        return self.slot >= 0 or self.get_slot(self)
