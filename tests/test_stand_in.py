"""benchmark/stand_in.py: what it writes runs in the engine, and never stops by itself."""

import json
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from triton_server import ROOT

from dq_engine.engine import DqCoreEngine, EngineConfig, Request

sys.path.insert(0, str(ROOT / "benchmark"))

import stand_in  # noqa: E402

LOCAL = {"hidden_dim": 64, "ffn_dim": 96, "num_heads": 2, "num_layers": 2}
TINY = {
    "lm_config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "residual_lm_num_layers": 1,
    "scalar_quantization_latent_dim": 32,
    "encoder_config": LOCAL,
    "dit_config": LOCAL,
    "audio_vae_config": {"encoder_dim": 4, "decoder_dim": 64},
}


def test_a_stand_in_speaks_to_the_most_it_may(tmp_path):
    count = stand_in.write_checkpoint(tmp_path / "made", TINY, seed=0)
    with safe_open(tmp_path / "made/model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    assert count == sum(weight.numel() for weight in weights.values())
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "made/config.json").read_text())
    assert config["lm_config"]["kv_channels"] == 128 and config["lm_config"]["hidden_size"] == 64
    settings = EngineConfig(model=str(tmp_path / "made"), device="cpu", threads=1, max_num_seqs=2)
    with DqCoreEngine(settings) as engine:
        chunks = list(engine.submit(Request(text="hello", seed=1, max_generate_length=40, return_latents=True)))
    assert (chunks[-1].finish_reason, chunks[-1].stats["patches"]) == ("length", 40)
    assert np.isfinite(chunks[-1].latents).all() and chunks[-1].latents.std() > 0.1
    with pytest.raises(FileExistsError):
        stand_in.write_checkpoint(tmp_path / "made", TINY, seed=0)
