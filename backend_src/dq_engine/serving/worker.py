"""The engine worker: a process that owns one engine and talks to its supervisor.

    python -m dq_engine.serving.worker INBOX OUTBOX

INBOX and OUTBOX are zmq endpoints that the supervisor has bound. The first line of standard input is the `EngineConfig`
as JSON; the supervisor then keeps that pipe open. Its end means that the supervisor is gone, however it ended, and the
worker ends at once.
"""

import argparse
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import zmq

from dq_engine.audio.output import OutputEncoder, check_output
from dq_engine.config import EngineConfig
from dq_engine.errors import CheckpointError, RequestError, as_unicode
from dq_engine.logs import configure
from dq_engine.request import Chunk
from dq_engine.serving.encoder_process import EncoderProcess, Output, RemoteEncoder
from dq_engine.serving.messages import (
    Call,
    Cancel,
    Failed,
    FromWorker,
    Heartbeat,
    Progress,
    Ready,
    Shutdown,
    StartFailed,
    Submit,
    decode_to_worker,
    encode,
)
from dq_engine.serving.operations import Operations
from dq_engine.serving.outbox import Outbox, OutgoingStream

logger = logging.getLogger("dq_engine.serving.worker")  # the module's own name is __main__

HEARTBEAT_S = 1.0
# Few, so that chunks wait in the outbox, where they are joined, and not in zmq, where they are not.
SEND_QUEUE_MESSAGES = 16
LINGER_MS = 500
# An mp3 costs 1.5 ms of a core for each patch of 160 ms.
MOST_ENCODERS = 8
VOICE_READERS = 4
_OWN_FORMATS = ("f32", "pcm16", "wav")
"""What takes hardly more than a copy is made here, unless the rate has to be converted."""


class Worker:
    """Serves one engine until it is told to shut down or the engine breaks.

    Args:
        engine: a started `DqCoreEngine`.
        outbox: takes what goes to the supervisor.
        encoders: one for each lane of the outbox but the first, which waits for none of them.
    """

    def __init__(self, engine, outbox: Outbox, encoders: list[EncoderProcess]) -> None:
        self._engine, self._outbox, self._encoders = engine, outbox, encoders
        self._operations = Operations(engine, outbox.post)
        self._streams = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._readers = ThreadPoolExecutor(VOICE_READERS, "dq-voice")
        self._reading: dict[int, bool] = {}
        """Streams whose voice is being read, and whether their client has left meanwhile; guarded by _lock."""
        self._ended: set[int] = set()
        """Streams that ended before `submit` returned their `Stream`."""

    def run(self, inbox: zmq.Socket) -> int:
        """Handle messages; the exit status of the process: 0 after a shutdown or SIGTERM, 1 when the engine broke."""
        poller = zmq.Poller()
        terminated = os.eventfd(0, os.EFD_CLOEXEC)
        signal.signal(signal.SIGTERM, lambda *_: os.eventfd_write(terminated, 1))
        poller.register(terminated, zmq.POLLIN)
        poller.register(inbox, zmq.POLLIN)
        next_heartbeat = time.monotonic()
        while True:
            if (now := time.monotonic()) >= next_heartbeat:
                next_heartbeat = now + HEARTBEAT_S
                snapshot = self._engine.snapshot()
                self._outbox.post(Heartbeat(snapshot))
                if snapshot.get("closed"):
                    logger.error("the engine serves no more: %s", snapshot["closed"])
                    return 1
                if snapshot.get("stalled"):
                    logger.critical("a step hangs (step_timeout_s); the worker ends")
                    os._exit(1)  # the engine's thread cannot be stopped any more
            events = dict(poller.poll(max(0.0, 1e3 * (next_heartbeat - now))))
            if terminated in events:
                self._stopping = True
                return 0
            if inbox not in events:
                continue
            message = decode_to_worker(inbox.recv())
            if isinstance(message, Submit) and message.request.voice is not None:
                # Its file may lie on a share that is slow, or answers no more: that is nobody else's concern.
                with self._lock:
                    self._reading[message.id] = False
                self._readers.submit(self._submit, message)
            elif isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Cancel):
                self._cancel(message.id)
            elif isinstance(message, Call):
                self._operations.handle(message)
            elif isinstance(message, Shutdown):
                self._stopping = True
                return 0

    def _submit(self, message: Submit) -> None:
        try:
            model_rate = self._engine.sample_rate
            sample_rate = model_rate if message.sample_rate is None else message.sample_rate
            check_output(message.output_format, sample_rate)
            if message.output_format.removesuffix("_base64") in _OWN_FORMATS and sample_rate == model_rate:
                encoder, lane = OutputEncoder(message.output_format, model_rate, sample_rate), 0
            else:
                number = message.id % len(self._encoders)
                output = Output(message.output_format, model_rate, sample_rate)
                encoder, lane = RemoteEncoder(self._encoders[number], message.id, output), 1 + number
            outgoing = OutgoingStream(
                message.id, encoder, sample_rate, not message.stream, lambda: self._cancel(message.id), lane
            )
            stream = self._engine.submit(message.request, lambda chunk: self._on_chunk(outgoing, chunk))
        except RequestError as error:
            self._outbox.post(Failed(message.id, error.code, error.message))
        except Exception as error:
            logger.exception("taking a request failed")
            self._outbox.post(Failed(message.id, "INTERNAL", f"taking the request failed: {error}"))
        else:
            with self._lock:
                has_left = self._reading.get(message.id, False)
                if message.id in self._ended:
                    self._ended.remove(message.id)
                else:
                    self._streams[message.id] = stream
            if has_left:
                stream.cancel()
        finally:
            with self._lock:
                self._reading.pop(message.id, None)

    def _on_chunk(self, outgoing: OutgoingStream, chunk: Chunk) -> None:
        """On the engine's delivery thread."""
        if self._stopping and chunk.error is not None:
            chunk = dataclasses.replace(chunk, error=RequestError("UNAVAILABLE", "the server is shutting down"))
        if chunk.is_last:
            with self._lock:
                if self._streams.pop(outgoing.id, None) is None:
                    self._ended.add(outgoing.id)
        self._outbox.put(outgoing, chunk)

    def _cancel(self, id: int) -> None:
        with self._lock:
            if id in self._reading:
                self._reading[id] = True
            stream = self._streams.get(id)
        if stream is not None:
            stream.cancel()


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inbox")
    parser.add_argument("outbox")
    arguments = parser.parse_args()
    # Ctrl-C reaches the whole foreground group; when to end is the supervisor's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The thread that sends audio must not wait 5 ms for the engine's to give the interpreter up.
    sys.setswitchinterval(0.001)

    with open(0, "rb", buffering=0, closefd=False) as lifeline:
        # The supervisor has applied the environment already; EngineConfig(...) would apply it again.
        config = EngineConfig.model_construct(**json.loads(lifeline.readline()))
    configure(config.log_level)
    threading.Thread(target=_end_with_supervisor, name="dq-lifeline", daemon=True).start()

    context = zmq.Context()
    inbox, socket = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    socket.set(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
    socket.set(zmq.LINGER, LINGER_MS)
    inbox.set(zmq.LINGER, 0)
    inbox.connect(arguments.inbox)
    socket.connect(arguments.outbox)

    sending = threading.Lock()  # a zmq socket is not for several threads

    def send(message: FromWorker) -> None:
        data = encode(message)
        with sending:
            socket.send(data)

    encoders = [EncoderProcess() for _ in range(min(MOST_ENCODERS, max(1, len(os.sched_getaffinity(0)) // 2)))]
    outbox = Outbox(send, 1 + len(encoders))
    status = _serve(config, inbox, outbox, encoders)
    outbox.close()
    for encoder in encoders:
        encoder.stop()
    socket.close()
    inbox.close()
    context.term()
    logging.shutdown()
    # Tearing torch down takes a second, and there is nothing left to save.
    os._exit(status)


def _serve(config: EngineConfig, inbox: zmq.Socket, outbox: Outbox, encoders: list[EncoderProcess]) -> int:
    try:
        from dq_engine.engine import DqCoreEngine  # heavy: after the lifeline and the sockets stand

        engine = DqCoreEngine(config)
        engine.start(lambda stage, fraction: outbox.post(Progress(stage, fraction)))
    except (CheckpointError, ValueError) as error:
        outbox.post(StartFailed(as_unicode(str(error))))
        return 1
    except Exception as error:
        logger.exception("the engine did not start")
        outbox.post(StartFailed(as_unicode(f"{type(error).__name__}: {error}")))
        return 1
    rates = engine.sample_rate, engine.encoder_sample_rate
    outbox.post(Ready(*rates, engine.feat_dim, engine.patch_size, engine.patch_samples))
    try:
        return Worker(engine, outbox, encoders).run(inbox)
    finally:
        engine.stop()


def _end_with_supervisor() -> None:
    os.read(0, 1)  # nothing is ever written: this returns when the last writer is gone
    os._exit(2)


if __name__ == "__main__":
    main()
