"""Recordings that were cut off: libsndfile quietly reads what is there, so the containers are looked at before it."""

import struct

from dq_engine.errors import invalid

# Writers that stream put one of these, or something near it, where the size of a wav file's samples is not known yet.
_UNKNOWN_FROM = 0x7FFF0000
_MAX_WAV_CHUNKS = 1_000


def check_wav(data: bytes, field: str) -> None:
    """Refuse a wav file (RIFF or RF64) with fewer bytes of samples than its header promises."""
    start, long_size = 12, None
    for _ in range(_MAX_WAV_CHUNKS):
        if start + 8 > len(data):
            raise invalid(field, "is a wav file that ends before its samples")
        name, size = struct.unpack_from("<4sI", data, start)
        start += 8
        if name == b"ds64" and start + 16 <= len(data):
            (long_size,) = struct.unpack_from("<Q", data, start + 8)
        if name == b"data":
            if size == 0xFFFFFFFF and long_size is not None:
                size = long_size
            elif size >= _UNKNOWN_FROM:
                return
            if start + size > len(data):
                there = len(data) - start
                raise invalid(field, f"ends early: its header promises {size} bytes of samples, {there} are there")
            return
        start += size + size % 2
    raise invalid(field, f"has more than {_MAX_WAV_CHUNKS} wav chunks before its samples")


def check_ogg(data: bytes, field: str) -> None:
    """Refuse an Ogg file whose last page is cut or is not marked as the end of its stream."""
    start, flags = 0, 0
    while data.startswith(b"OggS", start) and start + 27 <= len(data):
        flags, segments = data[start + 5], data[start + 26]
        lengths = data[start + 27 : start + 27 + segments]
        start += 27 + segments + sum(lengths)
        if len(lengths) < segments or start > len(data):
            raise invalid(field, "ends early: within an Ogg page")
    if not flags & 4:
        raise invalid(field, "ends early: its last Ogg page is not the end of its stream")
