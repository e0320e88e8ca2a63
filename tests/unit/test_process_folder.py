"""A process's temporary folder: private, and gone with it or when the next one looks."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dq_engine.process_folder import ProcessFolder

PREFIX = "dq-test-"
MAKE = f"""
import sys, time
from dq_engine.process_folder import ProcessFolder
folder = ProcessFolder("{PREFIX}")
(folder.path / "0.in").touch()
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other(temporary):
    """Another process that has one."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", MAKE], stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def age(path: Path) -> None:
    an_hour_ago = time.time() - 3600
    os.utime(path, (an_hour_ago, an_hour_ago), follow_symlinks=False)


def test_it_is_private_and_removed_with_what_it_holds(temporary):
    folder = ProcessFolder(PREFIX)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "file").touch()
    folder.remove()
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_the_next_one_removes_what_a_killed_process_left(temporary, other):
    process, left = other
    age(left)
    living = ProcessFolder(PREFIX)
    assert (left / "0.in").exists()  # as its process lives
    process.send_signal(signal.SIGKILL)
    process.wait()
    age(left)
    age(living.path)
    new = ProcessFolder(PREFIX)
    assert {*temporary.iterdir()} == {living.path, new.path}


def test_what_is_not_such_a_folder_is_left_alone(temporary):
    (temporary / f"{PREFIX}file").touch()
    (temporary / "elsewhere").mkdir(mode=0o700)
    (temporary / f"{PREFIX}link").symlink_to("elsewhere")
    (temporary / f"{PREFIX}shared").mkdir(mode=0o755)
    (temporary / "other-kind").mkdir(mode=0o700)
    before = sorted(temporary.iterdir())
    for path in before:
        age(path)
    (temporary / f"{PREFIX}new").mkdir(mode=0o700)  # whose process has not locked it yet
    ProcessFolder(PREFIX).remove()
    assert sorted(temporary.iterdir()) == sorted([*before, temporary / f"{PREFIX}new"])
