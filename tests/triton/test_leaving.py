"""Clients that leave, however they do it, free what they had."""

import json
import socket
import subprocess
import sys
import time

import pytest
from talk import LONG, TEXT, Talk, active_streams, speak, wait_until
from triton_server import ROOT

GONE_S = 4.0  # the gauge is set once a second


@pytest.fixture(autouse=True)
def nobody_else(server):
    wait_until(lambda: active_streams(server) == 0, 60, "nobody speaks")


def _http_request(server, fields: dict) -> socket.socket:
    body = json.dumps(fields).encode()
    connection = socket.create_connection(("127.0.0.1", server.http_port))
    head = f"POST /v2/models/voxcpm2/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_a_closed_grpc_stream(server):
    talks = [Talk(server, LONG) for _ in range(4)]
    talks[0].next()
    wait_until(lambda: active_streams(server) >= 1, 5, "they speak")
    for talk in talks:
        talk.close()
    wait_until(lambda: active_streams(server) == 0, GONE_S, "they are gone")


def test_a_killed_grpc_client(server):
    script = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests/triton")!r}, {str(ROOT / "tools")!r}]
from types import SimpleNamespace
from talk import LONG, Talk
talk = Talk(SimpleNamespace(grpc_url={server.grpc_url!r}), LONG)
talk.next()
print("audio", flush=True)
talk.rest()
"""
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert client.stdout.readline() == "audio\n"
    wait_until(lambda: active_streams(server) == 1, 5, "it speaks")
    client.kill()
    client.wait()
    client.stdout.close()
    wait_until(lambda: active_streams(server) == 0, GONE_S, "it is gone")


def test_a_dropped_http_stream(server):
    connection = _http_request(server, LONG)
    assert b"200 OK" in connection.recv(4096)
    wait_until(lambda: active_streams(server) == 1, 5, "it speaks")
    connection.close()
    wait_until(lambda: active_streams(server) == 0, GONE_S, "it is gone")


def test_one_that_never_reads_holds_up_nobody(server):
    connection = _http_request(server, LONG)
    wait_until(lambda: active_streams(server) == 1, 20, "it speaks")
    begun = time.monotonic()
    assert speak(server, {"text": TEXT})[-1].as_numpy("finish_reason").tolist() == [b"stop"]
    assert time.monotonic() - begun < 20
    connection.close()
    wait_until(lambda: active_streams(server) == 0, GONE_S, "it is gone")


def test_the_other_stream_of_a_connection_goes_on(server):
    """Two streams, one client library, two connections: only the one that was closed ends."""
    with Talk(server, LONG) as gone, Talk(server, {"text": TEXT, "seed": 3}) as stays:
        gone.next()
        gone.close()
        assert stays.rest()[-1].as_numpy("finish_reason").tolist() == [b"stop"]
