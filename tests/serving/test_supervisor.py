"""The supervisor and real worker processes with the small model: audio, cancellation, death, restart, orderly ends."""

import logging
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import psutil
import pytest
from collector import SMALL, TEXT, Collector, config, long_request, wait_until

from dq_engine.errors import RequestError
from dq_engine.request import Request
from dq_engine.serving.messages import Audio, Failed, Finished
from dq_engine.serving.supervisor import STOP_S, Supervisor, WorkerStartError

pytestmark = pytest.mark.alone


def _worker_pids() -> list[int]:
    return [p.pid for p in psutil.Process().children() if "dq_engine.serving.worker" in " ".join(p.cmdline())]


def _is_ready(supervisor: Supervisor) -> bool:
    try:
        Collector(supervisor, Request(text="hello there", max_generate_length=1)).rest()
    except RequestError as error:
        assert error.code == "UNAVAILABLE"
        return False
    return True


@pytest.fixture(scope="module")
def heartbeats():
    return []


@pytest.fixture(scope="module")
def supervisor(heartbeats):
    supervisor = Supervisor([config(max_num_seqs=8)], lambda index, snapshot: heartbeats.append((index, snapshot)))
    supervisor.start()
    yield supervisor
    supervisor.stop()
    assert _worker_pids() == []


def test_a_stream_and_the_same_in_one_piece(supervisor):
    request = Request(text=TEXT, seed=3, return_latents=True)
    *chunks, last = [message for _, message in Collector(supervisor, request).rest()]
    assert all(isinstance(chunk, Audio) and chunk.sample_rate == 48000 for chunk in chunks)
    assert isinstance(last, Finished)
    assert last.finish_reason == "stop"
    assert (last.stats["seed"], last.stats["prompt_tokens"]) == (3, 29)
    patches = last.stats["patches"]
    assert len(chunks) >= patches // 2
    samples = np.frombuffer(b"".join(chunk.audio for chunk in [*chunks, last]), np.float32)
    assert samples.size == 7680 * patches
    assert 0.01 < np.sqrt(np.mean(samples**2)) < 0.5
    assert last.latents.shape == (4 * patches, 64)

    ((_, whole),) = Collector(supervisor, request, stream=False).rest()
    np.testing.assert_allclose(np.frombuffer(whole.audio, np.float32), samples, atol=1e-4)
    np.testing.assert_allclose(whole.latents, last.latents, atol=1e-4)

    # The last latents continue it: they travel to the worker as they came from it.
    prompt = Request(text=TEXT, prompt_text=TEXT, prompt_latents=whole.latents, max_generate_length=2)
    ((_, continued),) = Collector(supervisor, prompt, stream=False).rest()
    assert continued.stats["prompt_tokens"] > 29 + patches


def test_another_format_and_rate(supervisor):
    request = Request(text=TEXT, seed=3, max_generate_length=4)
    pieces = [message for _, message in Collector(supervisor, request, "wav", 16000).rest()]
    data = b"".join(piece.audio for piece in pieces)
    assert data[:4] == b"RIFF"
    assert len(data) == 44 + 2 * 4 * 2560
    assert {piece.sample_rate for piece in pieces} == {16000}


@pytest.mark.parametrize(
    ("request_", "output_format", "rate", "message"),
    [
        (Request(text=""), "f32", None, "text: is empty"),
        (Request(text=TEXT, cfg_value=float("nan")), "f32", None, "cfg_value: must be between 0 and 10, got nan"),
        (Request(text=TEXT, reference_audio=b"no audio"), "f32", None, "reference_audio: "),
        (Request(text=TEXT), "ogg", None, "output_format: must be one of"),
        (Request(text=TEXT), "f32", 7999, "sample_rate: must be between 8000 and 48000 Hz, got 7999"),
    ],
)
def test_a_bad_request_fails_alone(supervisor, request_, output_format, rate, message):
    ((_, failed),) = Collector(supervisor, request_, output_format, rate).rest()
    assert isinstance(failed, Failed)
    assert failed.code == "INVALID_ARG"
    assert failed.message.startswith(message)


def test_cancel_ends_a_stream_soon_and_frees_its_slot(supervisor, heartbeats):
    streams = [Collector(supervisor, long_request()) for _ in range(12)]  # some of them wait
    streams[0].next()
    begun = time.monotonic()
    for stream in streams:
        stream.routed.cancel()
        stream.routed.cancel()  # once more is no error
    for stream in streams:
        at, last = stream.rest()[-1]
        assert last == Failed(stream.routed.id, "CANCELLED", "the client left")
        assert at - begun < 2
    heartbeats.clear()
    wait_until(lambda: len(heartbeats) >= 2, 5, "heartbeats")
    assert (heartbeats[-1][1]["active"], heartbeats[-1][1]["queued"]) == (0, 0)
    streams[0].routed.cancel()  # a stream that is over: no error either


def test_heartbeats_count_streams(supervisor, heartbeats):
    streams = [Collector(supervisor, long_request()) for _ in range(10)]
    streams[0].next()
    heartbeats.clear()
    wait_until(lambda: len(heartbeats) >= 2, 5, "heartbeats")
    index, snapshot = heartbeats[-1]
    assert index == 0
    assert 1 <= snapshot["active"] <= snapshot["slots"] == 8
    assert snapshot["active"] + snapshot["queued"] == 10
    for stream in streams:
        stream.routed.cancel()
        stream.rest()


def test_the_sockets_are_private(supervisor):
    assert stat.S_IMODE(supervisor._folder.path.stat().st_mode) == 0o700
    assert supervisor._folder.path.stat().st_uid == os.getuid()


def test_a_killed_worker_fails_its_streams_within_a_second_and_comes_back(supervisor, heartbeats):
    (pid,) = _worker_pids()
    streams = [Collector(supervisor, long_request()) for _ in range(10)]
    streams[0].next()  # how many of the others run depends on the machine
    heartbeats.clear()
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for stream in streams:
        at, last = stream.rest()[-1]
        assert last == Failed(stream.routed.id, "INTERNAL", "the engine worker 0 died; its streams are lost")
        assert at - begun < 1
    with pytest.raises(RequestError, match="^UNAVAILABLE: no engine worker is ready; a restart is under way$"):
        supervisor.submit(Request(text=TEXT), "f32", None, True, pytest.fail)
    streams[0].routed.cancel()  # of a worker that is gone
    wait_until(lambda: (0, None) in heartbeats, 5, "word of the death")
    wait_until(lambda: _is_ready(supervisor), 40, "a new worker")
    (new,) = _worker_pids()
    assert new != pid
    assert isinstance(Collector(supervisor, Request(text=TEXT)).rest()[-1][1], Finished)


def test_a_worker_that_hangs_is_replaced(supervisor, monkeypatch):
    """Stopped in the middle of everything, it can neither speak nor send a heartbeat."""
    monkeypatch.setattr("dq_engine.serving.worker_slot.SILENCE_S", 3.0)
    collector = Collector(supervisor, long_request())
    collector.next()  # from now on the supervisor waits no longer than that
    (pid,) = _worker_pids()
    os.kill(pid, signal.SIGSTOP)
    *_, (_, last) = collector.rest()
    assert isinstance(last, Failed) and last.code == "INTERNAL"
    wait_until(lambda: _is_ready(supervisor), 60, "a new worker")
    assert _worker_pids() != [pid]


def test_sigterm_to_a_worker_ends_its_streams_in_order_and_is_no_error(supervisor, caplog):
    caplog.set_level(logging.INFO, "dq_engine")
    wait_until(lambda: _is_ready(supervisor), 40, "a worker")
    stream = Collector(supervisor, long_request())
    stream.next()
    os.kill(_worker_pids()[0], signal.SIGTERM)
    assert stream.rest()[-1][1].code == "UNAVAILABLE"
    wait_until(lambda: " ended: " in caplog.text, 10, "word of its end")
    wait_until(lambda: _is_ready(supervisor), 60, "a new worker")
    (end,) = (record for record in caplog.records if " ended: " in record.getMessage())
    assert end.getMessage().startswith("worker 0 ended: it was told to (SIGTERM); ")
    assert end.levelname == "INFO"


def test_stop_answers_running_streams_and_leaves_nothing():
    supervisor = Supervisor([config()])
    supervisor.start()
    folder, (pid,) = supervisor._folder.path, _worker_pids_of(supervisor)
    streams = [Collector(supervisor, long_request()) for _ in range(4)]
    streams[0].next()
    begun = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - begun < STOP_S
    for stream in streams:
        assert stream.rest()[-1][1].code == "UNAVAILABLE"
    assert not psutil.pid_exists(pid)
    assert not folder.exists()
    with pytest.raises(RequestError, match="^UNAVAILABLE: the server is shutting down$"):
        supervisor.submit(Request(text=TEXT), "f32", None, True, pytest.fail)


def _worker_pids_of(supervisor: Supervisor) -> list[int]:
    return [slot.worker.process.pid for slot in supervisor._slots if slot.worker is not None]


def test_two_workers_share_the_load_and_fail_apart():
    supervisor = Supervisor([config(), config()])
    supervisor.start()
    try:
        streams = [Collector(supervisor, long_request())]
        short = [Collector(supervisor, Request(text=TEXT, max_generate_length=1)) for _ in range(3)]
        assert [stream.routed.worker for stream in (*streams, *short)] == [0, 1, 1, 1]  # by work, not by count
        for stream in short:
            stream.rest()
        streams += [Collector(supervisor, long_request()) for _ in range(3)]
        assert sorted(stream.routed.worker for stream in streams) == [0, 0, 1, 1]
        for stream in streams[:2]:
            stream.next()
        os.kill(_worker_pids_of(supervisor)[1], signal.SIGKILL)
        for stream in streams:
            if stream.routed.worker == 1:
                assert stream.rest()[-1][1].code == "INTERNAL"
        again = Collector(supervisor, Request(text=TEXT, max_generate_length=2))
        assert again.routed.worker == 0
        assert isinstance(again.rest()[-1][1], Finished)
        for stream in streams:
            if stream.routed.worker == 0:
                stream.routed.cancel()
                assert stream.rest()[-1][1].code == "CANCELLED"
    finally:
        supervisor.stop()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all is neither a directory nor a hub id"),
        ({"model": str(SMALL.parent)}, "config.json"),
    ],
)
def test_a_worker_that_cannot_start_says_why(settings, message):
    supervisor = Supervisor([config().model_copy(update=settings)])
    with pytest.raises(WorkerStartError, match=message):
        supervisor.start()
    assert not supervisor._folder.path.exists()


def test_a_reason_that_is_no_unicode_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"architecture": "\\ud800"}')
    supervisor = Supervisor([config().model_copy(update={"model": str(tmp_path)})])
    with pytest.raises(WorkerStartError, match=re.escape('config.json has architecture "\\ud800"')):
        supervisor.start()


def test_a_worker_that_is_killed_while_it_starts():
    supervisor = Supervisor([config()])

    def kill() -> None:
        wait_until(lambda: bool(_worker_pids_of(supervisor)), 5, "a process")
        os.kill(_worker_pids_of(supervisor)[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(WorkerStartError, match="killed by SIGKILL"):
        supervisor.start()
    thread.join()
    assert not supervisor._folder.path.exists()


@pytest.mark.parametrize("when", ["starting", "serving"])
def test_a_worker_ends_with_its_killed_parent(when):
    script = f"""
        import sys
        from dq_engine.config import EngineConfig
        from dq_engine.request import Request
        from dq_engine.serving.supervisor import Supervisor
        supervisor = Supervisor([EngineConfig(model={str(SMALL)!r}, device="cpu", threads=1)])
        import threading, time
        def tell():
            while not supervisor._slots[0].worker: time.sleep(0.01)
            print(supervisor._slots[0].worker.process.pid, flush=True)
        threading.Thread(target=tell, daemon=True).start()
        supervisor.start()
        supervisor.submit(Request(text={TEXT!r}, min_generate_length=300, max_generate_length=400), "f32", None, True,
                          lambda message: print("audio", flush=True))
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    try:
        worker = psutil.Process(int(parent.stdout.readline()))
        if when == "serving":
            assert parent.stdout.readline() == "audio\n"
        else:
            time.sleep(0.5)
        assert worker.is_running()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 3, "the worker's end")
