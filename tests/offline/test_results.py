"""What `voxcpm-generate` leaves in its folder, wherever it is ended, and where it cannot write."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
from reference.ending import Ending
from typer.testing import CliRunner

from dq_engine.offline import command, results
from dq_engine.offline.manifest import Item, Row
from dq_engine.offline.results import Results, ResultsError

SAMPLES = np.linspace(-0.5, 0.5, 7680, dtype=np.float32)
STATS = {"audio_s": 0.16, "patches": 1, "finish_reason": "stop", "seed": 3}


def save(kept: Results, id: str = "a", samples: np.ndarray = SAMPLES) -> None:
    kept.save(id, "made from this", samples, 48_000, STATS)


def test_an_item_that_was_spoken_is_done(tmp_path):
    kept = Results(tmp_path / "out")
    save(kept)
    kept.close()
    again = Results(tmp_path / "out")
    assert again.is_done("a", "made from this")
    assert not again.is_done("a", "made from something else") and not again.is_done("b", "made from this")
    again.discard("a")
    assert not again.is_done("a", "made from this")


def _ended_at(step: int, folder: Path) -> None:
    """Save two items, and be gone at the given call of the system, half of its data written."""
    ending = Ending(step)
    kept = Results(folder)
    real_open, real_replace, journal = results.Path.open, results.Path.replace, kept._journal
    results.Path.open = lambda path, *mode, **options: ending.halved(real_open(path, *mode, **options))
    results.Path.replace = ending.counted(real_replace)
    results.os.fsync = ending.counted(os.fsync)
    kept._journal = ending.halved(journal)
    save(kept, "a")
    save(kept, "b", -SAMPLES)
    os._exit(0)


def test_a_run_that_is_ended_at_any_step_goes_on(tmp_path):
    fork = multiprocessing.get_context("fork")
    done = []
    for step in range(1, 30):
        folder = tmp_path / str(step)
        process = fork.Process(target=_ended_at, args=(step, folder))
        process.start()
        process.join(20)
        for path in folder.glob("*.wav"):
            assert soundfile.info(path).frames == SAMPLES.size
        kept = Results(folder)
        done.append([id for id in "ab" if kept.is_done(id, "made from this")])
        for id, samples in ("a", SAMPLES), ("b", -SAMPLES):
            if id not in done[-1]:
                kept.discard(id)
                save(kept, id, samples)
        kept.write_table([Item(1, "a", Row(id="a", text="x")), Item(2, "b", Row(id="b", text="x"))], {})
        kept.close()
        assert sorted(os.listdir(folder)) == ["a.wav", "b.wav", "results.csv", "results.jsonl"]
        assert [line.split(",")[2] for line in (folder / "results.csv").read_text().splitlines()[1:]] == ["ok", "ok"]
        assert (soundfile.read(folder / "b.wav", dtype="float32")[0] + SAMPLES < 1e-4).all()
        if process.exitcode == 0:
            break
    # Of each item: two writes, fsync, replace, and two writes to the journal.
    assert done == [[]] * 6 + [["a"]] * 6 + [["a", "b"]]


def test_a_full_disk_leaves_no_half_files(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    kept = Results(tmp_path)
    monkeypatch.setattr(results.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        save(kept)
    assert os.listdir(tmp_path) == ["results.jsonl"]


def test_a_journal_that_is_none(tmp_path):
    journal = tmp_path / "results.jsonl"
    journal.write_bytes(b'5\n[1]\n{"id": []}\n{}\n\xff\xfe\n\0\0\0\nnull\n{"id": "a"')
    kept = Results(tmp_path)
    save(kept, "b")
    kept.close()
    assert Results(tmp_path).is_done("b", "made from this")


def test_two_at_once(tmp_path):
    first = Results(tmp_path)
    with pytest.raises(ResultsError, match=f"^another process writes to {tmp_path}$"):
        Results(tmp_path)
    first.close()
    Results(tmp_path)


def test_a_table_that_cannot_be_written_is_told_of_in_a_line(tmp_path):
    """Also where nothing had to be spoken."""
    (tmp_path / "m.jsonl").write_text("no JSON\n")
    (tmp_path / "out" / "results.csv").mkdir(parents=True)
    done = CliRunner().invoke(command.app, [str(tmp_path / "m.jsonl"), str(tmp_path / "out"), "--model", "/nowhere"])
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("voxcpm-generate: the table cannot be written: [Errno 21] Is a di")
    assert sorted(os.listdir(tmp_path / "out")) == ["results.csv", "results.jsonl"]


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="/file cannot be written to: File exists$"):
        Results(tmp_path / "file")
