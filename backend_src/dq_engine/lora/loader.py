"""Copies adapters into their slots on the device, on a thread of its own: no step waits for it."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dq_engine.lora.layers import AdapterWeights, LoraLayers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Load:
    weights: AdapterWeights
    after: torch.cuda.Event | None


class SlotLoader:
    """Loads slots, in the order in which that is asked for.

    Args:
        layers: whose slots.
        on_done: called on the loader's thread with a slot, the weights for it, and None or why they are not there.
    """

    def __init__(self, layers: LoraLayers, on_done: Callable[[int, AdapterWeights, Exception | None], None]) -> None:
        self._layers, self._on_done = layers, on_done
        self._on_gpu = layers.device.type == "cuda"
        if self._on_gpu:
            self._stream = torch.cuda.Stream(layers.device)
        self._wake = threading.Condition()
        self._pending: dict[int, _Load] = {}
        """The last load asked for of each slot that is to be loaded; guarded by _wake, as _stopped is."""
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="dq-lora-loader", daemon=True)
        self._thread.start()

    def load(self, slot: int, weights: AdapterWeights) -> None:
        """Put an adapter into a slot that nothing launched from now on uses until it is done.

        To be called on the thread that launches steps: what it has launched is let finish first.
        """
        after = None
        if self._on_gpu:
            after = torch.cuda.Event()
            after.record(torch.cuda.current_stream(self._layers.device))
        with self._wake:
            self._pending[slot] = _Load(weights, after)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread; loads that have not begun are not made."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._pending and not self._stopped:
                    self._wake.wait()
                if self._stopped:
                    return
                loads, self._pending = self._pending, {}
            # All are on their way before the first is waited for.
            copies = [
                (slot, load, self._try(lambda slot=slot, load=load: self._copy(slot, load)))
                for slot, load in loads.items()
            ]
            for slot, load, (copied, error) in copies:
                if copied is not None:
                    _, error = self._try(copied.synchronize)
                self._on_done(slot, load.weights, error)

    def _try(self, action: Callable[[], torch.cuda.Event | None]) -> tuple[torch.cuda.Event | None, Exception | None]:
        """What it returns, and what it raises: of the device, say. The streams that wait must be told."""
        try:
            return action(), None
        except Exception as fault:
            logger.exception("loading an adapter failed")
            return None, fault

    @torch.inference_mode()
    def _copy(self, slot: int, load: _Load) -> torch.cuda.Event | None:
        """Begin a copy; the event that is recorded when it is done, or None if it is."""
        target = self._layers.slot(slot)
        if not self._on_gpu:
            target.copy_(load.weights.row)
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(load.after)
            target.copy_(load.weights.row, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return copied
