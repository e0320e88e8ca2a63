"""Ten thousand short requests: nothing grows."""

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients import connect
from contract_inputs import inputs
from observed import ObservedServer, Use, is_idle, wait_until
from reference.checkpoints import SHAPES, make_checkpoint

pytestmark = pytest.mark.alone

WARM_UP, REQUESTS, CLIENTS = 2_000, 10_000, 16
SAMPLES_PER_PATCH = 480  # of this checkpoint
MOST_GROWTH_MIB = 16.0  # seen: below 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObservedServer]:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", SHAPES[0])
    with ObservedServer(checkpoint, tmp_path, {"DQ_ENGINE_REALTIME": "0"}) as server:
        yield server


async def _ask(server: ObservedServer, numbers: Iterator[int]) -> None:
    """Requests of 1 to 4 patches, one after the other on one gRPC stream, until there are no more numbers."""
    client = connect(server.grpc_url)
    answered = asyncio.Event()

    async def requests():
        for number in numbers:
            fields = {"text": f"number {number}", "max_generate_length": 1 + number % 4, "seed": number}
            yield {"model_name": "voxcpm2", "inputs": inputs(fields)}
            await answered.wait()
            answered.clear()

    samples = 0
    async for result, error in client.stream_infer(requests()):
        assert error is None, error
        samples += result.as_numpy("audio").size
        if result.as_numpy("finish_reason") is not None:
            stats = json.loads(result.as_numpy("stats")[0])
            assert samples == SAMPLES_PER_PATCH * stats["patches"]
            assert 1 <= stats["patches"] <= 1 + stats["seed"] % 4
            samples = 0
            answered.set()
    await client.close()


def _soak(server: ObservedServer, count: int) -> dict[str, Use]:
    """What each process uses after so many requests."""
    numbers = iter(range(count))

    async def run() -> None:
        await asyncio.gather(*(_ask(server, numbers) for _ in range(CLIENTS)))

    asyncio.run(run())
    gc.collect()
    wait_until(lambda: is_idle(server.next_snapshot()), 30, "nobody speaks")
    return server.uses()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_requests(server):
    before = _soak(server, WARM_UP)
    after = _soak(server, REQUESTS)
    assert after.keys() == before.keys() == {"server", "stub", "worker"}
    snapshot = server.snapshot()
    assert snapshot["kv_blocks_free"] == snapshot["kv_blocks_total"]
    for name in before:
        print(f"{name}: {before[name]} -> {after[name]}")
    for name in before:
        assert after[name].rss_mib < before[name].rss_mib + MOST_GROWTH_MIB, name
        assert after[name].files <= before[name].files + 4, name
        assert after[name].threads <= before[name].threads + 8, name
