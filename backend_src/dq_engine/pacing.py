"""Keeps running streams ahead of their listeners: how many may start, how much prompt a step takes in, who goes first.

A stream's slack is the audio delivered minus the time since its first chunk: how long until a player that began with
that chunk runs dry. A step must end before the least slack of those it makes wait.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence as Streams
from dataclasses import dataclass

from dq_engine.sequence import Sequence

# New streams are admitted while a step of all would last at most this share of the audio that it makes.
_LOAD = 0.9
# Of the least slack, the share that one step may take: measured times vary.
_CAUTION = 0.7
# However little slack there is, prompts advance by this many tokens a step, so nobody waits for ever.
MIN_PREFILL_TOKENS = 16
# A prompt costs no less a token in a longer step than this (H200: 11 ms for 2,048), and its first patch comes later.
MAX_PREFILL_TOKENS = 2048
# Prompts go before running streams only while a step of all lasts less than this share of a patch: slack soon returns.
_LIGHT_LOAD = 0.5
# Streams this many patches ahead let the others go first when a step of all would come too late for one.
_AHEAD_PATCHES = 2
_SMOOTHING = 0.3
# Prefills whose sizes differ by less than this share tell nothing of what one token costs.
_TELLING_SPREAD = 0.2


@dataclass
class Plan:
    """What the next step may hold.

    Args:
        prefill_tokens: most prompt tokens to take in.
        postponed: streams that are ahead and let the others go first.
    """

    prefill_tokens: int
    postponed: set[Sequence]


class PrefillCost:
    """What prompt tokens add to a step: a fixed part and one for each token, by regression over the latest steps."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        keep = 1.0 - _SMOOTHING
        self._weight = keep * self._weight + 1.0
        self._x, self._y = keep * self._x + tokens, keep * self._y + seconds
        self._xx, self._xy = keep * self._xx + tokens * tokens, keep * self._xy + tokens * seconds

    def tokens_within(self, seconds: float) -> int | None:
        """Tokens that take at most `seconds`; None while nothing is known."""
        if not self._y:
            return None
        fixed, token = self._parts()
        return max(0, int((seconds - fixed) / token))

    def seconds(self, tokens: int) -> float:
        """What `tokens` take; infinite while nothing is known."""
        if not self._y:
            return math.inf
        fixed, token = self._parts()
        return fixed + token * tokens

    def _parts(self) -> tuple[float, float]:
        """Seconds of the fixed part and of one token."""
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        token = (self._xy / self._weight - x * y) / spread if spread > (_TELLING_SPREAD * x) ** 2 else 0.0
        # Steps that were all alike do not tell the two parts apart: then all of it counts as the tokens'.
        token = token if 0.0 < token * x < y else y / x
        return y - token * x, token


class StepCosts:
    """Learns from the steps that have run how long one will take."""

    def __init__(self) -> None:
        self._decode: dict[int, float] = {}
        self._rows: list[int] = []
        """Which numbers of rows were seen, ascending."""
        self._prefill = PrefillCost()

    def observe(self, rows: int, prefill_tokens: int, seconds: float) -> None:
        """A step with `rows` patches and `prefill_tokens` tokens of prompts took `seconds`."""
        if prefill_tokens:
            # Rows beyond what was seen count as the most that were: tokens rather seem too dear than too cheap.
            known = self.decode(min(rows, self._rows[-1] if self._rows else 0))
            self._prefill.observe(prefill_tokens, max(0.0, seconds - known))
        else:
            if rows not in self._decode:
                insort(self._rows, rows)
            before = self._decode.get(rows, seconds)
            self._decode[rows] = before + _SMOOTHING * (seconds - before)

    def decode(self, rows: int) -> float:
        """Seconds of a step that makes `rows` patches; 0 while nothing is known. More rows than ever: in proportion."""
        if rows in self._decode or not self._decode or not rows:
            return self._decode.get(rows, 0.0)
        index = bisect_left(self._rows, rows)
        if index == 0:
            return self._decode[self._rows[0]]
        below = self._rows[index - 1]
        if index == len(self._rows):
            return self._decode[below] * rows / below
        above = self._rows[index]
        share = (rows - below) / (above - below)
        return self._decode[below] + share * (self._decode[above] - self._decode[below])

    def prefill(self, tokens: int) -> float:
        """Seconds that prompt tokens add to a step; infinite while their cost is not known."""
        return self._prefill.seconds(tokens)

    def tokens_within(self, seconds: float) -> int | None:
        """Prompt tokens that add at most `seconds` to a step; None while their cost is not known."""
        return self._prefill.tokens_within(seconds)


class Pacer:
    """Plans each step.

    Args:
        patch_seconds: audio of one patch.
        max_prefill_tokens: most prompt tokens of a step in any case.
        protect: False takes everyone in as fast as possible, for work to which nobody listens.
    """

    def __init__(self, patch_seconds: float, max_prefill_tokens: int, protect: bool) -> None:
        self.patch_seconds, self.protect = patch_seconds, protect
        self.max_prefill_tokens = longest_prefill(max_prefill_tokens, protect)
        self.costs = StepCosts()

    def forget(self) -> None:
        """Forget what steps cost."""
        self.costs = StepCosts()

    def slack(self, stream: Sequence, now: float) -> float:
        """Seconds until a player of this stream, which has begun, runs dry."""
        return stream.generated * self.patch_seconds - (now - stream.first_patch_at)

    def plan(self, running: Streams[Sequence], now: float) -> Plan:
        """What the next step may hold, beside what `running` need at time `now`."""
        tokens, postponed = self.max_prefill_tokens, set()
        slacks = {s: self.slack(s, now) for s in running if s.generated} if self.protect else {}
        if slacks:
            # Streams whose prompt this step completes get their first patch in it.
            least, duration = min(slacks.values()), self.costs.decode(len(running))
            room = self.costs.tokens_within(_CAUTION * least - duration)
            if room is not None:
                tokens = min(tokens, max(MIN_PREFILL_TOKENS, room))
            if duration > _CAUTION * least:
                ahead = {s for s, slack in slacks.items() if slack > _AHEAD_PATCHES * self.patch_seconds}
                postponed = ahead if len(ahead) < len(slacks) else set()
            elif duration < _LIGHT_LOAD * self.patch_seconds and _waiting_tokens(running) > tokens:
                # More prompts than one step takes: whose audio lasts for two such steps and one of all waits for them.
                enough = (self.costs.prefill(2 * tokens) + duration) / _CAUTION
                postponed = {s for s, slack in slacks.items() if slack > enough}
        return Plan(tokens, postponed)

    def admissions(self, running: int, waiting: int) -> int:
        """How many of those who wait may start beside `running` streams."""
        limit = _LOAD * self.patch_seconds
        # If not even one stream keeps up with its listener there is nothing to protect.
        if not self.protect or self.costs.decode(1) > limit:
            return waiting
        count = 0
        while count < waiting and (running + count == 0 or self.costs.decode(running + count + 1) <= limit):
            count += 1
        return count


def longest_prefill(most: int, protect: bool) -> int:
    """Prompt tokens of the longest step that is planned, of `most` that it may have; `protect` as of `Pacer`."""
    return min(most, MAX_PREFILL_TOKENS) if protect else most


def _waiting_tokens(running: Streams[Sequence]) -> int:
    """Tokens of prompts that have been admitted and not been taken in."""
    return sum(s.prompt_length - s.prefilled for s in running)
