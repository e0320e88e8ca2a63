"""Audio of every kind through a real tritonserver: out in every format, in from every kind of file, and refused."""

import base64
import io
import json

import httpx
import numpy as np
import pytest
import soundfile
import soxr
from talk import TEXT, Talk, samples, speak

FIELDS = {"text": TEXT, "seed": 3, "max_generate_length": 8}
RAW = {"pcm16": "PCM_16", "mulaw": "ULAW", "alaw": "ALAW"}
SNR_DB = {"pcm16": 76, "wav": 76, "mulaw": 36, "alaw": 36, "flac": 76, "mp3": 22, "opus": 16}
LAME_DELAY = 1_105


@pytest.fixture(scope="module")
def spoken(server):
    """float32 [n] at 48 kHz, as f32."""
    return samples(speak(server, FIELDS))


def read(data: bytes, output_format: str, rate: int) -> np.ndarray:
    subtype = RAW.get(output_format)
    raw = {"samplerate": rate, "channels": 1, "format": "RAW", "subtype": subtype} if subtype else {}
    decoded, read_rate = soundfile.read(io.BytesIO(data), dtype="float32", **raw)
    assert read_rate == rate
    return decoded


def snr_db(expected: np.ndarray, decoded: np.ndarray) -> float:
    noise = decoded[: len(expected)] - expected
    return 10 * np.log10(np.mean(expected**2) / np.mean(noise**2))


def flac_with_length(data: bytes, count: int) -> bytes:
    """soundfile reads no flac file of unknown length."""
    return data[:21] + bytes([data[21] & 0xF0 | count >> 32]) + (count & 0xFFFFFFFF).to_bytes(4, "big") + data[26:]


@pytest.mark.parametrize("rate", [48_000, 16_000])
@pytest.mark.parametrize("output_format", SNR_DB)
def test_a_stream_in_every_format(server, spoken, output_format, rate):
    results = speak(server, FIELDS | {"output_format": output_format, "sample_rate": rate})
    assert len(results) > 1
    assert {result.as_numpy("sample_rate").item() for result in results} == {rate}
    assert all(result.as_numpy("audio") is None for result in results)
    data = b"".join(result.as_numpy("audio_bytes")[0] for result in results)
    expected = spoken if rate == 48_000 else soxr.resample(spoken, 48_000, rate, quality="HQ")
    if output_format == "flac":
        data = flac_with_length(data, len(expected))
    decoded = read(data, output_format, rate)
    late = LAME_DELAY if output_format == "mp3" else 0
    assert len(decoded) == len(expected) if not late else late <= len(decoded) - len(expected) < late + 2 * 1_152
    assert snr_db(expected, decoded[late:]) > SNR_DB[output_format]


@pytest.mark.parametrize("output_format", SNR_DB)
def test_one_response_over_http_in_every_format(server, spoken, output_format):
    fields = FIELDS | {"output_format": f"{output_format}_base64", "stream": False}
    response = httpx.post(f"http://{server.http_url}/v2/models/voxcpm2/generate", json=fields, timeout=60)
    assert response.status_code == 200, response.text
    body = response.json()
    assert (body["sample_rate"], body["finish_reason"]) == (48_000, "length")
    decoded = read(base64.b64decode(body["audio_bytes"], validate=True), output_format, 48_000)
    assert len(decoded) == len(spoken) == round(json.loads(body["stats"])["audio_s"] * 48_000)
    assert snr_db(spoken, decoded) > SNR_DB[output_format]


def recording(format: str, subtype: str | None = None, rate: int = 16_000, channels: int = 1) -> bytes:
    time = np.arange(2 * rate) / rate
    tone = 0.3 * np.sin(2 * np.pi * 200 * time) * np.sin(2 * np.pi * 2 * time)
    data = io.BytesIO()
    soundfile.write(data, np.stack([tone] * channels, axis=1), rate, format=format, subtype=subtype)
    return data.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        recording("WAV"),
        recording("WAV", "PCM_24", 96_000, 8),
        recording("FLAC"),
        recording("OGG", "VORBIS"),
        recording("OGG", "OPUS"),
        recording("MP3"),
        base64.encodebytes(recording("MP3")),
        b"data:audio/mpeg;base64," + base64.b64encode(recording("MP3")),
    ],
    ids=["wav", "wav of 96 kHz, 24 bit, 8 channels", "flac", "vorbis", "opus", "mp3", "base64", "data URL"],
)
def test_a_reference_of_every_kind(server, data):
    fields = {"text": TEXT, "max_generate_length": 1, "reference_audio": data}
    stats = json.loads(speak(server, fields)[-1].as_numpy("stats")[0])
    alone = json.loads(speak(server, {"text": TEXT, "max_generate_length": 1})[-1].as_numpy("stats")[0])
    # 2 s are 12.5 patches, the last one padded, and a token before and one behind them
    assert stats["prompt_tokens"] - alone["prompt_tokens"] == 13 + 2


@pytest.mark.parametrize("field", ["reference_audio", "prompt_audio"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"this is a text file", "is neither a wav, flac, ogg or mp3 file nor base64 of one"),
        (recording("FLAC")[:-500], "is damaged or ends early"),
        (recording("OGG", "OPUS")[:-500], "ends early: within an Ogg page"),
        (b"", "is empty"),
        (recording("WAV") + bytes(17 * 2**20), "has 17889836 bytes, the limit is 16777216"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_recordings_that_are_refused(server, spoken, field, data, message):
    fields = FIELDS | {field: data} | ({"prompt_text": "a"} if field == "prompt_audio" else {})
    with Talk(server, fields) as talk:
        assert talk.error() == f"INVALID_ARG: {field}: {message}"
        talk.send(FIELDS)
        np.testing.assert_allclose(samples(talk.rest()), spoken, atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"output_format": "aac"},
            "output_format: must be one of f32, pcm16, mulaw, alaw, wav, flac, mp3, opus, all but f32 also with "
            '_base64 behind it, got "aac"',
        ),
        ({"sample_rate": 48_001}, "sample_rate: must be between 8000 and 48000 Hz, got 48001"),
        (
            {"output_format": "opus_base64", "sample_rate": 44_100},
            "sample_rate: must be one of 8000, 12000, 16000, 24000, 48000 Hz for opus, got 44100",
        ),
        (
            {"output_format": "mp3", "sample_rate": 8_001},
            "sample_rate: must be one of 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000 Hz for mp3, "
            "got 8001",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_formats_that_are_refused(server, fields, message):
    with Talk(server, FIELDS | fields) as talk:
        assert talk.error() == f"INVALID_ARG: {message}"
