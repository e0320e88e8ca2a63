"""What steps took, and how long the host may wait before it launches the next; on a made-up clock."""

from types import SimpleNamespace

import pytest

from dq_engine import step_clock
from dq_engine.step_clock import StepClock


def test_a_step_begins_when_the_one_before_it_ends_if_the_device_was_busy_then():
    clock = StepClock()
    assert clock.ended(launched_at=10.0, now=10.5) == (0.5, 0.0)
    assert clock.ended(launched_at=10.3, now=11.2) == pytest.approx((0.7, 0.0))  # launched ahead
    assert clock.ended(launched_at=11.3, now=11.5) == pytest.approx((0.2, 0.1))  # the device had nothing to do
    clock.rest()
    assert clock.ended(launched_at=20.0, now=20.5) == (0.5, 0.0)  # nor had anybody else


def test_the_next_step_is_launched_as_late_as_the_host_of_late_allows(monkeypatch):
    clock = StepClock()
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(monotonic=lambda: 10.01))
    running = SimpleNamespace(done=False, launched_at=10.0, least_seconds=0.05)
    assert clock.spare_seconds(running) == pytest.approx(0.04)
    clock.launched(0.02)
    assert clock.spare_seconds(running) == pytest.approx(0.04 - 0.02)
    clock.launched(0.001)  # the longest is forgotten step by step
    assert clock.spare_seconds(running) == pytest.approx(0.04 - 0.018)
    clock.ended(launched_at=9.0, now=10.005)  # until then the device was busy with another
    assert clock.spare_seconds(running) == pytest.approx(0.045 - 0.018)
    assert clock.spare_seconds(SimpleNamespace(done=True, launched_at=10.0, least_seconds=0.05)) == 0.0
    assert clock.spare_seconds(SimpleNamespace(done=False, launched_at=10.0, least_seconds=0.0)) < 0.0  # not known
