"""Many items through one engine, so that no slot is ever free while an item waits."""

import queue
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from dq_engine.engine import DqCoreEngine
from dq_engine.errors import RequestError, invalid
from dq_engine.offline.manifest import Item, Row
from dq_engine.request import MAX_AUDIO_BYTES, Chunk, Request

MAX_AHEAD = 64
"""Items that wait in the engine behind those that it speaks, their recordings being encoded meanwhile."""
_LOOK_S = 5.0


class EngineStoppedError(Exception):
    """The engine serves no more; says why."""


@dataclass
class Outcome:
    """What became of an item: audio and its last chunk, or an error."""

    item: Item
    samples: np.ndarray | None = None
    last: Chunk | None = None
    error: RequestError | None = None


@dataclass
class _Collector:
    """Gathers an item's audio on the engine's delivery thread."""

    item: Item
    finished: "queue.SimpleQueue[Outcome]"
    pieces: list[np.ndarray] = field(default_factory=list)

    def __call__(self, chunk: Chunk) -> None:
        if chunk.error is not None:
            self.finished.put(Outcome(self.item, error=chunk.error))
            return
        self.pieces.append(chunk.samples)
        if chunk.is_last:
            self.finished.put(Outcome(self.item, np.concatenate(self.pieces), chunk))


def speak_all(engine: DqCoreEngine, items: Iterable[Item], folder: Path) -> Iterator[Outcome]:
    """Speak items, each with a row; yields what became of them as they end.

    Args:
        engine: started, with a queue of MAX_AHEAD at least.
        folder: of the recordings that rows name.

    Raises:
        EngineStoppedError: the engine failed or hangs; what has not been yielded was not spoken.
    """
    slots = engine.snapshot()["slots"]
    finished: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    waiting, under_way = iter(items), 0
    while True:
        while under_way < slots + min(slots, MAX_AHEAD) and (item := next(waiting, None)) is not None:
            try:
                engine.submit(to_request(item.row, folder), _Collector(item, finished))
            except RequestError as error:
                _check(engine)
                yield Outcome(item, error=error)
            else:
                under_way += 1
        if not under_way:
            return
        try:
            outcome = finished.get(timeout=_LOOK_S)
        except queue.Empty:
            _check(engine)
            continue
        under_way -= 1
        if outcome.error is not None:
            _check(engine)
        yield outcome


def _check(engine: DqCoreEngine) -> None:
    snapshot = engine.snapshot()
    if snapshot["closed"]:
        raise EngineStoppedError(snapshot["closed"])
    if snapshot["stalled"]:
        raise EngineStoppedError("a step hangs (step_timeout_s)")


def to_request(row: Row, folder: Path) -> Request:
    """A row as the engine takes it.

    Raises:
        RequestError: INVALID_ARG, a recording cannot be read.
    """
    fields = msgspec.structs.asdict(row)
    del fields["id"]
    for kind in ("reference", "prompt"):
        if (name := fields.pop(kind)) is not None:
            fields[f"{kind}_audio"] = _read(folder / name, kind)
    return Request(**fields)


def _read(path: Path, field: str) -> bytes:
    try:
        if not path.is_file():  # a pipe, say, would be waited for
            raise invalid(field, f"{path} is no file")
        with path.open("rb") as file:
            data = file.read(MAX_AUDIO_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise invalid(field, f"{path} cannot be read: {error}") from None
    if len(data) > MAX_AUDIO_BYTES:
        raise invalid(field, f"{path} has more than {MAX_AUDIO_BYTES} bytes")
    return data
