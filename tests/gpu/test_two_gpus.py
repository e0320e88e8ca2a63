"""Two GPUs of one machine: an engine on the second, a worker on each, and one engine on both."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from dq_engine import VoxCPM
from dq_engine.engine import DqCoreEngine, EngineConfig, Request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

MODEL = "models/small"
TEXTS = ["peter bought nine green toys", "thomas sees ten white rings", "rachel wants five pretty flowers"]


def speak(path: str, settings: dict) -> None:
    """Write the latents of some requests at once, and then of one alone, into an .npz file.

    Not with seed 0, with which the first sentence makes 1e-3 of 1e-6 (tests/engine/test_official_equality.py).
    """
    with DqCoreEngine(EngineConfig(model=MODEL, max_num_seqs=8, realtime=False, **settings)) as engine:
        streams = [engine.submit(Request(text=t, seed=n, return_latents=True)) for n, t in enumerate(TEXTS, 1)]
        latents = [list(stream)[-1].latents for stream in streams]
        latents += [list(engine.submit(Request(text=TEXTS[0], seed=9, return_latents=True)))[-1].latents]
    np.savez(path, *latents)


def spoken(folder: Path, name: str, **settings) -> list[np.ndarray]:
    """`speak` in a process of its own: torch.distributed is a process's, not an engine's."""
    path = str(folder / f"{name}.npz")
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_two_gpus
        test_two_gpus.speak({path!r}, {settings!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    with np.load(path) as arrays:
        return list(arrays.values())


@pytest.fixture(scope="module")
def on_first(tmp_path_factory) -> list[np.ndarray]:
    return spoken(tmp_path_factory.mktemp("first"), "first", device="cuda:0", dtype="float32")


def assert_close(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        # Sums in another order are 1e-5 apart, until one of the quantizer's roundings goes the other way for it.
        errors = np.abs(one - other).reshape(-1, 4, one.shape[1]).max(axis=(1, 2))
        assert errors[:3].max() < 1e-4 and errors.max() < 0.3, errors


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_an_engine_on_the_second_gpu(on_first, tmp_path, enforce_eager):
    settings = {"device": "cuda:1", "dtype": "float32", "enforce_eager": enforce_eager}
    assert_close(spoken(tmp_path, "second", **settings), on_first)


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_one_engine_on_both(on_first, tmp_path, enforce_eager):
    settings = {"tensor_parallel_size": 2, "dtype": "float32", "enforce_eager": enforce_eager}
    assert_close(spoken(tmp_path, "both", device="cuda:0", **settings), on_first)


def test_one_engine_on_both_in_bfloat16(on_first, tmp_path):
    """It speaks, and about as long; how close it is to one GPU is measured with a real model's weights."""
    ours = spoken(tmp_path, "both", device="cuda:0", tensor_parallel_size=2)
    for one, other in zip(ours, on_first, strict=True):
        assert np.isfinite(one).all()
        assert 0.5 < len(one) / len(other) < 2


def test_a_worker_on_each():
    pool = VoxCPM.from_pretrained(MODEL, devices=[0, 1], dtype="float32", max_num_seqs=8)
    try:
        long = pool.generate(TEXTS[0], max_generate_length=200, seed=1)
        first = next(long)  # of worker 0, which owes it much: the next goes to the other
        second = next(pool.generate(TEXTS[0], max_generate_length=2, seed=1))
        assert np.abs(first - second).max() < 1e-2
        used = [torch.cuda.mem_get_info(device) for device in (0, 1)]
        assert all(free < total - 2**30 for free, total in used), "a worker without its own GPU"
        long.close()
    finally:
        pool.stop()
