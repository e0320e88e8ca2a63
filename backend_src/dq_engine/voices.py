"""Stored voices: a reference, a prompt or both, encoded once and kept on disk under a name.

Each voice is one safetensors file, `<name>.safetensors`, with its latents and, as JSON in its metadata, the rest. It is
written beside its place and renamed, so that it is whole or absent whatever happens. Every use looks at the file, so
that replicas which share the folder see each other's voices and deletions at once.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save

from dq_engine.atomic_folder import AtomicFolder
from dq_engine.errors import RequestError, invalid
from dq_engine.guarded_files import load_tensors, open_guarded, read_guarded
from dq_engine.request import Request, check_latents, check_text

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SUFFIX = ".safetensors"
_TENSORS = ("reference_latents", "prompt_latents")
_MAX_FILE_BYTES = 8 * 2**20
_MAX_HEADER_BYTES = 2**20
_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Voice:
    """What a voice holds.

    Args:
        name: letters, digits, - and _; 64 at most.
        reference_latents, prompt_latents: float32 [frames, feat_dim], as a request takes them.
        prompt_text: the prompt's words; with `prompt_latents`.
        created: UTC, ISO 8601.
    """

    name: str
    reference_latents: np.ndarray | None = None
    prompt_latents: np.ndarray | None = None
    prompt_text: str | None = None
    created: str = ""

    @property
    def nbytes(self) -> int:
        return sum(latents.nbytes for latents in (self.reference_latents, self.prompt_latents) if latents is not None)

    def apply(self, request: Request) -> Request:
        """The request with what this voice holds.

        Raises:
            RequestError: INVALID_ARG naming a field that brings what the voice holds itself.
        """
        held = {}
        if self.reference_latents is not None:
            held |= {"reference_audio": None, "reference_latents": self.reference_latents}
        if self.prompt_latents is not None:
            held |= {"prompt_audio": None, "prompt_latents": self.prompt_latents, "prompt_text": self.prompt_text}
        for field in held:
            if getattr(request, field) is not None:
                kind = field.partition("_")[0]
                raise invalid(field, f'cannot be combined with the voice "{self.name}", which holds a {kind}')
        return dataclasses.replace(request, **held)


class VoiceStore:
    """Voices in a folder. Any thread and any process may use it at the same time.

    Args:
        folder: made if it is not there.
        max_count: most voices.
        max_bytes: most bytes of all voices' files together.
        feat_dim, patch_size: of the model's latents.

    Raises:
        ValueError: the folder can neither be opened nor made.
    """

    def __init__(self, folder: Path, max_count: int, max_bytes: int, feat_dim: int, patch_size: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._feat_dim, self._patch_size = feat_dim, patch_size
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, tuple[tuple, Voice]] = OrderedDict()
        """The file's version and what it holds, the least recently used first; guarded by _lock."""
        try:
            self._folder = AtomicFolder(folder)
        except OSError as error:
            raise ValueError(f"voices_dir: {folder} cannot be used: {error.strerror}") from None

    def get(self, name: str, field: str = "voice") -> Voice:
        """A voice, as it is on disk now.

        Raises:
            RequestError: NOT_FOUND; INVALID_ARG for a name that cannot be one; INTERNAL if its file is damaged.
        """
        _check_name(name, field)
        try:
            with open_guarded(self._folder.path, name + _SUFFIX, field) as handle:
                version = _version(os.fstat(handle))
            with self._lock:
                if (cached := self._cache.get(name)) is not None and cached[0] == version:
                    self._cache.move_to_end(name)
                    return cached[1]
            voice = self._load(name, read_guarded(self._folder.path, name + _SUFFIX, _MAX_FILE_BYTES, field), field)
        except RequestError as error:
            if error.code == "NOT_FOUND":
                with self._lock:
                    self._cache.pop(name, None)
                raise _not_found(name, field) from None
            raise RequestError("INTERNAL", f'{field}: the stored voice "{name}" is damaged: {error.message}') from None
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
                size = os.fstat(handle).st_size
                length = min(int.from_bytes(os.read(handle, 8), "little"), _MAX_HEADER_BYTES)
                header = json.loads(os.read(handle, length))
            prompt_text, created = _about(header["__metadata__"], field)
            tensors = [header.get(kind, {"dtype": "F32", "shape": [0]}) for kind in _TENSORS]
            frames = [tensor["shape"][0] for tensor in tensors]
            if not all(type(count) is int and 0 <= count <= _MAX_FILE_BYTES for count in frames):
                raise ValueError("no numbers of frames")
            if any(tensor["dtype"] != "F32" for tensor in tensors):
                raise invalid(field, "its latents are not float32")
            described = {"name": name, "reference_frames": frames[0], "prompt_frames": frames[1]}
            return described | {"prompt_text": prompt_text, "created": created, "bytes": size}
        except RequestError as error:
            if error.code == "NOT_FOUND":
                raise _not_found(name, field) from None
            raise RequestError("INTERNAL", f'{field}: the stored voice "{name}" is damaged: {error.message}') from None
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
        self._check_content(reference_latents, prompt_latents, prompt_text)
        tensors = dict(zip(_TENSORS, (reference_latents, prompt_latents), strict=True))
        tensors = {key: np.ascontiguousarray(value, np.float32) for key, value in tensors.items() if value is not None}
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        data = save(tensors, {"voice": json.dumps({"version": 1, "prompt_text": prompt_text, "created": created})})
        with self._changing():
            self.check_new(name)
            names = self._names()
            if len(names) >= self._max_count:
                raise RequestError("UNAVAILABLE", f"{len(names)} voices are stored, the limit is voices_max_count")
            used = sum(self._size(other) for other in names)
            if used + len(data) > self._max_bytes:
                message = f"{used} bytes of voices are stored and this has {len(data)}, the limit is voices_max_bytes"
                raise RequestError("UNAVAILABLE", message)
            self._folder.write(name + _SUFFIX, data)
            return self.describe(name)

    def delete(self, name: str) -> None:
        """Remove a voice; streams that use it end as they would have.

        Raises:
            RequestError: NOT_FOUND; INVALID_ARG for a name that cannot be one; UNAVAILABLE if the folder cannot be
                changed.
        """
        _check_name(name, "name")
        with self._changing():
            try:
                self._folder.remove(name + _SUFFIX)
            except FileNotFoundError:
                raise _not_found(name, "name") from None
        with self._lock:
            self._cache.pop(name, None)

    def check_new(self, name: str) -> None:
        """Raises RequestError: INVALID_ARG for a name that cannot be one, ALREADY_EXISTS if there is such a voice."""
        _check_name(name, "name")
        if os.path.lexists(self._folder.path / (name + _SUFFIX)):
            raise RequestError("ALREADY_EXISTS", f'name: there is a stored voice named "{name}"; delete it first')

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the folder; no room, no rights or no folder is no fault of the engine."""
        try:
            with self._folder.locked():
                yield
        except OSError as error:
            raise RequestError("UNAVAILABLE", f"the folder of voices cannot be changed: {error.strerror}") from None

    def _check_content(
        self, reference: np.ndarray | None, prompt: np.ndarray | None, prompt_text: str | None, field: str = ""
    ) -> None:
        if reference is None and prompt is None:
            raise invalid(field or "reference_latents", "a voice holds a reference, a prompt or both")
        if (prompt is None) != (prompt_text is None):
            missing = "prompt_text" if prompt_text is None else "prompt_latents"
            raise invalid(field or missing, "a prompt is a recording and its words")
        if prompt_text is not None:
            check_text(field or "prompt_text", prompt_text)
        for kind, latents in ("reference_latents", reference), ("prompt_latents", prompt):
            if latents is not None:
                check_latents(field or kind, latents, self._feat_dim, self._patch_size)
                if latents.nbytes > _MAX_FILE_BYTES // 4:
                    limit = _MAX_FILE_BYTES // 4 // 4 // self._feat_dim
                    raise invalid(field or kind, f"has {len(latents)} frames, the limit is {limit}")

    def _load(self, name: str, data: bytes, field: str) -> Voice:
        tensors, metadata = load_tensors(data, name, field)
        prompt_text, created = _about(metadata, field)
        if any(tensor.dtype != torch.float32 for tensor in tensors.values()):
            raise invalid(field, "its latents are not float32")
        reference, prompt = (tensors[kind].numpy() if kind in tensors else None for kind in _TENSORS)
        self._check_content(reference, prompt, prompt_text, field)
        return Voice(name, reference, prompt, prompt_text, created)

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


def _about(metadata: dict[str, str], field: str) -> tuple[str | None, str]:
    """Prompt text and time of creation, out of a file's metadata.

    Raises:
        RequestError: INVALID_ARG, they are not what a voice has.
    """
    try:
        about = json.loads(metadata["voice"])
        prompt_text, created = about["prompt_text"], about["created"]
        datetime.datetime.fromisoformat(created)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise invalid(field, "its metadata is not that of a voice") from None
    if prompt_text is not None:
        if not isinstance(prompt_text, str):
            raise invalid(field, "its metadata is not that of a voice")
        check_text(field, prompt_text)
    return prompt_text, created


def _check_name(name: str, field: str) -> None:
    if not _NAME.fullmatch(name):
        raise invalid(field, "must be 1 to 64 letters, digits, - or _")


def _not_found(name: str, field: str) -> RequestError:
    return RequestError("NOT_FOUND", f'{field}: there is no stored voice named "{name}"')


def _version(status: os.stat_result) -> tuple:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
