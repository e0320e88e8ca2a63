"""What can be asked for over the control socket, and who may ask: each operation, its arguments, and what it calls."""

import hmac
from collections.abc import Callable
from typing import Literal

import msgspec

from dq_engine.errors import RequestError, invalid
from dq_engine.serving.control_protocol import MAX_TIMEOUT_S, ControlCall, ControlResult
from dq_engine.serving.supervisor import Supervisor

Payload = bytes | None


class Arguments(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Of an operation that needs none."""


class Encode(Arguments):
    """`purpose`: "reference" or "prompt". The payload is the recording."""

    purpose: str


class Named(Arguments):
    name: str


class RegisterVoice(Named):
    """A voice: recordings as base64, or latents as raw float32; one of them may be the payload."""

    reference_audio: str | None = None
    reference_latents: bytes | None = None
    prompt_audio: str | None = None
    prompt_latents: bytes | None = None
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
            if self._token and not call.token:
                raise invalid("token", "is required; voxcpm-admin takes it from --token or DQ_ENGINE_ADMIN_TOKEN")
            if self._token and not hmac.compare_digest(call.token.encode(), self._token.encode()):
                raise invalid("token", "is not the administration's")
            table = self._fenced
        if call.operation not in table:
            raise invalid("operation", f'must be one of {", ".join(table)}, got "{call.operation}"')
        kind, function = table[call.operation]
        try:
            arguments = msgspec.convert(call.arguments, kind, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            raise invalid("arguments", str(error)) from None
        arguments = msgspec.to_builtins(arguments, builtin_types=(bytes,))
        return function(call.operation, arguments, call.payload, min(max(call.timeout_s, 0.0), MAX_TIMEOUT_S))

    def _on_a_worker(self, operation: str, arguments: dict, payload: Payload, timeout_s: float) -> ControlResult:
        result = self._supervisor.call(operation, arguments, payload, timeout_s)
        return ControlResult(result.value, result.payload)

    def _on_all_workers(self, operation: str, arguments: dict, payload: Payload, timeout_s: float) -> ControlResult:
        workers = []
        for worker in self._supervisor.ready_workers:
            try:
                result = self._supervisor.call(operation, arguments, payload, timeout_s, worker)
            except RequestError:
                if worker in self._supervisor.ready_workers:
                    raise
                continue  # it has died since, and is no longer one of them
            workers.append({"worker": worker, **result.value})
        return ControlResult({"workers": workers})

    def _register_voice(self, operation: str, arguments: dict, payload: Payload, timeout_s: float) -> ControlResult:
        arguments["given_as_payload"] = arguments.pop("payload", "reference_audio")
        return self._on_a_worker(operation, arguments, payload, timeout_s)

    def _register_lora(self, operation: str, arguments: dict, payload: Payload, timeout_s: float) -> ControlResult:
        return ControlResult({"workers": self._supervisor.adapters.register(**arguments, timeout_s=timeout_s)})

    def _unregister_lora(self, operation: str, arguments: dict, payload: Payload, timeout_s: float) -> ControlResult:
        return ControlResult({"workers": self._supervisor.adapters.unregister(**arguments, timeout_s=timeout_s)})

    def _drain(self, operation: str, *_) -> ControlResult:
        self._supervisor.draining = operation == "drain"
        return ControlResult({"draining": self._supervisor.draining})

    def _statistics(self, operation: str, arguments: dict, payload: Payload, timeout_s: float) -> ControlResult:
        result = self._on_all_workers("snapshot", {}, None, timeout_s)
        return ControlResult({"draining": self._supervisor.draining, **result.value})
