"""Workers in trouble behind a real server: a step that hangs, memory that runs out. (A killed one: tests/server.)"""

import asyncio
import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import clients
import numpy as np
import psutil
import pytest
from clients import Answer, connect, hear, responses
from observed import ObservedServer, is_idle, wait_until
from triton_server import ROOT

pytestmark = pytest.mark.alone

SETTINGS = {"DQ_ENGINE_MAX_NUM_SEQS": "2", "DQ_ENGINE_REALTIME": "0", "DQ_ENGINE_STEP_TIMEOUT_S": "2"}
LONG = {"text": clients.TEXTS[0], "min_generate_length": 580, "max_generate_length": 600}
LOST = "INTERNAL: the engine worker 0 died; its streams are lost"
RESTARTING = "UNAVAILABLE: no engine worker is ready; a restart is under way"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObservedServer]:
    with ObservedServer(ROOT / "models" / "small", tmp_path, SETTINGS) as server:
        yield server


async def _ask(server: ObservedServer, fields: dict) -> tuple[str, float]:
    """A request's end, "served" or the message of its error, and when it came."""
    client, end = connect(server.grpc_url), "served"
    try:
        await asyncio.wait_for(responses(client, fields), 60)
    except Answer as answer:
        end = str(answer)
    at = time.monotonic()
    await client.close()
    return end, at


async def _hear(server: ObservedServer, fields: dict) -> np.ndarray:
    client = connect(server.grpc_url)
    try:
        return await asyncio.wait_for(hear(client, fields), 60)
    finally:
        await client.close()


async def _ends(process: psutil.Process) -> float:
    """When it ended."""
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        await asyncio.sleep(0.01)
    return time.monotonic()


def _is_served(server: ObservedServer) -> bool:
    end, _ = asyncio.run(_ask(server, {"text": "hello there", "max_generate_length": 1}))
    # INTERNAL where a worker that was about to end had taken it.
    assert end == "served" or end.startswith(("UNAVAILABLE: ", "INTERNAL: the engine worker 0 died")), end
    return end == "served"


def test_a_step_that_hangs(server):
    known = asyncio.run(_hear(server, clients.KNOWN[0]))
    before, old = server.uses()["stub"], server.processes()["worker"]

    async def lose() -> tuple[list[tuple[str, float]], float, tuple[str, float]]:
        asking = [asyncio.create_task(_ask(server, LONG)) for _ in range(5)]  # two speak, three wait
        while server.snapshot()["active"] < 2:
            await asyncio.sleep(0.1)
        server.hang()
        ended = await _ends(old)
        return await asyncio.gather(*asking), ended, await _ask(server, LONG)

    lost, ended, (meanwhile, _) = asyncio.run(lose())
    assert [end for end, _ in lost] == [LOST] * 5
    assert max(at for _, at in lost) < ended + 1
    assert meanwhile == RESTARTING
    wait_until(lambda: _is_served(server), 60, "a new worker")
    assert server.processes()["worker"] != old
    np.testing.assert_allclose(asyncio.run(_hear(server, clients.KNOWN[0])), known, atol=1e-3)
    assert server.uses()["stub"].files <= before.files + 2
    assert server.uses()["stub"].threads <= before.threads + 1


@pytest.mark.slow
@pytest.mark.parametrize("spare_mib", [0, 4, 64])
def test_memory_that_runs_out(server, spare_mib):
    """Each request ends, in one way or another; when there is memory again, all is well."""
    known = asyncio.run(_hear(server, clients.KNOWN[0]))
    worker = server.processes()["worker"]
    _, hard = resource.prlimit(worker.pid, resource.RLIMIT_AS)
    resource.prlimit(worker.pid, resource.RLIMIT_AS, (worker.memory_info().vms + spare_mib * 2**20, hard))
    minute = np.random.default_rng(0).standard_normal((6 * 60 * 4, 64)).astype(np.float32)
    requests = [LONG | {"max_generate_length": 600}, {"text": "a", "reference_audio": clients.recording(1, 50.0)}]
    requests += [{"text": "b" * 300, "reference_latents": minute[: 4 * 200]}] * 2

    async def ask() -> list[tuple[str, float]]:
        return await asyncio.gather(*(_ask(server, fields) for fields in requests))

    ends = [end for end, _ in asyncio.run(ask())]
    print(ends)
    assert all(end == "served" or end.startswith(("INTERNAL: ", "UNAVAILABLE: ")) for end in ends), ends
    with contextlib.suppress(ProcessLookupError):  # it may have died of it
        resource.prlimit(worker.pid, resource.RLIMIT_AS, (hard, hard))
    wait_until(lambda: _is_served(server), 60, "a worker")
    wait_until(lambda: is_idle(server.next_snapshot()), 60, "nobody speaks")
    assert server.snapshot()["kv_blocks_free"] == server.snapshot()["kv_blocks_total"]
    np.testing.assert_allclose(asyncio.run(_hear(server, clients.KNOWN[0])), known, atol=1e-3)
