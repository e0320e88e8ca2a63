"""What can be asked for over the control socket, and who may ask: each operation, its arguments, and what it calls."""

import hmac
from collections.abc import Callable

import msgspec

from dq_engine.errors import invalid
from dq_engine.serving.control_protocol import MAX_TIMEOUT_S, ControlCall, ControlResult
from dq_engine.serving.supervisor import Supervisor


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No arguments."""


class Encode(msgspec.Struct, forbid_unknown_fields=True):
    """`purpose`: "reference" or "prompt". The payload is the recording."""

    purpose: str


class Administration:
    """Answers control calls, from any thread.

    Args:
        supervisor: of the engine workers.
        token: what callers must know for everything but `encode`; None if anybody may.
    """

    def __init__(self, supervisor: Supervisor, token: str | None) -> None:
        self._supervisor, self._token = supervisor, token
        self._open: dict[str, tuple[type, Callable]] = {"encode": (Encode, self._encode)}
        self._fenced: dict[str, tuple[type, Callable]] = {
            "drain": (Nothing, self._drain),
            "undrain": (Nothing, self._undrain),
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
        return function(arguments, call.payload, min(max(call.timeout_s, 0.0), MAX_TIMEOUT_S))

    def _encode(self, arguments: Encode, payload: bytes | None, timeout_s: float) -> ControlResult:
        result = self._supervisor.call("encode", {"purpose": arguments.purpose}, payload, timeout_s)
        return ControlResult(result.value, result.payload)

    def _drain(self, *_) -> ControlResult:
        self._supervisor.draining = True
        return ControlResult({"draining": True})

    def _undrain(self, *_) -> ControlResult:
        self._supervisor.draining = False
        return ControlResult({"draining": False})
