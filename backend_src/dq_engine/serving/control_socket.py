"""Where the control socket of a model is, and how it gets there: private to its owner, and one server's only."""

import contextlib
import fcntl
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

_BACKLOG = 128


class ControlSocketError(Exception):
    """The control socket cannot be opened; the message says why."""


def socket_path(setting: str | None, model: str) -> Path:
    """The path of a model's control socket; every model of the same tritonserver comes to the same result.

    Args:
        setting: `control_socket` of the settings; none or empty for the default.
        model: the model's name.
    """
    if setting:
        # Triton's stubs run Python in the C locale, which takes no letters beyond ASCII in paths but in this form.
        return Path(os.fsdecode(setting.encode("utf-8", "surrogateescape"))).expanduser()
    # Triton's stubs are children of their server: its number tells two servers of one machine apart.
    return _default_folder() / f"{model}-{os.getppid()}.sock"


class ControlSocket:
    """An open control socket, mode 0600 in a folder of mode 0700.

    What a dead server left is removed. A socket of the same server (of a model that is being replaced) is taken over.

    Args:
        path: see `socket_path`.

    Raises:
        ControlSocketError: the folder is not private, the path is too long, or another server listens there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        try:
            with _locked(_private_folder(path.parent)):
                self._bind()
        except (OSError, ControlSocketError) as error:
            self.listener.close()
            if isinstance(error, ControlSocketError):
                raise
            raise ControlSocketError(f"the control socket {path} cannot be opened: {error}") from None

    def close(self) -> None:
        """Close it, and remove it unless another one has taken its place."""
        with contextlib.suppress(OSError), _locked(self.path.parent):
            if _inode(self.path) == self._inode:
                self.path.unlink()
        with contextlib.suppress(OSError):  # wakes who waits in `accept`
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _bind(self) -> None:
        if self.path.parent == _default_folder():
            _remove_dead(self.path.parent)
        owner = _owner(self.path)
        if owner is not None and _parent(owner) != os.getppid():
            raise ControlSocketError(f"process {owner}, of another server, has the control socket {self.path}")
        new = self.path.with_name(self.path.name + ".new")
        new.unlink(missing_ok=True)
        self.listener.bind(str(new))
        new.chmod(0o600)
        self._inode = _inode(new)
        self.listener.listen(_BACKLOG)
        new.rename(self.path)


def _default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"dq-engine-{os.getuid()}"


def _private_folder(folder: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        what = f"a folder of user {os.getuid()}, mode 0700 (control_socket puts it elsewhere)"
        raise ControlSocketError(f"{folder} has to be {what}")
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Among all processes, one at a time."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_dead(folder: Path) -> None:
    for path in folder.glob("*.sock"):
        if _owner(path) is None:
            path.unlink(missing_ok=True)


def _owner(path: Path) -> int | None:
    """The process that listens at a path, if any."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its backlog is full: it lives, but does not say who it is
            return 0
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _inode(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
