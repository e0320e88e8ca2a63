"""LoRA adapters from Python, as nano-vllm-voxcpm's examples use them."""

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from reference.adapters import ATTENTION, BETWEEN, AdapterShape, adapter_sizes, random_weights, write_adapter
from triton_server import ROOT

from dq_engine import LoRAConfig, VoxCPM

SMALL = ROOT / "models" / "small"
SAID = {"target_text": "rachel wants five pretty flowers", "max_generate_length": 3, "seed": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    small = folder / "small"  # the official model takes its dtype from config.json
    small.mkdir()
    for file in SMALL.iterdir():
        (small / file.name).symlink_to(file)
    (small / "config.json").unlink()
    (small / "config.json").write_text((SMALL / "config.json").read_text().replace("bfloat16", "float32"))
    for name, shape in {"one": AdapterShape(seed=1), "attention": AdapterShape(seed=2, between=())}.items():
        write_adapter(folder / name, random_weights(adapter_sizes(small, shape), shape), shape)
    return folder


async def say(server, **parameters) -> np.ndarray:
    return np.concatenate([chunk async for chunk in server.generate(**SAID, **parameters)], axis=0)


def test_the_asynchronous_example(folder):
    async def main() -> None:
        server = VoxCPM.from_pretrained(
            model=str(SMALL),
            max_num_batched_tokens=8192,
            max_num_seqs=16,
            max_model_len=4096,
            gpu_memory_utilization=0.95,
            enforce_eager=False,
            devices=[0],
            lora_config=LoRAConfig(
                enable_lm=True,
                enable_dit=True,
                enable_proj=False,
                max_loras=1,
                max_lora_rank=8,
                target_modules_lm=list(ATTENTION),
                target_modules_dit=list(ATTENTION),
                target_proj_modules=[],
            ),
        )
        await server.wait_for_ready()
        try:
            assert await server.register_lora("demo", str(folder / "attention")) == {"name": "demo"}
            assert await server.list_loras() == [{"name": "demo"}]
            plain, adapted = await asyncio.gather(say(server, cfg_value=2), say(server, cfg_value=2, lora_name="demo"))
            assert plain.shape == adapted.shape == (3 * 7680,)
            assert np.abs(plain - adapted).max() > 1e-2
            np.testing.assert_allclose(await say(server), plain, atol=1e-3)
            with pytest.raises(ValueError, match="^NOT_FOUND: path: "):
                await server.register_lora("other", "/path/to/lora/checkpoint")
            with pytest.raises(ValueError, match="^INVALID_ARG: path: "):  # it changes projections
                await server.register_lora("other", str(folder / "one"))
            assert await server.list_loras() == [{"name": "demo"}]
        finally:
            assert await server.unregister_lora("demo") == {"name": "demo"}
            with pytest.raises(ValueError, match='^NOT_FOUND: name: there is no registered adapter named "demo"$'):
                await server.unregister_lora("demo")
            with pytest.raises(ValueError, match='^NOT_FOUND: lora_name: there is no registered adapter named "demo"$'):
                await say(server, lora_name="demo")
            await server.stop()

    asyncio.run(main())


@pytest.mark.slow
def test_a_worker_that_starts_again_does_not_bring_back_what_was_unregistered(folder, tmp_path):
    """Nor does it miss the files of it."""
    for name in ("one", "attention"):
        shutil.copytree(folder / name, tmp_path / name)
    room = {"lora_max_loras": 2, "lora_dir": str(tmp_path), "lora_preload": "one, other=attention"}
    server = VoxCPM.from_pretrained(str(SMALL), devices=["cpu"], threads=1, **room)
    slot = server._pool._supervisor._slots[0]
    try:
        known = next(server.generate(**SAID, lora_name="other"))
        server.unregister_lora("one")
        shutil.rmtree(tmp_path / "one")
        before = slot.worker.process.pid
        os.kill(before, signal.SIGKILL)
        ends = time.monotonic() + 60
        while slot.worker is None or slot.worker.process.pid == before or not slot.worker.ready:
            assert time.monotonic() < ends
            time.sleep(0.05)
        assert server.list_loras() == [{"name": "other"}]
        np.testing.assert_allclose(next(server.generate(**SAID, lora_name="other")), known, atol=1e-3)
        with pytest.raises(ValueError, match="^NOT_FOUND: lora_name: "):
            next(server.generate(**SAID, lora_name="one"))
    finally:
        server.stop()


@pytest.mark.slow
def test_two_workers_have_the_same_adapters_also_after_one_has_died(folder):
    room = LoRAConfig(enable_proj=True, max_loras=1, max_lora_rank=32, target_proj_modules=list(BETWEEN))
    server = VoxCPM.from_pretrained(str(SMALL), devices=["cpu", "cpu"], lora_config=room, threads=1)

    def workers() -> list[int]:
        """The processes of those that serve."""
        slots = server._pool._supervisor._slots
        return [slot.worker.process.pid for slot in slots if slot.worker is not None and slot.worker.ready]

    def everywhere() -> list[np.ndarray]:
        """The same three times at once: from both of the workers."""
        long = [server.generate(**{**SAID, "max_generate_length": n}, lora_name="demo") for n in (60, 3, 3)]
        firsts = [next(stream) for stream in long]
        for stream in long:
            stream.close()
        return firsts

    try:
        server.register_lora("demo", str(folder / "one"))
        before = workers()
        known, *others = everywhere()
        os.kill(before[1], signal.SIGKILL)
        ends = time.monotonic() + 60
        while before[1] in workers() or len(workers()) < 2:
            assert time.monotonic() < ends
            time.sleep(0.05)
        for first in (*others, *everywhere()):
            np.testing.assert_allclose(first, known, atol=1e-3)
        server.unregister_lora("demo")
        assert server.list_loras() == []
    finally:
        server.stop()
