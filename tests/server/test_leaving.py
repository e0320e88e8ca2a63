"""Clients that leave, however they do it, free what they had."""

import base64
import json
import queue
import re
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from talk import LABELS, LONG, TEXT, Talk, active_streams, metrics, samples, speak, wait_until
from triton_server import ROOT, TritonServer

pytestmark = pytest.mark.alone

GONE_S = 4.0  # the gauge is set once a second


@pytest.fixture
def speaking(tight_server: TritonServer):
    """The two streams that it speaks to now."""
    with Talk(tight_server, LONG) as first, Talk(tight_server, LONG) as second:
        first.next()
        second.next()
        yield [first, second]


def _queued(server: TritonServer) -> float:
    return metrics(server)[f"voxcpm2_queued_streams{LABELS}"]


@pytest.fixture(autouse=True)
def nobody_else(server):
    wait_until(lambda: active_streams(server) == 0, 60, "nobody speaks")


def _http_request(server, fields: dict) -> socket.socket:
    body = json.dumps(fields).encode()
    connection = socket.create_connection(("127.0.0.1", server.http_port), timeout=20)
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
sys.path[:0] = [{str(ROOT / "tests/server")!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tools")!r}]
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


def test_a_dropped_http_request_that_waits(tight_server, speaking):
    """It gets a sign of life, once, in its format, and is let go while it waits; who waits over gRPC gets none."""
    formats = {"f32": {"audio": []}, "opus_base64": {"audio_bytes": ""}}
    with Talk(tight_server, LONG) as waiting:
        for output_format, nothing in formats.items():
            fields = LONG | {"output_format": output_format, "sample_rate": 24000}
            begun = time.monotonic()
            connection = _http_request(tight_server, fields)
            reply = b""
            while not reply.endswith(b"\n\n\r\n"):
                reply += connection.recv(4096)
            assert time.monotonic() - begun > 0.1
            (event,) = re.findall(rb"^data: (.+)$", reply, re.MULTILINE)
            expected = {"model_name": "voxcpm2", "model_version": "1", "sample_rate": 24000, **nothing}
            assert json.loads(event) == expected
            connection.settimeout(0.4)
            with pytest.raises(TimeoutError):  # once
                connection.recv(1)
            wait_until(lambda: _queued(tight_server) == 2, 3, "it waits")
            connection.close()
            wait_until(lambda: _queued(tight_server) == 1, GONE_S, "it is gone")
        with pytest.raises(queue.Empty):
            waiting.next(timeout=0)


def test_a_sign_of_life_is_no_part_of_the_audio(tight_server, speaking):
    fields = {"text": TEXT, "seed": 3, "output_format": "wav_base64", "max_generate_length": 4}
    with httpx.Client(base_url=f"http://{tight_server.http_url}", timeout=60) as client:
        with client.stream("POST", "/v2/models/voxcpm2/generate_stream", json=fields) as reply:
            lines = reply.iter_lines()
            events = [json.loads(next(line for line in lines if line)[6:])]
            for talk in speaking:
                talk.close()
            events += [json.loads(line[6:]) for line in lines if line]
        alone = client.post("/v2/models/voxcpm2/generate_stream", json=fields)
    assert events[0]["audio_bytes"] == ""
    expected = [json.loads(line[6:]) for line in alone.text.splitlines() if line]
    audio = [b"".join(base64.b64decode(e["audio_bytes"]) for e in some) for some in (expected, events)]
    assert len(audio[1]) == len(audio[0]) == 44 + 2 * 4 * 7680
    np.testing.assert_allclose(*(np.frombuffer(a[44:], "<i2").astype(float) for a in audio), atol=33)


def test_what_marks_grpc_is_no_input(server):
    """Neither a JSON field nor a gRPC parameter of its name does anything, and what Triton forwards is not refused."""
    fields = {"text": TEXT, "seed": 3, "stream": False, "max_generate_length": 1}
    plain = samples(speak(server, fields))
    with Talk(server, fields, parameters={"user-agent": "x"}) as talk:
        np.testing.assert_allclose(samples(talk.rest()), plain, atol=1e-3)
    reply = httpx.post(
        f"http://{server.http_url}/v2/models/voxcpm2/generate", json=fields | {"user-agent": "x"}, timeout=60
    )
    np.testing.assert_allclose(reply.json()["audio"], plain, atol=1e-3)


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
