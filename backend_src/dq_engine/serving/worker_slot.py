"""A worker's place, which outlives its processes: when the next one is started, and when this one is given up."""

import logging
import math
import signal
import time

from dq_engine.config import EngineConfig
from dq_engine.serving.messages import Progress
from dq_engine.serving.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

RESTART_DELAYS_S = (0.2, 1.0, 5.0, 15.0, 60.0)
"""Wait before the first, second, ... restart in a row; the last is used from then on."""
STABLE_S = 60.0
"""A worker that has served this long starts again with the first delay."""
SILENCE_S = 30.0
"""A worker that serves and says nothing for this long, not even a heartbeat, hangs and is killed."""
PROGRESS_LOG_S = 2.0


class WorkerSlot:
    """One worker's present process and the history of its failures.

    Args:
        index: the worker's number, from 0.
        config: the engine's settings.

    Attributes:
        worker: None while it waits for a restart.
        ready_since, heard_at: when it began to serve, and when it last said something (time.monotonic).
        restart_at: when the next process may be started, while there is none.
    """

    def __init__(self, index: int, config: EngineConfig) -> None:
        self.index, self.config = index, config
        self.worker: WorkerProcess | None = None
        self.ready_since = self.heard_at = self.restart_at = 0.0
        self._failures = 0
        self._logged_stage, self._logged_at = "", 0.0

    @property
    def acts_at(self) -> float:
        """When something has to be done here, if nothing comes before: a restart, or an end to the silence."""
        if self.worker is None:
            return self.restart_at
        return self.heard_at + SILENCE_S if self.worker.ready else math.inf

    def kill_if_silent(self) -> None:
        """Kill a worker that hangs; its end comes as any other's."""
        if self.worker.ready and time.monotonic() >= self.heard_at + SILENCE_S:
            logger.error("worker %d has said nothing for %g s and is killed", self.index, SILENCE_S)
            self.worker.process.kill()
            self.heard_at = time.monotonic()

    def plan_restart(self) -> None:
        """The longer the more failures there were in a row."""
        delay = RESTART_DELAYS_S[min(self._failures, len(RESTART_DELAYS_S) - 1)]
        self._failures += 1
        self.restart_at = time.monotonic() + delay

    def ended(self, worker: WorkerProcess, was_ready: bool) -> str:
        """Plan the restart after a process that has ended; why it did."""
        if was_ready and time.monotonic() - self.ready_since > STABLE_S:
            self._failures = 0
        if worker.process.returncode == 0:  # by SIGTERM, as the whole server perhaps: it gets time to stop
            self._failures = max(self._failures, 1)
        self.plan_restart()
        return worker.start_error or _exit_reason(worker.process.returncode)

    def log_progress(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage != self._logged_stage or now - self._logged_at >= PROGRESS_LOG_S:
            self._logged_stage, self._logged_at = progress.stage, now
            logger.info("worker %d: %s, %.0f%% done", self.index, progress.stage, 100 * progress.fraction)


def was_told_to_end(status: int) -> bool:
    """Whether a process of this exit status got SIGTERM, as the whole server perhaps, whose own end then follows."""
    return status in (0, -signal.SIGTERM)  # the second before it was far enough to end in order


def _exit_reason(status: int) -> str:
    if was_told_to_end(status):
        return "it was told to (SIGTERM)"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}; what it logged says why"
