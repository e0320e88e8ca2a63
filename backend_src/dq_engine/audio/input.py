"""A user's recording to mono samples at the model's rate, with every limit checked before it costs anything."""

import base64
import binascii
import io
import math
import struct

import numpy as np
import soundfile
import soxr

from dq_engine.errors import invalid
from dq_engine.request import MAX_AUDIO_BYTES, MAX_AUDIO_SECONDS, MIN_AUDIO_SECONDS

MIN_RATE, MAX_RATE = 8_000, 192_000
MAX_CHANNELS = 8
# What writers that stream put where the size of a wav file's samples is not known yet.
_UNKNOWN_SIZES = (0, 0x7FFFFFFF, 0xFFFFFFFF)


def decode_audio(data: bytes, field: str, rate: int) -> np.ndarray:
    """Decode a recording as the official package does: mean of the channels, resampled by soxr's "HQ".

    Args:
        data: an audio file, or base64 of one.
        field: the request's field, named in errors.
        rate: the rate wanted, in Hz.

    Returns:
        float32 [n], mono.

    Raises:
        RequestError: INVALID_ARG for anything that is not a whole recording within the limits.
    """
    data = _raw(data, field)
    _check_riff(data, field)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_header(file, field)
            # The header's count is not trusted for the memory: a file may promise hours and hold a second.
            samples = file.read(int(MAX_AUDIO_SECONDS * file.samplerate) + 1, dtype="float32", always_2d=True)
            source_rate, promised = file.samplerate, file.frames
    except soundfile.LibsndfileError as error:
        raise invalid(field, f"is not an audio file that can be decoded ({error.error_string})") from None
    if len(samples) < min(promised, MAX_AUDIO_SECONDS * source_rate):
        raise invalid(field, f"ends early: its header promises {promised} frames, {len(samples)} are there")
    seconds = max(promised, len(samples)) / source_rate
    if not MIN_AUDIO_SECONDS <= seconds <= MAX_AUDIO_SECONDS:
        raise invalid(field, f"must last {MIN_AUDIO_SECONDS:g} to {MAX_AUDIO_SECONDS:g} s, this is {seconds:.2f} s")
    mono = np.ascontiguousarray(samples.mean(axis=1))
    if not np.isfinite(mono).all():
        raise invalid(field, "has samples that are not finite")
    if not mono.any():
        raise invalid(field, "is digital silence")
    if source_rate == rate:
        return mono
    resampled = soxr.resample(mono, source_rate, rate, quality="HQ")
    length = math.ceil(len(mono) * rate / source_rate)
    return np.pad(resampled[:length], (0, max(0, length - len(resampled))))


def _raw(data: bytes, field: str) -> bytes:
    """The file itself, where base64 of it was given."""
    if len(data) > 4 * math.ceil(MAX_AUDIO_BYTES / 3) + 4:
        raise invalid(field, f"has {len(data)} bytes, the limit is {MAX_AUDIO_BYTES}")
    if data[:4].isalnum() and data[:4] not in (b"RIFF", b"RF64", b"OggS", b"fLaC", b"FORM") and data[:3] != b"ID3":
        try:
            data = base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise invalid(field, f"is neither an audio file nor base64 of one ({error})") from None
    if len(data) > MAX_AUDIO_BYTES:
        raise invalid(field, f"has {len(data)} bytes, the limit is {MAX_AUDIO_BYTES}")
    return data


def _check_riff(data: bytes, field: str) -> None:
    """Refuse a wav file whose samples were cut off: libsndfile would quietly read what is there."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    start = 12
    while start + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, start)
        start += 8
        if name == b"data":
            if size not in _UNKNOWN_SIZES and start + size > len(data):
                raise invalid(
                    field, f"ends early: its header promises {size} bytes of samples, {len(data) - start} are there"
                )
            return
        start += size + size % 2


def _check_header(file: soundfile.SoundFile, field: str) -> None:
    if not MIN_RATE <= file.samplerate <= MAX_RATE:
        raise invalid(field, f"has a sample rate of {file.samplerate} Hz, the limits are {MIN_RATE} and {MAX_RATE}")
    if file.channels > MAX_CHANNELS:
        raise invalid(field, f"has {file.channels} channels, the limit is {MAX_CHANNELS}")
