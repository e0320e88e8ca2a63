"""How long steps take, the host for launching one and the device for running it; how late the next may be launched."""

import time

from dq_engine.step_output import StepOutput

# What is kept of the longest time that the host took for a step, from step to step.
_REMEMBERED = 0.9


class StepClock:
    """Told of each step in the order of their launches. For the engine's thread."""

    def __init__(self) -> None:
        self._last_end = 0.0
        """When the device was done with the step before, by time.monotonic(); 0 after a time without work."""
        self._host_seconds = 0.0
        """How long the host takes from deciding on a step to having launched it, at most, of late."""

    def rest(self) -> None:
        """There is no work: from now on the device does not idle."""
        self._last_end = 0.0

    def launched(self, seconds: float) -> None:
        """The host took so long for a step."""
        self._host_seconds = max(seconds, _REMEMBERED * self._host_seconds)

    def ended(self, launched_at: float, now: float) -> tuple[float, float]:
        """A step is done; how long the device took for it, and how long it had had nothing to do before it.

        It begins when it is launched or, if the device was busy then, when the one before it ends.
        """
        idle = max(0.0, launched_at - self._last_end) if self._last_end else 0.0
        seconds = now - max(launched_at, self._last_end)
        self._last_end = now
        return seconds, idle

    def spare_seconds(self, running: StepOutput) -> float:
        """How long the device needs no other step: whoever arrives until then can still be part of it."""
        if running.done:
            return 0.0
        begun = max(running.launched_at, self._last_end)
        return begun + running.least_seconds - self._host_seconds - time.monotonic()
