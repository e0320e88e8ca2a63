"""A real tritonserver whose engine worker shows what its engine holds, and what its processes use."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from triton_server import TritonServer

_MARKS = {"server": "bin/tritonserver", "stub": "/voxcpm2/1/model.py", "worker": "serving.worker"}


@dataclass(frozen=True)
class Use:
    """What a process uses."""

    rss_mib: float
    threads: int
    files: int


class ObservedServer(TritonServer):
    """Args: as of TritonServer, and a folder for what the worker shows (see injected/sitecustomize.py)."""

    def __init__(self, model: Path, folder: Path, environment: dict[str, str] | None = None, **options) -> None:
        self.folder = folder
        injected = str(Path(__file__).parent / "injected")
        environment = {"PYTHONPATH": injected, "STORM_FOLDER": str(folder), **(environment or {})}
        super().__init__(model=model, environment=environment, **options)

    def snapshot(self) -> dict:
        """The engine's latest snapshot, at most a second old, and the worker's `pid`."""
        return json.loads((self.folder / "snapshot.json").read_text())

    def next_snapshot(self, seconds: float = 30) -> dict:
        """One that is taken after this call."""
        (self.folder / "snapshot.json").unlink(missing_ok=True)
        wait_until((self.folder / "snapshot.json").exists, seconds, "a heartbeat")
        return self.snapshot()

    def leaving(self) -> dict[int, dict[str, dict]]:
        """Of each stream whose client left, by the engine's number: when that was noticed, when its slot was free.

        Both are {"at": seconds of time.monotonic(), "steps": of the engine so far, "generated": patches or None}.
        """
        found: dict[int, dict[str, dict]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / "leaving.jsonl").read_text().splitlines():
                event = json.loads(line)
                found.setdefault(event["stream"], {}).setdefault(event["event"], event)
        return found

    def hang(self) -> None:
        """Let the next step of the engine hang, of this worker only."""
        (self.folder / "hang").touch()

    def trim(self) -> None:
        """Have the worker's allocator give back to the system what is free; the rest is in use, or beside what is."""
        (self.folder / "trim").touch()
        wait_until(lambda: not (self.folder / "trim").exists(), 30, "the worker gave its memory back")

    def processes(self) -> dict[str, psutil.Process]:
        """tritonserver, its stub and the engine worker: those that are alive."""
        found = {}
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie too
                line = " ".join(process.cmdline())
                found |= {name: process for name, mark in _MARKS.items() if mark in line and name not in found}
        return found

    def uses(self) -> dict[str, Use]:
        """What each process uses now."""
        return {
            name: Use(process.memory_info().rss / 2**20, process.num_threads(), process.num_fds())
            for name, process in self.processes().items()
        }

    def shared_memory(self) -> list[str]:
        """Its entries in /dev/shm."""
        return sorted(name for name in os.listdir("/dev/shm") if name.startswith(f"voxcpm2_{self.pid}_"))


def is_idle(snapshot: dict) -> bool:
    return snapshot["active"] == snapshot["queued"] == 0


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"not within {seconds} s: {what}"
        time.sleep(0.05)
