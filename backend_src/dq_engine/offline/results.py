"""What `voxcpm-generate` leaves in its folder: a wav file an item, a journal that a crash cannot spoil, and a table."""

import contextlib
import csv
import fcntl
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import soundfile

from dq_engine.audio.output import pcm16
from dq_engine.offline.manifest import Item

COLUMNS = "line id status wav audio_s patches finish_reason seed prompt_tokens error".split()
"""Of results.csv. `status` is `ok`, `error`, or empty for what was not reached; the others as in the stream's stats."""


class ResultsError(Exception):
    """The folder cannot be used; says why."""


class Results:
    """The folder of the results. Every file in it is whole or not there, whenever the program ends.

    Args:
        folder: made if it is not there.

    Raises:
        ResultsError: it cannot be written to, or another process writes to it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._journal = (folder / "results.jsonl").open("a+", encoding="utf-8", errors="replace")
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsError(f"another process writes to {folder}") from None
        except OSError as error:
            raise ResultsError(f"{folder} cannot be written to: {error.strerror}") from None
        self._entries: dict[str, dict] = {}
        self._journal.seek(0)
        text = self._journal.read()
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._entries[entry["id"]] = entry
            except (ValueError, TypeError, KeyError):  # the last one, cut off by a crash
                continue
        if text and not text.endswith("\n"):
            self._journal.write("\n")

    def is_done(self, id: str, fingerprint: str) -> bool:
        """Whether this item was spoken already, from the same input."""
        entry = self._entries.get(id, {})
        return entry.get("fingerprint") == fingerprint and self._wav(id).is_file()

    def discard(self, id: str) -> None:
        """Remove an item's audio: it was made from something else."""
        self._wav(id).unlink(missing_ok=True)

    def save(self, id: str, fingerprint: str, samples: np.ndarray, rate: int, stats: dict) -> None:
        """Write an item's audio, then its journal entry.

        Args:
            samples: float32 [n]; written as 16-bit PCM, with the rounding of the server's `wav`.
            stats: what the table shows of it.

        Raises:
            OSError: the disk is full, say.
        """
        wav = io.BytesIO()  # soundfile does not tell why a file cannot be written
        soundfile.write(wav, pcm16(samples), rate, format="WAV", subtype="PCM_16")
        with self._whole(self._wav(id), f".{id}.part", "wb") as file:
            file.write(wav.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        entry = {"id": id, "fingerprint": fingerprint, **stats}
        self._journal.write(json.dumps(entry) + "\n")
        self._journal.flush()
        self._entries[id] = entry

    def write_table(self, items: Iterable[Item], errors: dict[int, str]) -> None:
        """Write results.csv, a row for each item in the manifest's order.

        Args:
            errors: of items that failed, by their line.

        Raises:
            OSError: the disk is full, say.
        """
        name = self.folder / "results.csv"
        with self._whole(name, ".results.csv.part", "w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            table.writeheader()
            for item in items:
                cells: dict[str, object] = {"line": item.line, "id": item.id}
                entry = self._entries.get(item.id)
                if item.line in errors:
                    cells |= {"status": "error", "error": errors[item.line]}
                elif entry is not None and self._wav(item.id).is_file():
                    cells |= {"status": "ok", "wav": self._wav(item.id).name, **entry}
                table.writerow(cells)

    def close(self) -> None:
        """Let others write to the folder."""
        with contextlib.suppress(OSError):  # what could not be written when it was to be
            self._journal.close()

    @contextlib.contextmanager
    def _whole(self, path: Path, part: str, mode: str, **options: str) -> Iterator[IO]:
        """A file to write to that takes the place of `path` when it is whole, and is gone if it cannot be."""
        unfinished = self.folder / part
        try:
            with unfinished.open(mode, **options) as file:
                yield file
            unfinished.replace(path)
        except BaseException:  # Ctrl-C too
            unfinished.unlink(missing_ok=True)
            raise

    def _wav(self, id: str) -> Path:
        return self.folder / f"{id}.wav"
