"""Clients that leave are noticed, each once and soon, however many others stay."""

import threading
import time

import pytest

from dq_engine.serving.cancel_watcher import ROUND_S, CancelWatcher

pytestmark = pytest.mark.alone


class Stream:
    def __init__(self) -> None:
        self.closed = False
        self.left = False
        self.asked = 0
        self.kept_alive = 0

    def keep_alive(self) -> None:
        self.kept_alive += 1
        assert self.kept_alive == self.asked + 1

    def is_cancelled(self) -> bool:
        self.asked += 1
        return self.left


@pytest.fixture
def watcher():
    watcher = CancelWatcher()
    yield watcher
    watcher.stop()


def test_one_that_leaves_among_many(watcher):
    streams, noticed = [Stream() for _ in range(64)], {}
    for number, stream in enumerate(streams):
        watcher.watch(stream, lambda number=number: noticed.setdefault(number, time.monotonic()))
    time.sleep(0.3)
    streams[40].left = True
    left = time.monotonic()
    time.sleep(0.5)
    assert list(noticed) == [40]
    assert noticed[40] - left < 0.25
    asked = streams[40].asked
    time.sleep(0.3)
    assert streams[40].asked == asked  # it is not asked again


def test_streams_are_asked_about_once_a_round(watcher):
    streams = [Stream() for _ in range(10)]
    for stream in streams:
        watcher.watch(stream, lambda: None)
    time.sleep(0.2)
    before = [stream.asked for stream in streams]
    time.sleep(10 * ROUND_S)
    for stream, asked in zip(streams, before, strict=True):
        assert 5 <= stream.asked - asked <= 11
        assert stream.asked <= stream.kept_alive <= stream.asked + 1


def test_a_stream_that_is_closed_is_let_go(watcher):
    stream = Stream()
    watcher.watch(stream, pytest.fail)
    time.sleep(0.3)
    stream.closed = True
    time.sleep(0.2)
    asked = stream.asked
    stream.left = True
    time.sleep(0.3)
    assert stream.asked == asked > 0


def test_a_question_that_fails_hurts_no_other(watcher):
    class Broken(Stream):
        def is_cancelled(self) -> bool:
            raise RuntimeError("no answer")

    noticed, other = threading.Event(), Stream()
    watcher.watch(Broken(), pytest.fail)
    watcher.watch(other, noticed.set)
    time.sleep(0.2)
    other.left = True
    assert noticed.wait(1)


def test_stop_is_quick_with_and_without_streams():
    for count in (0, 3):
        watcher = CancelWatcher()
        for _ in range(count):
            watcher.watch(Stream(), lambda: None)
        begun = time.monotonic()
        watcher.stop()
        assert time.monotonic() - begun < 0.5
        assert not any(thread.name == "dq-cancel-watcher" for thread in threading.enumerate())
