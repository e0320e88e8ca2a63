"""Recordings in: values against libraries that read and resample the same way, and what is refused."""

import base64
import io
import struct
import subprocess
import sys
import time
from fractions import Fraction

import av
import numpy as np
import pytest
import soundfile
import soxr
from audio_files import TONE, file_of, lag_of, snr_db, speech_like

from dq_engine.audio.input import decode_audio
from dq_engine.audio.output import OutputEncoder
from dq_engine.errors import RequestError

SPEECH = speech_like(1.0, 48_000)
WAV = file_of(TONE, 48_000)
FLAC = file_of(TONE, 48_000, "FLAC")
MP3 = file_of(SPEECH, 48_000, "MP3")
VORBIS = file_of(SPEECH, 48_000, "OGG", "VORBIS")
OPUS = file_of(SPEECH, 48_000, "OGG", "OPUS")


def flac_of_32_bits(samples: np.ndarray) -> bytes:
    """By FFmpeg: libsndfile neither writes nor reads them."""
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        options = {"strict": "experimental", "bits_per_raw_sample": "32"}
        stream = container.add_stream("flac", rate=48_000, layout="mono", options=options)
        stream.format = "s32"
        values = np.rint(samples.astype(np.float64) * (2**31 - 1)).astype(np.int32)
        frame = av.AudioFrame.from_ndarray(values[np.newaxis], format="s32", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = 48_000, Fraction(1, 48_000), 0
        container.mux([*stream.encode(frame), *stream.encode(None)])
    return file.getvalue()


def streamed(format: str, samples: np.ndarray = SPEECH) -> bytes:
    """What our own server sends for a stream: files that do not know their length."""
    encoder = OutputEncoder(format, 48_000, 48_000)
    parts = [encoder.encode(samples[start : start + 7_680]) for start in range(0, len(samples), 7_680)]
    return b"".join(parts) + encoder.finish()


def flac_of_length(data: bytes, frames: int) -> bytes:
    """The file with another count in its header; 0 means unknown."""
    word = int.from_bytes(data[18:26], "big") >> 36 << 36 | frames
    return data[:18] + word.to_bytes(8, "big") + data[26:]


def without_length(mp3: bytes) -> bytes:
    """The file without its first frame, which says how many there are."""
    assert b"Xing" in mp3[:64] or b"Info" in mp3[:64]
    return mp3[mp3.index(mp3[:2], 4) :]


def test_mono_at_the_same_rate_is_untouched():
    assert np.array_equal(decode_audio(file_of(TONE, 16_000, subtype="FLOAT"), "f", 16_000), TONE)


def test_channels_are_averaged_and_the_rate_is_converted_by_soxr():
    stereo = np.stack([TONE, 0.25 * TONE], axis=1)
    decoded = decode_audio(file_of(stereo, 44_100, subtype="FLOAT"), "f", 16_000)
    expected = soxr.resample(stereo.mean(axis=1), 44_100, 16_000, quality="HQ")
    assert len(decoded) == -(-48_000 * 16_000 // 44_100)
    assert np.abs(decoded[: len(expected)] - expected[: len(decoded)]).max() < 1e-6


@pytest.mark.parametrize(
    ("format", "subtype", "snr"),
    [
        ("WAV", "PCM_U8", 28),
        ("WAV", "PCM_16", 76),
        ("WAV", "PCM_24", 124),
        ("WAV", "PCM_32", 140),
        ("WAV", "FLOAT", 300),
        ("WAV", "DOUBLE", 300),
        ("WAV", "ULAW", 35),
        ("WAV", "ALAW", 35),
        ("WAVEX", "PCM_24", 124),
        ("RF64", "PCM_16", 76),
        ("FLAC", "PCM_S8", 34),
        ("FLAC", "PCM_16", 76),
        ("FLAC", "PCM_24", 124),
        ("OGG", "VORBIS", 20),
        ("OGG", "OPUS", 15),
        ("MP3", "MPEG_LAYER_III", 20),
    ],
)
def test_every_kind_of_file(format, subtype, snr):
    decoded = decode_audio(file_of(SPEECH, 48_000, format, subtype), "f", 48_000)
    assert len(decoded) == len(SPEECH)
    assert lag_of(SPEECH, decoded) == 0
    assert snr_db(SPEECH, decoded) > snr


def test_a_flac_file_of_32_bits():
    data = flac_of_32_bits(SPEECH)
    decoded = decode_audio(data, "f", 48_000)
    assert len(decoded) == len(SPEECH)
    assert snr_db(SPEECH, decoded) > 140
    for wrong, message in (
        (data[: len(data) // 2], "is damaged or ends early"),
        (flac_of_length(data, 48_001), "ends early: its header promises 48001 frames, 48000 are there"),
        (flac_of_length(data, 61 * 48_000), "must last 0.1 to 60 s, this is 61.00 s"),
    ):
        with pytest.raises(RequestError, match=f"^INVALID_ARG: f: {message}$"):
            decode_audio(wrong, "f", 48_000)


@pytest.mark.parametrize("channels", range(1, 9))
@pytest.mark.parametrize(("rate", "format", "subtype"), [(96_000, "WAV", "PCM_24"), (192_000, "FLAC", "PCM_24")])
def test_rates_and_channels(channels, rate, format, subtype):
    source = speech_like(0.5, rate)
    gains = np.arange(1, channels + 1) / channels
    decoded = decode_audio(file_of(source[:, None] * gains, rate, format, subtype), "f", 16_000)
    expected = soxr.resample(source * gains.mean(), rate, 16_000, quality="HQ")
    assert len(decoded) == len(expected)
    assert np.abs(decoded - expected).max() < 1e-5


@pytest.mark.parametrize("rate", [8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100])
@pytest.mark.parametrize(("format", "subtype"), [("WAV", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")])
def test_low_rates(rate, format, subtype):
    source = speech_like(1.0, rate)
    decoded = decode_audio(file_of(source, rate, format, subtype), "f", rate)
    assert abs(len(decoded) - len(source)) <= 40  # libsndfile pads an mp3 file of 8 kHz by 38
    assert snr_db(source, decoded) > 15


@pytest.mark.parametrize("data", [WAV, FLAC, MP3, VORBIS, OPUS, without_length(MP3)])
def test_base64_of_a_file_is_the_file(data):
    expected = decode_audio(data, "f", 16_000)
    plain = base64.b64encode(data)
    lines = base64.encodebytes(data)
    for encoded in (
        plain,
        lines,
        lines.replace(b"\n", b"\r\n"),
        b"  " + plain + b"\n",
        b"data:audio/wav;base64," + plain,
        b"data:;base64," + plain,
        b"DATA:audio/ogg;codecs=opus;base64," + lines,
    ):
        assert np.array_equal(decode_audio(encoded, "f", 16_000), expected)


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus"])
def test_our_own_streams_can_be_read_back(format):
    decoded = decode_audio(streamed(format), "f", 48_000)
    late = 1_105 if format == "mp3" else 0
    assert len(decoded) == len(SPEECH) if format != "mp3" else len(decoded) - len(SPEECH) < late + 2 * 1_152
    assert lag_of(SPEECH, decoded) == late
    assert snr_db(SPEECH, decoded[late:]) > 15


def test_an_mp3_file_of_a_variable_bit_rate_and_without_a_length():
    """libsndfile would guess its length from the first frame's bit rate, and read a quarter of it."""
    noise = np.random.default_rng(0).normal(0, 0.2, 96_000).astype(np.float32)
    data = file_of(np.concatenate([noise, np.zeros(96_000, np.float32), noise]), 48_000, "MP3")
    assert len(decode_audio(data, "f", 48_000)) == 288_000
    late = len(decode_audio(without_length(data), "f", 48_000)) - 288_000
    assert 0 <= late < 3 * 1_152


def test_tags_around_an_mp3_file():
    tag = b"ID3\x04\x00\x00\x00\x00\x02\x00" + bytes(256)
    for data in (MP3, without_length(MP3)):
        plain = decode_audio(data, "f", 48_000)
        assert np.array_equal(decode_audio(tag + data, "f", 48_000), plain)
        tagged = decode_audio(data + b"TAG" + bytes(125), "f", 48_000)
        assert np.array_equal(tagged, plain)


@pytest.mark.parametrize("data", [WAV, FLAC, MP3, VORBIS, OPUS], ids=["wav", "flac", "mp3", "vorbis", "opus"])
def test_a_file_that_ends_early(data):
    decode_audio(data, "f", 16_000)
    for share in (0.02, 0.3, 0.6, 0.9, 0.97):
        with pytest.raises(RequestError, match="^INVALID_ARG: f: (.*ends early|is not an audio file)"):
            decode_audio(data[: int(share * len(data))], "f", 16_000)


def test_a_wav_file_of_unknown_length_is_what_is_there():
    for size in (0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF):
        data = WAV[:40] + struct.pack("<I", size) + WAV[44:]
        assert len(decode_audio(data, "f", 48_000)) == 48_000


CHUNK = b"junk" + bytes(4)
LONG_MP3 = file_of(np.zeros(8_000 * 3_600), 8_000, "MP3")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is neither a wav, flac, ogg or mp3 file nor base64 of one"),
        (b"this is a text file, not audio", "is neither a wav, flac, ogg or mp3 file nor base64 of one"),
        (b"abcd" * 100, "is neither a wav, flac, ogg or mp3 file nor base64 of one"),
        (base64.urlsafe_b64encode(MP3), "is neither a wav, flac, ogg or mp3 file nor base64 of one"),
        (b"data:audio/wav," + WAV, "is neither a wav, flac, ogg or mp3 file nor base64 of one"),
        (base64.b64encode(base64.b64encode(WAV)), "is neither a wav, flac, ogg or mp3 file nor base64 of one"),
        (file_of(TONE, 48_000, "AIFF"), "is neither a wav, flac, ogg or mp3 file nor base64 of one"),
        (b"RIFF" + bytes(40), "is neither a wav, flac, ogg or mp3 file nor base64 of one"),
        (
            file_of(TONE, 48_000, "WAV", "MS_ADPCM"),
            "is WAV with MS_ADPCM: wav (PCM, float, mulaw, alaw), flac, ogg (vorbis, opus) and mp3 are taken",
        ),
        (b"RIFF\0\0\0\0WAVE" + CHUNK * 10, "is a wav file that ends before its samples"),
        (b"RIFF\0\0\0\0WAVE" + CHUNK * 2_000_000, "has more than 1000 wav chunks before its samples"),
        (b"OggS" + bytes(23), "ends early: its last Ogg page is not the end of its stream"),
        (OPUS[:-1], "ends early: within an Ogg page"),
        (OPUS[: OPUS.rindex(b"OggS")], "ends early: its last Ogg page is not the end of its stream"),
        (WAV[: len(WAV) // 2], "ends early: its header promises 96000 bytes of samples, 47978 are there"),
        (FLAC[:-1000], "is damaged or ends early"),
        (flac_of_length(FLAC, 48_001), "is damaged or ends early"),
        (streamed("flac")[:-500], "is damaged or ends early"),
        (b"fLaC" + bytes(100), "is not an audio file that can be decoded"),
        (b"\xff\xfb" + bytes(100), "is not an audio file that can be decoded"),
        (b"ID3", "is not an audio file that can be decoded"),
        (file_of(TONE[:1], 48_000), "must last 0.1 to 60 s, this is 0.00 s"),
        (file_of(TONE[:0], 48_000), "must last 0.1 to 60 s, this is 0.00 s"),
        (file_of(TONE[:4_799], 48_000), "must last 0.1 to 60 s, this is 0.10 s"),
        (file_of(np.zeros(8_000 * 61), 8_000), "must last 0.1 to 60 s, this is 61.00 s"),
        (file_of(np.zeros(8_000 * 600), 8_000, "FLAC"), "must last 0.1 to 60 s, this is 600.00 s"),
        (file_of(np.zeros(8_000 * 600), 8_000, "OGG", "VORBIS"), "must last 0.1 to 60 s, this is 600.00 s"),
        (LONG_MP3, "must last 0.1 to 60 s, this is 3600.00 s"),
        (without_length(LONG_MP3), "must last 0.1 to 60 s, this is longer"),
        (flac_of_length(file_of(np.zeros(48_000 * 3_600), 48_000, "FLAC"), 0), "must last 0.1 to 60 s, this is longer"),
        (file_of(np.zeros(16_000), 16_000), "is digital silence"),
        (file_of(np.full(16_000, np.nan, np.float32), 16_000, subtype="FLOAT"), "has samples that are not finite"),
        (file_of(np.full(16_000, np.inf, np.float32), 16_000, subtype="FLOAT"), "has samples that are not finite"),
        (
            file_of(32_768 * TONE, 16_000, subtype="FLOAT"),
            "has samples of up to 16384, the limit is 100 (full scale is 1)",
        ),
        (file_of(TONE, 7_999), "has a sample rate of 7999 Hz, the limits are 8000 and 192000"),
        (file_of(TONE, 384_000), "has a sample rate of 384000 Hz, the limits are 8000 and 192000"),
        (file_of(np.tile(TONE[:9_000, None], 9), 48_000), "has 9 channels, the limit is 8"),
        (WAV + bytes(17 * 2**20 - len(WAV)), "has 17825792 bytes, the limit is 16777216"),
        (base64.b64encode(WAV + bytes(2**24)), "has 16873260 bytes, the limit is 16777216"),
        (base64.b64encode(bytes(2**25)), "has 44739244 bytes, the limit is 16777216"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_refused(data, message):
    began = time.process_time()
    with pytest.raises(RequestError) as error:
        decode_audio(data, "prompt_audio", 16_000)
    assert str(error.value) == f"INVALID_ARG: prompt_audio: {message}"
    assert time.process_time() - began < 0.5


def test_the_limits_themselves_are_taken():
    assert len(decode_audio(file_of(TONE[:4_800], 48_000), "f", 48_000)) == 4_800
    minute = np.resize(TONE[:8_000], 480_000)
    assert len(decode_audio(file_of(minute, 8_000), "f", 8_000)) == 480_000
    data = WAV + b"junk" + struct.pack("<I", 2**24 - len(WAV) - 8) + bytes(2**24 - len(WAV) - 8)
    assert len(data) == 2**24
    for given in (data, base64.b64encode(data), base64.encodebytes(data)):
        assert len(decode_audio(given, "f", 48_000)) == 48_000


def test_a_header_that_says_less_than_there_is():
    """No more than it says is decoded."""
    data = flac_of_length(file_of(np.resize(TONE, 48_000 * 600), 48_000, "FLAC"), 48_000 * 2)
    began = time.process_time()
    assert len(decode_audio(data, "f", 48_000)) == 96_000
    assert time.process_time() - began < 0.5


def test_the_largest_recording_is_read_in_blocks(tmp_path):
    """A minute of 8 channels at 192 kHz is 369 MB of float32; mono it is 46."""
    path = tmp_path / "large.flac"
    with soundfile.SoundFile(path, "w", 192_000, 8, "PCM_16", format="FLAC") as file:
        second = np.stack([speech_like(1, 192_000)] * 8, axis=1) * np.linspace(0.1, 1, 8)
        second[1_000:] = 0
        for _ in range(60):
            file.write(second)
    code = f"""
import resource, sys
from pathlib import Path
from dq_engine.audio.input import decode_audio
data = Path({str(path)!r}).read_bytes()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(decode_audio(data, "f", 16_000)) == 960_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 220 * 1024  # KiB


def test_these_files_are_what_they_are_called():
    for data, format in ((WAV, "WAV"), (FLAC, "FLAC"), (MP3, "MP3"), (VORBIS, "OGG"), (OPUS, "OGG")):
        assert soundfile.info(io.BytesIO(data)).format == format
