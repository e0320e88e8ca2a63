"""Starts the engine workers, routes requests to them, answers for those that die, and starts them again."""

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from dq_engine.config import EngineConfig
from dq_engine.errors import RequestError
from dq_engine.process_folder import ProcessFolder
from dq_engine.request import Request
from dq_engine.serving.adapters import Adapters
from dq_engine.serving.messages import Call, Failed, Heartbeat, Ready, Result, Submit
from dq_engine.serving.routing import expected_seconds
from dq_engine.serving.worker_process import OnMessage, WorkerProcess
from dq_engine.serving.worker_slot import WorkerSlot

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 3600.0
"""Longest wait for the workers' first start, which may download a checkpoint."""
STOP_S = 2.0


class WorkerStartError(Exception):
    """A worker could not start; the message says why."""


class RoutedStream:
    """A stream that a worker has. `worker`: the worker's number."""

    def __init__(self, id: int, worker: WorkerProcess) -> None:
        self.id, self.worker = id, worker.index
        self._worker = worker

    def cancel(self) -> None:
        """Have it ended, as nobody listens; its last message still comes. From any thread."""
        self._worker.cancel(self.id)


class Supervisor:
    """Workers that serve requests. All callbacks run on the supervisor's own thread, one at a time.

    Args:
        configs: the settings of each worker.
        on_heartbeat: called with a worker's number and its engine's snapshot once a second, and with None when it has
            died and before it is started again.
    """

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        on_heartbeat: Callable[[int, dict | None], None] = lambda index, snapshot: None,
    ) -> None:
        self._slots = [WorkerSlot(index, config) for index, config in enumerate(configs)]
        self._heartbeat_callback = on_heartbeat
        self._ids = itertools.count(1)
        self._started = threading.Condition()
        self._serving = False
        self._model: Ready | None = None
        self._start_error: str | None = None
        self._stop_at: float | None = None
        self.adapters = Adapters(self.call, lambda: self.ready_workers, configs[0].adapters_to_preload)
        self.draining = False
        """True while no requests are taken, so that those that run can end."""

    @property
    def ready_workers(self) -> list[int]:
        """The numbers of the workers that serve."""
        return [w.index for slot in self._slots if (w := slot.worker) is not None and w.ready]

    def start(self) -> None:
        """`begin_start` and `wait_until_ready`."""
        self.begin_start()
        self.wait_until_ready()

    def begin_start(self) -> None:
        """Start the workers."""
        self._folder = ProcessFolder("dq-workers-")
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for slot in self._slots:
            self._start_worker(slot)
        self._thread = threading.Thread(target=self._run, name="dq-supervisor", daemon=True)
        self._thread.start()

    def wait_until_ready(self) -> Ready:
        """Wait until all workers are ready; what the first of them says of the model.

        Raises:
            WorkerStartError: one of them could not start, or was stopped. Nothing is left behind then.
        """
        with self._started:
            in_time = self._started.wait_for(lambda: self._serving or self._start_error, START_TIMEOUT_S)
        if not self._serving:
            self.stop()
            raise WorkerStartError(self._start_error if in_time else f"not ready after {START_TIMEOUT_S:g} s")
        return self._model

    def submit(
        self, request: Request, output_format: str, sample_rate: int | None, stream: bool, on_message: OnMessage
    ) -> RoutedStream:
        """Hand a request to the least loaded worker (`routing.load`), or the next where that one takes nothing.

        Args:
            request, output_format, sample_rate, stream: as in `Submit`.
            on_message: called with `Audio` messages, then once with `Finished` or `Failed`; perhaps before this
                returns.

        Raises:
            RequestError: UNAVAILABLE; then `on_message` is not called.
        """
        if self.draining:
            raise RequestError("UNAVAILABLE", "the server is being drained")
        workers = self._by_load()
        if request.lora is not None:  # what none has, any may refuse
            workers = [w for w in workers if not self.adapters.is_missing(w.index, request.lora)] or workers
        id = next(self._ids)
        message = Submit(id, request, output_format, sample_rate, stream)
        expected_s = expected_seconds(request, self._model.patch_samples / self._model.sample_rate)
        for worker in workers:
            try:
                worker.submit(message, on_message, expected_s)
            except RequestError as error:  # it has just died, or has too many streams
                refusal = error
            else:
                return RoutedStream(id, worker)
        raise refusal

    def call(
        self,
        operation: str,
        arguments: dict,
        payload: bytes | None,
        timeout_s: float,
        worker: int | None = None,
        too_late: Callable[[Result | Failed], None] = lambda answer: None,
    ) -> Result:
        """Have a worker do something other than speak, and wait for it.

        Args:
            operation, arguments, payload: as in `Call`.
            worker: which one; None for the least loaded.
            too_late: see `WorkerProcess.call`.

        Raises:
            RequestError: of the operation; UNAVAILABLE if no worker is ready or none has answered within `timeout_s`.
        """
        message = Call(next(self._ids), operation, arguments, payload)
        return self._by_load(worker)[0].call(message, timeout_s, too_late)

    def begin_stop(self) -> None:
        """Take no more requests and end the workers, within STOP_S seconds; streams that run end with UNAVAILABLE."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + STOP_S
            os.eventfd_write(self._wake, 1)
            self._set_start_error("it was stopped before it was ready")

    def stop(self) -> None:
        """`begin_stop`, and wait for it to be done."""
        self.begin_stop()
        self._thread.join()
        os.close(self._wake)
        self._context.term()
        self._folder.remove()

    def kill(self) -> None:
        """End the workers at once, without a word to anyone: for a process that is about to exit."""
        for slot in self._slots:
            if (worker := slot.worker) is not None:
                worker.process.kill()
        self._folder.remove()

    def _by_load(self, index: int | None = None) -> list[WorkerProcess]:
        """The ready workers, the least loaded first, or the one of that number."""
        ready = [w for slot in self._slots if (w := slot.worker) is not None and w.ready]
        if self._stop_at is not None:
            raise RequestError("UNAVAILABLE", "the server is shutting down")
        if index is not None:
            ready = [worker for worker in ready if worker.index == index]
        if not ready:
            raise RequestError("UNAVAILABLE", "no engine worker is ready; a restart is under way")
        return sorted(ready, key=lambda worker: worker.load) if len(ready) > 1 else ready

    # --- on the supervisor's thread ---

    def _run(self) -> None:
        told = False
        while True:
            workers = [slot.worker for slot in self._slots if slot.worker is not None]
            if self._stop_at is not None:
                if not told:
                    told = True
                    for worker in workers:
                        worker.shut_down()
                        if not worker.ready:  # it would hear of it only when its engine has started
                            worker.process.kill()
                if not workers or time.monotonic() >= self._stop_at:
                    break
            self._turn()
        for slot in self._slots:
            if slot.worker is not None:
                logger.warning("worker %d did not end in %g s and is killed", slot.index, STOP_S)
                self._end_worker(slot)

    def _turn(self) -> None:
        """Wait for something to happen, and handle it."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for slot in self._slots:
            if slot.worker is not None:
                poller.register(slot.worker.outbox, zmq.POLLIN)
                poller.register(slot.worker.pidfd, zmq.POLLIN)
        events = dict(poller.poll(self._poll_timeout_ms()))
        if self._wake in events:
            os.eventfd_read(self._wake)
        for slot in self._slots:
            if slot.worker is None:
                if self._stop_at is None and time.monotonic() >= slot.restart_at:
                    self._on_heartbeat(slot.index, None)  # which may find that all of it is to stop
                    if self._stop_at is None:
                        self._start_worker(slot)
                continue
            if slot.worker.outbox in events:
                self._receive(slot)
            if slot.worker.pidfd in events:
                self._receive(slot)  # what it said before it died
                self._end_worker(slot)
            else:
                slot.kill_if_silent()

    def _poll_timeout_ms(self) -> float | None:
        times = [slot.acts_at for slot in self._slots if slot.worker is not None or self._stop_at is None]
        if self._stop_at is not None:
            times.append(self._stop_at)
        soonest = min(times, default=math.inf)
        return None if soonest == math.inf else max(0.0, 1e3 * (soonest - time.monotonic()))

    def _start_worker(self, slot: WorkerSlot) -> None:
        if (error := slot.start(self._folder.path, self._context)) is not None:
            self._set_start_error(error)

    def _receive(self, slot: WorkerSlot) -> None:
        for message in slot.receive():
            if isinstance(message, Heartbeat):
                self._on_heartbeat(slot.index, message.snapshot)
            else:
                self._model = self._model or message
                # Adapters are read, which takes a while, and perhaps first registered with the others.
                threading.Thread(target=self._begin_serving, args=(slot, slot.worker), daemon=True).start()

    def _begin_serving(self, slot: WorkerSlot, worker: WorkerProcess) -> None:
        """Give a worker the adapters that the others have, then requests; on a thread of its own."""

        def do(operation: str, arguments: dict, timeout_s: float) -> Result:
            return worker.call(Call(next(self._ids), operation, arguments), timeout_s)

        try:
            self.adapters.restore(slot.index, do, lambda: slot.begin_serving(worker))
        except RequestError as error:
            logger.error("worker %d is not used: %s", slot.index, error)
            worker.process.kill()  # if it still runs; there will be another
            return
        with self._started:
            if all(s.worker is not None and s.worker.ready for s in self._slots):
                self._serving = True
                self._started.notify_all()

    def _on_heartbeat(self, index: int, snapshot: dict | None) -> None:
        try:
            self._heartbeat_callback(index, snapshot)
        except Exception:  # a metric that could not be set must not end the thread that answers everybody
            logger.exception("a heartbeat of worker %d was not taken", index)

    def _end_worker(self, slot: WorkerSlot) -> None:
        how = slot.end(stopping=self._stop_at is not None)
        self._on_heartbeat(slot.index, None)
        self._set_start_error(how)

    def _set_start_error(self, reason: str) -> None:
        """The first start must succeed; later ones are tried again."""
        with self._started:
            if not self._serving:
                self._start_error = self._start_error or reason
                self._started.notify_all()
