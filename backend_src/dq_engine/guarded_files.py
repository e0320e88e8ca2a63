"""Reading files that somebody else has put into a configured folder: none outside it, none oversized, none torn."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from dq_engine.errors import RequestError, invalid

MAX_HEADER_BYTES = 4 * 2**20
"""Of a safetensors file: some 30,000 tensors."""
_CHUNK_BYTES = 1 << 20


def read_guarded(folder: Path, name: str, max_bytes: int, field: str) -> bytes:
    """Read a whole regular file below a configured folder.

    Args:
        folder: the folder, which may itself be reached by symbolic links.
        name: the file, relative to `folder`, or absolute and below it. No part of it may be `..` or a symbolic link.
        max_bytes: the largest file that is read.
        field: named in errors.

    Raises:
        RequestError: NOT_FOUND if there is no such file; INVALID_ARG if the path leaves the folder or holds a symbolic
            link, if it is no regular file, too large, not readable, or changes while it is read; UNAVAILABLE if the
            folder is not there, or the machine cannot read (no file handles, a fault of the disk).
    """
    with open_guarded(folder, name, field) as handle:
        before = os.fstat(handle)
        if before.st_size > max_bytes:
            raise invalid(field, f'"{name}" has {before.st_size} bytes, the limit is {max_bytes}')
        data = bytearray()
        while len(data) <= before.st_size and (piece := os.read(handle, _CHUNK_BYTES)):
            data += piece
        if len(data) != before.st_size or _version(os.fstat(handle)) != _version(before):
            raise invalid(field, f'"{name}" was changed while it was read')
    return bytes(data)


@contextlib.contextmanager
def open_guarded(folder: Path, name: str, field: str) -> Iterator[int]:
    """A file descriptor of a regular file below `folder`, for reading; arguments and errors as of `read_guarded`."""
    parts = _parts(folder, name, field)
    try:
        directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        message = f'{field}: the folder of "{name}" cannot be opened: {error.strerror}'
        raise RequestError("UNAVAILABLE", message) from None
    try:
        # Each part is opened within the folder before it, so that no link put there meanwhile is followed.
        for part in parts[:-1]:
            inner = _open(directory, part, os.O_PATH | os.O_DIRECTORY, name, field)
            os.close(directory)
            directory = inner
        handle = _open(directory, parts[-1], os.O_RDONLY | os.O_NONBLOCK, name, field)  # a pipe must not be waited for
    finally:
        os.close(directory)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise invalid(field, f'"{name}" is not a regular file')
        yield handle
    except OSError as error:
        raise _unreadable(name, error, field) from None
    finally:
        os.close(handle)


def load_tensors(data: bytes, name: str, field: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors, on the CPU, and metadata of a safetensors file.

    Args:
        data: the whole file.
        name, field: named in errors.

    Raises:
        RequestError: INVALID_ARG, it is not a whole and consistent safetensors file.
    """
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise invalid(field, f'"{name}" has a safetensors header of {length} bytes, the limit is {MAX_HEADER_BYTES}')
    try:
        tensors = load(data)  # checks types, shapes, and that the tensors fill the file without gap or overlap
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise invalid(field, f'"{name}" is not a valid safetensors file: {error}') from None
    return tensors, metadata


def _parts(folder: Path, name: str, field: str) -> list[str]:
    path = PurePosixPath(name)
    if path.is_absolute():
        try:
            path = path.relative_to(PurePosixPath(os.path.abspath(folder)))
        except ValueError:
            raise invalid(field, f'"{name}" is not below {folder}') from None
    if not path.parts or "\0" in name:
        raise invalid(field, f'"{name}" is not the name of a file')
    if ".." in path.parts:
        raise invalid(field, f'"{name}" must not hold ".."')
    return list(path.parts)


def _open(directory: int, part: str, flags: int, name: str, field: str) -> int:
    try:
        handle = os.open(part, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        raise RequestError("NOT_FOUND", f'{field}: there is no file "{name}"') from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(directory, part):
            raise invalid(field, f'"{name}" leads through a symbolic link') from None
        if error.errno in (errno.ENOTDIR, errno.ENXIO):  # ENXIO: a socket
            raise invalid(field, f'"{name}" is not a regular file') from None
        raise _unreadable(name, error, field) from None
    return handle


def _unreadable(name: str, error: OSError, field: str) -> RequestError:
    """It is the file's fault if it may not be read, or has such a name; everything else is the machine's."""
    code = "INVALID_ARG" if error.errno in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG) else "UNAVAILABLE"
    return RequestError(code, f'{field}: "{name}" cannot be read: {error.strerror}')


def _is_link(directory: int, part: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISLNK(os.stat(part, dir_fd=directory, follow_symlinks=False).st_mode)
    return False


def _version(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
