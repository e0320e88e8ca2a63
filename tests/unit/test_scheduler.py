"""Slots, blocks and tokens of a step are handed out first come, first served, and all come back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dq_engine.kv_cache import BlockPool
from dq_engine.scheduler import Scheduler
from dq_engine.sequence import Sequence
from dq_engine.stream import Stream


def make_sequence(prompt: int, patches: int) -> Sequence:
    return Sequence(
        stream=Stream(0, lambda chunk: None, lambda stream: None),
        token_ids=np.ones(prompt, np.int64),
        patches=np.zeros((0, 4, 64), np.float32),
        patch_rows=np.zeros(0, np.int64),
        continues=False,
        seed=0,
        cfg_value=2.0,
        temperature=1.0,
        min_length=2,
        max_patches=patches,
        return_latents=False,
    )


def make_scheduler(blocks=100, slots=4, tokens=64, prefill_tokens=0, prefill_seqs=0) -> Scheduler:
    return Scheduler(BlockPool(blocks, 16), slots, tokens, prefill_tokens, prefill_seqs)


def test_a_prompt_runs_and_then_its_patches():
    scheduler = make_scheduler()
    sequence = make_sequence(10, 3)
    scheduler.add(sequence)
    assert scheduler.admit() == [sequence]
    first = scheduler.schedule()
    assert [(p.start, p.length, p.completes) for p in first.prefills] == [(0, 10, True)]
    assert first.sampled == [sequence] and sequence.launched == 1
    for launched in (2, 3):
        step = scheduler.schedule()
        assert step.decodes == [sequence] and not step.prefills and sequence.launched == launched
    assert scheduler.schedule() is None, "no more than max_patches are launched"


def test_long_prompts_are_cut_into_chunks_and_running_streams_go_on():
    scheduler = make_scheduler(tokens=32)
    running, long = make_sequence(8, 10), make_sequence(70, 10)
    scheduler.add(running)
    scheduler.admit()
    scheduler.schedule()
    scheduler.add(long)
    scheduler.admit()
    chunks = []
    while long.launched == 0:
        step = scheduler.schedule()
        assert step.decodes == [running]
        chunks += [(p.start, p.length, p.completes) for p in step.prefills]
    assert chunks == [(0, 31, False), (31, 31, False), (62, 8, True)]


@pytest.mark.parametrize(
    ("limit", "lengths"), [({"prefill_tokens": 20}, [[20], [10, 10], [20]]), ({"prefill_seqs": 1}, [[30], [30]])]
)
def test_prefill_limits(limit, lengths):
    scheduler = make_scheduler(tokens=64, **limit)
    for _ in range(2):
        scheduler.add(make_sequence(30, 1))
    scheduler.admit()
    seen = []
    while (step := scheduler.schedule()) and step.prefills:
        seen.append([p.length for p in step.prefills])
    assert seen == lengths


def test_a_stream_waits_until_blocks_for_its_longest_length_are_free():
    scheduler = make_scheduler(blocks=4)
    first, second = make_sequence(16, 33), make_sequence(16, 33)  # 48 tokens: 3 blocks each
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.admit() == [first] and scheduler.pool.num_free == 1
    assert scheduler.admit() == []
    scheduler.remove(first)
    assert scheduler.pool.num_free == 4 and first.slot == -1
    assert scheduler.admit() == [second]


def test_nobody_overtakes():
    scheduler = make_scheduler(blocks=4)
    running, big, small = make_sequence(16, 17), make_sequence(32, 33), make_sequence(1, 1)
    for sequence in (running, big, small):
        scheduler.add(sequence)
    assert scheduler.admit() == [running], "the small one does not pass the big one, which would starve"


def test_a_block_given_back_twice_is_noticed():
    pool = BlockPool(2, 16)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(blocks)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_block_and_slot_comes_back(data):
    scheduler = make_scheduler(blocks=30, slots=3, tokens=24)
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "step", "remove"]))
        if action == "add":
            scheduler.add(make_sequence(data.draw(st.integers(1, 100)), data.draw(st.integers(1, 40))))
        elif action == "step":
            scheduler.admit()
            step = scheduler.schedule()
            if step is not None:
                assert sum(p.length for p in step.prefills) + len(step.decodes) <= 24
                assert len({s.slot for s in step.sampled}) == len(step.sampled)
        elif scheduler.waiting or scheduler.running:
            scheduler.remove(data.draw(st.sampled_from([*scheduler.waiting, *scheduler.running])))
        held = [b for s in scheduler.running for b in s.blocks]
        assert len(held) == len(set(held)) and len(held) + scheduler.pool.num_free == 30
    for sequence in [*scheduler.waiting, *scheduler.running]:
        scheduler.remove(sequence)
    assert scheduler.pool.num_free == 30 and not scheduler.busy
