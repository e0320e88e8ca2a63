"""Calls over the control socket, from another process of the same server."""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from dq_engine.errors import RequestError, invalid
from dq_engine.serving.control_protocol import (
    MAX_ARGUMENTS_BYTES,
    TRANSFER_TIMEOUT_S,
    ControlCall,
    ControlError,
    ControlResult,
    ProtocolError,
    decode_answer,
    receive,
    send,
)
from dq_engine.serving.control_socket import socket_path

logger = logging.getLogger(__name__)


def control_address(parameters: dict[str, str]) -> tuple[Path, str]:
    """Where the control socket is that a model's config.pbtxt parameters mean, and the name of the model it is of.

    `serves` is that name; `control_socket` is its setting, over which the environment's wins.
    """
    setting = os.environ.get("DQ_ENGINE_CONTROL_SOCKET") or parameters.get("control_socket")
    return socket_path(setting, parameters["serves"]), parameters["serves"]


def json_arguments(data: bytes) -> dict:
    """The arguments of a call that are given as JSON; a list of numbers becomes raw float32 bytes.

    Raises:
        RequestError: INVALID_ARG naming `arguments`, or the one that holds something else than numbers.
    """
    if len(data) > MAX_ARGUMENTS_BYTES:
        raise invalid("arguments", f"has {len(data)} bytes, the limit is {MAX_ARGUMENTS_BYTES}")
    try:
        arguments = msgspec.json.decode(data, type=dict)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid("arguments", str(error)) from None
    for name, value in arguments.items():
        if isinstance(value, list):
            if not all(type(number) in (int, float) for number in value):
                raise invalid(name, "must be one flat list of numbers")
            try:
                arguments[name] = np.array(value, "<f4").tobytes()
            except OverflowError:
                raise invalid(name, "must be one flat list of numbers of 32 bits") from None
    return arguments


class ControlClient:
    """Calls a model's engine, on threads of its own.

    Args:
        path: of the control socket.
        model: whose socket it is, for messages.
        threads: most calls at once.
        max_waiting: most calls that may wait for a thread.
    """

    def __init__(self, path: Path, model: str, threads: int, max_waiting: int) -> None:
        self._path, self._model = path, model
        self._threads = ThreadPoolExecutor(threads, "dq-call")
        self._most = threads + max_waiting
        self._room = threading.Semaphore(self._most)

    def submit(self, call: ControlCall, done: Callable[[ControlResult | RequestError], None]) -> None:
        """Call, and hand the answer to `done` on one of the client's threads.

        Raises:
            RequestError: UNAVAILABLE, too many calls wait; then `done` is not called.
        """
        if not self._room.acquire(blocking=False):
            raise RequestError("UNAVAILABLE", f"{self._most} calls are under way already; try again later")
        self._threads.submit(self._run, call, done)

    def call(self, call: ControlCall) -> ControlResult:
        """Call, and wait for the answer.

        Raises:
            RequestError: of the operation; UNAVAILABLE if the model is not there or does not answer in time.
        """
        try:
            connection = socket.socket(socket.AF_UNIX)
        except OSError as error:  # no file handles, say
            raise RequestError("UNAVAILABLE", f"the model {self._model} cannot be called: {error.strerror}") from None
        with connection:
            connection.settimeout(TRANSFER_TIMEOUT_S)
            try:
                connection.connect(str(self._path))
            except OSError:
                raise RequestError("UNAVAILABLE", f"the model {self._model} is not ready") from None
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused already: the answer says why
                send(connection, call)
            try:
                data = receive(connection, call.timeout_s + TRANSFER_TIMEOUT_S)
                if data is None:
                    raise RequestError("UNAVAILABLE", f"the model {self._model} has ended")
                answer = decode_answer(data)
                with contextlib.suppress(OSError):  # until the server has closed it: it has room for another call then
                    connection.recv(1)
            except TimeoutError:
                message = f"the model {self._model} has not answered within {call.timeout_s:g} s"
                raise RequestError("UNAVAILABLE", message) from None
            except (ProtocolError, OSError, msgspec.MsgspecError) as error:
                raise RequestError("UNAVAILABLE", f"the model {self._model} does not answer: {error}") from None
        if isinstance(answer, ControlError):
            raise RequestError(answer.code, answer.message)
        return answer

    def stop(self) -> None:
        """Take no more calls; those that wait for a thread are dropped, unanswered."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, call: ControlCall, done: Callable[[ControlResult | RequestError], None]) -> None:
        try:
            answer = self.call(call)
        except RequestError as error:
            answer = error
        except Exception as error:
            logger.exception("a call failed")
            answer = RequestError("INTERNAL", f"the call failed: {error}")
        finally:
            self._room.release()
        try:
            done(answer)
        except Exception:
            logger.exception("an answer was not taken")
