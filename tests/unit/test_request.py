"""Every limit of a request's own fields: the code, the field and the limit are in the message."""

import re

import numpy as np
import pytest

from dq_engine.errors import RequestError
from dq_engine.request import Request

LATENTS = np.zeros((8, 64), np.float32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": ""}, "text: is empty"),
        ({"text": " \n\t"}, "text: is empty"),
        ({"text": "a" * 4097}, "text: has 4097 characters, the limit is 4096"),
        ({"text": "a\x00b"}, "text: has the control character U+0000 at position 1"),
        ({"text": "a\x1b"}, "text: has the control character U+001B at position 1"),
        ({"text": "a\ud800"}, "text: has the control character U+D800 at position 1"),
        ({"control": "x", "prompt_text": "y", "prompt_latents": LATENTS}, "control: cannot be combined with a prompt"),
        ({"prompt_text": "y"}, "prompt_audio: is required with prompt_text"),
        ({"prompt_latents": LATENTS}, "prompt_text: is required with prompt audio"),
        ({"prompt_text": "", "prompt_latents": LATENTS}, "prompt_text: is empty"),
        ({"voice": "a\ud800"}, "voice: has the control character U+D800 at position 1"),
        ({"lora": "a\ud800"}, "lora: has the control character U+D800 at position 1"),
        ({"reference_audio": b""}, "reference_audio: is empty"),
        ({"reference_audio": b"x", "reference_latents": LATENTS}, "reference_latents: cannot be combined"),
        (
            {"reference_latents": np.zeros((8, 63), np.float32)},
            "reference_latents: must have shape [frames, 64], got [8, 63]",
        ),
        (
            {"reference_latents": np.zeros((6, 64), np.float32)},
            "reference_latents: must have a multiple of 4 frames and at least one, got 6",
        ),
        ({"reference_latents": np.zeros((0, 64), np.float32)}, "reference_latents: must have a multiple of 4 frames"),
        (
            {"reference_latents": np.full((4, 64), np.nan, np.float32)},
            "reference_latents: has values that are not finite",
        ),
        ({"cfg_value": 10.5}, "cfg_value: must be between 0 and 10, got 10.5"),
        ({"cfg_value": float("nan")}, "cfg_value: must be between 0 and 10, got nan"),
        ({"temperature": -1.0}, "temperature: must be between 0 and 2, got -1"),
        ({"temperature": float("inf")}, "temperature: must be between 0 and 2, got inf"),
        ({"seed": -1}, "seed: must be between 0 and"),
        ({"seed": 2**63}, "seed: must be between 0 and"),
        ({"min_generate_length": 0}, "min_generate_length: must be at least 1, got 0"),
        ({"max_generate_length": 0}, "max_generate_length: must be at least 1, got 0"),
        (
            {"min_generate_length": 5, "max_generate_length": 4},
            "min_generate_length: must not exceed max_generate_length (4), got 5",
        ),
    ],
)
def test_refused(fields, message):
    with pytest.raises(RequestError, match="^" + re.escape(f"INVALID_ARG: {message}")) as error:
        Request(**{"text": "hello", **fields}).validate(64, 4)
    assert error.value.code == "INVALID_ARG"


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "你好 🙂 é  two\nlines\t"},
        {"text": "a" * 4096},
        {"cfg_value": 0.0, "temperature": 0.0},
        {"cfg_value": 10.0, "temperature": 2.0, "seed": 2**63 - 1},
        {"prompt_text": "y", "prompt_latents": LATENTS, "reference_latents": LATENTS},
        {"min_generate_length": 1, "max_generate_length": 1},
    ],
)
def test_accepted(fields):
    Request(**{"text": "hello", **fields}).validate(64, 4)
