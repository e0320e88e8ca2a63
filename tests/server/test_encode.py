"""voxcpm2_encode over gRPC and HTTP: recordings to latents that voxcpm2 takes, many at once, beside running streams."""

import base64
import io
import queue

import httpx
import numpy as np
import pytest
import soundfile
import tritonclient.grpc as grpcclient
from reference.recordings import write_voice
from talk import LONG, TEXT, Talk, inputs, speak
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def voice(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("voice") / "voice.wav"
    return write_voice(path, seconds=1.1, rate=44_100, channels=2, pitch=120, seed=3).read_bytes()


@pytest.fixture
def client(server):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        yield client


def encode(client, audio: bytes, purpose: str) -> tuple[np.ndarray, float]:
    result = client.infer("voxcpm2_encode", inputs({"audio": audio, "purpose": purpose}), client_timeout=60)
    (seconds,) = result.as_numpy("seconds")
    return result.as_numpy("latents"), seconds


def refusal(client, audio: bytes, purpose: str) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as error:
        encode(client, audio, purpose)
    return error.value.status(), error.value.message()


@pytest.mark.parametrize("purpose", ["reference", "prompt"])
def test_latents_are_what_the_audio_is(server, client, voice, purpose):
    latents, seconds = encode(client, voice, purpose)
    assert seconds == pytest.approx(1.1, abs=1e-3)
    assert latents.shape == (28, 64)
    assert latents.dtype == np.float32
    fields = {"text": TEXT, "seed": 5, "max_generate_length": 3, "return_latents": True}
    fields |= {"prompt_text": "a word"} if purpose == "prompt" else {}
    given = speak(server, fields | {f"{purpose}_latents": latents})[-1]
    sent = speak(server, fields | {f"{purpose}_audio": voice})[-1]
    np.testing.assert_allclose(given.as_numpy("latents"), sent.as_numpy("latents"), atol=1e-4)
    other = encode(client, voice, "prompt" if purpose == "reference" else "reference")[0]
    assert not np.allclose(latents, other, atol=1e-3)


def test_json_and_base64(server, client, voice):
    fields = {"audio": base64.b64encode(voice).decode(), "purpose": "prompt"}
    answer = httpx.post(f"http://{server.http_url}/v2/models/voxcpm2_encode/generate", json=fields, timeout=60).json()
    latents = np.array(answer["latents"], np.float32).reshape(-1, 64)
    np.testing.assert_allclose(latents, encode(client, voice, "prompt")[0], atol=1e-5)
    assert answer["seconds"] == pytest.approx(1.1, abs=1e-3)


def test_what_cannot_be_encoded(server, client, voice):
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(16_000), 16_000, format="WAV")
    bad = "StatusCode.INVALID_ARGUMENT"
    assert refusal(client, silence.getvalue(), "prompt") == (bad, "INVALID_ARG: audio: is digital silence")
    assert refusal(client, b"", "prompt") == (bad, "INVALID_ARG: audio: is empty")
    expected = 'INVALID_ARG: purpose: must be "reference" or "prompt", got "both"'
    assert refusal(client, voice, "both") == (bad, expected)
    size = 17 * 2**20
    expected = f"INVALID_ARG: audio: has {size} bytes, the limit is 16777216"
    assert refusal(client, voice + bytes(size - len(voice)), "prompt") == (bad, expected)
    size = 40 * 2**20
    expected = f"INVALID_ARG: audio: has {size} bytes, the limit is 16777216"
    assert refusal(client, voice + bytes(size - len(voice)), "prompt") == (bad, expected)
    url = f"http://{server.http_url}/v2/models/voxcpm2_encode/generate"
    response = httpx.post(url, json={"audio": "hello", "purpose": "prompt"}, timeout=60)
    unknown = httpx.post(url, json={"audio": "hello", "purpose": "prompt", "rate": 5}, timeout=60).json()
    assert unknown == {"error": "INVALID_ARG: rate: is neither an input nor a parameter of this model"}
    words = "INVALID_ARG: audio: is neither a wav, flac, ogg or mp3 file nor base64 of one"
    assert (response.status_code, response.json()) == (400, {"error": words})


def test_many_at_once_beside_a_stream(server, client, voice):
    answers: queue.SimpleQueue = queue.SimpleQueue()
    with Talk(server, LONG) as talk:
        talk.next()
        for _ in range(24):
            tensors = inputs({"audio": voice, "purpose": "reference"})
            client.async_infer("voxcpm2_encode", tensors, lambda result, error: answers.put(error or result))
        encoded = [answers.get(timeout=60) for _ in range(24)]
        talk.next()  # it goes on
    latents = [result.as_numpy("latents") for result in encoded]
    for other in latents[1:]:
        np.testing.assert_allclose(other, latents[0], atol=1e-5)
