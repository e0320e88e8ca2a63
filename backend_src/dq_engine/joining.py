"""When many streams run, patches of those that are ahead of their listeners travel together: fewer, larger chunks.

Whoever sends chunks pays for each (tritonserver's Python backend manages some 3,000 a second), and a listener who has
audio for the next half second gains nothing from having a patch 50 ms earlier.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

_NOTHING = np.zeros(0, np.float32)
# With fewer streams in a step every patch goes out at once.
CROWD = 64
# Audio that a listener must have in hand, in patches, for each patch that is held back.
RESERVE_PATCHES = 2
MOST_PATCHES = 4


@dataclass
class _Sent:
    """What a stream has been sent: since when, how many seconds of audio; and what is held back."""

    first_at: float
    seconds: float = 0.0
    held: list[np.ndarray] = field(default_factory=list)


class Joiner:
    """Decides which chunks go out now.

    Args:
        sample_rate: of the audio, in Hz.
    """

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self._streams: dict[Hashable, _Sent] = {}

    def take(self, stream: Hashable, samples: np.ndarray, now: float, crowd: int, last: bool) -> np.ndarray | None:
        """A stream's next patch has been made.

        Args:
            stream: whose it is.
            samples: float32 [n].
            now: by time.monotonic().
            crowd: how many streams share the step.
            last: whether the stream ends with it.

        Returns:
            What to send now, this patch at its end; None if it is held back.
        """
        first = stream not in self._streams
        sent = self._streams.setdefault(stream, _Sent(now))
        sent.held.append(samples)
        if not (first or last or crowd <= CROWD):
            reserve = self._slack(sent, now) * self.sample_rate / samples.size / RESERVE_PATCHES
            if len(sent.held) < min(MOST_PATCHES, 1 + int(reserve)):
                return None
        return self._release(sent)

    def overdue(self, now: float) -> list[tuple[Hashable, np.ndarray]]:
        """What is held back of streams that get no patches any more, before their listeners need it."""
        late = []
        for stream, sent in self._streams.items():
            if sent.held and self._slack(sent, now) * self.sample_rate < RESERVE_PATCHES / 2 * sent.held[0].size:
                late.append((stream, self._release(sent)))
        return late

    def first_chunk_at(self, stream: Hashable) -> float:
        """When a stream's first chunk went out."""
        return self._streams[stream].first_at

    def end(self, stream: Hashable) -> np.ndarray:
        """Forget a stream; what was still held back of it."""
        sent = self._streams.pop(stream, None)
        return _NOTHING if sent is None else self._release(sent)

    def _slack(self, sent: _Sent, now: float) -> float:
        """Seconds until a listener who began with the first chunk has heard all that was sent."""
        return sent.seconds - (now - sent.first_at)

    def _release(self, sent: _Sent) -> np.ndarray:
        samples = sent.held[0] if len(sent.held) == 1 else np.concatenate([_NOTHING, *sent.held])
        sent.held.clear()
        sent.seconds += samples.size / self.sample_rate
        return samples
