"""The model's samples to what the client asked for: rate and format, with state from chunk to chunk."""

import base64
import struct

import numpy as np
import soxr

from dq_engine.errors import invalid

FORMATS = ("f32", "pcm16", "pcm16_base64", "wav", "wav_base64")
MIN_RATE, MAX_RATE = 8_000, 48_000
_NOTHING = np.zeros(0, np.float32)


class OutputEncoder:
    """Encodes one stream; the chunks joined are one valid file.

    Args:
        output_format: one of FORMATS. With `_base64` each chunk is encoded by itself: decode, then join.
        model_rate: rate of the samples that come in, in Hz.
        sample_rate: rate wanted, in Hz.

    Raises:
        RequestError: INVALID_ARG for an unknown format or a rate outside the limits.
    """

    def __init__(self, output_format: str, model_rate: int, sample_rate: int) -> None:
        if output_format not in FORMATS:
            raise invalid("output_format", f'must be one of {", ".join(FORMATS)}, got "{output_format}"')
        if not MIN_RATE <= sample_rate <= MAX_RATE:
            raise invalid("sample_rate", f"must be between {MIN_RATE} and {MAX_RATE} Hz, got {sample_rate}")
        name, _, base = output_format.partition("_")
        self._as_float, self._as_base64 = name == "f32", bool(base)
        self._header = wav_header(sample_rate) if name == "wav" else b""
        self._resampler = None
        if sample_rate != model_rate:
            self._resampler = soxr.ResampleStream(model_rate, sample_rate, 1, dtype="float32", quality="HQ")

    def encode(self, samples: np.ndarray) -> bytes:
        """Encode the next samples, float32 [n]; what a resampler still holds back comes with a later chunk."""
        return self._bytes(samples, last=False)

    def finish(self, samples: np.ndarray = _NOTHING) -> bytes:
        """Encode the stream's last samples and what is left of it, as one chunk."""
        return self._bytes(samples, last=True)

    def _bytes(self, samples: np.ndarray, last: bool) -> bytes:
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=last)
        if self._as_float:
            return samples.tobytes()
        data = self._header + pcm16(samples).tobytes()
        self._header = b""
        return base64.b64encode(data) if self._as_base64 else data


def pcm16(samples: np.ndarray) -> np.ndarray:
    """float32 in [-1, 1] to little-endian int16, clipped beyond."""
    return np.clip(np.rint(samples * 32767.0), -32768, 32767).astype("<i2")


def wav_header(sample_rate: int) -> bytes:
    """The header of a mono 16-bit PCM wav file of unknown length: both sizes are 0xFFFFFFFF."""
    unknown = 0xFFFFFFFF
    fields = (b"RIFF", unknown, b"WAVE", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16, b"data", unknown)
    return struct.pack("<4sI4s4sIHHIIHH4sI", *fields)
