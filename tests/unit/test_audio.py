"""Recordings in and audio out: values against libraries that read and resample the same way."""

import base64
import io

import numpy as np
import pytest
import soundfile
import soxr

from dq_engine.audio.input import decode_audio
from dq_engine.audio.output import OutputEncoder
from dq_engine.errors import RequestError

TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000)).astype(np.float32)


def file_of(samples: np.ndarray, rate: int, format: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format, subtype=subtype)
    return buffer.getvalue()


def test_mono_at_the_same_rate_is_untouched():
    assert np.array_equal(decode_audio(file_of(TONE, 16_000, subtype="FLOAT"), "f", 16_000), TONE)


def test_channels_are_averaged_and_the_rate_is_converted_by_soxr():
    stereo = np.stack([TONE, 0.25 * TONE], axis=1)
    decoded = decode_audio(file_of(stereo, 44_100, subtype="FLOAT"), "f", 16_000)
    expected = soxr.resample(stereo.mean(axis=1), 44_100, 16_000, quality="HQ")
    assert len(decoded) == -(-48_000 * 16_000 // 44_100)
    assert np.abs(decoded[: len(expected)] - expected[: len(decoded)]).max() < 1e-6


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG"])
def test_base64_of_a_file_is_the_file(format):
    data = file_of(TONE, 48_000, format)
    assert np.array_equal(decode_audio(base64.b64encode(data), "f", 16_000), decode_audio(data, "f", 16_000))


def test_our_own_streamed_wav_can_be_read_back():
    encoder = OutputEncoder("wav", 48_000, 48_000)
    data = b"".join(encoder.encode(TONE[i : i + 7680]) for i in range(0, len(TONE), 7680)) + encoder.finish()
    assert np.abs(decode_audio(data, "f", 48_000) - TONE).max() < 1e-4


WAV = file_of(TONE, 48_000)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (WAV[: len(WAV) // 2], "ends early: its header promises 96000 bytes of samples, 47978 are there"),
        (file_of(TONE, 48_000, "FLAC")[:2000], "ends early|cannot|decoded"),
        (file_of(TONE[:1], 48_000), "must last 0.1 to 60 s, this is 0.00 s"),
        (file_of(np.zeros(8_000 * 61), 8_000), "must last 0.1 to 60 s, this is 61.00 s"),
        (file_of(np.zeros(16_000), 16_000), "is digital silence"),
        (file_of(np.full(16_000, np.nan, np.float32), 16_000, subtype="FLOAT"), "has samples that are not finite"),
        (file_of(TONE, 4_000), "has a sample rate of 4000 Hz, the limits are 8000 and 192000"),
        (file_of(np.tile(TONE[:9_000, None], 9), 48_000), "has 9 channels, the limit is 8"),
        (b"this is a text file, not audio", "is neither an audio file nor base64 of one"),
        (b"RIFF" + bytes(40), "is not an audio file that can be decoded"),
        (bytes(17 * 2**20), "has 17825792 bytes, the limit is 16777216"),
        (base64.b64encode(bytes(17 * 2**20)), "the limit is 16777216"),
    ],
)
def test_refused(data, message):
    with pytest.raises(RequestError, match=f"^INVALID_ARG: prompt_audio: .*({message})"):
        decode_audio(data, "prompt_audio", 16_000)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("format", ["f32", "pcm16", "wav"])
def test_chunks_joined_equal_one_conversion(format, rate):
    encoder = OutputEncoder(format, 48_000, rate)
    data = b"".join(encoder.encode(TONE[i : i + 7680]) for i in range(0, len(TONE), 7680)) + encoder.finish()
    whole = TONE if rate == 48_000 else soxr.resample(TONE, 48_000, rate, quality="HQ")
    if format == "f32":
        samples = np.frombuffer(data, np.float32)
    elif format == "pcm16":
        samples = np.frombuffer(data, "<i2") / 32_767
    else:
        samples, read_rate = soundfile.read(io.BytesIO(data))
        assert read_rate == rate
        samples = samples * 32_768 / 32_767
    assert abs(len(samples) - len(whole)) <= 1
    count = min(len(samples), len(whole))
    assert np.abs(samples[:count] - whole[:count]).max() < 1e-4


def test_base64_chunks_are_each_decodable():
    plain, encoded = OutputEncoder("wav", 48_000, 48_000), OutputEncoder("wav_base64", 48_000, 48_000)
    for start in (0, 7680):
        chunk = TONE[start : start + 7680]
        assert base64.b64decode(encoded.encode(chunk)) == plain.encode(chunk)


def test_samples_beyond_full_scale_are_clipped():
    data = OutputEncoder("pcm16", 48_000, 48_000).encode(np.array([2.0, -2.0, 1.0, -1.0], np.float32))
    assert np.frombuffer(data, "<i2").tolist() == [32767, -32768, 32767, -32767]


@pytest.mark.parametrize(
    ("format", "rate", "message"),
    [
        ("aac", 48_000, 'output_format: must be one of f32, .*, got "aac"'),
        ("wav", 96_000, "sample_rate: must be between 8000 and 48000 Hz, got 96000"),
        ("wav", 0, "sample_rate: must be between 8000 and 48000 Hz, got 0"),
    ],
)
def test_unknown_formats_and_rates(format, rate, message):
    with pytest.raises(RequestError, match="^INVALID_ARG: " + message):
        OutputEncoder(format, 48_000, rate)
