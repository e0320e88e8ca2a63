"""Calls of the supervisor to its workers: answers, errors, time limits, a worker that dies, draining."""

import os
import signal
import threading

import numpy as np
import pytest
from collector import TEXT, Collector, config, long_request, wait_until
from reference.recordings import write_voice

from dq_engine.errors import RequestError
from dq_engine.request import Request
from dq_engine.serving.messages import Call, Failed, Finished, Result
from dq_engine.serving.operations import MAX_CALLS, Operations
from dq_engine.serving.supervisor import Supervisor


@pytest.fixture(scope="module")
def supervisor():
    supervisor = Supervisor([config(max_num_seqs=4)])
    supervisor.start()
    yield supervisor
    supervisor.stop()


def refusal(supervisor, *arguments, **options) -> str:
    with pytest.raises(RequestError) as error:
        supervisor.call(*arguments, **options)
    return str(error.value)


def test_a_recording_is_encoded_beside_running_streams(supervisor, tmp_path):
    audio = write_voice(tmp_path / "v.wav", seconds=0.5, rate=16_000, channels=1, pitch=150, seed=1).read_bytes()
    running = Collector(supervisor, long_request())
    running.next()
    result = supervisor.call("encode", {"purpose": "reference"}, audio, 30)
    assert result.value == {"seconds": 0.5}
    latents = np.frombuffer(result.payload, np.float32).reshape(-1, 64)
    assert len(latents) % 4 == 0
    assert 12 <= len(latents) <= 16
    running.next()  # it goes on
    running.routed.cancel()
    running.rest()
    given, sent = (
        Collector(supervisor, Request(text=TEXT, seed=1, max_generate_length=2, return_latents=True, **fields)).rest()
        for fields in ({"reference_latents": latents}, {"reference_audio": audio})
    )
    np.testing.assert_allclose(given[-1][1].latents, sent[-1][1].latents, atol=1e-4)


def test_errors_of_calls(supervisor):
    assert refusal(supervisor, "encode", {"purpose": "x"}, b"x", 30).startswith("INVALID_ARG: purpose: ")
    assert refusal(supervisor, "encode", {"purpose": "prompt"}, None, 30) == "INVALID_ARG: audio: is empty"
    assert refusal(supervisor, "fly", {}, None, 30) == 'INVALID_ARG: operation: there is none named "fly"'
    assert refusal(supervisor, "encode", {"wings": 2}, None, 30).startswith("INTERNAL: encode failed: ")
    none = "UNAVAILABLE: no engine worker is ready; a restart is under way"
    assert refusal(supervisor, "snapshot", {}, None, 30, worker=1) == none
    assert supervisor.call("snapshot", {}, None, 30, worker=0).value["slots"] == 4


def test_a_call_that_cannot_be_sent_is_not_waited_for(supervisor):
    (slot,) = supervisor._slots
    before = dict(slot.worker._streams)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        supervisor.call("get_voice", {"name": "\ud800"}, None, 5.0)
    assert slot.worker._streams == before


def test_a_call_that_takes_too_long_is_given_up(supervisor):
    worker = supervisor._slots[0].worker
    os.kill(worker.process.pid, signal.SIGSTOP)
    try:
        assert refusal(supervisor, "snapshot", {}, None, 0.2) == "UNAVAILABLE: snapshot was not answered within 0.2 s"
        assert worker.load == (False, 0)
    finally:
        os.kill(worker.process.pid, signal.SIGCONT)
    assert supervisor.call("snapshot", {}, None, 30).value["slots"] == 4  # the late answer disturbs nobody


def test_draining_lets_streams_end_and_takes_no_more(supervisor):
    running = Collector(supervisor, Request(text=TEXT, min_generate_length=30, max_generate_length=30))
    running.next()
    supervisor.draining = True
    with pytest.raises(RequestError, match="^UNAVAILABLE: the server is being drained$"):
        Collector(supervisor, Request(text=TEXT))
    assert isinstance(running.rest()[-1][1], Finished)
    supervisor.draining = False
    assert isinstance(Collector(supervisor, Request(text=TEXT, max_generate_length=1)).rest()[-1][1], Finished)


def test_a_worker_that_dies_fails_its_calls(supervisor):
    pid = supervisor._slots[0].worker.process.pid
    os.kill(pid, signal.SIGSTOP)
    errors = []
    thread = threading.Thread(target=lambda: errors.append(refusal(supervisor, "snapshot", {}, None, 30)))
    thread.start()
    wait_until(lambda: supervisor._slots[0].worker.load > (False, 0), 10, "the call")
    os.kill(pid, signal.SIGKILL)
    thread.join(20)
    assert errors == ["INTERNAL: the engine worker 0 died; its streams are lost"]


def test_the_workers_calls_are_bounded():
    class Engine:
        def encode(self, audio, purpose):
            assert release.wait(20)
            return np.zeros((4, 64), np.float32), 0.1

    release, answers = threading.Event(), []
    operations = Operations(Engine(), answers.append)
    for id in range(MAX_CALLS):
        operations.handle(Call(id, "encode", {"purpose": "prompt"}, b"x"))
    assert answers == []
    operations.handle(Call(99, "encode", {"purpose": "prompt"}, b"x"))
    assert answers == [Failed(99, "UNAVAILABLE", f"the engine worker has {MAX_CALLS} calls already")]
    release.set()
    wait_until(lambda: len(answers) == MAX_CALLS + 1, 20, "all answers")
    assert all(isinstance(answer, Result) for answer in answers[1:])
