"""How soon the engine hears of clients that leave, and how soon their slots and blocks are free.

The engine worker itself notes when it hears of a client that left and when the stream's slot is free, with the number
of steps that had been run (see injected/sitecustomize.py); its clock is the test's. So what is measured is exact. On a
busy machine the times hold the wait for a core as well: they are asserted of the middle one of several clients.
"""

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import clients
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from observed import ObservedServer, is_idle, wait_until
from triton_server import ROOT

pytestmark = pytest.mark.alone

NOTICED_S = 0.25
SLOTS = 2
WAITING = 4
LONG = {"text": clients.TEXTS[0], "min_generate_length": 580, "max_generate_length": 600}
SETTINGS = {"DQ_ENGINE_MAX_NUM_SEQS": str(SLOTS), "DQ_ENGINE_REALTIME": "0"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedServer]:
    with ObservedServer(ROOT / "models" / "small", tmp_path_factory.mktemp("leaving"), SETTINGS) as server:
        yield server


def over_grpc(server: ObservedServer) -> Callable[[], None]:
    """A long request on a gRPC stream; what closes it."""
    client = grpcclient.InferenceServerClient(server.grpc_url)
    client.start_stream(lambda result, error: None)
    tensors = []
    for name, value in LONG.items():
        text = isinstance(value, str)
        array = np.array([value.encode()], np.object_) if text else np.array([value], np.int32)
        tensors.append(grpcclient.InferInput(name, [1], "BYTES" if text else "INT32"))
        tensors[-1].set_data_from_numpy(array)
    client.async_stream_infer("voxcpm2", tensors)

    def leave() -> None:
        client.stop_stream(cancel_requests=True)
        client.close()

    return leave


def over_http(server: ObservedServer) -> Callable[[], None]:
    """A long request over HTTP; what closes its connection."""
    body = json.dumps(LONG).encode()
    connection = socket.create_connection(("127.0.0.1", server.http_port))
    head = f"POST /v2/models/voxcpm2/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection.close


def killed(server: ObservedServer) -> Callable[[], None]:
    """A long request of a process of its own; what kills it."""
    script = """
import asyncio, sys, clients
from test_leaving_in_time import LONG
async def run():
    async for _ in clients.start(clients.connect(sys.argv[1]), LONG):
        pass
asyncio.run(run())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, server.grpc_url],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT / "tools")]),
        },
    )

    def leave() -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()

    return leave


@pytest.fixture
def begin(server) -> Iterator[Callable]:
    """Starts clients of a kind; those that have not left when the test is over leave then."""
    began: list[Callable[[], None]] = []

    def begin(client: Callable[[ObservedServer], Callable[[], None]], count: int) -> list[Callable[[], None]]:
        began.extend(new := [client(server) for _ in range(count)])
        return new

    wait_until(lambda: is_idle(server.next_snapshot()), 60, "nobody speaks")
    yield begin
    for leave in began:
        with contextlib.suppress(Exception):  # most have left
            leave()


@pytest.mark.parametrize("client", [over_grpc, over_http, killed], ids=lambda client: client.__name__)
def test_clients_that_wait_and_clients_that_speak(server, begin, client):
    before = set(server.leaving())
    speaking = begin(client, SLOTS)
    wait_until(lambda: _counts(server) == (SLOTS, 0), 60, "the first speak")
    waiting = begin(client, WAITING)
    wait_until(lambda: _counts(server) == (SLOTS, WAITING), 60, "the others wait")
    noticed, steps = [], []
    for number, leave in enumerate(waiting + speaking, start=1):
        left = time.monotonic()
        leave()
        wait_until(lambda number=number: len(_freed(server, before)) == number, 10, "it is gone")
        event = _freed(server, before)[-1]
        noticed.append(event["noticed"]["at"] - left)
        steps.append(event["freed"]["steps"] - event["noticed"]["steps"])
        assert (event["freed"]["generated"] == 0) == (number <= WAITING)
    print(f"noticed after {[round(s, 3) for s in noticed]} s, free {steps} steps later")
    assert statistics.median(noticed) < NOTICED_S
    assert max(steps) <= 2
    _nothing_is_done_for_nobody(server)


def _nothing_is_done_for_nobody(server: ObservedServer) -> None:
    snapshot = server.next_snapshot()
    assert is_idle(snapshot)
    assert snapshot["kv_blocks_free"] == snapshot["kv_blocks_total"]
    assert server.next_snapshot()["patches"] == snapshot["patches"]


def _counts(server: ObservedServer) -> tuple[int, int]:
    snapshot = server.next_snapshot()
    return snapshot["active"], snapshot["queued"]


def _freed(server: ObservedServer, before) -> list[dict[str, dict]]:
    """Of the streams that were freed since, in the order in which that was noticed."""
    new = [events for stream, events in server.leaving().items() if stream not in before and "freed" in events]
    return sorted(new, key=lambda events: events["noticed"]["at"])
