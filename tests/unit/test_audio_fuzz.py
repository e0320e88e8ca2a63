"""decode_audio against files that were tampered with: audio or a RequestError, within bounds of time and memory."""

import base64
import resource
import time

import numpy as np
import pytest
from audio_files import file_of, speech_like
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dq_engine.audio.input import decode_audio
from dq_engine.errors import RequestError

RATE = 16_000
SPEECH = speech_like(0.5, RATE)
FILES = [
    file_of(SPEECH, RATE, format, subtype)
    for format, subtype in [
        *(("WAV", subtype) for subtype in ("PCM_U8", "PCM_16", "PCM_24", "FLOAT", "ULAW", "MS_ADPCM")),
        *(("RF64", "PCM_16"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS")),
        *(("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_16")),
    ]
]
FILES += [
    FILES[7][:18] + (int.from_bytes(FILES[7][18:26], "big") >> 36 << 36).to_bytes(8, "big") + FILES[7][26:],
    FILES[11][FILES[11].index(FILES[11][:2], 4) :],
    file_of(np.stack([SPEECH] * 8, axis=1), 48_000, "WAV", "PCM_24"),
]
"""And flac and mp3 without a length, and 8 channels."""
SECONDS, MEMORY = 5.0, 400 * 2**20
"""Of one example, on a busy machine; a minute of 8 channels at 192 kHz is the most that is decoded."""


@st.composite
def tampered(draw) -> bytes:
    """A file with some bytes set, cut out, doubled or put in; mostly near its beginning, where the headers are."""
    data = bytearray(draw(st.sampled_from(FILES)))
    for _ in range(draw(st.integers(0, 6))):
        end = min(len(data), 128) if draw(st.booleans()) else len(data)
        at = draw(st.integers(0, max(0, end - 1)))
        what = draw(st.sampled_from(["set", "set", "set", "cut", "end", "double", "insert"]))
        if what == "set":
            value = draw(st.sampled_from([b"\x00", b"\xff", b"\x7f", b"\xff" * 4, b"\x00" * 8]) | st.binary(max_size=4))
            data[at : at + len(value)] = value
        elif what == "cut":
            del data[at : at + draw(st.integers(1, 2_000))]
        elif what == "end":
            del data[at:]
        elif what == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 2_000))]
        else:
            data[at:at] = draw(st.binary(max_size=200))
    return bytes(data)


RECORDINGS = st.one_of(
    tampered(),
    tampered(),
    tampered(),
    tampered().map(base64.b64encode),
    st.binary(max_size=500),
    st.text(max_size=200).map(str.encode),
    st.builds(
        bytes.__add__,
        st.sampled_from([b"RIFF\0\0\0\0WAVEfmt ", b"fLaC", b"OggS\0", b"ID3", b"\xff\xfb", b"data:;base64,"]),
        st.binary(max_size=2_000),
    ),
)


def check(data: bytes) -> None:
    before, began = peak_memory(), time.process_time()
    try:
        samples = decode_audio(data, "prompt_audio", RATE)
    except RequestError as error:
        assert error.code == "INVALID_ARG"
        assert error.message.startswith("prompt_audio: ")
        assert len(error.message) < 300
    else:
        assert samples.dtype == np.float32
        assert 0.1 * RATE <= len(samples) <= 60 * RATE
        assert np.isfinite(samples).all()
        assert samples.any()
    assert time.process_time() - began < SECONDS
    assert peak_memory() - before < MEMORY


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


CALM = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@settings(max_examples=200, **CALM)
@given(RECORDINGS)
def test_tampered_recordings(data):
    check(data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=10_000, **CALM)
@given(RECORDINGS)
def test_many_tampered_recordings(data):
    check(data)


def test_the_files_themselves_are_good():
    refused = 0
    for data in FILES:
        try:
            decode_audio(data, "f", RATE)
        except RequestError:
            refused += 1
    assert refused == 2  # ADPCM and AIFF
