"""Keeps running streams ahead of their listeners: how many may start, how much prompt a step takes in, who goes first.

A stream's slack is the audio delivered minus the time since its first chunk: how long until a player that began with
that chunk runs dry. A step must end before the least slack of those it makes wait.
"""

from collections.abc import Sequence as Streams
from dataclasses import dataclass

from dq_engine.sequence import Sequence

# New streams are admitted while a step of all would last at most this share of the audio that it makes.
_LOAD = 0.9
# Of the least slack, the share that one step may take: measured times vary.
_CAUTION = 0.7
# However little slack there is, prompts advance by this many tokens a step, so nobody waits for ever.
MIN_PREFILL_TOKENS = 16
# Streams this many patches ahead let the others go first when a step of all would come too late for one.
_AHEAD_PATCHES = 2
_SMOOTHING = 0.3
# A step with fewer prompt tokens than this says less about what one costs.
_TELLING_TOKENS = 64


@dataclass
class Plan:
    """What the next step may hold.

    Args:
        admissions: most streams to admit.
        prefill_tokens: most prompt tokens to take in.
        postponed: streams that are ahead and let the others go first.
    """

    admissions: int
    prefill_tokens: int
    postponed: set[Sequence]


class StepCosts:
    """Learns from the steps that have run how long one will take."""

    def __init__(self) -> None:
        self._decode: dict[int, float] = {}
        self._token = 0.0

    def observe(self, rows: int, prefill_tokens: int, seconds: float) -> None:
        """A step with `rows` patches and `prefill_tokens` tokens of prompts took `seconds`."""
        if not prefill_tokens:
            before = self._decode.get(rows, seconds)
            self._decode[rows] = before + _SMOOTHING * (seconds - before)
        else:
            # Rows beyond what was seen count as the most that were: tokens rather seem too dear than too cheap.
            known = self.decode(min(rows, max(self._decode, default=0)))
            token = max(0.0, seconds - known) / prefill_tokens
            weight = _SMOOTHING * min(1.0, prefill_tokens / _TELLING_TOKENS) if self._token else 1.0
            self._token += weight * (token - self._token)

    def decode(self, rows: int) -> float:
        """Seconds of a step that makes `rows` patches; 0 while nothing is known. More rows than ever: in proportion."""
        if rows in self._decode or not self._decode or not rows:
            return self._decode.get(rows, 0.0)
        below = max((r for r in self._decode if r < rows), default=None)
        if below is None:
            return self._decode[min(self._decode)]
        above = min((r for r in self._decode if r > rows), default=None)
        if above is None:
            return self._decode[below] * rows / below
        share = (rows - below) / (above - below)
        return self._decode[below] + share * (self._decode[above] - self._decode[below])

    def tokens_within(self, seconds: float) -> int | None:
        """Prompt tokens that take at most `seconds`; None while their cost is not known."""
        return int(max(0.0, seconds) / self._token) if self._token else None


class Pacer:
    """Plans each step.

    Args:
        patch_seconds: audio of one patch.
        max_num_seqs: slots.
        max_prefill_tokens: most prompt tokens of a step in any case.
        protect: False takes everyone in as fast as possible, for work to which nobody listens.
    """

    def __init__(self, patch_seconds: float, max_num_seqs: int, max_prefill_tokens: int, protect: bool) -> None:
        self.patch_seconds, self.max_num_seqs, self.max_prefill_tokens = patch_seconds, max_num_seqs, max_prefill_tokens
        self.protect = protect
        self.costs = StepCosts()

    def slack(self, stream: Sequence, now: float) -> float:
        """Seconds until a player of this stream, which has begun, runs dry."""
        return stream.generated * self.patch_seconds - (now - stream.first_patch_at)

    def plan(self, running: Streams[Sequence], now: float) -> Plan:
        """What the next step may hold, beside what `running` need at time `now`."""
        if not self.protect:
            return Plan(self.max_num_seqs, self.max_prefill_tokens, set())
        slacks = {s: self.slack(s, now) for s in running if s.generated}
        tokens, postponed = self.max_prefill_tokens, set()
        if slacks:
            # Streams whose prompt this step completes get their first patch in it.
            least, duration = min(slacks.values()), self.costs.decode(len(running))
            room = self.costs.tokens_within(_CAUTION * least - duration)
            if room is not None:
                tokens = min(tokens, max(MIN_PREFILL_TOKENS, room))
            if duration > _CAUTION * least:
                ahead = {s for s, slack in slacks.items() if slack > _AHEAD_PATCHES * self.patch_seconds}
                postponed = ahead if len(ahead) < len(slacks) else set()
        return Plan(self._admissions(len(running)), tokens, postponed)

    def _admissions(self, running: int) -> int:
        limit = _LOAD * self.patch_seconds
        if self.costs.decode(1) > limit:  # not even one stream keeps up with its listener: nothing to protect
            return self.max_num_seqs
        count = running
        while count < self.max_num_seqs and (count == 0 or self.costs.decode(count + 1) <= limit):
            count += 1
        return count - running
