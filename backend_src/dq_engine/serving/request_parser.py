"""A client's tensors and parameters to a `Request`. Knows no Triton code: tensors are numpy arrays here.

Only what a tensor can get wrong is checked (type, shape, size, UTF-8, unknown names); the values are for
`Request.validate` to judge, and the output's format and rate for `OutputEncoder`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dq_engine.errors import invalid
from dq_engine.request import MAX_AUDIO_BYTES, MAX_ENCODED_AUDIO_BYTES, MAX_TEXT_CHARACTERS, Request
from dq_engine.serving.signature import DTYPES, INPUTS, LATENTS

GRPC_MARK = "user-agent"
"""Request parameter of what came over gRPC: a header that docker/entrypoint.sh has Triton forward there only."""

_SCALARS = {tensor.name: DTYPES[tensor.data_type] for tensor in INPUTS if tensor.dims != LATENTS}
_LATENTS = [tensor.name for tensor in INPUTS if tensor.dims == LATENTS]
_TRITON_TYPES = {np.object_: "BYTES", np.float32: "FP32", np.int64: "INT64", np.int32: "INT32", np.bool_: "BOOL"}
_RAW = ("prompt_audio", "reference_audio")
"""BYTES fields that are no text."""
_MOST_COUNTED_BYTES = 2**20
"""The characters of a longer text are not counted: decoding a gigabyte takes a second, in which nobody is served."""
# What an error repeats of a client's names.
_QUOTED_CHARACTERS = 40


@dataclass(frozen=True)
class ParsedRequest:
    """What one inference request asks for: what to speak, and how its audio comes back (fields as in `Submit`)."""

    request: Request
    output_format: str
    sample_rate: int | None
    stream: bool


def parse_request(inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any]) -> ParsedRequest:
    """Read an inference request.

    Args:
        inputs: the input tensors by name; BYTES and STRING ones as object arrays of bytes.
        parameters: the request parameters; JSON fields that are no inputs arrive among them.

    Raises:
        RequestError: INVALID_ARG naming the field.
    """
    refuse_parameters(parameters)
    if "text" not in inputs:
        raise invalid("text", "is required")
    fields: dict[str, Any] = {}
    for name, array in inputs.items():
        if name in _LATENTS:
            fields[name] = _latents(name, array)
        elif name in _SCALARS:
            fields[name] = value = scalar(name, array, _SCALARS[name], text=name not in _RAW)
            _check_size(name, value)
        else:
            raise invalid(name[:_QUOTED_CHARACTERS], "is not an input of this model")
    output_format = fields.pop("output_format", "f32")
    sample_rate = fields.pop("sample_rate", None)
    stream = fields.pop("stream", True)
    return ParsedRequest(Request(**fields), output_format, sample_rate, stream)


def refuse_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuse JSON fields that are no inputs, which arrive as request parameters: our models have none.

    Raises:
        RequestError: INVALID_ARG naming one.
    """
    for name in parameters:
        if name != GRPC_MARK:
            raise invalid(name[:_QUOTED_CHARACTERS], "is neither an input nor a parameter of this model")


def scalar(name: str, array: np.ndarray, expected: type, text: bool = True) -> Any:
    """The one value of a tensor of shape [1].

    Args:
        name: the input's.
        array: its tensor; a BYTES one is an object array of bytes.
        expected: the dtype that it must have.
        text: whether a BYTES tensor holds UTF-8, which becomes a str.

    Raises:
        RequestError: INVALID_ARG, another type or shape, no UTF-8, or text that is far too long for any input.
    """
    if array.dtype != expected:
        raise invalid(name, f"must be of type {_TRITON_TYPES[expected]}, got {array.dtype}")
    if array.shape != (1,):
        raise invalid(name, f"must have shape [1], got {list(array.shape)}")
    value = array[0] if expected is np.object_ else array[0].item()
    if expected is not np.object_ or not text:
        return value
    if len(value) > _MOST_COUNTED_BYTES:
        raise invalid(name, f"has {len(value)} bytes, the limit is {MAX_TEXT_CHARACTERS} characters")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(name, f"is not UTF-8: {error.reason} at byte {error.start}") from None


def _check_size(name: str, value: Any) -> None:
    """Refuse here what is far too large to be passed on."""
    if isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS:
        raise invalid(name, f"has {len(value)} characters, the limit is {MAX_TEXT_CHARACTERS}")
    if isinstance(value, bytes) and len(value) > MAX_ENCODED_AUDIO_BYTES:
        raise invalid(name, f"has {len(value)} bytes, the limit is {MAX_AUDIO_BYTES}")


def _latents(name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype != np.float32:
        raise invalid(name, f"must be of type FP32, got {array.dtype}")
    if array.nbytes > MAX_AUDIO_BYTES:
        raise invalid(name, f"has {array.nbytes} bytes, the limit is {MAX_AUDIO_BYTES}")
    return array
