"""What a finished wav file must be, read byte by byte: libraries forgive wrong sizes."""

import struct
from pathlib import Path

import numpy as np


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """The samples (int16 [n]) and the rate of a mono 16-bit PCM file, whose header has to be true."""
    data = path.read_bytes()
    riff, riff_size, wave, fmt, fmt_size = struct.unpack_from("<4sI4s4sI", data)
    kind, channels, rate, byte_rate, frame_bytes, bits = struct.unpack_from("<HHIIHH", data, 20)
    name, size = struct.unpack_from("<4sI", data, 20 + fmt_size)
    assert (riff, wave, fmt, name) == (b"RIFF", b"WAVE", b"fmt ", b"data")
    assert (kind, channels, frame_bytes, bits, byte_rate) == (1, 1, 2, 16, 2 * rate)
    assert riff_size == len(data) - 8
    assert size == len(data) - 28 - fmt_size
    return np.frombuffer(data, "<i2", offset=28 + fmt_size), rate
