"""Answers calls that come over the control socket, each on a thread of its own."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dq_engine.errors import RequestError
from dq_engine.serving.control_protocol import (
    TRANSFER_TIMEOUT_S,
    ControlCall,
    ControlError,
    ControlResult,
    ProtocolError,
    decode_call,
    receive,
    send,
)
from dq_engine.serving.control_socket import ControlSocket

logger = logging.getLogger(__name__)

MAX_CALLS = 32
"""At once; more are refused. Each may hold a message of MAX_MESSAGE_BYTES."""


class ControlServer:
    """Listens from the moment it is made.

    Args:
        path: of the socket.
        handle: answers a call, on any thread; raises `RequestError`.

    Raises:
        ControlSocketError: the socket cannot be opened.
    """

    def __init__(self, path: Path, handle: Callable[[ControlCall], ControlResult]) -> None:
        self._handle = handle
        self._socket = ControlSocket(path)
        self._room = threading.Semaphore(MAX_CALLS)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="dq-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more calls; those that are under way are still answered."""
        self._closed = True
        self._socket.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.listener.accept()
            except OSError as error:
                if self._closed:
                    return
                logger.error("no call can be taken: %s", error)  # no file handles, say
                time.sleep(0.1)
                continue
            if not self._room.acquire(blocking=False):
                self._refuse(connection)
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="dq-call", daemon=True).start()
            except RuntimeError:  # no more threads
                self._room.release()
                self._refuse(connection)

    def _refuse(self, connection: socket.socket) -> None:
        with connection:
            _answer(connection, ControlError("UNAVAILABLE", f"{MAX_CALLS} calls are under way already"))

    def _serve(self, connection: socket.socket) -> None:
        with connection:  # closed when there is room for the next: the client waits for that
            try:
                self._serve_one(connection)
            except Exception:
                logger.exception("a call failed")
            finally:
                self._room.release()

    def _serve_one(self, connection: socket.socket) -> None:
        try:
            data = receive(connection, TRANSFER_TIMEOUT_S)
            if data is None:  # somebody has looked whether the socket is alive
                return
            call = decode_call(data)
            del data
        except (ProtocolError, OSError, msgspec.MsgspecError) as error:
            _answer(connection, ControlError("INVALID_ARG", f"control call: {error}"))
            return
        try:
            answer = self._handle(call)
        except RequestError as error:
            answer = ControlError(error.code, error.message)
        except Exception as error:
            logger.exception("%s failed", call.operation)
            answer = ControlError("INTERNAL", f"{call.operation} failed: {error}")
        _answer(connection, answer)


def _answer(connection: socket.socket, answer: ControlResult | ControlError) -> None:
    try:
        send(connection, answer)
    except OSError as error:
        logger.warning("an answer was not taken: %s", error)
