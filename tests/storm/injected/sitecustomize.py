"""Runs in every Python process of the server that has this folder on its PYTHONPATH, before anything else.

In the engine worker it shows the tests what the engine holds and how it treats clients that leave, in files in the
folder STORM_FOLDER, and makes a step hang or gives free memory back when they ask for it. It changes nothing else.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path


def _watch(folder: Path) -> None:
    from dq_engine.engine import DqCoreEngine
    from dq_engine.loop import EngineLoop
    from dq_engine.runner import Runner

    snapshot, cancel, release, run = DqCoreEngine.snapshot, EngineLoop.cancel, EngineLoop._release, Runner.run

    def write_snapshot(self) -> dict:
        if (folder / "trim").exists():
            ctypes.CDLL(None).malloc_trim(0)
            (folder / "trim").unlink()
        found = snapshot(self)
        unfinished = folder / "snapshot.part"
        unfinished.write_text(json.dumps({**found, "pid": os.getpid()}))
        unfinished.replace(folder / "snapshot.json")
        return found

    def note(event: str, loop: EngineLoop, stream, generated: int | None) -> None:
        line = {"event": event, "at": time.monotonic(), "stream": stream.id, "generated": generated}
        with (folder / "leaving.jsonl").open("a") as file:
            file.write(json.dumps({**line, "steps": loop.counters["steps"]}) + "\n")

    def note_cancel(self, stream) -> None:
        note("noticed", self, stream, None)
        cancel(self, stream)

    def note_release(self, sequence) -> None:
        release(self, sequence)
        if sequence.stream.cancelled:
            note("freed", self, sequence.stream, sequence.generated)

    def run_or_hang(self, step):
        if (folder / "hang").exists():
            (folder / "hang").unlink()  # the next worker is well
            time.sleep(3600)
        return run(self, step)

    DqCoreEngine.snapshot, EngineLoop.cancel = write_snapshot, note_cancel
    EngineLoop._release, Runner.run = note_release, run_or_hang


if "STORM_FOLDER" in os.environ and "dq_engine.serving.worker" in sys.orig_argv:
    _watch(Path(os.environ["STORM_FOLDER"]))
