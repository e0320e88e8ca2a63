"""An engine under measurement, in a process of its own."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path


def run_to_its_end(command: Sequence[str], log: Path, timeout_s: float) -> str | None:
    """Run a command; what was wrong with its end, None if nothing was.

    Args:
        command: what is run.
        log: takes its standard error.
        timeout_s: then it is killed.
    """
    with log.open("w") as stderr:
        # A session of its own: its worker processes, which hold GPU memory, end with it.
        process = subprocess.Popen(command, stderr=stderr, start_new_session=True)
        try:
            code = process.wait(timeout_s)
            return f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            return f"not done after {timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
