"""Audio out: chunks joined, read back by soundfile and PyAV, against the samples that went in."""

import base64
import gc
import io

import av
import numpy as np
import psutil
import pytest
import soundfile
import soxr
from audio_files import TONE, lag_of, snr_db, speech_like

from dq_engine.audio.file_encoder import MP3_RATES, OPUS_RATES
from dq_engine.audio.output import FORMATS, OutputEncoder
from dq_engine.errors import RequestError

PATCH = 7_680
SPEECH = speech_like(2.05, 48_000)
CODEC_SNR_DB = {"mulaw": 36, "alaw": 36, "flac": 80, "mp3": 24, "opus": 16}
LAME_DELAY = 1_105


def chunks_of(format: str, rate: int, samples: np.ndarray = SPEECH) -> list[bytes]:
    """What a stream sends, a patch at a time."""
    encoder = OutputEncoder(format, 48_000, rate)
    chunks = [encoder.encode(samples[start : start + PATCH]) for start in range(0, len(samples), PATCH)]
    return [*chunks, encoder.finish()]


def in_one_piece(format: str, rate: int, samples: np.ndarray = SPEECH) -> bytes:
    """What `stream: false` gives."""
    return OutputEncoder(format, 48_000, rate).finish(samples)


def resampled(rate: int, samples: np.ndarray = SPEECH) -> np.ndarray:
    return samples if rate == 48_000 else soxr.resample(samples, 48_000, rate, quality="HQ")


def read_soundfile(data: bytes, format: str, rate: int) -> tuple[np.ndarray, int]:
    raw = {"mulaw": "ULAW", "alaw": "ALAW", "pcm16": "PCM_16"}.get(format)
    options = {"samplerate": rate, "channels": 1, "format": "RAW", "subtype": raw} if raw else {}
    return soundfile.read(io.BytesIO(data), dtype="float32", **options)


def read_av(data: bytes, format: str, rate: int) -> tuple[np.ndarray, int]:
    raw = {"mulaw": "mulaw", "alaw": "alaw", "pcm16": "s16le"}.get(format)
    options = {"sample_rate": str(rate)} if raw else {}
    with av.open(io.BytesIO(data), format=raw, options=options) as container:
        to_float = av.AudioResampler(format="fltp")
        frames = [part for frame in container.decode(audio=0) for part in to_float.resample(frame)]
        return np.concatenate([frame.to_ndarray()[0] for frame in frames]), container.streams.audio[0].rate


def flac_with_length(data: bytes, samples: int) -> bytes:
    return data[:21] + bytes([data[21] & 0xF0 | samples >> 32]) + (samples & 0xFFFFFFFF).to_bytes(4, "big") + data[26:]


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("format", ["f32", "pcm16", "wav"])
def test_chunks_joined_equal_one_conversion(format, rate):
    data = b"".join(chunks_of(format, rate))
    assert data == in_one_piece(format, rate)
    if format == "f32":
        samples = np.frombuffer(data, np.float32)
    else:
        samples, read_rate = read_soundfile(data, format, rate)
        assert read_rate == rate
        assert np.array_equal(samples, read_av(data, format, rate)[0])
        samples = samples * 32_768 / 32_767
    assert len(samples) == len(resampled(rate))
    assert np.abs(samples - resampled(rate)).max() < 1e-4


@pytest.mark.parametrize("whole", [False, True], ids=["chunks", "whole"])
@pytest.mark.parametrize("reader", [read_soundfile, read_av])
@pytest.mark.parametrize(
    ("format", "rate"),
    [(format, rate) for format in ("mulaw", "alaw", "flac") for rate in (8_000, 11_025, 16_000, 44_100, 48_000)]
    + [("mp3", rate) for rate in MP3_RATES]
    + [("opus", rate) for rate in OPUS_RATES],
)
def test_codecs(format, rate, reader, whole):
    data = in_one_piece(format, rate) if whole else b"".join(chunks_of(format, rate))
    expected = resampled(rate)
    if format == "flac" and not whole and reader is read_soundfile:
        data = flac_with_length(data, len(expected))  # soundfile reads no flac file of unknown length
    decoded, read_rate = reader(data, format, rate)
    if format == "opus" and reader is read_av:  # FFmpeg decodes opus to 48 kHz always
        assert read_rate == 48_000
        expected = soxr.resample(expected, rate, 48_000, quality="HQ")
    else:
        assert read_rate == rate
    late = 0
    if format == "mp3" and not whole:  # without a header of lengths the codec's own padding stays
        late, frame = LAME_DELAY, 1152 if rate >= 32_000 else 576
        assert late <= len(decoded) - len(expected) < late + 2 * frame
    else:
        assert len(decoded) == len(expected)
    assert lag_of(expected, decoded) == late
    assert snr_db(expected, decoded[late:]) > CODEC_SNR_DB[format]


@pytest.mark.parametrize("samples", [0, len(SPEECH) + 1, 2 * len(SPEECH)])
def test_soundfile_wants_the_exact_length_of_a_flac_file(samples):
    """So that we notice when it no longer does: docs/contract.md says so."""
    data = b"".join(chunks_of("flac", 48_000))
    assert len(read_soundfile(flac_with_length(data, len(SPEECH)), "flac", 48_000)[0]) == len(SPEECH)
    with pytest.raises((ValueError, soundfile.LibsndfileError)):
        read_soundfile(flac_with_length(data, samples), "flac", 48_000)


def test_flac_is_the_16_bit_samples():
    decoded, _ = soundfile.read(io.BytesIO(in_one_piece("flac", 48_000)), dtype="int16")
    assert decoded.tobytes() == in_one_piece("pcm16", 48_000)


def test_bit_rates():
    def kbits(format: str, rate: int) -> float:
        return len(in_one_piece(format, rate, speech_like(10, 48_000))) * 8 / 10 / 1000

    assert kbits("mp3", 48_000) == pytest.approx(128, rel=0.02)
    assert kbits("mp3", 16_000) == pytest.approx(128, rel=0.02)
    assert kbits("mp3", 8_000) == pytest.approx(64, rel=0.05)  # the most that the format has there
    # 64 of opus and 11 of Ogg pages, one in 20 ms
    assert kbits("opus", 48_000) == pytest.approx(75, rel=0.05)


@pytest.mark.parametrize(
    ("law", "codes"),
    # ITU-T G.711, tables 1a to 2b: silence and the ends of both signs
    [("mulaw", {0.0: 0xFF, 1.0: 0x80, -1.0: 0x00}), ("alaw", {0.0: 0xD5, 1.0: 0xAA, -1.0: 0x2A})],
)
def test_g711_codes(law, codes):
    data = OutputEncoder(law, 48_000, 48_000).finish(np.array(list(codes), np.float32))
    assert list(data) == list(codes.values())
    beyond = OutputEncoder(law, 48_000, 48_000).finish(np.array([1e9, -1e9], np.float32))
    assert list(beyond) == [codes[1.0], codes[-1.0]]


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize("rate", [48_000, 16_000])
def test_base64_chunks_are_each_decodable(format, rate):
    plain = chunks_of(format, rate)
    encoded = [base64.b64decode(chunk, validate=True) for chunk in chunks_of(f"{format}_base64", rate)]
    if format == "opus":  # each Ogg stream has a serial number of its own
        assert [len(chunk) for chunk in encoded] == [len(chunk) for chunk in plain]
    else:
        assert encoded == plain


@pytest.mark.parametrize(
    ("format", "held_ms"), [("pcm16", 0), ("mulaw", 0), ("wav", 0), ("flac", 0), ("opus", 50), ("mp3", 100)]
)
def test_a_first_chunk_is_audio_already(format, held_ms):
    """A patch is 160 ms; a codec holds back its delay and what does not fill a frame."""
    first = OutputEncoder(format, 48_000, 48_000).encode(SPEECH[:PATCH])
    decoded, rate = read_av(first, format, 48_000)
    assert len(decoded) / rate >= 0.160 - held_ms / 1e3


@pytest.mark.parametrize("sizes", [(1,), (100, 1, 7_000), (30_720,)], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_the_size_of_chunks_does_not_matter(format, sizes):
    """What comes out depends on the samples, not on how they came; some of it comes earlier or later."""
    encoder, start, data = OutputEncoder(format, 48_000, 24_000), 0, b""
    samples = SPEECH[: 4_000 if sizes == (1,) else None]
    while start < len(samples):
        for size in sizes:
            data += encoder.encode(samples[start : start + size])
            start += size
    data += encoder.finish()
    expected = b"".join(chunks_of(format, 24_000, samples))
    if format == "opus":
        data, expected = (read_av(file, format, 24_000)[0].tobytes() for file in (data, expected))
    assert data == expected


@pytest.mark.parametrize("format", FORMATS)
def test_a_stream_without_a_sample(format):
    data = in_one_piece(format, 48_000, SPEECH[:0])
    if format == "wav":
        assert len(read_soundfile(data, format, 48_000)[0]) == 0
    else:
        assert (data == b"") == (format not in ("flac", "mp3", "opus"))


def test_samples_beyond_full_scale_are_clipped():
    data = OutputEncoder("pcm16", 48_000, 48_000).encode(np.array([2.0, -2.0, 1.0, -1.0], np.float32))
    assert np.frombuffer(data, "<i2").tolist() == [32767, -32768, 32767, -32767]
    loud = 4 * SPEECH
    for format in ("flac", "mp3", "opus"):
        decoded, _ = read_soundfile(in_one_piece(format, 48_000, loud), format, 48_000)
        assert lag_of(loud.clip(-1, 1), decoded) == 0
        assert snr_db(loud.clip(-1, 1), decoded) > 12


def test_streams_that_are_dropped_half_way_leave_nothing():
    process = psutil.Process()

    def after_dropping(count: int) -> tuple[int, int]:
        for _ in range(count):
            for format in ("flac", "mp3", "opus"):
                OutputEncoder(format, 48_000, 24_000).encode(TONE[:PATCH])
        gc.collect()
        return process.memory_info().rss, process.num_fds()

    before, after = after_dropping(100), after_dropping(300)
    assert after[0] - before[0] < 64 * 2**20  # an encoder has 0.3 MB and more; the allocator keeps some tens of them
    assert after[1] == before[1]


ALL = "f32, pcm16, mulaw, alaw, wav, flac, mp3, opus, all but f32 also with _base64 behind it"
MP3 = "8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000 Hz for mp3"


@pytest.mark.parametrize(
    ("format", "rate", "message"),
    [
        ("aac", 48_000, f'output_format: must be one of {ALL}, got "aac"'),
        ("", 48_000, f'output_format: must be one of {ALL}, got ""'),
        ("WAV", 48_000, f'output_format: must be one of {ALL}, got "WAV"'),
        ("f32_base64", 48_000, f'output_format: must be one of {ALL}, got "f32_base64"'),
        ("wav_base64_base64", 48_000, f'output_format: must be one of {ALL}, got "wav_base64_base64"'),
        ("_base64", 48_000, f'output_format: must be one of {ALL}, got "_base64"'),
        ("x" * 100_000, 48_000, f'output_format: must be one of {ALL}, got "{"x" * 40}"'),
        ("wav", 96_000, "sample_rate: must be between 8000 and 48000 Hz, got 96000"),
        ("wav", 7_999, "sample_rate: must be between 8000 and 48000 Hz, got 7999"),
        ("f32", 0, "sample_rate: must be between 8000 and 48000 Hz, got 0"),
        ("mulaw_base64", -8_000, "sample_rate: must be between 8000 and 48000 Hz, got -8000"),
        ("opus", 44_100, "sample_rate: must be one of 8000, 12000, 16000, 24000, 48000 Hz for opus, got 44100"),
        ("opus_base64", 22_050, "sample_rate: must be one of 8000, 12000, 16000, 24000, 48000 Hz for opus, got 22050"),
        ("mp3", 47_999, f"sample_rate: must be one of {MP3}, got 47999"),
        ("mp3_base64", 96_000, f"sample_rate: must be one of {MP3}, got 96000"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_unknown_formats_and_rates(format, rate, message):
    with pytest.raises(RequestError) as error:
        OutputEncoder(format, 48_000, rate)
    assert str(error.value) == f"INVALID_ARG: {message}"
