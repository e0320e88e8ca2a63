"""A worker's place, which outlives its processes: starts them, listens to them, gives them up, answers for them."""

import logging
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from dq_engine.config import EngineConfig
from dq_engine.serving.messages import Audio, Failed, Heartbeat, Progress, Ready, StartFailed, decode_from_worker
from dq_engine.serving.worker_process import WorkerProcess, answer

logger = logging.getLogger(__name__)

RESTART_DELAYS_S = (0.2, 1.0, 5.0, 15.0, 60.0)
"""Wait before the first, second, ... restart in a row; the last is used from then on."""
STABLE_S = 60.0
"""A worker that has served this long starts again with the first delay."""
SILENCE_S = 30.0
"""A worker that serves and says nothing for this long, not even a heartbeat, hangs and is killed."""
MESSAGES_A_TURN = 256
PROGRESS_LOG_S = 2.0


class WorkerSlot:
    """One worker's present process and the history of its failures.

    Args:
        index: the worker's number, from 0.
        config: the engine's settings.

    Attributes:
        worker: None while it waits for a restart.
        restart_at: when the next process may be started, while there is none (time.monotonic).
    """

    def __init__(self, index: int, config: EngineConfig) -> None:
        self.index, self.config = index, config
        self.worker: WorkerProcess | None = None
        self.restart_at = 0.0
        self._ready_since = self._heard_at = 0.0
        self._failures = 0
        self._logged_stage, self._logged_at = "", 0.0

    @property
    def acts_at(self) -> float:
        """When something has to be done here, if nothing comes before: a restart, or an end to the silence."""
        if self.worker is None:
            return self.restart_at
        return self._heard_at + SILENCE_S if self.worker.ready else math.inf

    def start(self, folder: Path, context: zmq.Context) -> str | None:
        """Start a process; why there is none, if it cannot be started now.

        Args:
            folder, context: as of `WorkerProcess`.
        """
        try:
            self.worker = WorkerProcess(self.config, self.index, folder, context)
        except OSError as error:  # no memory, no file handles: later perhaps
            logger.error("worker %d cannot be started: %s", self.index, error)
            self._plan_restart()
            return f"worker {self.index} cannot be started: {error}"
        self._logged_stage = ""
        logger.info("worker %d starts (process %d)", self.index, self.worker.process.pid)
        return None

    def begin_serving(self, worker: WorkerProcess) -> None:
        """Let it have requests, if it has not ended meanwhile."""
        if self.worker is not worker:
            return
        logger.info("worker %d is ready", self.index)
        # What was preloaded may be unregistered by the time there is another process, and its files gone: that one gets
        # the adapters that the others have then.
        self.config = self.config.model_copy(update={"lora_preload": ""})
        self._ready_since = time.monotonic()
        worker.ready = True

    def receive(self) -> Iterator[Heartbeat | Ready]:
        """Take the messages that are there, a limited number, so that no worker keeps the others waiting.

        Those of streams go to them; what is for the supervisor is returned.
        """
        for _ in range(MESSAGES_A_TURN):
            try:
                data = self.worker.outbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode_from_worker(data)
            self._heard_at = time.monotonic()
            if isinstance(message, Ready):
                yield message
            elif isinstance(message, Heartbeat):
                self.worker.slots = message.snapshot["slots"]
                yield message
            elif isinstance(message, Progress):
                self._log_progress(message)
            elif isinstance(message, StartFailed):
                self.worker.start_error = message.message
            else:
                self.worker.deliver(message, last=not isinstance(message, Audio))

    def kill_if_silent(self) -> None:
        """Kill a worker that hangs; its end comes as any other's."""
        if self.worker.ready and time.monotonic() >= self._heard_at + SILENCE_S:
            logger.error("worker %d has said nothing for %g s and is killed", self.index, SILENCE_S)
            self.worker.process.kill()
            self._heard_at = time.monotonic()

    def end(self, stopping: bool) -> str:
        """The process has ended, or must: answer its streams, clean up, and plan the next start; why it ended.

        Args:
            stopping: as all of them must.
        """
        worker, self.worker = self.worker, None
        was_ready, unanswered = worker.ready, worker.close()
        code, reason = "INTERNAL", f"the engine worker {self.index} died; its streams are lost"
        if stopping:
            code, reason = "UNAVAILABLE", "the server is shutting down"
        for id, on_message in unanswered.items():
            answer(on_message, Failed(id, code, reason))
        worker.dispose()
        status = worker.process.returncode
        if was_ready and time.monotonic() - self._ready_since > STABLE_S:
            self._failures = 0
        if status == 0:  # by SIGTERM, as the whole server perhaps: it gets time to stop
            self._failures = max(self._failures, 1)
        self._plan_restart()
        how = worker.start_error or _exit_reason(status)
        if not stopping:
            told = _was_told_to_end(status)
            logger.log(
                logging.INFO if told else logging.ERROR,
                "worker %d ended: %s; %d streams lost; next start in %.1f s%s",
                self.index,
                how,
                len(unanswered),
                self.restart_at - time.monotonic(),
                ", unless the server ends too" if told else "",
            )
        return how

    def _plan_restart(self) -> None:
        """The longer the more failures there were in a row."""
        delay = RESTART_DELAYS_S[min(self._failures, len(RESTART_DELAYS_S) - 1)]
        self._failures += 1
        self.restart_at = time.monotonic() + delay

    def _log_progress(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage != self._logged_stage:
            logger.info("worker %d: %s", self.index, progress.stage)
        elif now - self._logged_at >= PROGRESS_LOG_S:
            logger.info("worker %d: %s, %.0f%% done", self.index, progress.stage, 100 * progress.fraction)
        else:
            return
        self._logged_stage, self._logged_at = progress.stage, now


def _was_told_to_end(status: int) -> bool:
    """Whether a process of this exit status got SIGTERM, as the whole server perhaps, whose own end then follows."""
    return status in (0, -signal.SIGTERM)  # the second before it was far enough to end in order


def _exit_reason(status: int) -> str:
    if _was_told_to_end(status):
        return "it was told to (SIGTERM)"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}; what it logged says why"
