"""What a caller notices of a stream, computed from when its chunks arrive. Standard library only."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PATCH_S = 0.16
"""Seconds of audio that VoxCPM2 makes in one autoregressive step."""
_SAME_TIME_S = 1e-9


@dataclass
class StreamRecord:
    """One request as the client saw it. Times are seconds on one clock.

    Args:
        due: when the request should have been sent; waiting is counted from here.
        sent: when it was.
        arrivals: (time, seconds of audio) of each chunk with audio.
        failure: None, "refused", "timeout" or "error".
        message: of the failure.
    """

    due: float
    sent: float
    arrivals: list[tuple[float, float]] = field(default_factory=list)
    failure: str | None = None
    message: str = ""

    @property
    def audio_s(self) -> float:
        return sum(seconds for _, seconds in self.arrivals)

    @property
    def ttfb_s(self) -> float:
        """Request to first audio, in seconds; infinite when none came."""
        return self.arrivals[0][0] - self.due if self.arrivals else math.inf

    @property
    def rtf(self) -> float:
        """Seconds for a second of audio, after the first chunk; infinite for a stream that failed."""
        return math.inf if self.failure else self._after_first_s / self.audio_s

    @property
    def patch_s(self) -> float | None:
        """Seconds from patch to patch, infinite for a stream that failed; None when there was only one patch."""
        if self.failure:
            return math.inf
        patches = round(self.audio_s / PATCH_S)
        return self._after_first_s / (patches - 1) if patches > 1 else None

    @property
    def dry_s(self) -> float:
        """How long a player that starts on the first chunk is silent before the last; infinite if the stream failed."""
        if self.failure:
            return math.inf
        dry, runs_out = 0.0, self.arrivals[0][0]
        for time, seconds in self.arrivals:
            if time > runs_out + _SAME_TIME_S:
                dry += time - runs_out
                runs_out = time
            runs_out += seconds
        return dry

    @property
    def largest_gap_s(self) -> float:
        """Longest time between two chunks, infinite for a stream that failed; 0 when there was only one chunk."""
        if self.failure:
            return math.inf
        times = [time for time, _ in self.arrivals]
        return max((later - earlier for earlier, later in zip(times, times[1:], strict=False)), default=0.0)

    @property
    def _after_first_s(self) -> float:
        return self.arrivals[-1][0] - self.arrivals[0][0]


def percentile(values: Iterable[float], q: float) -> float:
    """The q-quantile (0 to 1), linear between neighbours; infinite where it reaches into infinite values.

    Raises:
        ValueError: there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("percentile of no values")
    position = (len(ordered) - 1) * q
    low = math.floor(position)
    share = position - low
    if share == 0 or math.isinf(ordered[low]):
        return ordered[low]
    return ordered[low] + (ordered[low + 1] - ordered[low]) * share


def peak_streams(records: Sequence[StreamRecord]) -> int:
    """Most streams under way at once, from being sent to the last audio; those without audio are left out."""
    edges = [edge for r in records if r.arrivals for edge in ((r.sent, 1), (r.arrivals[-1][0], -1))]
    count = peak = 0
    for _, step in sorted(edges):
        count += step
        peak = max(peak, count)
    return peak


def figures(records: Sequence[StreamRecord], wall_s: float) -> dict:
    """The row of a table: figures over all streams, those that failed included.

    A stream that was refused, broke off or ran out of time has an infinite RTF, time per patch and gap, counts as an
    underrun, and has an infinite TTFB unless audio came. Only `audio_s_per_s` and `first_chunk_one_patch` look at what
    arrived alone.

    Args:
        records: every stream of the row, at least one.
        wall_s: from the first request to the end of the last stream, summed over the iterations of a closed loop.

    Returns:
        JSON values; an infinite figure is None.
    """

    def quantiles(name: str, values: Sequence[float], scale: float, *percents: int) -> dict:
        return {
            f"{name}_p{percent}": _json(scale * percentile(values, percent / 100)) if values else None
            for percent in percents
        }

    def count(failure: str) -> int:
        return sum(record.failure == failure for record in records)

    first_chunks = [record.arrivals[0][1] for record in records if record.arrivals]
    patch_s = [record.patch_s for record in records if record.patch_s is not None]
    audio_s = sum(record.audio_s for record in records)
    gaps = [record.largest_gap_s for record in records]
    return {
        "streams": len(records),
        "refused": count("refused"),
        "timeouts": count("timeout"),
        "errors": count("error"),
        "peak_streams": peak_streams(records),
        **quantiles("ttfb_ms", [record.ttfb_s for record in records], 1e3, 50, 90, 99),
        **quantiles("patch_ms", patch_s, 1e3, 50, 99),
        **quantiles("rtf", [record.rtf for record in records], 1, 50, 99),
        "underrun": _json(sum(record.dry_s > 0 for record in records) / len(records)),
        "dry_ms_max": _json(1e3 * max(record.dry_s for record in records)),
        **quantiles("gap_ms", gaps, 1e3, 50, 99),
        "gap_ms_max": _json(1e3 * max(gaps)),
        "first_chunk_one_patch": _json(statistics.mean(abs(s - PATCH_S) < 1e-3 for s in first_chunks))
        if first_chunks
        else None,
        "audio_s": _json(audio_s),
        "wall_s": _json(wall_s),
        "audio_s_per_s": _json(audio_s / wall_s),
        "sent_late_ms_p99": _json(1e3 * percentile([record.sent - record.due for record in records], 0.99)),
    }


def _json(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
