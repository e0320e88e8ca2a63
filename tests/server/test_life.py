"""The server's and the model's life: unload, load, a worker that dies, a stop half-way, tritonserver killed."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as grpcclient
from reference.recordings import write_voice
from talk import LONG, MEDIUM, TEXT, Talk, active_streams, inputs, speak, wait_until
from triton_server import ROOT, ServerError, TritonServer
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.alone


@pytest.fixture
def server(tmp_path_factory):
    """It is started among files with the names of modules, none of which must be taken for its own."""
    folder = tmp_path_factory.mktemp("misleading")
    for name in ("json", "logging", "queue", "numpy", "msgspec", "zmq", "torch"):
        (folder / f"{name}.py").write_text("raise ImportError('not this one')")
    script = folder / "start"
    script.write_text(f'#!/bin/sh\ncd {folder} && exec {ROOT}/docker/entrypoint.sh "$@"\n')
    script.chmod(0o755)
    with TritonServer(model=ROOT / "models" / "small", model_control=True, entrypoint=script) as server:
        yield server


@pytest.fixture
def voice(tmp_path) -> bytes:
    """A recording that becomes 8 frames."""
    return write_voice(tmp_path / "v.wav", seconds=0.3, rate=16_000, channels=1, pitch=150, seed=1).read_bytes()


MARKS = {
    "worker": "dq_engine.serving.worker",
    "encoder": "dq_engine.serving.encoder",
    "stub": "voxcpm2/1/model.py",
    "server": "bin/tritonserver",
}
"""In the first words of their command lines; of the stubs voxcpm2's own."""


def _processes(server: TritonServer, kind: str) -> list[psutil.Process]:
    """The server's processes of a kind."""
    found = []
    for process in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie too
            if any(MARKS[kind] in word for word in process.cmdline()[:4]):
                found.append(process)
    return found


def _all_processes(server: TritonServer) -> list[psutil.Process]:
    """The server's processes of every kind; encoders there are as many as the cores ask for."""
    by_kind = {kind: _processes(server, kind) for kind in MARKS}
    assert {kind: len(found) for kind, found in by_kind.items() if kind != "encoder"} == dict.fromkeys(
        ("worker", "stub", "server"), 1
    )
    assert by_kind["encoder"]
    return sum(by_kind.values(), [])


def _ends(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def _serves(server: TritonServer) -> bool:
    try:
        return bool(speak(server, {"text": TEXT, "max_generate_length": 1}))
    except InferenceServerException as error:
        assert error.message().startswith("UNAVAILABLE: ")
        return False


def _encode(client: grpcclient.InferenceServerClient, audio: bytes) -> str:
    """What a recording is answered with: the shape of its latents, or an error."""
    try:
        answer = client.infer("voxcpm2_encode", inputs({"audio": audio, "purpose": "prompt"}), client_timeout=60)
    except InferenceServerException as error:
        return error.message()
    return str(answer.as_numpy("latents").shape)


@pytest.mark.slow
def test_unload_and_load(server, voice):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        for _ in range(2):
            (worker,) = _processes(server, "worker")
            talks = [Talk(server, LONG) for _ in range(3)]
            talks[0].next()
            client.unload_model("voxcpm2")
            begun = time.monotonic()
            errors = [talk.error(5) for talk in talks]
            assert all(error.startswith("UNAVAILABLE: ") for error in errors), errors
            assert time.monotonic() - begun < 3
            with Talk(server, {"text": TEXT}) as late:
                assert "voxcpm2" in late.error()  # Triton's: no such model now
            for talk in talks:
                talk.close()
            wait_until(lambda worker=worker: _ends(worker), 5, "the worker is gone")
            assert not client.is_model_ready("voxcpm2")
            wait_until(lambda: not _processes(server, "stub"), 5, "the stub is gone")
            assert _encode(client, voice) == "UNAVAILABLE: the model voxcpm2 is not ready"
            client.load_model("voxcpm2")
            assert client.is_model_ready("voxcpm2")
            assert _encode(client, voice) == "(8, 64)"
            assert speak(server, {"text": TEXT})[-1].as_numpy("finish_reason").tolist() == [b"stop"]
        wait_until(lambda: active_streams(server) == 0, 3, "the gauge is back")


def test_a_reload_lets_running_streams_end(server, voice):
    (worker,) = _processes(server, "worker")
    with grpcclient.InferenceServerClient(server.grpc_url) as client, Talk(server, MEDIUM) as talk:
        talk.next()
        config = client.get_model_config("voxcpm2", as_json=True)["config"]
        config["parameters"]["queue_size"] = {"string_value": "7"}  # what has not changed is not loaded anew
        client.load_model("voxcpm2", config=json.dumps(config))
        assert _processes(server, "worker") != [worker]
        assert speak(server, {"text": TEXT})[-1].as_numpy("finish_reason").tolist() == [b"stop"]
        assert talk.rest()[-1].as_numpy("finish_reason").tolist() == [b"length"]
    wait_until(lambda: _ends(worker), 10, "the old worker is gone")
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        wait_until(lambda: len(_processes(server, "stub")) == 1, 10, "the old stub is gone")
        assert _encode(client, voice) == "(8, 64)", "the new one has taken the control socket over"


@pytest.mark.slow
def test_a_stub_that_dies_ends_the_server_and_its_streams():
    """Triton starts it no more, and goes on to say that it is ready: whoever started the server has to be told."""
    server = TritonServer(model=ROOT / "models" / "small")
    server.start()
    processes = [psutil.Process(server.pid), *_all_processes(server)]
    with Talk(server, LONG) as talk:
        talk.next()
        _processes(server, "stub")[0].kill()
        talk.error(10)
        wait_until(lambda: all(map(_ends, processes)), 10, "all processes are gone")
    assert "entrypoint: the process of the model voxcpm2 has died, " in server.log_path.read_text()
    with pytest.raises(ServerError, match="tritonserver ended with 1"):
        server.check()
    server.log_path.unlink()


def test_a_request_that_triton_never_frees_does_not_keep_the_worker(server):
    """Clients that cancel just after a stream's end make Triton 2.51 keep the model for ever."""
    for _ in range(8):
        talk = Talk(server, {"text": TEXT, "max_generate_length": 1})
        talk.rest()
        talk.client.stop_stream(cancel_requests=True)
        talk.client.close()
    (worker,) = _processes(server, "worker")
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.unload_model("voxcpm2")
    wait_until(lambda: _ends(worker), 4, "the worker is gone")


def test_a_killed_worker(server):
    talks = [Talk(server, LONG) for _ in range(4)]
    talks[0].next()
    begun = time.monotonic()
    os.kill(_processes(server, "worker")[0].pid, signal.SIGKILL)
    for talk in talks:
        assert talk.error() == "INTERNAL: the engine worker 0 died; its streams are lost"
    assert time.monotonic() - begun < 1
    with Talk(server, {"text": TEXT}) as talk:
        assert talk.error() == "UNAVAILABLE: no engine worker is ready; a restart is under way"
    for talk in talks:
        talk.close()
    wait_until(lambda: _serves(server), 60, "a new worker")
    assert speak(server, {"text": TEXT})[-1].as_numpy("finish_reason").tolist() == [b"stop"]


@pytest.mark.parametrize("how", [psutil.Process.kill, psutil.Process.suspend], ids=["killed", "hung"])
def test_an_encoder_that_answers_no_more(server, how):
    """It takes the streams along that it encodes, after 5 s if it hangs, and nobody else; the next have a new one."""
    with Talk(server, MEDIUM) as plain, Talk(server, MEDIUM | {"output_format": "mp3"}) as encoded:
        plain.next()
        encoded.next()
        for process in _processes(server, "encoder"):
            how(process)
        assert plain.rest()[-1].as_numpy("finish_reason").tolist() == [b"length"]
        assert encoded.error() == "INTERNAL: encoding the audio failed: the process that encoded it has ended"
    last = speak(server, {"text": TEXT, "output_format": "mp3"})[-1]
    assert last.as_numpy("finish_reason").tolist() == [b"stop"]


def test_a_stop_half_way(server):
    processes = _all_processes(server)
    talks = [Talk(server, LONG | {"output_format": name}) for name in ("f32", "mp3", "f32", "opus")]
    for talk in talks[:2]:
        talk.next()
    begun = time.monotonic()
    server.stop()
    assert time.monotonic() - begun < 5.5
    for talk in talks:
        error = talk.error(1)
        assert "UNAVAILABLE" in error or "closed" in error.lower(), error
        talk.close()
    assert all(_ends(process) for process in processes)
    assert list(Path("/dev/shm").glob(f"voxcpm2_{server.pid}_*")) == []
    log = server.log_path.read_text()
    assert not re.search(r"^\S+ \S+ ERROR dq_engine.*", log, re.MULTILINE)
    assert log.count("worker 0 starts (process") == 1


def test_a_failed_start_ends_with_its_reason(tmp_path):
    (tmp_path / "model").mkdir()
    server = TritonServer(model=tmp_path / "model", log_path=tmp_path / "log")
    with pytest.raises(ServerError, match="tritonserver ended with 1"):
        server.start()
    reason = f"entrypoint: the engine did not start: {tmp_path}/model has no config.json: "
    assert server.log_path.read_text().splitlines()[-1].startswith(reason)
    assert list(Path("/dev/shm").glob(f"voxcpm2_{server.pid}_*")) == []


def test_a_killed_tritonserver_leaves_nothing(server):
    processes = _all_processes(server)
    talks = [Talk(server, LONG) for _ in range(4)]
    talks[0].next()
    _processes(server, "server")[0].kill()
    for talk in talks:
        talk.error(5)
        talk.close()
    for process in processes:
        wait_until(lambda process=process: _ends(process), 3, f"{process} is gone")
