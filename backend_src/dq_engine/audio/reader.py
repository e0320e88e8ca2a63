"""Audio files to mono samples, a block at a time, so that no file's promises decide over the memory."""

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import soundfile

_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
_SUBTYPES = (
    *("PCM_U8", "PCM_S8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"),
    *("VORBIS", "OPUS", "MPEG_LAYER_III"),
)
_LIBSNDFILE_FLAC_BITS = (8, 16, 24)
MIN_RATE, MAX_RATE = 8_000, 192_000
MAX_CHANNELS = 8
# There are tags of many kinds behind the audio of mp3 files, and players do not mind them.
_BROKEN_MP3_PACKETS = 50
_NOT_DECODABLE = "is not an audio file that can be decoded"
_BROKEN = "is damaged or ends early"
_NOTHING = np.zeros(0, np.float32)


class ReadError(Exception):
    """A file that cannot be read, or not to its end; the message goes behind the field's name."""


@dataclass
class Recording:
    """Mono samples, float32 [n], the mean of the channels, at `rate` Hz; more than asked for is not read.

    `promised`: frames that the file says it has; None if it says nothing.
    """

    samples: np.ndarray
    rate: int
    promised: int | None


def read_mono(data: bytes, max_seconds: float) -> Recording:
    """Read a wav, flac, ogg or mp3 file.

    Args:
        data: the file.
        max_seconds: most of it to decode. One that promises more is not decoded at all.

    Raises:
        ReadError: it is another kind of file, is damaged, or its rate or channels are outside the limits.
    """
    # libsndfile guesses the length of an mp3 file without one, its Python face reads no such flac file to its end, and
    # it knows few numbers of bits.
    if data.startswith(b"fLaC"):
        bits, frames = _flac_bits_and_frames(data)
        if not frames or bits not in _LIBSNDFILE_FLAC_BITS:
            return _read_by_ffmpeg(data, "flac", max_seconds, frames or None)
    if _is_mp3(data) and not _mp3_has_length(data):
        return _read_by_ffmpeg(data, "mp3", max_seconds)
    with _in_memory(data) as descriptor:
        try:
            with soundfile.SoundFile(descriptor, closefd=False) as file:
                if file.format not in _FORMATS or file.subtype not in _SUBTYPES:
                    raise ReadError(
                        f"is {file.format} with {file.subtype}: wav (PCM, float, mulaw, alaw), flac, ogg (vorbis, "
                        "opus) and mp3 are taken"
                    )
                _check(file.samplerate, file.channels)
                rate, promised = file.samplerate, file.frames
                limit = int(max_seconds * rate) + 1
                blocks = _blocks(file, limit) if promised < limit else []
                return Recording(np.concatenate([_NOTHING, *blocks]), rate, promised)
        except soundfile.LibsndfileError:  # its reasons mislead: "File does not exist", for one
            raise ReadError(_NOT_DECODABLE) from None


def _blocks(file: soundfile.SoundFile, limit: int) -> Iterator[np.ndarray]:
    """A second at a time: 8 channels of 192 kHz are 6 MB."""
    done = 0
    while done < limit:
        try:
            block = file.read(min(file.samplerate, limit - done), dtype="float32", always_2d=True)
        except soundfile.LibsndfileError:
            raise ReadError(_BROKEN) from None
        if not len(block):
            return
        done += len(block)
        with np.errstate(invalid="ignore", over="ignore"):  # samples that are not finite are the caller's to refuse
            mono = block.mean(axis=1)
        yield mono


def _read_by_ffmpeg(data: bytes, format: str, max_seconds: float, promised: int | None = None) -> Recording:
    """A flac or mp3 file.

    Args:
        promised: frames that it says it has, if it says so.
    """
    import av  # large, and few files need it

    to_float = av.AudioResampler(format="fltp")
    blocks, done, broken = [_NOTHING], 0, 0
    try:
        with av.open(io.BytesIO(data), format=format) as container:
            stream = container.streams.audio[0]
            rate, channels = stream.rate, stream.channels
            _check(rate, channels)
            limit = int(max_seconds * rate) + 1
            if promised is not None and promised >= limit:
                return Recording(_NOTHING, rate, promised)
            allowed = _BROKEN_MP3_PACKETS if format == "mp3" else 0
            for packet in container.demux(stream):
                try:
                    frames = packet.decode()
                except av.InvalidDataError:
                    broken += 1
                    if broken > allowed:
                        raise ReadError(_BROKEN) from None
                    continue
                for frame in frames:
                    if (frame.sample_rate, frame.layout.nb_channels) != (rate, channels):
                        raise ReadError("changes its rate or its channels on the way")
                    for converted in to_float.resample(frame):
                        blocks.append(converted.to_ndarray().mean(axis=0))
                        done += converted.samples
                if done >= limit:
                    break
    except (av.FFmpegError, IndexError):
        raise ReadError(_NOT_DECODABLE) from None
    if not done:
        raise ReadError(_NOT_DECODABLE)
    return Recording(np.concatenate(blocks)[:limit], rate, promised)


def _flac_bits_and_frames(data: bytes) -> tuple[int, int]:
    """The 5 bits of STREAMINFO that say how many a sample has, and the 36 that say how many there are (0: unknown)."""
    word = int.from_bytes(data[18:26], "big")
    return (word >> 36 & 0x1F) + 1, word & (1 << 36) - 1


def _is_mp3(data: bytes) -> bool:
    return data.startswith(b"ID3") or data[:1] == b"\xff"


def _mp3_has_length(data: bytes) -> bool:
    """Whether the first frame is a header (Xing, Info or VBRI) with a count of frames."""
    start = 0
    if data.startswith(b"ID3"):  # its size: four times 7 bits
        start = 10 + sum((byte & 0x7F) << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=False))
    head = data[start : start + 64]
    if (at := max(head.find(b"Xing"), head.find(b"Info"))) >= 0:
        return len(head) > at + 7 and head[at + 7] & 1 == 1
    return b"VBRI" in head


def _check(rate: int, channels: int) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ReadError(f"has a sample rate of {rate} Hz, the limits are {MIN_RATE} and {MAX_RATE}")
    if channels > MAX_CHANNELS:
        raise ReadError(f"has {channels} channels, the limit is {MAX_CHANNELS}")


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    """`data` as an open file: libsndfile then reads it without Python, and other threads run meanwhile."""
    with os.fdopen(os.memfd_create("recording"), "w+b", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        file.seek(0)
        yield file.fileno()
