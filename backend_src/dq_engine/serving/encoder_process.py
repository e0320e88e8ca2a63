"""Audio encoded outside of the worker, seen from the worker: codecs share no interpreter with the engine.

FFmpeg's encoders are entered and left dozens of times for one patch. In threads of the worker each time would be a turn
at its interpreter, which the engine's loop then waits for.
"""

import socket
import struct
import threading
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from dq_engine.audio.output import MIN_RATE, NOTHING
from dq_engine.child_process import start_module

ANSWER_TIMEOUT_S, ANSWER_TIMEOUT_SHARE = 5, 0.05
"""A process that takes longer for one piece, and this share of the piece's length more, is taken for hung."""


class Output(msgspec.Struct, frozen=True):
    """What a stream's audio becomes; see `OutputEncoder`."""

    output_format: str
    model_rate: int
    sample_rate: int


class Piece(msgspec.Struct, tag=True):
    """A stream's next samples, float32. Answered with `Encoded` or `Failure`.

    Args:
        output: with the first piece.
    """

    stream: int
    output: Output | None
    samples: bytes
    last: bool


class Drop(msgspec.Struct, tag=True):
    """Nothing more comes of this stream. Not answered."""

    stream: int


class Encoded(msgspec.Struct, tag=True):
    data: bytes


class Failure(msgspec.Struct, tag=True):
    message: str


class EncoderProcess:
    """A process that encodes any number of streams. Making one starts it; one that dies or hangs is replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(Encoded | Failure)
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def encode(self, piece: Piece) -> bytes:
        """What the piece becomes.

        Raises:
            RuntimeError: it cannot be encoded, or the process has ended, and with it all streams that it had.
        """
        data, samples = msgspec.msgpack.encode(piece), len(piece.samples) / np.float32().nbytes
        with self._lock:
            try:
                self._connection.send_bytes(data)
                if not self._connection.poll(ANSWER_TIMEOUT_S + ANSWER_TIMEOUT_SHARE * samples / MIN_RATE):
                    raise TimeoutError
                answer = self._decoder.decode(self._connection.recv_bytes())
            except (OSError, EOFError) as error:
                self._replace()
                raise RuntimeError("the process that encoded it has ended") from error
        if isinstance(answer, Failure):
            raise RuntimeError(answer.message)
        return answer.data

    def drop(self, stream: int) -> None:
        """Forget a stream."""
        with self._lock:
            try:
                self._connection.send_bytes(msgspec.msgpack.encode(Drop(stream)))
            except OSError:  # it has ended, and forgotten all
                self._replace()

    def stop(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # One that hangs does not read: a send must end too.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", ANSWER_TIMEOUT_S, 0))
        with theirs:
            self._process = start_module("dq_engine.serving.encoder", stdin=theirs.fileno())
        self._connection = Connection(ours.detach())

    def _replace(self) -> None:
        self._end()
        self._start()

    def _end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


class RemoteEncoder:
    """An `OutputEncoder` in another process; it has the same methods.

    Args:
        process: where.
        stream: a number that no other stream of the process has.
        output: what comes out; valid.
    """

    def __init__(self, process: EncoderProcess, stream: int, output: Output) -> None:
        self._process, self._stream, self._output = process, stream, output
        self.model_rate = output.model_rate
        self._begun = self._over = False

    def encode(self, samples: np.ndarray) -> bytes:
        return self._ask(samples, last=False)

    def finish(self, samples: np.ndarray = NOTHING) -> bytes:
        return self._ask(samples, last=True)

    def close(self) -> None:
        if self._begun and not self._over:
            self._over = True
            self._process.drop(self._stream)

    def _ask(self, samples: np.ndarray, last: bool) -> bytes:
        output = None if self._begun else self._output
        self._begun, self._over = True, last
        return self._process.encode(Piece(self._stream, output, samples.tobytes(), last))
