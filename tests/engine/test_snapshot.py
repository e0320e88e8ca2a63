"""What an engine tells of itself: all that the metrics ask for, and numbers that add up."""

from triton_server import ROOT

from dq_engine.engine import DqCoreEngine, EngineConfig, Request
from dq_engine.metrics import DEFINITIONS

KEYS = [definition.key for definition in DEFINITIONS if definition.key and "graph" not in definition.key]
"""Of the graphs is told only where there are some."""


def test_a_snapshot():
    config = EngineConfig(model=str(ROOT / "models" / "small"), device="cpu", threads=1, max_num_seqs=2)
    with DqCoreEngine(config) as engine:
        before = engine.snapshot()
        assert set(KEYS) - {"prefill_padding_tokens"} <= before.keys()
        counted = [definition.key for definition in DEFINITIONS if definition.kind == "counter"]
        assert {name: before[name] for name in KEYS if name in counted and before.get(name)} == {}, "not the warm-up"
        for seed in 1, 2:
            chunks = list(engine.submit(Request(text="hello", seed=seed, min_generate_length=5, max_generate_length=5)))
        now = engine.snapshot()
        assert (now["patches"], now["steps"], now["preemptions"], now["recordings"]) == (10, 10, 0, 0)
        assert now["audio_seconds"] == 2 * chunks[-1].stats["audio_s"] == 1.6
        assert now["prefill_tokens"] + now["cached_tokens"] == 2 * chunks[-1].stats["prompt_tokens"]
        assert 0 < now["delivery_seconds"] < now["vae_seconds"] < now["step_seconds"]
        assert 0 < now["prefill_seconds"] < now["step_seconds"]
        assert (now["active"], now["queued"], now["preempted"]) == (0, 0, 0)
        assert now["kv_blocks_free"] == now["kv_blocks_total"]
