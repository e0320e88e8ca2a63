"""Kernels are compiled, or read from their cache, while the engine starts: later every stream would wait for that."""

import importlib
import pkgutil

import numpy as np
import pytest

from dq_engine import kernels
from dq_engine.engine import DqCoreEngine, EngineConfig, Request

pytestmark = pytest.mark.gpu

LENGTHS, REFERENCES_S = (2, 7, 15, 16, 31, 60, 130, 250), (0, 0, 0.16, 2, 9.6)


def forget_kernels() -> None:
    """As in a new process."""
    from triton import JITFunction

    forgotten = 0
    for module in pkgutil.iter_modules(kernels.__path__, "dq_engine.kernels."):
        for kernel in vars(importlib.import_module(module.name)).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()
                forgotten += 1
    assert forgotten > 10


def describe(*, fn, compile, **_: object) -> str:
    return f"{fn.name}: {compile['signature']}, {compile['configs']}"


def requests(engine: DqCoreEngine, count: int, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        seconds = rng.choice(REFERENCES_S)
        patches = round(seconds / 0.16)
        latents = rng.standard_normal((patches * engine.patch_size, engine.feat_dim)).astype(np.float32)
        made.append(
            Request(
                text="".join(rng.choice(list("abcdefgh "), rng.choice(LENGTHS))) + "x",
                reference_latents=latents if patches else None,
                lora=("kal", None)[number % 2] if count > 1 else ("kal", None)[seed % 2],
                max_generate_length=3,
                seed=number,
            )
        )
    return made


@pytest.mark.parametrize(
    "settings",
    [{}, {"prefill_graph_lora": True}, {"prefill_buckets": "1:24"}, {"prefill_graph": False}],
    ids=lambda settings: next(iter(settings), "as usual"),
)
def test_none_is_compiled_for_a_request(monkeypatch, settings):
    from triton import knobs

    late: list[str] = []
    config = EngineConfig(
        model="models/small",
        max_num_seqs=64,
        lora_max_loras=4,
        lora_dir="models/adapters",
        lora_preload="kal",
        gpu_memory_utilization=0.2,
        **settings,
    )
    forget_kernels()
    with DqCoreEngine(config) as engine:
        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **how: late.append(describe(**how)))
        for seed, count in enumerate((1, 1, 2, 3, 5, 1, 1, 12, 33, 64, 1, 1)):
            for stream in [engine.submit(request) for request in requests(engine, count, seed)]:
                assert list(stream)[-1].finish_reason in ("length", "stop")
    assert not late, "\n".join(sorted(set(late)))
