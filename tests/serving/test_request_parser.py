"""Tensors to a Request: what each field becomes, and what a client is told when a tensor is wrong."""

import numpy as np
import pytest

from dq_engine.errors import RequestError
from dq_engine.request import Request
from dq_engine.serving.request_parser import parse_request


def _text(*values: bytes) -> np.ndarray:
    return np.array(values, np.object_)


TEXT = {"text": _text(b"hello")}
LATENTS = np.arange(512, dtype=np.float32).reshape(8, 64)


def test_text_alone_leaves_every_default():
    parsed = parse_request(TEXT, {})
    assert parsed.request == Request(text="hello")
    assert (parsed.output_format, parsed.sample_rate, parsed.stream) == ("f32", None, True)


@pytest.mark.parametrize(
    ("name", "array", "value"),
    [
        ("text", _text("zwölf Boxkämpfer 你好".encode()), "zwölf Boxkämpfer 你好"),
        ("control", _text(b"slt"), "slt"),
        ("prompt_text", _text(b""), ""),
        ("prompt_audio", _text(b"RIFF\xff\x00"), b"RIFF\xff\x00"),
        ("reference_audio", _text(b"\xff\xfe"), b"\xff\xfe"),
        ("cfg_value", np.array([2.5], np.float32), 2.5),
        ("cfg_value", np.array([np.inf], np.float32), float("inf")),  # Request.validate refuses it
        ("temperature", np.array([0], np.float32), 0.0),
        ("seed", np.array([2**62], np.int64), 2**62),
        ("seed", np.array([-1], np.int64), -1),
        ("min_generate_length", np.array([3], np.int32), 3),
        ("max_generate_length", np.array([9], np.int32), 9),
        ("return_latents", np.array([True]), True),
        ("lora", _text(b"ann"), "ann"),
        ("voice", _text(b"bob"), "bob"),
    ],
)
def test_scalars_become_plain_python_values(name, array, value):
    got = getattr(parse_request({**TEXT, name: array}, {}).request, name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("name", ["prompt_latents", "reference_latents"])
def test_latents_keep_their_values_and_shape(name):
    got = getattr(parse_request({**TEXT, name: LATENTS}, {}).request, name)
    assert got.shape == (8, 64)
    np.testing.assert_array_equal(got, LATENTS)


def test_how_audio_comes_back():
    inputs = {
        **TEXT,
        "output_format": _text(b"wav"),
        "sample_rate": np.array([16000], np.int32),
        "stream": np.array([False]),
    }
    parsed = parse_request(inputs, {})
    assert (parsed.output_format, parsed.sample_rate, parsed.stream) == ("wav", 16000, False)


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        ({}, {}, "INVALID_ARG: text: is required"),
        ({"control": _text(b"x")}, {}, "INVALID_ARG: text: is required"),
        (TEXT, {"speed": 2}, "INVALID_ARG: speed: is neither an input nor a parameter of this model"),
        ({**TEXT, "speed": _text(b"2")}, {}, "INVALID_ARG: speed: is not an input of this model"),
        ({"text": _text(b"ab\xff")}, {}, "INVALID_ARG: text: is not UTF-8: invalid start byte at byte 2"),
        ({"text": _text(b"\xc3")}, {}, "INVALID_ARG: text: is not UTF-8: unexpected end of data at byte 0"),
        ({"text": _text(b"\xed\xa0\x80")}, {}, "INVALID_ARG: text: is not UTF-8: invalid continuation byte at byte 0"),
        ({**TEXT, "voice": _text(b"\xff")}, {}, "INVALID_ARG: voice: is not UTF-8: invalid start byte at byte 0"),
        ({"text": _text(b"a" * 2**20)}, {}, "INVALID_ARG: text: has 1048576 characters, the limit is 4096"),
        (
            {"text": _text(b"\xff" * (2**20 + 1))},
            {},
            "INVALID_ARG: text: has 1048577 bytes, the limit is 4096 characters",
        ),
        ({"text": _text(b"a", b"b")}, {}, "INVALID_ARG: text: must have shape [1], got [2]"),
        ({"text": _text()}, {}, "INVALID_ARG: text: must have shape [1], got [0]"),
        ({"text": _text(b"a").reshape(1, 1)}, {}, "INVALID_ARG: text: must have shape [1], got [1, 1]"),
        ({"text": np.array([1], np.int32)}, {}, "INVALID_ARG: text: must be of type BYTES, got int32"),
        ({**TEXT, "cfg_value": np.array([2.0])}, {}, "INVALID_ARG: cfg_value: must be of type FP32, got float64"),
        ({**TEXT, "seed": np.array([2], np.int32)}, {}, "INVALID_ARG: seed: must be of type INT64, got int32"),
        ({**TEXT, "seed": np.zeros(2, np.int64)}, {}, "INVALID_ARG: seed: must have shape [1], got [2]"),
        ({**TEXT, "stream": np.array([1], np.int32)}, {}, "INVALID_ARG: stream: must be of type BOOL, got int32"),
        (
            {**TEXT, "prompt_latents": LATENTS.astype(np.float64)},
            {},
            "INVALID_ARG: prompt_latents: must be of type FP32, got float64",
        ),
        ({**TEXT, "lora": _text(b"\xff")}, {}, "INVALID_ARG: lora: is not UTF-8: invalid start byte at byte 0"),
    ],
)
def test_a_wrong_tensor_is_named(inputs, parameters, message):
    with pytest.raises(RequestError) as error:
        parse_request(inputs, parameters)
    assert str(error.value) == message
