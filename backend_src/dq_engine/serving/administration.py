"""What can be asked for over the control socket, and who may ask: each operation, its arguments, and what it calls."""

import contextlib
import hmac
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from dq_engine.errors import RequestError, invalid
from dq_engine.serving.control_protocol import MAX_TIMEOUT_S, ControlCall, ControlResult
from dq_engine.serving.supervisor import Supervisor

logger = logging.getLogger(__name__)

_REPEAT_TIMEOUT_S = 120.0

Payload = bytes | None


class Arguments(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Of an operation that needs none."""


class Encode(Arguments):
    """`purpose`: "reference" or "prompt". The payload is the recording."""

    purpose: str


class Named(Arguments):
    name: str


class RegisterVoice(Named):
    """A voice: recordings as base64, or latents as one flat list of numbers; what is large may be the payload."""

    reference_audio: str | None = None
    reference_latents: list[float] | None = None
    prompt_audio: str | None = None
    prompt_latents: list[float] | None = None
    prompt_text: str | None = None
    payload: Literal["reference_audio", "reference_latents", "prompt_audio", "prompt_latents"] = "reference_audio"


class RegisterLora(Named):
    """`path`: as `DqCoreEngine.register_lora` takes it."""

    path: str


class Administration:
    """Answers control calls, from any thread.

    Args:
        supervisor: of the engine workers.
        token: what callers must know for everything but `encode`; None if anybody may.
    """

    def __init__(self, supervisor: Supervisor, token: str | None) -> None:
        self._supervisor, self._token = supervisor, token
        supervisor.on_worker_back = self.worker_is_back
        self._adapters: dict[str, str] = {}
        """Path of each adapter that was registered here; a worker that starts again gets them."""
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        """Names of adapters that are being changed; guarded by _lock."""
        self._open: dict[str, tuple[type[Arguments], Callable]] = {"encode": (Encode, self._on_a_worker)}
        self._fenced: dict[str, tuple[type[Arguments], Callable]] = {
            "register_voice": (RegisterVoice, self._register_voice),
            "list_voices": (Arguments, self._on_a_worker),
            "get_voice": (Named, self._on_a_worker),
            "delete_voice": (Named, self._on_a_worker),
            "register_lora": (RegisterLora, self._register_lora),
            "unregister_lora": (Named, self._unregister_lora),
            "list_loras": (Arguments, self._on_all_workers),
            "drain": (Arguments, self._drain),
            "undrain": (Arguments, self._drain),
            "statistics": (Arguments, self._statistics),
            "information": (Arguments, self._on_a_worker),
        }

    def handle(self, call: ControlCall) -> ControlResult:
        """Do what a call asks for.

        Raises:
            RequestError: INVALID_ARG naming `operation`, `arguments` or `token`, or what the operation raises.
        """
        table = self._open
        if call.operation not in table:
            if self._token and not hmac.compare_digest((call.token or "").encode(), self._token.encode()):
                raise invalid("token", "is not the administration's")
            table = self._fenced
        if call.operation not in table:
            raise invalid("operation", f'must be one of {", ".join(table)}, got "{call.operation}"')
        kind, function = table[call.operation]
        try:
            arguments = msgspec.json.decode(call.arguments, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise invalid("arguments", str(error)) from None
        return function(
            call.operation, msgspec.to_builtins(arguments), call.payload, min(max(call.timeout_s, 0.0), MAX_TIMEOUT_S)
        )

    def worker_is_back(self, worker: int) -> None:
        """A worker has started again: what was registered while it served is registered anew, on another thread."""
        threading.Thread(target=self._repeat, args=(worker,), name="dq-repeat", daemon=True).start()

    def _on_a_worker(self, operation: str, arguments: dict, payload: Payload, timeout_s: float) -> ControlResult:
        result = self._supervisor.call(operation, arguments, payload, timeout_s)
        return ControlResult(result.value, result.payload)

    def _on_all_workers(
        self, operation: str, arguments: dict, payload: bytes | None, timeout_s: float
    ) -> ControlResult:
        workers = []
        for worker in self._supervisor.ready_workers:
            result = self._supervisor.call(operation, arguments, payload, timeout_s, worker)
            workers.append({"worker": worker, **result.value})
        return ControlResult({"workers": workers})

    def _register_voice(
        self, operation: str, arguments: dict, payload: bytes | None, timeout_s: float
    ) -> ControlResult:
        arguments["given_as_payload"] = arguments.pop("payload", "reference_audio")
        return self._on_a_worker(operation, arguments, payload, timeout_s)

    def _register_lora(self, operation: str, arguments: dict, payload: Payload, timeout_s: float) -> ControlResult:
        name = arguments["name"]
        with self._changing(name):
            done = []
            try:
                for worker in self._supervisor.ready_workers:
                    result = self._supervisor.call(operation, arguments, None, timeout_s, worker)
                    done.append({"worker": worker, **result.value})
            except RequestError:
                for entry in done:  # all of them have an adapter or none
                    self._take_back(entry["worker"], name)
                raise
            self._adapters[name] = arguments["path"]
        return ControlResult({"workers": done})

    def _unregister_lora(self, operation: str, arguments: dict, payload: Payload, timeout_s: float) -> ControlResult:
        with self._changing(arguments["name"]):
            self._adapters.pop(arguments["name"], None)
            return self._on_all_workers(operation, arguments, payload, timeout_s)

    def _take_back(self, worker: int, name: str) -> None:
        try:
            if (path := self._adapters.get(name)) is not None:
                self._supervisor.call("register_lora", {"name": name, "path": path}, None, _REPEAT_TIMEOUT_S, worker)
            else:
                self._supervisor.call("unregister_lora", {"name": name}, None, _REPEAT_TIMEOUT_S, worker)
        except RequestError as error:
            logger.error("worker %d keeps the adapter %s, which others could not register: %s", worker, name, error)

    def _repeat(self, worker: int) -> None:
        """Register all adapters with a worker."""
        for name, path in list(self._adapters.items()):
            try:
                self._supervisor.call("register_lora", {"name": name, "path": path}, None, _REPEAT_TIMEOUT_S, worker)
            except RequestError as error:
                logger.error("worker %d serves without the adapter %s: %s", worker, name, error)

    @contextlib.contextmanager
    def _changing(self, name: str) -> Iterator[None]:
        """Keep other operations off a name."""
        with self._lock:
            if name in self._busy:
                raise RequestError("UNAVAILABLE", f'name: "{name}" is being changed by another operation; try again')
            self._busy.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._busy.remove(name)

    def _drain(self, operation: str, *_) -> ControlResult:
        self._supervisor.draining = operation == "drain"
        return ControlResult({"draining": self._supervisor.draining})

    def _statistics(self, operation: str, arguments: dict, payload: Payload, timeout_s: float) -> ControlResult:
        result = self._on_all_workers("snapshot", {}, None, timeout_s)
        return ControlResult({"draining": self._supervisor.draining, **result.value})
