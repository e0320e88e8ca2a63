"""What a stored voice holds, and the file that keeps it: safetensors, with JSON in the metadata."""

import dataclasses
import datetime
import json
import os
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.numpy import save

from dq_engine.errors import invalid
from dq_engine.guarded_files import load_tensors
from dq_engine.request import Request, check_latents, check_text

MAX_BYTES = 8 * 2**20
"""Of a file."""
_TENSORS = ("reference_latents", "prompt_latents")
_MAX_HEADER_BYTES = 2**20


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


def check(
    reference: np.ndarray | None,
    prompt: np.ndarray | None,
    prompt_text: str | None,
    feat_dim: int,
    patch_size: int,
    field: str = "",
) -> None:
    """Whether a voice can hold this.

    Args:
        reference, prompt: as `reference_latents` and `prompt_latents` of `Voice`.
        feat_dim, patch_size: of the model's latents.
        field: named in errors; by default the one at fault.

    Raises:
        RequestError: INVALID_ARG.
    """
    if reference is None and prompt is None:
        raise invalid(field or "reference_latents", "a voice holds a reference, a prompt or both")
    if (prompt is None) != (prompt_text is None):
        missing, given = ("prompt_text", "prompt audio") if prompt_text is None else ("prompt_audio", "prompt_text")
        raise invalid(field or missing, f"is required with {given}: a prompt is a recording and its words")
    if prompt_text is not None:
        check_text(field or "prompt_text", prompt_text)
    for kind, latents in ("reference_latents", reference), ("prompt_latents", prompt):
        if latents is not None:
            check_latents(field or kind, latents, feat_dim, patch_size)
            if latents.nbytes > MAX_BYTES // 4:
                limit = MAX_BYTES // 4 // 4 // feat_dim
                raise invalid(field or kind, f"has {len(latents)} frames, the limit is {limit}")


def pack(reference: np.ndarray | None, prompt: np.ndarray | None, prompt_text: str | None) -> bytes:
    """A new voice's file; arguments as of `check`."""
    tensors = dict(zip(_TENSORS, (reference, prompt), strict=True))
    tensors = {key: np.ascontiguousarray(value, np.float32) for key, value in tensors.items() if value is not None}
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return save(tensors, {"voice": json.dumps({"version": 1, "prompt_text": prompt_text, "created": created})})


def unpack(name: str, data: bytes, feat_dim: int, patch_size: int, field: str) -> Voice:
    """The voice in a file.

    Args:
        name: the voice's.
        data: the whole file.
        feat_dim, patch_size: of the model's latents.
        field: named in errors.

    Raises:
        RequestError: INVALID_ARG, the file is not that of a voice.
    """
    tensors, metadata = load_tensors(data, name, field)
    prompt_text, created = _about(metadata, field)
    if any(tensor.dtype != torch.float32 for tensor in tensors.values()):
        raise invalid(field, "its latents are not float32")
    reference, prompt = (tensors[kind].numpy() if kind in tensors else None for kind in _TENSORS)
    check(reference, prompt, prompt_text, feat_dim, patch_size, field)
    return Voice(name, reference, prompt, prompt_text, created)


def read_header(handle: int) -> bytes:
    """The beginning of a voice's file, as far as `describe` needs it.

    Args:
        handle: file descriptor, at the file's beginning.
    """
    length = os.read(handle, 8)
    return length + os.read(handle, min(int.from_bytes(length, "little"), _MAX_HEADER_BYTES))


def describe(data: bytes, size: int, field: str) -> dict:
    """reference_frames, prompt_frames, prompt_text, created and bytes of a voice, by its file's header alone.

    Args:
        data: the file, or its beginning with the header.
        size: of the file.
        field: named in errors.

    Raises:
        RequestError: INVALID_ARG, its metadata or its latents are not those of a voice.
        ValueError, KeyError, TypeError, IndexError, RecursionError: it is not the header of a safetensors file.
    """
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    prompt_text, created = _about(header["__metadata__"], field)
    tensors = [header.get(kind, {"dtype": "F32", "shape": [0]}) for kind in _TENSORS]
    frames = [tensor["shape"][0] for tensor in tensors]
    if not all(type(count) is int and 0 <= count <= MAX_BYTES for count in frames):
        raise ValueError("no numbers of frames")
    if any(tensor["dtype"] != "F32" for tensor in tensors):
        raise invalid(field, "its latents are not float32")
    described = {"reference_frames": frames[0], "prompt_frames": frames[1]}
    return described | {"prompt_text": prompt_text, "created": created, "bytes": size}


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
