"""The model's samples to what the client asked for: rate and format, with state from chunk to chunk."""

import base64
import io
import struct

import numpy as np
import soundfile
import soxr

from dq_engine.audio.file_encoder import MP3_RATES, OPUS_RATES, FileEncoder
from dq_engine.errors import invalid

FORMATS = ("f32", "pcm16", "mulaw", "alaw", "wav", "flac", "mp3", "opus")
"""All but f32 also with `_base64` behind the name."""
MIN_RATE, MAX_RATE = 8_000, 48_000
_OWN_RATES = {"mp3": MP3_RATES, "opus": OPUS_RATES}
# What an error repeats of a client's text.
_QUOTED_CHARACTERS = 40
NOTHING = np.zeros(0, np.float32)
"""No samples."""


def check_output(output_format: str, sample_rate: int) -> None:
    """Raises RequestError: INVALID_ARG for an unknown format, or a rate in Hz that it does not have."""
    name = output_format.removesuffix("_base64")
    if name not in FORMATS or output_format == "f32_base64":
        names = ", ".join(FORMATS)
        raise invalid(
            "output_format",
            f"must be one of {names}, all but f32 also with _base64 behind it, "
            f'got "{output_format[:_QUOTED_CHARACTERS]}"',
        )
    rates = _OWN_RATES.get(name)
    if rates is not None and sample_rate not in rates:
        listed = ", ".join(map(str, rates))
        raise invalid("sample_rate", f"must be one of {listed} Hz for {name}, got {sample_rate}")
    if not MIN_RATE <= sample_rate <= MAX_RATE:
        raise invalid("sample_rate", f"must be between {MIN_RATE} and {MAX_RATE} Hz, got {sample_rate}")


class OutputEncoder:
    """Encodes one stream; the chunks joined are one valid file.

    Args:
        output_format: one of FORMATS, perhaps with `_base64`: then each chunk is encoded by itself, to be decoded
            before the chunks are joined.
        model_rate: rate of the samples that come in, in Hz.
        sample_rate: rate wanted, in Hz.

    Raises:
        RequestError: INVALID_ARG for an unknown format or a rate outside the limits.
    """

    def __init__(self, output_format: str, model_rate: int, sample_rate: int) -> None:
        check_output(output_format, sample_rate)
        self.model_rate = model_rate
        self._format = output_format.removesuffix("_base64")
        self._as_base64 = self._format != output_format
        self._rate = sample_rate
        self._header = wav_header(sample_rate) if self._format == "wav" else b""
        self._file: FileEncoder | None = None
        """Made with the first chunk: only then is it known whether that is also the last."""
        self._resampler = None
        if sample_rate != model_rate:
            self._resampler = soxr.ResampleStream(model_rate, sample_rate, 1, dtype="float32", quality="HQ")

    def encode(self, samples: np.ndarray) -> bytes:
        """Encode the next samples, float32 [n]; what a resampler or a codec holds back comes with a later chunk."""
        return self._bytes(samples, last=False)

    def finish(self, samples: np.ndarray = NOTHING) -> bytes:
        """Encode the stream's last samples and what is left of it, as one chunk."""
        return self._bytes(samples, last=True)

    def close(self) -> None:
        """Nothing more comes, though the stream is not finished."""

    def _bytes(self, samples: np.ndarray, last: bool) -> bytes:
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=last)
        if self._format in ("flac", "mp3", "opus"):
            data = self._of_file(samples, last)
        elif self._format == "f32":
            data = samples.tobytes()
        elif self._format in ("mulaw", "alaw"):
            data = g711(samples, self._format)
        else:
            data, self._header = self._header + pcm16(samples).tobytes(), b""
        return base64.b64encode(data) if self._as_base64 else data

    def _of_file(self, samples: np.ndarray, last: bool) -> bytes:
        if self._file is None:
            self._file = FileEncoder(self._format, self._rate, whole=last)
        samples = pcm16(samples) if self._format == "flac" else np.clip(samples, -1.0, 1.0)
        return self._file.finish(samples) if last else self._file.encode(samples)


def pcm16(samples: np.ndarray) -> np.ndarray:
    """float32 in [-1, 1] to little-endian int16, clipped beyond."""
    return np.clip(np.rint(samples * 32767.0), -32768, 32767).astype("<i2")


def g711(samples: np.ndarray, law: str) -> bytes:
    """float32 [n] in [-1, 1], clipped beyond, to ITU-T G.711: a byte a sample, by libsndfile's tables.

    Args:
        law: "mulaw" or "alaw".
    """
    data = io.BytesIO()
    subtype = {"mulaw": "ULAW", "alaw": "ALAW"}[law]
    # The rate is of no meaning without a header. libsndfile does not clip: it would read beyond its table.
    soundfile.write(data, np.clip(samples, -1.0, 1.0), 8_000, format="RAW", subtype=subtype)
    return data.getvalue()


def wav_header(sample_rate: int) -> bytes:
    """The header of a mono 16-bit PCM wav file of unknown length: both sizes are 0xFFFFFFFF."""
    unknown = 0xFFFFFFFF
    fields = (b"RIFF", unknown, b"WAVE", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16, b"data", unknown)
    return struct.pack("<4sI4s4sIHHIIHH4sI", *fields)
