"""flac, mp3 and opus files out of samples that come piece by piece, by FFmpeg's encoders and muxers (PyAV)."""

import dataclasses
import io
from fractions import Fraction

import av
import numpy as np

OPUS_RATES = (8_000, 12_000, 16_000, 24_000, 48_000)
MP3_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
# Two blocks are one patch of the model, so that none of it waits for the next.
_FLAC_BLOCKS_A_SECOND = Fraction(25, 2)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What FFmpeg calls a format, and how it is set up."""

    container: str
    codec: str
    sample_format: str
    bit_rate: int | None = None
    muxer_options: dict[str, str] = dataclasses.field(default_factory=dict)
    codec_options: dict[str, str] = dataclasses.field(default_factory=dict)


_KINDS = {
    # No room for tags, which nobody will write.
    "flac": _Kind("flac", "flac", "s16", muxer_options={"metadata_header_padding": "0"}),
    # Below 16 kHz the format ends at 64 kbit/s, and that is what LAME takes then.
    # Level 7 takes 1.5 ms for a patch where LAME's own takes 2, and is as near to the samples (26 dB, a voice).
    "mp3": _Kind("mp3", "libmp3lame", "fltp", 128_000, {"id3v2_version": "0"}, {"compression_level": "7"}),
    # A page for each packet of 20 ms: the muxer holds a page back, by default a second of audio.
    "opus": _Kind("ogg", "libopus", "flt", 64_000, {"page_duration": "20000"}, {"vbr": "constrained"}),
}


class FileEncoder:
    """Makes one mono file.

    A file that is made in one piece has its length in its header, as FFmpeg goes back and writes it. In one that is
    made in several the header leaves before the length is known: flac says "unknown", and mp3 has no header of lengths
    at all, so its decoders keep the encoder's delay and the last frame's padding.

    Args:
        name: "flac" (16 bit), "mp3" or "opus" (in Ogg).
        rate: of the samples, in Hz; one of MP3_RATES or OPUS_RATES for these.
        whole: True if everything comes with one call of `finish`.
    """

    def __init__(self, name: str, rate: int, whole: bool) -> None:
        kind = _KINDS[name]
        self._rate, self._sample_format = rate, kind.sample_format
        self._sink = io.BytesIO() if whole else _Pipe()
        options = {"flush_packets": "1", **kind.muxer_options}
        if name == "mp3" and not whole:
            options["write_xing"] = "0"
        self._container = av.open(self._sink, "w", format=kind.container, options=options)
        codec_options = dict(kind.codec_options)
        if name == "flac":
            codec_options["frame_size"] = str(int(rate / _FLAC_BLOCKS_A_SECOND))
        self._stream = self._container.add_stream(kind.codec, rate=rate, layout="mono", options=codec_options)
        self._stream.format = kind.sample_format
        if kind.bit_rate is not None:
            self._stream.bit_rate = kind.bit_rate
        self._position = 0

    def encode(self, samples: np.ndarray) -> bytes:
        """The bytes that are ready after the next samples, int16 [n] for flac and float32 [n] for the others."""
        self._put(samples)
        return self._sink.take()

    def finish(self, samples: np.ndarray) -> bytes:
        """The rest of the file, after its last samples, perhaps none."""
        self._put(samples)
        # A file without a sample has its header all the same.
        self._container.start_encoding()
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._sink.getvalue() if isinstance(self._sink, io.BytesIO) else self._sink.take()

    def _put(self, samples: np.ndarray) -> None:
        if not len(samples):
            return
        frame = av.AudioFrame.from_ndarray(samples[np.newaxis], format=self._sample_format, layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = self._rate, Fraction(1, self._rate), self._position
        self._position += len(samples)
        self._container.mux(self._stream.encode(frame))


class _Pipe:
    """Takes what a muxer writes; has no `seek`, so the muxer knows that what was written has left."""

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def take(self) -> bytes:
        taken, self._written = bytes(self._written), bytearray()
        return taken
