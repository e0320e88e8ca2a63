"""A temporary folder of one process: private, and removed by the next such process if this one was killed."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

_SETTLED_S = 60.0
"""A folder is made and then locked; one that has not been touched for so long is not between the two."""


class ProcessFolder:
    """Mode 0700. Locked as long as its process lives, however that ends, which also keeps systemd-tmpfiles away.

    Args:
        prefix: of its name, and of those of its kind: the ones of this user that nobody has locked are removed.

    Raises:
        OSError: none can be made.
    """

    def __init__(self, prefix: str) -> None:
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                _remove_if_dead(path)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._handle = _open(self.path)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it with all that it holds. Once more is no error."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _remove_if_dead(path: Path) -> None:
    """Raises OSError: somebody has it locked, or it is no folder."""
    handle = _open(path)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
        if time.time() - status.st_mtime < _SETTLED_S:
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
