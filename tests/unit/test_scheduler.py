"""Slots, blocks and tokens are handed out first come, first served; streams grow, give way, and all comes back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import make_sequence

from dq_engine.kv_cache import BlockPool
from dq_engine.scheduler import Scheduler
from dq_engine.sequence import Sequence, block_keys


def collect(sequence: Sequence) -> None:
    """What the engine does when a launched patch has arrived."""
    while sequence.generated < sequence.launched:
        sequence.generated += 1
        sequence.latents.append(np.full((4, 64), sequence.generated, np.float32))


def save(sequence: Sequence) -> None:
    collect(sequence)
    sequence.rewind(16, [])


def make_scheduler(blocks=100, slots=4, tokens=64, prefill_tokens=0, prefill_seqs=0) -> Scheduler:
    return Scheduler(BlockPool(blocks, 16), slots, tokens, prefill_tokens, prefill_seqs)


def test_a_prompt_runs_and_then_its_patches():
    scheduler = make_scheduler()
    sequence = make_sequence(10, 3)
    scheduler.add(sequence)
    assert scheduler.admit(99) == [sequence]
    first = scheduler.schedule(999)
    assert [(p.start, p.length, p.completes) for p in first.prefills] == [(0, 10, True)]
    assert first.sampled == [sequence] and sequence.launched == 1
    for launched in (2, 3):
        step = scheduler.schedule(999)
        assert step.decodes == [sequence] and not step.prefills and sequence.launched == launched
    assert scheduler.schedule(999) is None, "no more than max_patches are launched"


def test_long_prompts_are_cut_into_chunks_and_running_streams_go_on():
    scheduler = make_scheduler(tokens=32)
    running, long = make_sequence(8, 10), make_sequence(70, 10)
    scheduler.add(running)
    scheduler.admit(99)
    scheduler.schedule(999)
    scheduler.add(long)
    scheduler.admit(99)
    chunks = []
    while long.launched == 0:
        step = scheduler.schedule(999)
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
    scheduler.admit(99)
    seen = []
    while (step := scheduler.schedule(999)) and step.prefills:
        seen.append([p.length for p in step.prefills])
    assert seen == lengths


def test_a_stream_grows_block_by_block():
    scheduler = make_scheduler(blocks=4)
    sequence = make_sequence(15, 40)
    scheduler.add(sequence)
    scheduler.admit(99)
    scheduler.schedule(999)
    sizes = []
    while step := scheduler.schedule(999):
        sizes.append((sequence.cache_length, len(sequence.blocks)))
        assert step.grown == ([sequence] if sequence.cache_length % 16 == 1 else [])
    assert sizes == [(n, -(-n // 16)) for n in range(16, 55)], "the last patch is not fed back"


def test_a_waiting_stream_leaves_a_block_for_each_running_one():
    scheduler = make_scheduler(blocks=4)
    first, second = make_sequence(32, 33), make_sequence(17, 33)
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.admit(99) == [first]
    scheduler.remove(first)
    assert first.slot == -1 and scheduler.admit(99) == [second]


def test_a_waiting_stream_is_admitted_where_that_leaves_exactly_a_block_for_each_running_one():
    for blocks, fits in ((5, True), (4, False)):
        scheduler = make_scheduler(blocks)
        first, second = make_sequence(32, 33), make_sequence(17, 33)  # two blocks each
        scheduler.add(first)
        assert scheduler.admit(99) == [first]
        scheduler.add(second)
        assert scheduler.admit(99) == [second] * fits


def test_nobody_overtakes():
    scheduler = make_scheduler(blocks=4)
    running, big, small = make_sequence(32, 17), make_sequence(33, 33), make_sequence(1, 1)
    for sequence in (running, big, small):
        scheduler.add(sequence)
    assert scheduler.admit(99) == [running], "the small one does not pass the big one, which would starve"


def run_until_short(scheduler: Scheduler) -> None:
    for _ in range(100):
        scheduler.admit(99)
        if scheduler.short_of_blocks():
            return
        scheduler.publish(scheduler.schedule(999).prefills)
    raise AssertionError("blocks never ran out")


def test_the_youngest_gives_way_and_comes_back_first():
    scheduler = make_scheduler(blocks=6)
    old, young, waiting = make_sequence(20, 60), make_sequence(20, 60, stream_id=1), make_sequence(80, 5)
    for sequence in (old, young, waiting):
        scheduler.add(sequence)
    run_until_short(scheduler)
    launched = young.launched
    assert scheduler.preempt_youngest(save) is young
    assert list(scheduler.waiting) == [young, waiting] and scheduler.running == [old]
    assert young.prompt_length == 20 + launched and young.launched == launched and young.prefilled == 0
    assert young.last_patch[0, 0] == launched, "the last patch is fed back when it returns"
    scheduler.remove(old)
    assert scheduler.admit(99)[0] is young
    assert young.prefilled == (20 + launched - 1) // 16 * 16, "its full blocks were still there"


def test_generated_tokens_of_others_are_never_shared():
    scheduler = make_scheduler(blocks=50)
    first, second = make_sequence(16, 60, tokens=7, stream_id=1), make_sequence(16, 60, tokens=7, stream_id=2)
    scheduler.add(first)
    scheduler.admit(99)
    for _ in range(40):
        scheduler.publish(scheduler.schedule(999).prefills)
    scheduler.preempt_youngest(save)
    scheduler.waiting.clear()
    collect(second)
    second.latents, second.generated = first.latents[:], first.generated
    second.rewind(16, [])
    assert len(scheduler.pool.lookup(first.keys)) == 3
    assert len(scheduler.pool.lookup(second.keys)) == 1, "the prompt only"


def test_a_prompt_is_published_when_it_is_computed_and_then_shared():
    scheduler = make_scheduler(tokens=40)
    first, second = make_sequence(50, 5, tokens=7), make_sequence(60, 5, tokens=7)
    scheduler.add(first)
    scheduler.admit(99)
    step = scheduler.schedule(999)
    assert scheduler.pool.lookup(second.keys) == [], "nothing is published before it has run"
    scheduler.publish(step.prefills)
    assert scheduler.pool.lookup(second.keys) == first.blocks[:2], "40 tokens fill two blocks"
    scheduler.publish(scheduler.schedule(999).prefills)
    scheduler.add(second)
    scheduler.admit(99)
    assert second.prefilled == 48 and second.blocks[:3] == first.blocks[:3]
    scheduler.remove(first)
    scheduler.remove(second)
    scheduler.pool.check()
    assert scheduler.pool.num_available == 100


def test_the_last_token_is_always_computed():
    scheduler = make_scheduler()
    for expected in (0, 16):
        sequence = make_sequence(32, 1, tokens=7)
        scheduler.add(sequence)
        scheduler.admit(99)
        assert sequence.prefilled == expected
        scheduler.publish(scheduler.schedule(999).prefills)


def test_cancelled_during_a_chunked_prefill_and_then_again():
    scheduler = make_scheduler(tokens=40)
    first, again = make_sequence(100, 5, tokens=7), make_sequence(100, 5, tokens=7)
    scheduler.add(first)
    scheduler.admit(99)
    scheduler.publish(scheduler.schedule(999).prefills)
    scheduler.remove(first)
    scheduler.add(again)
    scheduler.admit(99)
    assert again.prefilled == 32, "what had been computed of the cancelled prompt is used"


def test_adapters_do_not_share():
    contents = [b"7"] * 32
    assert not set(block_keys(contents, 16)) & set(block_keys(contents, 16, b"voice 1"))


def test_the_least_recently_used_block_is_evicted():
    pool = BlockPool(3, 16)
    held = {key: pool.allocate(1) for key in "abc"}
    for key, blocks in held.items():
        pool.publish(blocks[0], key)
    for key in "abc":
        pool.release(held[key])
    pool.release(pool.allocate(0, pool.lookup("a")))
    assert pool.allocate(1) == held["b"] and pool.lookup("b") == [] and pool.lookup("a") == held["a"]


def test_blocks_that_are_kept_are_evicted_last():
    pool = BlockPool(3, 16)
    held = {key: pool.allocate(1) for key in "abc"}
    for key, blocks in held.items():
        pool.publish(blocks[0], key)
    pool.keep(held["a"])
    for key in "abc":
        pool.release(held[key])
    pool.check()
    assert pool.num_cached == pool.num_available == 3
    assert pool.allocate(2) == [*held["b"], *held["c"]] and pool.lookup("a") == held["a"]
    assert pool.allocate(1, held["a"]) is None, "there is none but the one asked for"
    assert pool.allocate(0, held["a"]) == held["a"]
    pool.release(held["a"])
    assert pool.allocate(1) == held["a"] and pool.lookup("a") == []
    pool.publish(held["a"][0], "d")
    pool.release([*held["a"], *held["b"], *held["c"]])
    pool.check()
    pool.publish(pool.allocate(2)[1], "e")
    assert pool.allocate(1) == held["a"], "what it held before was kept, this is not"


def test_the_reference_of_a_stored_voice_outlives_prompts_that_nobody_repeats():
    scheduler = make_scheduler(blocks=6)
    voice = make_sequence(40, 1, tokens=7)
    voice.kept_tokens = 37
    for sequence in voice, *(make_sequence(60, 1) for _ in range(5)):
        scheduler.add(sequence)
        scheduler.admit(9)
        scheduler.publish(scheduler.schedule(999).prefills)
        scheduler.remove(sequence)
    again = make_sequence(40, 1, tokens=7)
    scheduler.add(again)
    assert scheduler.admit(9) == [again]
    assert again.prefilled == 32, "two blocks of its 37 tokens"


def test_blocks_of_a_prefix_are_not_evicted_for_the_same_request():
    pool = BlockPool(2, 16)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], "a")
    pool.release(blocks)
    assert pool.allocate(2, blocks) is None and pool.allocate(1, blocks) == [*blocks, 1 - blocks[0]]


def test_a_block_given_back_twice_is_noticed():
    pool = BlockPool(2, 16)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(blocks)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_block_and_slot_comes_back(data):
    """Random arrivals (some with equal beginnings), steps, preemptions and departures."""
    scheduler = make_scheduler(blocks=12, slots=3, tokens=24)
    finished = 0
    for number in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "remove"]))
        if action == "add":
            shape = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 90))
            sequence = make_sequence(*shape, tokens=data.draw(st.integers(0, 2)), stream_id=number)
            sequence.kept_tokens = data.draw(st.sampled_from([0, 0, sequence.prompt_length]))
            scheduler.add(sequence)
        elif action == "step":
            scheduler.admit(99)
            while scheduler.short_of_blocks():
                scheduler.preempt_youngest(save)
            step = scheduler.schedule(999)
            assert (step is not None) == bool(scheduler.running), "who runs goes on"
            if step is not None:
                assert sum(p.length for p in step.prefills) + len(step.decodes) <= 24
                assert len({s.slot for s in step.sampled}) == len(step.sampled)
                scheduler.publish(step.prefills)
                for sequence in step.sampled:
                    collect(sequence)
                    assert scheduler.pool.blocks_for(sequence.cache_length) <= len(sequence.blocks)
                    if sequence.generated == sequence.max_patches:
                        scheduler.remove(sequence)
                        finished += 1
        elif scheduler.busy:
            scheduler.remove(data.draw(st.sampled_from([*scheduler.waiting, *scheduler.running])))
        scheduler.pool.check()
    for sequence in [*scheduler.waiting, *scheduler.running]:
        scheduler.remove(sequence)
    scheduler.pool.check()
    assert scheduler.pool.num_available == 12 and not scheduler.busy
