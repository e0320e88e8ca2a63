"""Audio encoded in a process of its own is what it would be here; one that ends or hangs costs its streams only."""

import os
import select
import signal
import subprocess
import sys

import numpy as np
import pytest

from dq_engine.audio.output import OutputEncoder
from dq_engine.serving import encoder_process
from dq_engine.serving.encoder_process import EncoderProcess, Output, Piece, RemoteEncoder

RATE = 48_000
PIECES = [np.random.default_rng(n).uniform(-0.5, 0.5, 7680).astype(np.float32) for n in range(4)]


@pytest.fixture
def process():
    process = EncoderProcess()
    yield process
    process.stop()


def remote(process: EncoderProcess, stream: int, output_format: str = "mp3", rate: int = RATE) -> RemoteEncoder:
    return RemoteEncoder(process, stream, Output(output_format, RATE, rate))


def here(output_format: str, rate: int) -> list[bytes]:
    encoder = OutputEncoder(output_format, RATE, rate)
    return [*(encoder.encode(piece) for piece in PIECES[:-1]), encoder.finish(PIECES[-1])]


FORMATS = [("mp3", RATE), ("flac", RATE), ("mulaw", 8_000), ("f32", 16_000), ("mp3_base64", 24_000), ("wav", RATE)]


def test_many_streams_at_once_are_what_they_are_here(process):
    encoders = [remote(process, number, *output) for number, output in enumerate(FORMATS)]
    made = [[encoder.encode(piece) for encoder in encoders] for piece in PIECES[:-1]]
    made.append([encoder.finish(PIECES[-1]) for encoder in encoders])
    for output, bytes_there in zip(FORMATS, zip(*made, strict=True), strict=True):
        assert list(bytes_there) == here(*output), output


def test_a_process_that_dies_takes_its_streams_along_and_is_replaced(process):
    old = remote(process, 1)
    old.encode(PIECES[0])
    first = process.pid
    os.kill(first, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="has ended"):
        old.encode(PIECES[1])
    assert process.pid != first
    with pytest.raises(RuntimeError, match="that had encoded its beginning has ended"):
        old.encode(PIECES[2])
    assert remote(process, 2, "mulaw", 8_000).encode(PIECES[0]) == here("mulaw", 8_000)[0]


def test_a_process_that_hangs_is_replaced(process, monkeypatch):
    stream = remote(process, 1)
    stream.encode(PIECES[0])
    monkeypatch.setattr(encoder_process, "ANSWER_TIMEOUT_S", 1)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="has ended"):
        stream.encode(PIECES[1])
    monkeypatch.undo()
    assert remote(process, 2, "mulaw", 8_000).encode(PIECES[0]) == here("mulaw", 8_000)[0]


def test_one_stream_s_trouble_is_its_own(process):
    good = remote(process, 1, "mulaw", 8_000)
    begun = good.encode(PIECES[0])
    with pytest.raises(RuntimeError, match="RequestError"):
        remote(process, 2, "no format").encode(PIECES[0])
    assert [begun, good.encode(PIECES[1])] == here("mulaw", 8_000)[:2]


def test_a_stream_that_is_dropped_is_forgotten(process):
    stream = remote(process, 7)
    stream.encode(PIECES[0])
    stream.close()
    with pytest.raises(RuntimeError, match="has ended"):
        process.encode(Piece(7, None, b"", True))
    pid = process.pid
    unused = remote(process, 8)
    unused.close()  # nothing was begun, so nothing is said
    assert process.pid == pid


def test_it_ends_with_its_worker():
    code = """
        import sys, time
        from dq_engine.serving.encoder_process import EncoderProcess
        process = EncoderProcess()
        print(process.pid, flush=True)
        time.sleep(60)
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", "\n".join(map(str.strip, code.splitlines()))], stdout=subprocess.PIPE
    )
    pid = int(worker.stdout.readline())
    with open(os.pidfd_open(pid)) as pidfd:
        worker.kill()
        worker.wait()
        ended, _, _ = select.select([pidfd], [], [], 20)
    assert ended, "the process outlived its worker"
