"""What travels over the control socket: a call, then its answer, each a length (4 bytes, little endian) and msgpack.

A connection carries one call. Nothing here is pickled, and every message is checked against its type and a most size.
"""

import contextlib
import socket
import struct
import time

import msgspec

from dq_engine.request import MAX_ENCODED_AUDIO_BYTES

MAX_ARGUMENTS_BYTES = 16 * 2**20
"""Of the arguments as JSON, from which callers make them."""
MAX_MESSAGE_BYTES = MAX_ENCODED_AUDIO_BYTES + MAX_ARGUMENTS_BYTES + 4096
MAX_TIMEOUT_S = 600.0
TRANSFER_TIMEOUT_S = 10.0
"""For a message to travel, once it has begun."""
_LENGTH = struct.Struct("<I")


class ControlCall(msgspec.Struct, frozen=True):
    """Do something.

    Args:
        operation: its name.
        arguments: by name; numbers in bulk as raw float32 bytes, so that they cost this process nothing.
        payload: a recording, say.
        token: what DQ_ENGINE_ADMIN_TOKEN has to be, for administration.
        timeout_s: how long the caller waits for the answer.
    """

    operation: str
    arguments: dict = {}
    payload: bytes | None = None
    token: str | None = None
    timeout_s: float = 60.0


class ControlResult(msgspec.Struct, tag=True, frozen=True):
    """What a call led to. `value` can be written as JSON."""

    value: dict
    payload: bytes | None = None


class ControlError(msgspec.Struct, tag=True, frozen=True):
    """A call failed; `code` and `message` as in `RequestError`."""

    code: str
    message: str


class ProtocolError(Exception):
    """The other side sent something that is no message, too much, or nothing in time."""


encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(ControlCall).decode
decode_answer = msgspec.msgpack.Decoder(ControlResult | ControlError).decode


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message.

    Raises:
        OSError: the other side is gone, or takes nothing for TRANSFER_TIMEOUT_S.
    """
    data = encode(message)
    connection.settimeout(TRANSFER_TIMEOUT_S)  # of the whole
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket, begin_timeout_s: float) -> bytearray | None:
    """A message's bytes; None if the other side closed without sending any.

    Args:
        begin_timeout_s: how long to wait for its first byte.

    Raises:
        TimeoutError: nothing came in time.
        ProtocolError: it is too long, or broke off.
        OSError: the other side is gone.
    """
    connection.settimeout(begin_timeout_s)
    if not (head := connection.recv(_LENGTH.size)):
        return None
    deadline = time.monotonic() + TRANSFER_TIMEOUT_S
    if len(head) < _LENGTH.size:
        head += _receive_exactly(connection, _LENGTH.size - len(head), deadline)
    (length,) = _LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {length} bytes, the limit is {MAX_MESSAGE_BYTES}")
    return _receive_exactly(connection, length, deadline)


def _receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytearray:
    data = bytearray(count)
    view, have = memoryview(data), 0
    while have < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            if not (got := connection.recv_into(view[have:])):
                raise ProtocolError(f"a message broke off after {have} of {count} bytes")
            have += got
        if have < count and time.monotonic() >= deadline:
            raise ProtocolError(f"a message took longer than {TRANSFER_TIMEOUT_S:g} s")
    return data
