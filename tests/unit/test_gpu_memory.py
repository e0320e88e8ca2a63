"""How many KV blocks a GPU gets, and what is said when it is too small; the GPU is a stand-in that says its memory."""

from types import SimpleNamespace

import pytest
import torch

from dq_engine import loading
from dq_engine.config import EngineConfig

GIB = 2**30
MAX_MODEL_LEN = 4096
BLOCK_BYTES = 16 * 36 * 1024  # of VoxCPM2: docs/deploy.md


def blocks(monkeypatch, free: int, graphs: int, slots: int = 512, **settings: float) -> int:
    """For a GPU of 24 GiB of which so many bytes are free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 24 * GIB))
    attention = SimpleNamespace(bytes_per_block=BLOCK_BYTES)
    runner = SimpleNamespace(device=torch.device("cuda", 0), attention=attention)
    config = EngineConfig(model="m", **settings)
    return loading._num_kv_blocks(config, runner, slots, MAX_MODEL_LEN, graphs)


def test_a_gpu_of_24_gib_is_filled_up_to_its_share_beside_graphs_and_scratch(monkeypatch):
    found = blocks(monkeypatch, free=18 * GIB, graphs=3 * GIB)
    share = int(0.9 * 24 * GIB)
    used = 6 * GIB + 3 * GIB + loading._GPU_SCRATCH_BYTES + found * BLOCK_BYTES
    assert share - BLOCK_BYTES < used <= share
    assert found < 512 * MAX_MODEL_LEN // 16, "not all streams at full length fit"
    assert blocks(monkeypatch, free=18 * GIB, graphs=5 * GIB) == pytest.approx(found - 2 * GIB / BLOCK_BYTES, abs=1)


def test_no_more_blocks_than_all_slots_can_use(monkeypatch):
    assert blocks(monkeypatch, free=18 * GIB, graphs=0, slots=2) == 2 * MAX_MODEL_LEN // 16


def test_a_gpu_that_is_too_small_says_what_to_lower(monkeypatch):
    with pytest.raises(ValueError) as caught:
        blocks(monkeypatch, free=5 * GIB, graphs=int(1.5 * GIB), gpu_memory_utilization=0.5)
    message = str(caught.value)
    assert message.startswith("the GPU's memory does not hold the KV cache of one stream: 5.0 of 24.0 GiB are free")
    assert "CUDA graphs need 1.5 GiB" in message
    for setting in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        assert setting in message


def test_a_gpu_that_runs_out_while_it_is_filled_says_what_to_lower(monkeypatch):
    def out_of_memory(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "_load", out_of_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 2, 24 * GIB))
    with pytest.raises(
        ValueError, match=r"0\.5 of 24\.0 GiB were free in the end; lower max_num_seqs, .*num_kvcache_blocks"
    ):
        loading.load(EngineConfig(model="m", device="cpu"), None, lambda *_: None)
