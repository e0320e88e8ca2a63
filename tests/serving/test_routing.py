"""Which worker is the least loaded: the rule on made-up streams."""

import pytest

from dq_engine.request import Request
from dq_engine.serving.routing import StreamProgress, expected_seconds, load

NOW = 1000.0


def stream(expected: float, delivered: float = 0.0, playing_for: float | None = None) -> StreamProgress:
    return StreamProgress(expected, delivered, None if playing_for is None else NOW - playing_for)


@pytest.mark.parametrize(
    ("text", "lengths", "seconds"),
    [
        ("x" * 150, {}, 10),
        ("说" * 50, {}, 10),
        ("x" * 150, {"max_generate_length": 10}, 1.6),
        ("x", {"min_generate_length": 100}, 16),
        ("x" * 150, {"min_generate_length": 5, "max_generate_length": 400}, 10),
        ("\ud800", {}, 1 / 15),
    ],
)
def test_a_request_is_as_long_as_its_text_and_its_lengths_say(text, lengths, seconds):
    assert expected_seconds(Request(text=text, **lengths), 0.16) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("progress", "work"),
    [
        (stream(3), 3),  # it waits, or has just begun
        (stream(30), 4 + 0.1 * 26),  # as much as fits the horizon, and a tenth of the rest
        (stream(30, 10, playing_for=10), 4 + 0.1 * 16),  # no slack
        (stream(30, 10, playing_for=7), 1 + 0.1 * 19),  # its listener has 3 s
        (stream(30, 10, playing_for=2), 0.1 * 20),  # 8 s: more than the horizon
        (stream(30, 29, playing_for=29), 1),  # nearly done
        (stream(3, 5, playing_for=5), 0.5),  # longer than expected
        (stream(3, 5, playing_for=8), 0.5),  # and its listener runs dry
    ],
)
def test_what_a_stream_costs(progress, work):
    assert progress.work(NOW) == pytest.approx(work)


def test_delivered_audio_counts_from_the_first_chunk():
    progress = stream(10)
    progress.delivered(0.16, NOW - 1)
    progress.delivered(2.84, NOW)
    assert (progress.delivered_s, progress.first_at) == (3.0, NOW - 1)
    assert progress.work(NOW) == pytest.approx(2 + 0.1 * 5)


def choose(*workers: tuple[list[StreamProgress], int | None]) -> int:
    return min(range(len(workers)), key=lambda index: load(*workers[index], NOW))


def test_a_worker_with_more_streams_may_be_the_less_loaded():
    long, ending = [stream(20), stream(20)], [stream(5, 4.5, playing_for=4.5)] * 5
    assert choose((long, 16), (ending, 16)) == 1
    assert choose((ending, 16), (long, 16)) == 0
    ahead = [stream(20, 10, playing_for=3)] * 5
    assert choose((long, 16), (ahead, 16)) == 1


def test_a_full_worker_comes_last_and_ties_go_to_the_first():
    long, short = [stream(20)] * 3, [stream(1)] * 2
    assert choose((short, 2), (long, 4)) == 1
    assert choose((short, 2), (long, 3)) == 0  # both are full
    assert choose((short, None), (long, 4)) == 0  # it has not said yet how many it can have
    assert choose(([], 4), ([], 4)) == 0
