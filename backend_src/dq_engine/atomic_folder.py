"""A folder whose files are written whole or not at all, by one process at a time."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dq_engine.errors import RequestError

_UNFINISHED = ".unfinished"
_LOCK_TIMEOUT_S = 10.0


class AtomicFolder:
    """Any thread and any process, on any machine that shares the folder, may use it at the same time.

    Args:
        path: made, for its owner alone, if it is not there and can be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.suppress(OSError):  # who uses it is told; a share may be there again later
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator["LockedFolder"]:
        """The folder to be changed, while nobody else changes it.

        Raises:
            OSError: it is not there, or cannot be changed.
            RequestError: UNAVAILABLE, others have changed it for _LOCK_TIMEOUT_S.
        """
        handle = self._open()
        try:
            ends = time.monotonic() + _LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= ends:
                        message = f"{self.path} was being changed by others for {_LOCK_TIMEOUT_S:g} s"
                        raise RequestError("UNAVAILABLE", message) from None
                    time.sleep(0.01)
            yield LockedFolder(self.path, handle)
        finally:
            os.close(handle)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


class LockedFolder:
    """A folder that nobody else changes.

    Args:
        path: of the folder.
        handle: a file descriptor of it.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self._handle = path, handle

    def write(self, name: str, data: bytes) -> None:
        """Make a file that is not there; whoever looks finds it whole or not at all, after a crash too.

        Raises:
            OSError: the disk is full, say; there is no such file then.
        """
        for left in self.path.glob(f"*{_UNFINISHED}"):  # by a writer that was ended: nobody else writes now
            left.unlink(missing_ok=True)
        unfinished = self.path / (name + _UNFINISHED)
        try:
            with unfinished.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(self.path / name)
            os.fsync(self._handle)  # the folder's entries outlive a crash of the machine
        except OSError:
            for path in unfinished, self.path / name:
                path.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        """Remove a file.

        Raises:
            FileNotFoundError: there is none.
        """
        (self.path / name).unlink()
        os.fsync(self._handle)
