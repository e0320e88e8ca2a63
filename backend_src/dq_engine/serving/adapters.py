"""The adapters of all engine workers: the same in each, also in one that is started again."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from dq_engine.errors import RequestError
from dq_engine.serving.messages import Result

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0
"""Longest wait for a worker that reads an adapter, where nobody gives another."""


class Adapters:
    """Registers adapters with every worker. From any thread; of two changes of one name at once, one is refused.

    Args:
        call: has a worker, given last, do an operation: `Supervisor.call`.
        workers: the numbers of the workers that serve now.
        preloaded: paths by name; what the workers have when they first serve.
    """

    def __init__(
        self, call: Callable[..., Result], workers: Callable[[], Sequence[int]], preloaded: Mapping[str, str]
    ) -> None:
        self._call, self._workers = call, workers
        self._lock = threading.Lock()
        self._paths = dict(preloaded)
        self._names_lock = threading.Lock()
        self._names_in_change: set[str] = set()
        """Guarded by _names_lock."""

    def register(self, name: str, path: str, timeout_s: float = TIMEOUT_S) -> list[dict]:
        """Offer an adapter in every worker, or in none if one of them refuses it; see `DqCoreEngine.register_lora`.

        Returns:
            For each worker its number, `worker`, and the adapter as its engine describes it.

        Raises:
            RequestError: as the engine's; UNAVAILABLE if no worker serves, while the name is being changed already, or
                when changes of other names take longer than `timeout_s`.
        """
        done = []
        with self._changing(name, timeout_s):
            try:
                for worker in self._serving():
                    done.append(self._do("register_lora", {"name": name, "path": path}, worker, timeout_s))
            except RequestError:
                for entry in done:
                    self._take_back(name, entry["worker"])
                raise
            self._paths[name] = path
        return done

    def unregister(self, name: str, timeout_s: float = TIMEOUT_S) -> list[dict]:
        """Take an adapter back from every worker; see `DqCoreEngine.unregister_lora`. As `register`.

        Where one worker fails, the others have it no more all the same.
        """
        done, errors = [], []
        with self._changing(name, timeout_s):
            workers = self._serving()
            self._paths.pop(name, None)
            for worker in workers:
                try:
                    done.append(self._do("unregister_lora", {"name": name}, worker, timeout_s))
                except RequestError as error:
                    errors.append(error)
        failed = [error for error in errors if error.code != "NOT_FOUND"]
        if failed or not done:
            raise (failed or errors)[0]
        return done

    def list(self) -> list[dict]:
        """For each worker its number, `worker`, and its `adapters`; see `DqCoreEngine.list_loras`."""
        return [self._do("list_loras", {}, worker, TIMEOUT_S) for worker in self._serving()]

    def restore(self, do: Callable[[str, dict], object], preloaded: Mapping[str, str]) -> None:
        """Register all of them with a worker that has been started and does not serve yet.

        Args:
            do: has that worker do an operation.
            preloaded: paths by name; what it has already.
        """
        with self._lock:
            for name, path in self._paths.items():
                if preloaded.get(name) == path:
                    continue
                try:
                    do("register_lora", {"name": name, "path": path})
                except RequestError as error:  # its file is gone, say: requests for it will be told
                    logger.error("the new worker serves without the adapter %s: %s", name, error)

    @contextlib.contextmanager
    def _changing(self, name: str, timeout_s: float) -> Iterator[None]:
        with self._names_lock:
            if name in self._names_in_change:
                raise RequestError("UNAVAILABLE", f'name: "{name}" is being changed by another operation; try again')
            self._names_in_change.add(name)
        try:
            if not self._lock.acquire(timeout=timeout_s):
                raise RequestError("UNAVAILABLE", "adapters are being changed by other operations; try again")
            try:
                yield
            finally:
                self._lock.release()
        finally:
            with self._names_lock:
                self._names_in_change.remove(name)

    def _serving(self) -> Sequence[int]:
        if not (workers := self._workers()):
            raise RequestError("UNAVAILABLE", "no engine worker is ready; a restart is under way")
        return workers

    def _take_back(self, name: str, worker: int) -> None:
        """Undo a registration: back to the adapter that had the name before, or to none."""
        try:
            if name in self._paths:
                self._do("register_lora", {"name": name, "path": self._paths[name]}, worker, TIMEOUT_S)
            else:
                self._do("unregister_lora", {"name": name}, worker, TIMEOUT_S)
        except RequestError as error:
            logger.error("worker %d keeps the adapter %s, which others could not register: %s", worker, name, error)

    def _do(self, operation: str, arguments: dict, worker: int, timeout_s: float) -> dict:
        return {"worker": worker, **self._call(operation, arguments, None, timeout_s, worker).value}
