"""Patches travel together only in a crowd, only of streams that are ahead, and none is lost or late for it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dq_engine.joining import CROWD, MOST_PATCHES, Joiner

RATE, PATCH = 48000, 7680
SECONDS = PATCH / RATE
BEGAN = 1000.0
"""Of the clock, which counts from anywhere."""


def patch(number: int) -> np.ndarray:
    return np.full(PATCH, number, np.float32)


def sizes(step_seconds: float, crowd: int, patches: int) -> list[int]:
    """Patches in each chunk of a stream that gets one every `step_seconds`."""
    joiner, chunks = Joiner(RATE), []
    for number in range(patches):
        chunk = joiner.take("a", patch(number), BEGAN + number * step_seconds, crowd, number == patches - 1)
        chunks += [] if chunk is None else [len(chunk) // PATCH]
    return chunks


def test_every_patch_goes_out_at_once_where_few_run():
    assert sizes(0.01, CROWD, 30) == [1] * 30


def test_chunks_grow_with_what_the_listener_has():
    chunks = sizes(0.03, CROWD + 1, 60)
    assert chunks[0] == 1 and sum(chunks) == 60
    assert chunks[:-1] == sorted(chunks[:-1]) and max(chunks) == MOST_PATCHES
    assert len(chunks) <= 30, "at least two patches a chunk on average"


def test_streams_that_just_keep_up_are_not_held_back():
    assert sizes(SECONDS, CROWD + 1, 30) == [1] * 30


@given(
    gaps=st.lists(st.floats(0.001, 0.4), min_size=1, max_size=40),
    crowds=st.lists(st.sampled_from([1, CROWD, CROWD + 1, 200]), min_size=40, max_size=40),
)
def test_all_arrives_in_order_and_none_runs_dry_for_it(gaps, crowds):
    """A listener to whom patches would have gone out at once would run dry as often."""
    joiner, now, arrived, patient, eager = Joiner(RATE), BEGAN, [], 0.0, 0.0
    first = None
    for number, (gap, crowd) in enumerate(zip(gaps, crowds, strict=False)):
        now += gap
        first = now if first is None else first
        # The next step ends at most two patches later; what was held until now was not needed yet.
        chunk = joiner.take("a", patch(number), now, crowd, number == len(gaps) - 1)
        eager += SECONDS
        if chunk is not None:
            arrived += [int(value) for value in chunk[::PATCH]]
            patient += chunk.size / RATE
        assert patient - (now - first) >= min(SECONDS, eager - (now - first)) - 1e-9
    assert arrived == list(range(len(gaps)))


def test_what_is_held_of_a_stream_that_stands_still_goes_out_in_time():
    joiner = Joiner(RATE)
    for number in range(10):
        held = joiner.take("a", patch(number), BEGAN, CROWD + 1, False) is None
    assert held
    sent = BEGAN + joiner._streams["a"].seconds
    assert joiner.overdue(sent - 1.5 * SECONDS) == []
    ((stream, samples),) = joiner.overdue(sent - 0.9 * SECONDS)
    assert stream == "a" and samples[-1] == 9
    assert joiner.overdue(sent) == [] and joiner.end("a").size == 0


def test_an_end_gives_back_what_is_held():
    joiner = Joiner(RATE)
    while joiner.take("a", patch(1), BEGAN, CROWD + 1, False) is not None:
        pass
    assert joiner.end("a").size == PATCH
    assert joiner.end("a").size == 0
