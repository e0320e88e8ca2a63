"""A user's recording to mono samples at the model's rate, with every limit checked before it costs anything."""

import base64
import binascii
import math
import re

import numpy as np
import soxr

from dq_engine.audio.reader import ReadError, read_mono
from dq_engine.audio.wholeness import check_ogg, check_wav
from dq_engine.errors import invalid
from dq_engine.request import MAX_AUDIO_BYTES, MAX_AUDIO_SECONDS, MAX_ENCODED_AUDIO_BYTES, MIN_AUDIO_SECONDS

# Float files may go beyond full scale a little. Far beyond it they are integers in disguise, or an attack.
MAX_AMPLITUDE = 100.0
_DATA_URL = re.compile(rb"data:[^,]{0,200};base64,", re.IGNORECASE)
_WHITE_SPACE = b" \t\r\n"


def decode_audio(data: bytes, field: str, rate: int) -> np.ndarray:
    """Decode a recording as the official package does: mean of the channels, resampled by soxr's "HQ".

    Args:
        data: an audio file, or base64 of one, which may be broken into lines or be a data URL.
        field: the request's field, named in errors.
        rate: the rate wanted, in Hz.

    Returns:
        float32 [n], mono.

    Raises:
        RequestError: INVALID_ARG for anything that is not a whole recording within the limits. Of an mp3 file
            without a header of lengths, and of a wav or flac file that does not know its own, nobody can tell.
    """
    data = _raw(data, field)
    if data.startswith((b"RIFF", b"RF64")):
        check_wav(data, field)
    elif data.startswith(b"OggS"):
        check_ogg(data, field)
    try:
        recording = read_mono(data, MAX_AUDIO_SECONDS)
    except ReadError as error:
        raise invalid(field, str(error)) from None
    samples, source_rate, promised = recording.samples, recording.rate, recording.promised
    seconds = max(promised or 0, len(samples)) / source_rate
    if not MIN_AUDIO_SECONDS <= seconds <= MAX_AUDIO_SECONDS:
        this = "longer" if promised is None and seconds > MAX_AUDIO_SECONDS else f"{seconds:.2f} s"
        raise invalid(field, f"must last {MIN_AUDIO_SECONDS:g} to {MAX_AUDIO_SECONDS:g} s, this is {this}")
    if promised is not None and len(samples) < promised:
        raise invalid(field, f"ends early: its header promises {promised} frames, {len(samples)} are there")
    if not np.isfinite(samples).all():
        raise invalid(field, "has samples that are not finite")
    if (peak := np.abs(samples).max()) > MAX_AMPLITUDE:
        raise invalid(field, f"has samples of up to {peak:g}, the limit is {MAX_AMPLITUDE:g} (full scale is 1)")
    if not peak:
        raise invalid(field, "is digital silence")
    if source_rate == rate:
        return samples
    resampled = soxr.resample(samples, source_rate, rate, quality="HQ")
    length = math.ceil(len(samples) * rate / source_rate)
    return np.pad(resampled[:length], (0, max(0, length - len(resampled))))


def _raw(data: bytes, field: str) -> bytes:
    """The file itself, where base64 of it was given."""
    if len(data) > MAX_ENCODED_AUDIO_BYTES or len(data) > MAX_AUDIO_BYTES and _is_audio(data):
        raise invalid(field, f"has {len(data)} bytes, the limit is {MAX_AUDIO_BYTES}")
    if not _is_audio(data):
        prefix = _DATA_URL.match(data)
        encoded = data[prefix.end() if prefix else 0 :].translate(None, _WHITE_SPACE)
        try:
            data = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            data = b""
        if len(data) > MAX_AUDIO_BYTES:
            raise invalid(field, f"has {len(data)} bytes, the limit is {MAX_AUDIO_BYTES}")
        if not _is_audio(data):
            raise invalid(field, "is neither a wav, flac, ogg or mp3 file nor base64 of one")
    return data


def _is_audio(data: bytes) -> bool:
    """Whether this begins as one of the kinds of file that are taken."""
    if data.startswith((b"RIFF", b"RF64")):
        return data[8:12] == b"WAVE"
    return data.startswith((b"fLaC", b"OggS", b"ID3")) or data[:1] == b"\xff" and data[1:2] >= b"\xe0"
