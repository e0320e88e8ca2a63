"""Running streams do not fall behind playback because of new ones: scheduler and pacer on a device of known speed."""

from dataclasses import dataclass, field

import pytest
from sequences import make_sequence

from dq_engine.kv_cache import BlockPool
from dq_engine.pacing import MAX_PREFILL_TOKENS, MIN_PREFILL_TOKENS, Pacer, StepCosts
from dq_engine.scheduler import Scheduler
from dq_engine.sequence import Sequence

PATCH = 0.16


@dataclass
class Device:
    """Runs the engine's loop in virtual time: a step lasts fixed + row x rows + token x prompt tokens seconds."""

    protect: bool = True
    slots: int = 300
    fixed: float = 0.02
    row: float = 0.004
    token: float = 0.0005
    prefill: float = 0.0
    now: float = 0.0
    dry: set[Sequence] = field(default_factory=set)
    waits: dict[Sequence, float] = field(default_factory=dict)
    """Longest time between two patches, by stream."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(BlockPool(100_000, 16), self.slots, 8192, 0, 0)
        self.pacer = Pacer(PATCH, 8192, self.protect)
        self.last: dict[Sequence, float] = {}

    def add(self, count: int, prompt: int, patches: int) -> list[Sequence]:
        new = [make_sequence(prompt, patches) for _ in range(count)]
        for sequence in new:
            self.scheduler.add(sequence)
        return new

    def step(self) -> None:
        running, waiting = self.scheduler.running, len(self.scheduler.waiting)
        self.scheduler.admit(self.pacer.admissions(len(running), waiting))
        plan = self.pacer.plan(running, self.now)
        step = self.scheduler.schedule(plan.prefill_tokens, plan.postponed)
        tokens, rows = sum(p.length for p in step.prefills), len(step.sampled)
        seconds = self.fixed + self.row * rows + self.token * tokens + self.prefill * bool(tokens)
        self.now += seconds
        self.pacer.costs.observe(rows, tokens, seconds)
        for sequence in step.sampled:
            if sequence.generated and self.pacer.slack(sequence, self.now) < 0:
                self.dry.add(sequence)
            sequence.generated += 1
            sequence.first_patch_at = sequence.first_patch_at or self.now
            gap = self.now - self.last.get(sequence, self.now)
            self.waits[sequence] = max(self.waits.get(sequence, 0.0), gap)
            self.last[sequence] = self.now
            if sequence.generated == sequence.max_patches:
                self.scheduler.remove(sequence)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if not self.scheduler.busy:
                return
            self.step()


@pytest.mark.parametrize("prefill", [0.0, 0.01])
@pytest.mark.parametrize("prompt", [30, 300, 3000])
def test_a_storm_does_not_run_sixteen_streams_dry(prompt, prefill):
    device = Device(prefill=prefill)
    running = device.add(16, 30, 200)
    device.run(20)
    storm = device.add(200, prompt, 50)
    device.run(100_000)
    assert not device.dry & set(running), "a running stream fell behind playback"
    assert all(s.generated == s.max_patches for s in [*running, *storm]), "everybody was served in the end"
    assert len(device.dry) <= 0.02 * len(storm), "nor did those that were let in"


def test_without_protection_the_same_storm_does_run_them_dry():
    device = Device(protect=False)
    running = device.add(16, 30, 200)
    device.run(20)
    device.add(200, 300, 50)
    device.run(1000)
    assert len(device.dry & set(running)) == 16


def test_a_prompt_advances_however_little_slack_there_is():
    device = Device(row=0.0088)  # 16 streams take all of the time there is
    device.add(16, 10, 2000)
    device.run(30)
    device.scheduler.add(late := make_sequence(1600, 5))
    device.scheduler.admit(1)
    device.run(-(-1600 // MIN_PREFILL_TOKENS) + 1)
    assert late.generated >= 1


def test_those_who_are_ahead_let_the_others_go_first():
    device = Device(slots=40, row=0.01)
    ahead = device.add(12, 10, 500)
    device.run(200)
    assert min(device.pacer.slack(s, device.now) for s in ahead) > 1.0
    late = device.add(3, 10, 100)
    device.run(300)
    assert not device.dry & set(late)
    longest = max(device.waits[s] for s in ahead)
    assert longest < 2.0, f"a stream that was ahead waited {longest:.2f} s for its next patch"


def test_a_burst_goes_before_streams_that_can_wait():
    """Streams with audio in hand do not hold the prompts of a burst up, and what was first is heard first."""
    device = Device(fixed=0.008, row=0.0002, token=4e-6, prefill=0.003, slots=512)
    for tokens in (16, 256, 1024, 2048):  # as the engine learns from its graphs
        device.pacer.costs.observe(0, tokens, device.prefill + device.token * tokens)
    running = device.add(32, 20, 200)
    device.run(60)
    steps, before, burst = 4, [s.generated for s in running], device.add(120, 80, 50)
    device.run(steps)
    assert [s.generated for s in running] == before, "they have seconds of slack"
    assert sum(s.generated > 0 for s in burst) == steps * MAX_PREFILL_TOKENS // 80
    device.run(100_000)
    assert not device.dry


def test_costs_are_learned_from_what_was_measured():
    costs = StepCosts()
    assert costs.decode(5) == 0 and costs.tokens_within(1.0) is None
    for _ in range(30):
        costs.observe(4, 0, 0.04)
        costs.observe(8, 0, 0.06)
        costs.observe(4, 100, 0.09)
    assert costs.decode(4) == pytest.approx(0.04) and costs.decode(6) == pytest.approx(0.05)
    assert costs.decode(16) == pytest.approx(0.12), "beyond what was seen: in proportion"
    assert costs.decode(2) == pytest.approx(0.04), "below what was seen: no less"
    assert costs.tokens_within(0.1) == pytest.approx(200, abs=1) and costs.tokens_within(-1) == 0


def test_the_fixed_part_of_a_prefill_is_told_from_its_tokens():
    costs = StepCosts()
    for tokens in [50, 400, 1000, 50, 200] * 4:
        costs.observe(0, tokens, 0.02 + 1e-4 * tokens)
    assert costs.tokens_within(0.12) == pytest.approx(1000, rel=0.05) and costs.tokens_within(0.02) == 0


@pytest.mark.parametrize(("sizes", "per_token"), [((100, 110), 3e-4), ((60, 150), 1e-6)], ids=["alike", "unlike"])
def test_prefills_that_are_alike_do_not_tell_what_a_token_costs(sizes, per_token):
    """Their times hardly differ: of sizes that are alike that says nothing, and a token counts with its full share."""
    costs = StepCosts()
    for tokens in sizes * 20:
        costs.observe(0, tokens, 0.0315 + 1e-6 * tokens)
    added = costs.prefill(1000) - costs.prefill(0)
    assert added == pytest.approx(1000 * per_token, rel=0.05)


def streams_with_slack(*slacks: float) -> list[Sequence]:
    """Streams that at time 10 have so many seconds of audio in hand."""
    streams = []
    for slack in slacks:
        stream = make_sequence(10, 500)
        stream.generated, stream.prefilled = 20, 10
        stream.first_patch_at = 10 - (20 * PATCH - slack)
        streams.append(stream)
    return streams


def test_a_step_takes_seven_tenths_of_the_least_slack():
    pacer = Pacer(PATCH, 8192, True)
    pacer.costs.observe(2, 0, 0.02)
    for tokens in (100, 1000):
        pacer.costs.observe(0, tokens, 1e-4 * tokens)
    plan = pacer.plan(streams_with_slack(0.1, 1.0), 10)
    assert plan.prefill_tokens == pytest.approx((0.7 * 0.1 - 0.02) / 1e-4, abs=1) and not plan.postponed


@pytest.mark.parametrize(("least", "waits"), [(0.11, True), (0.12, False)])
def test_who_is_two_patches_ahead_waits_where_a_step_would_take_more_than_that(least, waits):
    pacer = Pacer(PATCH, 8192, True)
    pacer.costs.observe(4, 0, 0.08)
    streams = streams_with_slack(least, 2 * PATCH - 0.01, 2 * PATCH + 0.01, 1.0)
    assert pacer.plan(streams, 10).postponed == (set(streams[2:]) if waits else set())


def test_nobody_waits_for_himself():
    pacer = Pacer(PATCH, 8192, True)
    pacer.costs.observe(2, 0, 0.5)
    assert pacer.plan(streams_with_slack(0.4, 0.5), 10).postponed == set()


def test_a_device_that_cannot_keep_up_with_one_stream_takes_everyone():
    pacer = Pacer(PATCH, 8192, True)
    pacer.costs.observe(1, 0, 0.5)
    assert pacer.admissions(0, 16) == 16


def test_what_a_step_costs_follows_the_device():
    costs = StepCosts()
    costs.observe(4, 0, 0.02)
    assert costs.decode(4) == 0.02
    costs.observe(4, 0, 0.04)
    once = costs.decode(4)
    costs.observe(4, 0, 0.04)
    assert 0.02 < once < costs.decode(4) < 0.04
