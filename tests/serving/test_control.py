"""The control socket: who can reach it, whose it is, and what becomes of calls that are wrong, too many, too large."""

import contextlib
import os
import socket
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from collector import wait_until

from dq_engine.errors import RequestError
from dq_engine.serving import control_protocol, control_server, control_socket
from dq_engine.serving.control_client import ControlClient, control_address, json_arguments
from dq_engine.serving.control_protocol import MAX_MESSAGE_BYTES, ControlCall, ControlResult
from dq_engine.serving.control_server import ControlServer
from dq_engine.serving.control_socket import ControlSocketError, socket_path


def echo(call: ControlCall) -> ControlResult:
    if call.operation == "refuse":
        raise RequestError("NOT_FOUND", "name: nobody")
    if call.operation == "break":
        raise RuntimeError("broken")
    return ControlResult({"operation": call.operation, "arguments": call.arguments}, call.payload)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "private" / "control.sock"


@pytest.fixture
def server(path):
    server = ControlServer(path, echo)
    yield server
    server.close()


def client(path, threads=4, max_waiting=4) -> ControlClient:
    return ControlClient(path, "voxcpm2", threads, max_waiting)


def refusal(path, call: ControlCall) -> str:
    with pytest.raises(RequestError) as error:
        client(path).call(call)
    return str(error.value)


def raw(path, data: bytes, close: bool = False) -> bytes:
    """What comes back for bytes that are sent as they are."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
            if close:
                connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                answer += piece
        return answer


def test_a_call_and_its_answer(path, server):
    payload = os.urandom(20 * 2**20)
    result = client(path).call(ControlCall("say", {"a": 1, "b": b"raw"}, payload))
    assert result == ControlResult({"operation": "say", "arguments": {"a": 1, "b": b"raw"}}, payload)
    assert refusal(path, ControlCall("refuse")) == "NOT_FOUND: name: nobody"
    assert refusal(path, ControlCall("break")) == "INTERNAL: break failed: broken"


def test_the_socket_is_private(path, server):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["control.sock"]


@pytest.mark.parametrize("trouble", ["others may enter", "a link", "a file"])
def test_a_folder_that_is_not_private_is_refused(path, tmp_path, trouble):
    if trouble == "others may enter":
        path.parent.mkdir(mode=0o711)
    elif trouble == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.parent.symlink_to(tmp_path / "elsewhere")
    else:
        path.parent.write_text("")
    with pytest.raises(ControlSocketError, match=r"has to be a folder of user \d+, mode 0700"):
        ControlServer(path, echo)


def test_a_path_that_is_too_long(tmp_path):
    with pytest.raises(ControlSocketError, match="^the control socket /.* cannot be opened: AF_UNIX path too long$"):
        ControlServer(tmp_path / ("x" * 100), echo)


def test_what_a_dead_server_left_is_replaced(path):
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert refusal(path, ControlCall("say")) == "UNAVAILABLE: the model voxcpm2 is not ready"
    server = ControlServer(path, echo)
    assert client(path).call(ControlCall("say")).value["operation"] == "say"
    server.close()
    assert not path.exists()
    assert refusal(path, ControlCall("say")) == "UNAVAILABLE: the model voxcpm2 is not ready"


def test_dead_sockets_in_the_default_folder_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(control_socket.tempfile, "gettempdir", lambda: str(tmp_path))
    first = ControlServer(socket_path(None, "first"), echo)
    folder = tmp_path / f"dq-engine-{os.getuid()}"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "voxcpm2-1.sock"))
    second = ControlServer(socket_path("", "second"), echo)
    names = [f"{name}-{os.getppid()}.sock" for name in ("first", "second")]
    assert sorted(p.name for p in folder.iterdir()) == names
    first.close()
    second.close()


def test_a_model_that_is_replaced_hands_its_socket_on(path):
    old = ControlServer(path, lambda call: ControlResult({"who": "old"}))
    new = ControlServer(path, lambda call: ControlResult({"who": "new"}))
    old.close()
    assert client(path).call(ControlCall("say")).value == {"who": "new"}
    new.close()
    assert not path.exists()


def test_another_server_keeps_its_socket(path):
    script = f"""
        from pathlib import Path
        from dq_engine.serving.control_protocol import ControlResult
        from dq_engine.serving.control_server import ControlServer
        server = ControlServer(Path({str(path)!r}), lambda call: ControlResult({{"who": "other"}}))
        print("listens", flush=True)
        input()
    """
    # A shell between: our child's socket would be one of "the same server", whose models are siblings.
    command = ["bash", "-c", '"$0" -c "$1"; exit', sys.executable, textwrap.dedent(script)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "listens\n"
        with pytest.raises(ControlSocketError, match=r"^process \d+, of another server, has the control socket "):
            ControlServer(path, echo)
        assert client(path).call(ControlCall("say")).value == {"who": "other"}
    finally:
        other.communicate("\n", timeout=20)


def test_the_environment_says_where_it_is(monkeypatch):
    monkeypatch.delenv("DQ_ENGINE_CONTROL_SOCKET", raising=False)
    default = socket_path(None, "voxcpm2")
    assert control_address({"serves": "voxcpm2", "control_socket": ""}) == (default, "voxcpm2")
    assert str(control_address({"serves": "v", "control_socket": "/x/y"})[0]) == "/x/y"
    monkeypatch.setenv("DQ_ENGINE_CONTROL_SOCKET", "/a/b")
    assert str(control_address({"serves": "v", "control_socket": "/x/y"})[0]) == "/a/b"


def test_messages_that_are_none(path, server, monkeypatch):
    monkeypatch.setattr(control_protocol, "TRANSFER_TIMEOUT_S", 0.5)
    assert b"the limit is" in raw(path, struct.pack("<I", MAX_MESSAGE_BYTES + 1) + b"x")
    assert b"control call: " in raw(path, struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1")
    assert b"control call: " in raw(path, struct.pack("<I", 1) + b"\x90")
    assert b"broke off after 2 of 5 bytes" in raw(path, struct.pack("<I", 5) + b"ab", close=True)
    assert b"took longer than" in raw(path, struct.pack("<I", 5) + b"ab")
    assert raw(path, b"", close=True) == b""
    assert client(path).call(ControlCall("say")).value["operation"] == "say"


def test_who_says_nothing_is_not_waited_for(path, monkeypatch):
    monkeypatch.setattr(control_server, "TRANSFER_TIMEOUT_S", 0.2)
    server = ControlServer(path, echo)
    assert b"timed out" in raw(path, b"")
    server.close()


def test_large_messages_are_refused(path, server):
    assert refusal(path, ControlCall("say", payload=bytes(MAX_MESSAGE_BYTES))).startswith("INVALID_ARG: control call: ")


def test_arguments_from_json():
    assert json_arguments(b'{"a": "x", "n": 5, "z": [1, 2.5, -3e-2]}') == {
        "a": "x",
        "n": 5,
        "z": struct.pack("<3f", 1, 2.5, -0.03),
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "arguments: Input data was truncated"),
        (b"[]", "arguments: Expected `object`, got `array`"),
        (b"\xff", "arguments: JSON is malformed: invalid character"),
        (b'{"a": ' + b"[" * 100_000, "arguments: "),
        (b'{"a": [1, "2"]}', "a: must be one flat list of numbers"),
        (b'{"a": [1, true]}', "a: must be one flat list of numbers"),
        (b'{"a": [[1]]}', "a: must be one flat list of numbers"),
        (b'{"a": [1' + b"0" * 400 + b"]}", "a: must be one flat list of numbers of 32 bits"),
        (b" " * (16 * 2**20 + 1), "arguments: has 16777217 bytes, the limit is 16777216"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_that_are_none(data, message):
    with pytest.raises(RequestError) as error:
        json_arguments(data)
    assert str(error.value).startswith(f"INVALID_ARG: {message}")


def test_too_many_calls_at_once(path, monkeypatch):
    monkeypatch.setattr(control_server, "MAX_CALLS", 2)
    release, entered = threading.Event(), threading.Semaphore(0)

    def slow(call: ControlCall) -> ControlResult:
        entered.release()
        assert release.wait(20)
        return ControlResult({})

    server = ControlServer(path, slow)
    answers, caller = [], client(path, threads=2, max_waiting=1)
    for _ in range(3):
        caller.submit(ControlCall("say"), answers.append)
    with pytest.raises(RequestError, match="^UNAVAILABLE: 3 calls are under way already; try again later$"):
        caller.submit(ControlCall("say"), answers.append)
    assert entered.acquire(timeout=20)
    assert entered.acquire(timeout=20)
    assert refusal(path, ControlCall("say")) == "UNAVAILABLE: 2 calls are under way already"
    release.set()
    wait_until(lambda: len(answers) == 3, 20, "the calls that waited")
    assert answers == [ControlResult({})] * 3
    caller.submit(ControlCall("say"), answers.append)  # there is room again
    wait_until(lambda: len(answers) == 4, 20, "one more")
    server.close()


def test_a_model_that_does_not_answer_in_time(path, monkeypatch):
    monkeypatch.setattr("dq_engine.serving.control_client.TRANSFER_TIMEOUT_S", 0.1)
    release = threading.Event()

    def hang(call: ControlCall) -> ControlResult:
        release.wait(20)
        return ControlResult({})

    server = ControlServer(path, hang)
    begun = time.monotonic()
    call = ControlCall("say", timeout_s=0.2)
    assert refusal(path, call) == "UNAVAILABLE: the model voxcpm2 has not answered within 0.2 s"
    assert time.monotonic() - begun < 10
    release.set()
    server.close()


def test_a_model_that_ends_meanwhile(path):
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        answers = []
        client(path).submit(ControlCall("say"), answers.append)
        connection, _ = listener.accept()
        control_protocol.receive(connection, 20)
        connection.close()
        wait_until(lambda: bool(answers), 20, "an answer")
        assert str(answers[0]) == "UNAVAILABLE: the model voxcpm2 has ended"
