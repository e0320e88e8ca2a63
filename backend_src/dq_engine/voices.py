"""Stored voices: a reference, a prompt or both, encoded once and kept on disk under a name.

Each voice is one file, `<name>.safetensors`. It is written beside its place and renamed, so that it is whole or absent
whatever happens. Every use looks at the file, so that replicas which share the folder see each other's voices and
deletions at once.
"""

import contextlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dq_engine import voice_file
from dq_engine.atomic_folder import AtomicFolder, LockedFolder
from dq_engine.errors import RequestError, invalid
from dq_engine.guarded_files import open_guarded, read_guarded
from dq_engine.voice_file import Voice

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SUFFIX = ".safetensors"
_CACHE_BYTES = 256 * 2**20


class VoiceStore:
    """Voices in a folder. Any thread and any process may use it at the same time.

    Args:
        folder: made if it is not there; where it cannot be, all that needs it is answered with UNAVAILABLE.
        max_count: most voices.
        max_bytes: most bytes of all voices' files together.
        feat_dim, patch_size: of the model's latents.
        no_references: why no voice with a reference is kept; empty if the model knows references.
    """

    def __init__(
        self, folder: Path, max_count: int, max_bytes: int, feat_dim: int, patch_size: int, no_references: str = ""
    ) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._feat_dim, self._patch_size, self._no_references = feat_dim, patch_size, no_references
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, tuple[tuple, Voice]] = OrderedDict()
        """The file's version and what it holds, the least recently used first; guarded by _lock."""
        self._folder = AtomicFolder(folder)

    def get(self, name: str, field: str = "voice") -> Voice:
        """A voice, as it is on disk now.

        Raises:
            RequestError: NOT_FOUND; INVALID_ARG for a name that cannot be one; INTERNAL if its file is damaged;
                UNAVAILABLE if the folder cannot be read.
        """
        _check_name(name, field)
        try:
            with open_guarded(self._folder.path, name + _SUFFIX, field) as handle:
                version = _version(os.fstat(handle))
            with self._lock:
                if (cached := self._cache.get(name)) is not None and cached[0] == version:
                    self._cache.move_to_end(name)
                    return cached[1]
            data = read_guarded(self._folder.path, name + _SUFFIX, voice_file.MAX_BYTES, field)
            voice = voice_file.unpack(name, data, self._feat_dim, self._patch_size, field)
        except RequestError as error:
            if error.code == "NOT_FOUND":
                with self._lock:
                    self._cache.pop(name, None)
            raise _about_voice(error, name, field) from None
        with self._lock:
            self._cache[name] = version, voice
            self._cache.move_to_end(name)
            while sum(v.nbytes for _, v in self._cache.values()) > _CACHE_BYTES:
                self._cache.popitem(last=False)
        return voice

    def describe_all(self) -> list[dict]:
        """All voices, by name, as `describe` tells of them; a damaged one has an `error` instead."""
        described = []
        for name in self._names():
            try:
                described.append(self.describe(name))
            except RequestError as error:
                if error.code != "NOT_FOUND":  # deleted just now
                    described.append({"name": name, "error": error.message})
        return described

    def describe(self, name: str, field: str = "name") -> dict:
        """What there is to say of a voice: name, reference_frames, prompt_frames, prompt_text, created, bytes.

        Raises:
            RequestError: as `get`.
        """
        _check_name(name, field)
        try:
            with open_guarded(self._folder.path, name + _SUFFIX, field) as handle:
                data, size = voice_file.read_header(handle), os.fstat(handle).st_size
            return {"name": name, **voice_file.describe(data, size, field)}
        except RequestError as error:
            raise _about_voice(error, name, field) from None
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            raise RequestError("INTERNAL", f'{field}: the stored voice "{name}" is damaged') from None

    def register(
        self,
        name: str,
        reference_latents: np.ndarray | None = None,
        prompt_latents: np.ndarray | None = None,
        prompt_text: str | None = None,
    ) -> dict:
        """Keep a voice; what `describe` tells of it.

        Args:
            name, reference_latents, prompt_latents, prompt_text: as in `Voice`; one of the latents at least.

        Raises:
            RequestError: INVALID_ARG naming the field; ALREADY_EXISTS; UNAVAILABLE when a quota is used up, or
                the folder cannot be changed.
        """
        self.check_new(name)
        if reference_latents is not None:
            self.check_reference("reference_latents")
        voice_file.check(reference_latents, prompt_latents, prompt_text, self._feat_dim, self._patch_size)
        data = voice_file.pack(reference_latents, prompt_latents, prompt_text)
        with self._changing() as folder:
            self.check_new(name)
            names = self._names()
            if len(names) >= self._max_count:
                raise RequestError("UNAVAILABLE", f"{len(names)} voices are stored, the limit is voices_max_count")
            used = sum(self._size(other) for other in names)
            if used + len(data) > self._max_bytes:
                message = f"{used} bytes of voices are stored and this has {len(data)}, the limit is voices_max_bytes"
                raise RequestError("UNAVAILABLE", message)
            folder.write(name + _SUFFIX, data)
        return {"name": name, **voice_file.describe(data, len(data), "name")}

    def delete(self, name: str) -> None:
        """Remove a voice; streams that use it end as they would have.

        Raises:
            RequestError: NOT_FOUND; INVALID_ARG for a name that cannot be one; UNAVAILABLE if the folder cannot be
                changed.
        """
        _check_name(name, "name")
        with self._changing() as folder:
            try:
                folder.remove(name + _SUFFIX)
            except FileNotFoundError:
                raise _not_found(name, "name") from None
        with self._lock:
            self._cache.pop(name, None)

    def check_new(self, name: str) -> None:
        """Raises RequestError: INVALID_ARG for a name that cannot be one, ALREADY_EXISTS if there is such a voice."""
        _check_name(name, "name")
        if os.path.lexists(self._folder.path / (name + _SUFFIX)):
            raise RequestError("ALREADY_EXISTS", f'name: there is a stored voice named "{name}"; delete it first')

    def check_reference(self, field: str) -> None:
        """Raises RequestError: INVALID_ARG naming `field`, if the model knows no references."""
        if self._no_references:
            raise invalid(field, self._no_references)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[LockedFolder]:
        """Change the folder; no room, no rights or no folder is no fault of the engine."""
        try:
            with self._folder.locked() as folder:
                yield folder
        except OSError as error:
            raise RequestError("UNAVAILABLE", f"the folder of voices cannot be changed: {error.strerror}") from None

    def _names(self) -> list[str]:
        """Of all voices; what else lies in the folder is left alone."""
        try:
            files = os.listdir(self._folder.path)
        except OSError as error:
            raise RequestError("UNAVAILABLE", f"the folder of voices cannot be read: {error.strerror}") from None
        found = (name[: -len(_SUFFIX)] for name in files if name.endswith(_SUFFIX))
        return sorted(name for name in found if _NAME.fullmatch(name))

    def _size(self, name: str) -> int:
        try:
            return (self._folder.path / (name + _SUFFIX)).lstat().st_size
        except FileNotFoundError:  # deleted by hand just now
            return 0


def _check_name(name: str, field: str) -> None:
    if not _NAME.fullmatch(name):
        raise invalid(field, "must be 1 to 64 letters, digits, - or _")


def _about_voice(error: RequestError, name: str, field: str) -> RequestError:
    """What an error of its file means for who asks for a voice."""
    if error.code == "NOT_FOUND":
        return _not_found(name, field)
    if error.code == "UNAVAILABLE":
        return error
    return RequestError("INTERNAL", f'{field}: the stored voice "{name}" is damaged: {error.message}')


def _not_found(name: str, field: str) -> RequestError:
    return RequestError("NOT_FOUND", f'{field}: there is no stored voice named "{name}"')


def _version(status: os.stat_result) -> tuple:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
