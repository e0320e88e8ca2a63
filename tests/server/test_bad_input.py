"""Every field with every kind of wrong value, through the server: what it is told, and that the next request is well.

What recordings can be is in test_formats.py and tests/unit/test_audio_in.py; their words are the same here.
"""

import base64
import json
import socket
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from talk import TEXT, Talk, inputs, samples, speak
from tritonclient.utils import triton_to_np_dtype

from dq_engine.serving.signature import INPUTS, LATENTS

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from audio_files import TONE, file_of

GOOD = {"text": TEXT, "seed": 5, "max_generate_length": 1, "stream": False}
OK = None
LATENTS_8 = np.zeros((8, 64), np.float32)
PROMPT = {"prompt_text": "hello"}
WAV = file_of(TONE, 48_000)
NAN, INF = float("nan"), float("inf")


def of(field: str, value, told: str | None, **others) -> tuple:
    """A case: fields, and what is told of them (after the code); OK if they work."""
    return {field: value, **others}, told and f"INVALID_ARG: {told}"


TEXTS = [
    case
    for field, others in (("text", {}), ("control", {}), ("prompt_text", {"prompt_latents": LATENTS_8}))
    for case in (
        of(field, "", f"{field}: is empty", **others),
        of(field, " \t\n　", f"{field}: is empty", **others),
        of(field, "a" * 100_000, f"{field}: has 100000 characters, the limit is 4096", **others),
        of(field, b"caf\xe9", f"{field}: is not UTF-8: unexpected end of data at byte 3", **others),
        of(field, "a\x00b", f"{field}: has the control character U+0000 at position 1", **others),
        of(field, "a\x1b[31m", f"{field}: has the control character U+001B at position 1", **others),
        of(field, "a\x7f", f"{field}: has the control character U+007F at position 1", **others),
        of(field, "🙂 e\u0301 ñ 👩‍👩‍👧 नमस्ते 你好\n\tx", OK, **others),
    )
]
NAMES = [
    ({field: value}, told)
    for field in ("voice", "lora")
    for value, told in (
        (b"\xff", f"INVALID_ARG: {field}: is not UTF-8: invalid start byte at byte 0"),
        ("a" * 100_000, f"INVALID_ARG: {field}: has 100000 characters, the limit is 4096"),
        ("nobody", f"NOT_FOUND: {field}: there is no "),
    )
]
NUMBERS = [
    *(of("cfg_value", value, "cfg_value: must be between 0 and 10, got ") for value in (NAN, INF, -INF, -0.1, 1e38)),
    *(of("temperature", value, "temperature: must be between 0 and 2, got ") for value in (NAN, INF, -1.0, 2.01)),
    of("seed", -(2**63), "seed: must be between 0 and 2^63 - 1, got -9223372036854775808"),
    of("seed", 2**63 - 1, OK),
    of("cfg_value", 0.0, OK, temperature=0.0),
    of("min_generate_length", -(2**31), "min_generate_length: must be at least 1, got -2147483648"),
    of("max_generate_length", 0, "max_generate_length: must be at least 1, got 0"),
    of("max_generate_length", 2**31 - 1, "max_generate_length: 2147483647 and the prompt's "),
    of("min_generate_length", 3, "min_generate_length: must not exceed max_generate_length (1), got 3"),
    of("sample_rate", -8000, "sample_rate: must be between 8000 and 48000 Hz, got -8000"),
    of("sample_rate", 2**31 - 1, "sample_rate: must be between 8000 and 48000 Hz, got 2147483647"),
    of("output_format", "", "output_format: must be one of "),
    of("output_format", "f32_base64", "output_format: must be one of "),
    of("output_format", b"\xff", "output_format: is not UTF-8"),
]
ENCODED = [
    case
    for kind, others in (("reference", {}), ("prompt", PROMPT))
    for field in [f"{kind}_latents"]
    for case in (
        of(field, LATENTS_8[:0], f"{field}: must have a multiple of 4 frames and at least one, got 0", **others),
        of(field, LATENTS_8[:3], f"{field}: must have a multiple of 4 frames and at least one, got 3", **others),
        of(field, LATENTS_8 * np.float32(NAN), f"{field}: has values that are not finite", **others),
        of(field, LATENTS_8 + np.float32(INF), f"{field}: has values that are not finite", **others),
        of(field, np.zeros((65_540, 64), np.float32), f"{field}: has 16778240 bytes, the limit is 16777216", **others),
        of(field, LATENTS_8, f"{field}: cannot be combined with {kind}_audio", **{f"{kind}_audio": WAV}, **others),
        of(field, LATENTS_8, OK, **others),
    )
]
RECORDINGS = [
    case
    for field, others in (("reference_audio", {}), ("prompt_audio", PROMPT))
    for case in (
        of(field, b"", f"{field}: is empty", **others),
        of(field, WAV[: len(WAV) // 2], f"{field}: ends early: its header promises 96000 bytes of samples, ", **others),
        of(field, file_of(np.zeros(48_000), 48_000), f"{field}: is digital silence", **others),
        of(field, b"a text file named wav", f"{field}: is neither a wav, flac, ogg or mp3 file nor ", **others),
        of(field, file_of(TONE[:1], 48_000), f"{field}: must last 0.1 to 60 s, this is 0.00 s", **others),
        of(field, file_of(np.zeros(8_000 * 600), 8_000, "FLAC"), f"{field}: must last 0.1 to 60 s, this is ", **others),
        of(field, WAV + bytes(17 * 2**20 - len(WAV)), f"{field}: has 17825792 bytes, the limit is 16777216", **others),
        of(field, base64.b64encode(bytes(2**25)), f"{field}: has 44739244 bytes, the limit is 16777216", **others),
        of(field, file_of(np.tile(TONE[:, None], 8), 96_000, "WAV", "PCM_24"), OK, **others),
    )
]
# An hour of silence is 170 kB as a flac file: it is refused for its length, of which no more than a minute is decoded.
BOMB = file_of(np.zeros(48_000 * 3_600, np.int16), 48_000, "FLAC")
TOGETHER = [
    of("reference_audio", BOMB, "reference_audio: must last 0.1 to 60 s, this is 3600.00 s"),
    of("prompt_audio", WAV, "prompt_text: is required with prompt audio: "),
    of("prompt_latents", LATENTS_8, "prompt_text: is required with prompt audio: "),
    of("prompt_text", "a", "prompt_audio: is required with prompt_text: "),
    of("control", "slow", "control: cannot be combined with a prompt", prompt_latents=LATENTS_8, **PROMPT),
    of("sample_rate", 44_100, "sample_rate: must be one of 8000, 12000, 16000, 24000, 48000 Hz", output_format="opus"),
]


@pytest.fixture(scope="module")
def good(server):
    speak(server, GOOD)
    return samples(speak(server, GOOD))  # with its prompt in the cache, as from now on


GROUPS = {
    "texts": TEXTS,
    "names": NAMES,
    "numbers": NUMBERS,
    "latents": ENCODED,
    "recordings": RECORDINGS,
    "together": TOGETHER,
}


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_told_and_that_the_next_request_is_well(server, good, group):
    for fields, told in GROUPS[group]:
        described = {name: str(value)[:40] for name, value in fields.items()}
        with Talk(server, GOOD | fields) as talk:
            if told is OK:
                assert talk.rest()[-1].as_numpy("finish_reason") is not None, described
            else:
                assert talk.error().startswith(told), described
            talk.send(GOOD)
            np.testing.assert_array_equal(samples(talk.rest()), good, err_msg=str(described))


def test_the_bomb_is_one():
    assert len(BOMB) < 2**20


@pytest.mark.parametrize("tensor", INPUTS, ids=lambda tensor: tensor.name)
def test_wrong_types_and_shapes_are_told_by_triton(server, good, tensor):
    right = inputs({tensor.name: LATENTS_8 if tensor.dims == LATENTS else GOOD.get(tensor.name, 1)})[0]
    kind = right.datatype()
    shapes = ([8, 63], [512]) if tensor.dims == LATENTS else ([2], [0], [1, 1])
    with Talk(server, GOOD) as talk:
        talk.rest()
        for shape, its_kind, told in ([1], "FP64", "data-type is 'FP64'"), *((s, kind, "shape") for s in shapes):
            wrong = grpcclient.InferInput(tensor.name, shape, its_kind)
            wrong.set_data_from_numpy(np.full(shape, b"a" if its_kind == "BYTES" else 0, triton_to_np_dtype(its_kind)))
            talk.client.async_stream_infer("voxcpm2", [*(i for i in inputs(GOOD) if i.name() != tensor.name), wrong])
            message = talk.error()
            assert tensor.name in message, message
            assert told in message, message
        talk.send(GOOD)
        np.testing.assert_array_equal(samples(talk.rest()), good)


@pytest.mark.parametrize("field", ["text", "reference_audio"])
def test_a_length_of_2_gib_that_is_not_there(server, good, field):
    """A tensor whose bytes say that 2 GiB follow, and one that ends within its length."""
    for data in b"\xff\xff\xff\x7fabc", b"\x00\x00\x00\x80abc", b"\xff\xff\xff\xff", b"ab":
        tensor = grpcclient.InferInput(field, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([b"abc"], np.object_))
        tensor._raw_content = data
        with Talk(server, GOOD) as talk:
            talk.rest()
            talk.client.async_stream_infer("voxcpm2", [*(i for i in inputs(GOOD) if i.name() != field), tensor])
            assert field in talk.error()
            talk.send(GOOD)
            np.testing.assert_array_equal(samples(talk.rest()), good)


JSON = [
    (b'{"text": "a", "seed": "a"}', 500, "Unable to parse 'data': "),
    (b'{"text": "a", "seed": 1.5}', 500, "Unable to parse 'data': "),
    (b'{"text": "a", "seed": null}', 500, "Unable to parse 'data': "),
    (b'{"text": "a", "seed": {}}', 500, "Unable to parse 'data': "),
    (b'{"text": "a", "seed": 18446744073709551616}', 500, "Unable to parse 'data': "),
    (b'{"text": "a", "seed": [1, 2]}', 400, "The schema can not convert input 'seed'"),
    (b'{"text": "a", "seed": 1e400}', 500, "failed to parse the request JSON buffer: Number too big"),
    (b'{"text": "a", "cfg_value": NaN}', 400, "INVALID_ARG: cfg_value: must be between 0 and 10, got nan"),
    (b'{"text": "a", "stream": "yes"}', 500, "Unable to parse 'data': "),
    (b'{"text": "a", "reference_latents": [1, 2, 3]}', 400, "The schema can not convert input 'reference_latents'"),
    (b'{"text": "a", "reference_latents": []}', 400, "INVALID_ARG: reference_latents: must have a multiple of 4"),
    (b'{"text": "a", "speed": {"a": 1}}', 400, "parameter 'speed' has invalid type"),
    (b'{"text": 7}', 500, "Unable to parse JSON bytes array: "),
    (b'{"text": null}', 500, "Unable to parse JSON bytes array: "),
    (b'{"text": ["a", "b"]}', 400, "The schema can not convert input 'text'"),
    (b'{"text": "\\ud800"}', 500, "failed to parse the request JSON buffer: The surrogate pair in string is invalid"),
    (b'{"text": "caf\xe9"}', 400, "INVALID_ARG: text: is not UTF-8: unexpected end of data at byte 3"),
    (b'{"seed": 1}', 400, "INVALID_ARG: text: is required"),
    (b"", 500, "failed to parse the request JSON buffer: The document is empty"),
    (b"[]", 500, "attempt to get members for non-object"),
    (b'{"text": "a"', 500, "failed to parse the request JSON buffer: "),
    (b'{"text": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400, "expected 1 string elements"),  # docs/deploy.md
]


@pytest.mark.parametrize(("body", "status", "told"), JSON, ids=lambda value: str(value)[:30])
def test_json(server, body, status, told):
    reply = httpx.post(f"http://{server.http_url}/v2/models/voxcpm2/generate", content=body, timeout=60)
    assert told in reply.json()["error"]
    assert reply.status_code == status


def test_the_next_request_after_all_that(server, good):
    np.testing.assert_array_equal(samples(speak(server, GOOD)), good)


def post_large(server, path: str, head: bytes, length: int, tail: bytes, headers: str = "") -> str:
    """Send a body of `length` bytes of "A" between `head` and `tail`; what is answered."""
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=120) as connection:
        size = len(head) + length + len(tail)
        connection.sendall(
            f"POST /v2/models/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n{headers}".encode()
        )
        connection.sendall(b"\r\n" + head)
        for _ in range(length >> 20):
            connection.sendall(b"A" * 2**20)
        connection.sendall(tail)
        answer = b""
        while b'"}' not in answer and (more := connection.recv(65_536)):
            answer += more
        return answer.decode()


@pytest.mark.slow
def test_bodies_of_half_a_gibibyte(server, good):
    """All of it comes, and is refused; 2 GiB were sent by hand (docs/deploy.md)."""
    length = 2**29
    answer = post_large(server, "voxcpm2/generate", b'{"stream": false, "text": "', length, b'"}')
    assert f'"INVALID_ARG: text: has {length} bytes, the limit is 4096 characters"' in answer
    answer = post_large(
        server, "voxcpm2/generate", b'{"text": "a", "stream": false, "reference_audio": "', length, b'"}'
    )
    assert f'"INVALID_ARG: reference_audio: has {length} bytes, the limit is 16777216"' in answer
    tensor = {"name": "audio", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 4 + length}}
    purpose = {"name": "purpose", "shape": [1], "datatype": "BYTES", "data": ["prompt"]}
    head = json.dumps({"inputs": [tensor, purpose]}).encode()
    headers = f"Inference-Header-Content-Length: {len(head)}\r\n"
    answer = post_large(server, "voxcpm2_encode/infer", head + length.to_bytes(4, "little"), length, b"", headers)
    assert f'"INVALID_ARG: audio: has {length} bytes, the limit is 16777216"' in answer
    np.testing.assert_array_equal(samples(speak(server, GOOD)), good)


def test_an_http_request_that_promises_2_gib(server, good):
    """The rest never comes: the connection is closed, and nobody notices anything."""
    connection = socket.create_connection(("127.0.0.1", server.http_port))
    start = json.dumps({"text": TEXT})[:-2].encode()
    connection.sendall(
        b"POST /v2/models/voxcpm2/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2147483648\r\n\r\n" + start
    )
    np.testing.assert_array_equal(samples(speak(server, GOOD)), good)
    connection.close()
    np.testing.assert_array_equal(samples(speak(server, GOOD)), good)
