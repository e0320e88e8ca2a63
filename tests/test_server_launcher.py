"""docker/entrypoint.sh and tools/triton_server.py: a real tritonserver with a model that needs no engine."""

import contextlib
import os
import pty
import queue
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import stand_in_model
import tritonclient.grpc as grpcclient
from triton_server import ROOT, ServerError, TritonServer, free_ports

STOP_S = 5.0


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return stand_in_model.write(tmp_path_factory.mktemp("repository"))


NO_METRICS_YET = """#!/usr/bin/env python3
import os, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

def serve(port):
    ThreadingHTTPServer((os.environ["HOST"], int(os.environ[port])), Ready).serve_forever()

threading.Thread(target=serve, args=["HTTP_PORT"], daemon=True).start()
time.sleep(1)
serve("METRICS_PORT")
"""


def test_a_server_that_is_ready_has_metrics(tmp_path):
    """tritonserver begins to serve them after it has said that it is ready."""
    script = tmp_path / "entrypoint"
    script.write_text(NO_METRICS_YET)
    script.chmod(0o755)
    with TritonServer(entrypoint=script) as server:
        assert urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=5).status == 200


class Counting:
    """A stream of the model `counter`."""

    def __init__(self, server: TritonServer, n: int):
        self.answers: queue.Queue = queue.Queue()
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        self._client.start_stream(lambda result, error: self.answers.put((result, error)))
        tensor = grpcclient.InferInput("n", [1], "INT32")
        tensor.set_data_from_numpy(np.array([n], np.int32))
        self._client.async_stream_infer("counter", [tensor])

    def next(self) -> int:
        result, error = self.answers.get(timeout=20)
        assert error is None, error
        return int(result.as_numpy("i")[0])

    def error(self) -> Exception:
        """The error that ends the stream, past the answers that came before."""
        while True:
            _, error = self.answers.get(timeout=10)
            if error is not None:
                return error


def processes_of(server: TritonServer) -> list[psutil.Process]:
    """The server's: all that are below the entrypoint now."""
    return psutil.Process(server.pid).children(recursive=True)


def left_of(server: TritonServer, processes: list[psutil.Process]) -> list[str]:
    """What is still there of a server: its processes and its shared memory."""
    alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return [*map(str, alive), *map(str, Path("/dev/shm").glob(f"voxcpm2_{server.pid}_*"))]


def wait_until_nothing_is_left(server: TritonServer, processes: list[psutil.Process], seconds: float) -> float:
    began = time.monotonic()
    while left := left_of(server, processes):
        assert time.monotonic() - began < seconds, f"still there after {seconds} s: {left}"
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.mark.slow
def test_two_servers_at_once_serve_and_stop_one_by_one(repository):
    with (
        TritonServer("models/small", model_repository=repository) as first,
        TritonServer("some/hub-id", model_repository=repository) as second,
    ):
        for server in (first, second):
            stream = Counting(server, 3)
            assert [stream.next() for _ in range(3)] == [0, 1, 2]
        assert f"counter: {Path('.venv/bin/python3').absolute()} 1.26" in first.log_path.read_text()
        # A directory that exists is made absolute; a hub id goes as it is.
        assert f" {Path('models/small').absolute()}\n" in first.log_path.read_text()
        assert " some/hub-id\n" in second.log_path.read_text()

        processes = processes_of(first)
        names = {p.name()[:13] for p in processes}
        assert {"tritonserver", "triton_python"} <= names
        first.stop()
        assert left_of(first, processes) == []
        assert Counting(second, 1).next() == 0
        log = first.log_path
    assert not log.exists()


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
def test_a_stop_with_a_running_stream_ends_everything_within_5_s(repository, how):
    server = TritonServer(model_repository=repository)
    server.start()
    stream = Counting(server, 1000)
    stream.next()
    processes = processes_of(server)
    began = time.monotonic()
    if how == "SIGTERM":
        os.kill(server.pid, signal.SIGTERM)
    else:
        os.killpg(server.pid, signal.SIGINT)  # a terminal's: the entrypoint's whole process group
    wait_until_nothing_is_left(server, processes, STOP_S)
    server.stop()
    assert time.monotonic() - began < STOP_S
    assert "UNAVAILABLE" in str(stream.error())
    server.log_path.unlink()


def test_make_serve_in_a_terminal_ends_with_ctrl_c(repository):
    ports = dict(zip(("HTTP_PORT", "GRPC_PORT", "METRICS_PORT"), map(str, free_ports(3)), strict=True))
    make, terminal = pty.fork()
    if make == 0:
        os.environ["MODEL_REPOSITORY"] = str(repository)
        os.execvp("make", ["make", "-C", str(ROOT), "serve", *(f"{name}={port}" for name, port in ports.items())])
    seen = []

    def read_terminal() -> None:
        with contextlib.suppress(OSError):  # the terminal is gone when the last process that has it is
            while data := os.read(terminal, 65536):
                seen.append(data)

    reader = threading.Thread(target=read_terminal, daemon=True)
    reader.start()
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{ports['GRPC_PORT']}")
    deadline = time.monotonic() + 30
    ready = False
    while not ready and time.monotonic() < deadline:
        time.sleep(0.2)
        with contextlib.suppress(grpcclient.InferenceServerException):
            ready = client.is_model_ready("counter")
    assert ready, b"".join(seen).decode()
    processes = psutil.Process(make).children(recursive=True)
    assert "tritonserver" in [p.name() for p in processes]
    began = time.monotonic()
    os.write(terminal, b"\x03")
    os.waitpid(make, 0)
    reader.join(STOP_S)
    assert time.monotonic() - began < STOP_S
    assert [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert "entrypoint: stopping" in b"".join(seen).decode()


@pytest.mark.parametrize("killed", ["entrypoint", "tritonserver"])
def test_nothing_is_left_of_a_killed_server(repository, killed):
    server = TritonServer(model_repository=repository)
    server.start()
    stream = Counting(server, 1000)
    stream.next()
    processes = processes_of(server)
    if killed == "entrypoint":
        server.kill()
    else:
        next(p for p in processes if p.name() == "tritonserver").kill()
    wait_until_nothing_is_left(server, processes, STOP_S)
    assert "UNAVAILABLE" in str(stream.error())
    if killed == "tritonserver":
        time.sleep(0.2)
        with pytest.raises(ServerError, match="tritonserver ended with 137"):
            server.check()
    server.log_path.unlink()


def test_a_server_that_cannot_start_says_why(repository):
    server = TritonServer(model_repository=repository, environment={"COUNTER_FAILS": "no such checkpoint: xyz"})
    with pytest.raises(ServerError, match=r"tritonserver ended with 1; the end of [\s\S]*no such checkpoint: xyz"):
        server.start()
    assert server.log_path.exists()
    server.log_path.unlink()


@pytest.mark.parametrize("which", ["HTTP_PORT", "GRPC_PORT", "METRICS_PORT"])
def test_a_port_that_is_taken_is_told_before_anything_is_loaded(repository, which, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = free_ports(3)
        port = ports[("HTTP_PORT", "GRPC_PORT", "METRICS_PORT").index(which)] = taken.getsockname()[1]
        server = TritonServer(model_repository=repository, ports=tuple(ports), log_path=tmp_path / "log")
        with pytest.raises(ServerError, match="tritonserver ended with 1"):
            server.start()
    assert server.log_path.read_text() == f"entrypoint: {which}: 127.0.0.1:{port}: address already in use\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"HTTP_PORT": "65536"}, "HTTP_PORT: 127.0.0.1:65536: must be from 1 to 65535"),
        ({"HTTP_PORT": "31999", "GRPC_PORT": "31999"}, "GRPC_PORT: 127.0.0.1:31999: address already in use"),
        ({"MODEL": "/no/such/model"}, "/no/such/model is neither a directory nor a hub id of the form owner/name"),
        ({"MODEL": "models/smal"}, "there is no directory smal in models"),
        ({"DQ_ENGINE_MODEL": "no-such"}, "no-such is neither a directory nor a hub id of the form owner/name"),
        (
            {"HOST": "0.0.0.0", "HTTP_PORT": "x"},
            "without DQ_ENGINE_ADMIN_TOKEN whoever reaches a port may administer this server\n"
            "entrypoint: HTTP_PORT: 0.0.0.0:x: must be from 1 to 65535",
        ),
        (
            {"HOST": "0.0.0.0", "HTTP_PORT": "x", "DQ_ENGINE_ADMIN_TOKEN": "secret"},
            "HTTP_PORT: 0.0.0.0:x: must be from 1 to 65535",
        ),
    ],
)
def test_settings_that_cannot_be_are_told_before_anything_is_loaded(settings, message):
    """It listens on this machine alone, unless it is told otherwise."""
    environment = {name: value for name, value in os.environ.items() if name != "HOST"} | settings
    command = [ROOT / "docker/entrypoint.sh"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"entrypoint: {message}\n")


def test_a_models_own_folder_is_no_place_to_start_in():
    """Triton's stubs would take its 1/model.py for that of every model."""
    folder = ROOT / "model_repository/voxcpm2"
    done = subprocess.run([ROOT / "docker/entrypoint.sh"], cwd=folder, capture_output=True, text=True, timeout=20)
    message = f"entrypoint: {folder}/1/model.py would be run in the place of every model: start elsewhere\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


def test_progress_is_told_while_the_server_starts(repository):
    told = []
    with TritonServer(model_repository=repository, on_progress=lambda *what: told.append(what)):
        pass
    assert [seconds for seconds, _ in told] == sorted(seconds for seconds, _ in told)
    assert any("counter" in line for _, line in told)


def test_models_are_loaded_and_unloaded_only_where_it_is_allowed(repository):
    with TritonServer(model_repository=repository, model_control=True) as server:
        client = grpcclient.InferenceServerClient(server.grpc_url)
        client.unload_model("counter")
        deadline = time.monotonic() + 10
        while client.is_model_ready("counter") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not client.is_model_ready("counter")
        client.load_model("counter")
        assert Counting(server, 1).next() == 0
    with TritonServer(model_repository=repository) as server:
        client = grpcclient.InferenceServerClient(server.grpc_url)
        with pytest.raises(grpcclient.InferenceServerException, match="not allowed"):
            client.unload_model("counter")
        assert Counting(server, 1).next() == 0


def test_free_ports_are_different_and_not_those_of_outgoing_connections():
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert all(20000 <= port < 32000 for port in ports)
