"""What clients are told, word for word, over gRPC streams and over HTTP."""

import httpx
import numpy as np
import pytest
from talk import TEXT, Talk, speak

LATENTS = np.zeros((8, 64), np.float32)
CASES = [
    ({"text": ""}, "INVALID_ARG: text: is empty"),
    ({"text": "a" * 4097}, "INVALID_ARG: text: has 4097 characters, the limit is 4096"),
    ({"text": "a\x07b"}, "INVALID_ARG: text: has the control character U+0007 at position 1"),
    ({"text": b"\xff"}, "INVALID_ARG: text: is not UTF-8: invalid start byte at byte 0"),
    ({"cfg_value": 10.5}, "INVALID_ARG: cfg_value: must be between 0 and 10, got 10.5"),
    ({"cfg_value": float("nan")}, "INVALID_ARG: cfg_value: must be between 0 and 10, got nan"),
    ({"temperature": -1.0}, "INVALID_ARG: temperature: must be between 0 and 2, got -1"),
    ({"seed": -1}, "INVALID_ARG: seed: must be between 0 and 2^63 - 1, got -1"),
    ({"max_generate_length": 0}, "INVALID_ARG: max_generate_length: must be at least 1, got 0"),
    (
        {"min_generate_length": 5, "max_generate_length": 4},
        "INVALID_ARG: min_generate_length: must not exceed max_generate_length (4), got 5",
    ),
    (
        {"prompt_latents": LATENTS},
        "INVALID_ARG: prompt_text: is required with prompt audio: a prompt is a recording and its words",
    ),
    (
        {"prompt_latents": LATENTS[:3], "prompt_text": "a"},
        "INVALID_ARG: prompt_latents: must have a multiple of 4 frames and at least one, got 3",
    ),
    (
        {"reference_latents": LATENTS * np.float32(np.nan)},
        "INVALID_ARG: reference_latents: has values that are not finite",
    ),
    (
        {"control": "slt", "prompt_latents": LATENTS, "prompt_text": "a"},
        "INVALID_ARG: control: cannot be combined with a prompt",
    ),
    ({"sample_rate": 1}, "INVALID_ARG: sample_rate: must be between 8000 and 48000 Hz, got 1"),
    ({"voice": "ann"}, 'NOT_FOUND: voice: there is no stored voice named "ann"'),
    ({"lora": "ann"}, 'NOT_FOUND: lora: there is no registered adapter named "ann"'),
]


@pytest.mark.parametrize(("fields", "message"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_over_grpc(server, fields, message):
    with Talk(server, {"text": TEXT, **fields}) as talk:
        assert talk.error() == message
        # The stream itself goes on: the next request on it is served.
        talk.send({"text": TEXT, "max_generate_length": 1})
        assert talk.rest()[-1].as_numpy("finish_reason").tolist() == [b"length"]


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"output_format": "ogg2"}, "INVALID_ARG: output_format: must be one of f32, pcm16, "),
        ({"reference_audio": b"not audio at all"}, "INVALID_ARG: reference_audio: "),
        ({"max_generate_length": 100_000}, "INVALID_ARG: max_generate_length: 100000 "),
    ],
)
def test_messages_whose_end_depends_on_the_model(server, fields, start):
    with Talk(server, {"text": TEXT, **fields}) as talk:
        assert talk.error().startswith(start)


def test_unknown_names_are_refused_by_name(server):
    with Talk(server, {"text": TEXT}, parameters={"speed": 2}) as talk:
        assert talk.error() == "INVALID_ARG: speed: is neither an input nor a parameter of this model"
    with Talk(server, {"text": TEXT, "speed": "2"}) as talk:  # Triton itself
        assert talk.error() == "unexpected inference input 'speed' for model 'voxcpm2'"
    with Talk(server, {"control": "slt"}) as talk:
        assert talk.error() == "INVALID_ARG: text: is required"


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": TEXT, "speed": 2}, "INVALID_ARG: speed: is neither an input nor a parameter of this model"),
        ({"text": "", "stream": False}, "INVALID_ARG: text: is empty"),
        ({"text": TEXT, "voice": "ann"}, 'NOT_FOUND: voice: there is no stored voice named "ann"'),
    ],
)
def test_over_http(server, path, fields, message):
    response = httpx.post(f"http://{server.http_url}/v2/models/voxcpm2/{path}", json=fields, timeout=60)
    assert response.status_code == 400
    assert response.json() == {"error": message} if path == "generate" else message.replace('"', '\\"') in response.text


def test_generate_without_stream_false_says_so(server):
    response = httpx.post(f"http://{server.http_url}/v2/models/voxcpm2/generate", json={"text": TEXT}, timeout=60)
    assert response.json()["error"].startswith("generate expects model to produce exactly 1 response")


def test_the_server_is_well_after_all_that(server):
    assert speak(server, {"text": TEXT})[-1].as_numpy("finish_reason").tolist() == [b"stop"]
