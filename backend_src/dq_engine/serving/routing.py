"""Which engine worker gets the next request: the rule, without any process."""

from collections.abc import Iterable
from dataclasses import dataclass

from dq_engine.request import Request

BYTES_PER_SECOND = 15.0
"""Of text in a second of speech: some 15 Latin letters of one byte in UTF-8, or 5 Chinese characters of three."""
LEAST_SECONDS = 0.5
"""What a stream is thought to have left at least, as long as it has not ended."""
HORIZON_S = 4.0
"""Audio that is to be heard within this time has to be made now; what comes later can wait."""
LATER_WEIGHT = 0.1
"""Of audio that can wait: it needs no time now, but it will, and the stream keeps its slot until then."""


@dataclass
class StreamProgress:
    """What is known of a stream that a worker has.

    Args:
        expected_s: audio that it will have in all, in seconds, by `expected_seconds`.
        delivered_s: audio that has come, in seconds.
        first_at: when the first of it came (time.monotonic), and its listener began to play; None before.
    """

    expected_s: float
    delivered_s: float = 0.0
    first_at: float | None = None

    def delivered(self, seconds: float, now: float) -> None:
        """More of it has come."""
        self.delivered_s += seconds
        if self.first_at is None:
            self.first_at = now

    def work(self, now: float) -> float:
        """Seconds of audio still to be made for it, those that can wait weighted with LATER_WEIGHT.

        Its slack, audio delivered minus time since its first chunk, is how long its listener is content without more.
        """
        left = max(self.expected_s - self.delivered_s, LEAST_SECONDS)
        slack = 0.0 if self.first_at is None else self.delivered_s - (now - self.first_at)
        due = min(left, max(0.0, HORIZON_S - slack))
        return due + LATER_WEIGHT * (left - due)


def expected_seconds(request: Request, patch_seconds: float) -> float:
    """About how much audio a request will have, by its text and the lengths that it asks for."""
    seconds = len(request.text.encode("utf-8", "replace")) / BYTES_PER_SECOND
    if request.min_generate_length is not None:
        seconds = max(seconds, patch_seconds * request.min_generate_length)
    if request.max_generate_length is not None:
        seconds = min(seconds, patch_seconds * request.max_generate_length)
    return seconds


def load(streams: Iterable[StreamProgress], slots: int | None, now: float) -> tuple[bool, float]:
    """How busy a worker is, to be compared: the smallest gets the next request.

    Not the number of streams counts but the audio that they need soon: one that is about to end, or whose listener is
    well ahead, costs little; one that has just begun, or waits in the worker's queue, costs up to HORIZON_S. A worker
    without a free slot comes after all others, as a request would wait there for somebody else to end.

    Args:
        slots: streams that the worker can have at once, None if unknown.
    """
    streams = list(streams)
    is_full = slots is not None and len(streams) >= slots
    return is_full, sum(stream.work(now) for stream in streams)
