"""The adapters of all engine workers: the same in each, also in one that is started again."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dq_engine.errors import RequestError
from dq_engine.serving.messages import Result

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0
"""Longest wait for a worker that reads an adapter, where nobody gives another; and for one that reads all of them."""


@dataclass(frozen=True)
class _Files:
    """Where an adapter comes from. `digest`: of what lay there, see `AdapterRegistry.list`; None until it is known."""

    path: str
    digest: str | None = None


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
        self._files = {name: _Files(path) for name, path in preloaded.items()}
        self._missing: set[tuple[int, str]] = set()
        """Workers that go without an adapter which others have."""
        self._names_lock = threading.Lock()
        self._names_in_change: set[str] = set()
        """Guarded by _names_lock."""

    @property
    def names(self) -> list[str]:
        """Of all that can be asked for."""
        return sorted(self._files)

    def is_missing(self, worker: int, name: str) -> bool:
        """Whether a worker goes without an adapter, so that requests for it had better go to another."""
        return (worker, name) in self._missing

    def register(self, name: str, path: str, timeout_s: float = TIMEOUT_S) -> list[dict]:
        """Offer an adapter in every worker, or in none if one of them refuses it; see `DqCoreEngine.register_lora`.

        Returns:
            For each worker its number, `worker`, and the adapter as its engine describes it.

        Raises:
            RequestError: as the engine's; INVALID_ARG, too, if its files change before all have read them; UNAVAILABLE
                if no worker serves, while the name is being changed already, or when it takes longer than `timeout_s`.
        """
        done, files, ends = [], _Files(path), time.monotonic() + timeout_s
        with self._changing(name, ends):
            workers = self._serving()
            try:
                for worker in workers:
                    done.append(self._register(name, files, worker, ends))
                    files = _Files(path, done[-1].get("digest"))  # the others must read the very same
            except RequestError:
                for entry in done:
                    self._put_back(name, entry["worker"])
                raise
            self._files[name] = files
            self._missing.difference_update([(worker, name) for worker in workers])
        return done

    def unregister(self, name: str, timeout_s: float = TIMEOUT_S) -> list[dict]:
        """Take an adapter back from every worker; see `DqCoreEngine.unregister_lora`. As `register`.

        Where one worker fails, the others have it no more all the same. One that dies is no failure: it has none.
        """
        done, errors, ends = [], {}, time.monotonic() + timeout_s
        with self._changing(name, ends):
            workers = self._serving()
            known = self._files.pop(name, None) is not None
            for worker in workers:
                try:
                    done.append(self._do("unregister_lora", {"name": name}, worker, ends))
                except RequestError as error:
                    errors[worker] = error
                self._missing.discard((worker, name))
        failed = [e for worker, e in errors.items() if e.code != "NOT_FOUND" and worker in self._workers()]
        if failed or not (done or known):
            raise failed[0] if failed else errors[workers[0]]
        return done

    def restore(self, worker: int, do: Callable[[str, dict, float], Result], serve: Callable[[], None]) -> None:
        """Give a worker that does not serve yet what the others have, on its device too as far as there is room.

        It reads the files anew. What it cannot read, or what is not what another worker has, it goes without.

        Args:
            worker: its number.
            do: has it do an operation, within a time in seconds.
            serve: called when it has all; none of them is changed before.

        Raises:
            RequestError: it answers nothing; `serve` was not called.
        """
        ends, read, errors = time.monotonic() + TIMEOUT_S, [], {}
        with self._lock:
            self._missing = {entry for entry in self._missing if entry[0] != worker}
            has = _digests(do("list_loras", {}, TIMEOUT_S)) if self._files else {}
            for name, files in self._files.items():
                try:
                    if name not in has or files.digest not in (None, has[name]):  # it has preloaded the rest
                        answer = do("register_lora", self._arguments(name, files, worker), _left(ends))
                        read.append(name)
                        has[name] = answer.value.get("digest")
                    self._files[name] = _Files(files.path, has[name])
                except RequestError as error:
                    errors[name] = error
            self._missing |= {(worker, name) for name in errors}
            if errors:
                names, error = ", ".join(errors), next(iter(errors.values()))
                logger.error("worker %d goes without %s, until registered anew: %s", worker, names, error)
            if read:
                try:
                    do("load_loras", {"names": read}, _left(ends))
                except RequestError as error:  # the first who asks for one waits for it
                    logger.warning("worker %d has loaded no adapters: %s", worker, error)
            serve()

    @contextlib.contextmanager
    def _changing(self, name: str, ends: float) -> Iterator[None]:
        with self._names_lock:
            if name in self._names_in_change:
                raise RequestError("UNAVAILABLE", f'name: "{name}" is being changed by another operation; try again')
            self._names_in_change.add(name)
        try:
            if not self._lock.acquire(timeout=_left(ends)):
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

    def _arguments(self, name: str, files: _Files, worker: int) -> dict:
        """Of a registration. Where no other worker has the adapter, what lies there now is better than none."""
        held = any(other != worker and not self.is_missing(other, name) for other in self._workers())
        return {"name": name, "path": files.path, "digest": files.digest if held else None}

    def _register(self, name: str, files: _Files, worker: int, ends: float) -> dict:
        def too_late(answer: object) -> None:  # nobody was told that it has it
            if isinstance(answer, Result):
                threading.Thread(target=self._undo, args=(name, worker), daemon=True).start()

        arguments = {"name": name, "path": files.path, "digest": files.digest}
        return self._do("register_lora", arguments, worker, ends, too_late)

    def _undo(self, name: str, worker: int) -> None:
        with self._lock:
            self._put_back(name, worker)

    def _put_back(self, name: str, worker: int) -> None:
        """Undo a registration: back to the adapter that had the name before, or to none."""
        ends = time.monotonic() + TIMEOUT_S
        try:
            if (files := self._files.get(name)) is not None:
                try:
                    self._do("register_lora", self._arguments(name, files, worker), worker, ends)
                    return
                except RequestError as error:
                    logger.error("worker %d goes without %s, until registered anew: %s", worker, name, error)
                    self._missing.add((worker, name))
            self._do("unregister_lora", {"name": name}, worker, ends)
        except RequestError as error:
            logger.error("worker %d keeps an adapter %s that was refused: %s", worker, name, error)

    def _do(
        self,
        operation: str,
        arguments: dict,
        worker: int,
        ends: float,
        too_late: Callable[[object], None] = lambda answer: None,
    ) -> dict:
        return {"worker": worker, **self._call(operation, arguments, None, _left(ends), worker, too_late).value}


def _digests(listed: Result) -> dict[str, str | None]:
    """By name, of the adapters that requests can ask for."""
    return {a["name"]: a.get("digest") for a in listed.value.get("adapters", ()) if a["state"] != "draining"}


def _left(ends: float) -> float:
    return max(0.0, ends - time.monotonic())
