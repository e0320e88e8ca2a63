"""`lora` through the server: adapters that were registered at its start, beside streams without any."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from talk import TEXT, Talk, speak
from triton_server import ROOT, TritonServer

from dq_engine.lora.layers import LoraSettings
from dq_engine.model.checkpoint import load_checkpoint

MODEL = ROOT / "models" / "small"
FIELDS = {"text": TEXT, "seed": 7, "min_generate_length": 4, "max_generate_length": 4, "return_latents": True}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]

# A batch of another size sums in another order, and the small model makes that audible to the fourth digit.
TOGETHER = 3e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two random adapters for the model that ships."""
    folder = tmp_path_factory.mktemp("adapters")
    settings = LoraSettings(1, 8, PROJECTIONS, PROJECTIONS, [])
    layers = load_checkpoint(MODEL, torch.device("cpu"), torch.float32, 10, lambda *_: None, settings).lora.layers
    for seed, name in enumerate(("ann", "ben")):
        generator, state = torch.Generator().manual_seed(seed), {}
        for layer in layers:
            for target, size in zip(layer.targets, layer.sizes, strict=True):
                state[f"{target}.lora_A"] = torch.randn(8, layer.inputs, generator=generator) / layer.inputs**0.5
                state[f"{target}.lora_B"] = 0.3 * torch.randn(size, 8, generator=generator) / 8**0.5
        (folder / name).mkdir()
        save_file(state, folder / name / "lora_weights.safetensors")
        (folder / name / "lora_config.json").write_text(json.dumps({"lora_config": {"r": 8, "alpha": 8}}))
    return folder


@pytest.fixture(scope="module")
def server(folder):
    environment = {"DQ_ENGINE_LORA_MAX_LORAS": "1", "DQ_ENGINE_LORA_DIR": str(folder)}
    environment["DQ_ENGINE_LORA_PRELOAD"] = "ann, benjamin=ben"
    with TritonServer(model=MODEL, environment=environment) as server:
        yield server


def test_each_stream_has_its_own_adapter(server):
    names = ["ann", None, "benjamin", "ann", "benjamin", None]
    talks = [Talk(server, FIELDS | ({} if name is None else {"lora": name})) for name in names]
    together = {}
    for name, talk in zip(names, talks, strict=True):
        with talk:
            latents = talk.rest()[-1].as_numpy("latents")
        together.setdefault(name, latents)
        np.testing.assert_allclose(latents, together[name], atol=TOGETHER)
    for one in together:
        alone = speak(server, FIELDS | ({} if one is None else {"lora": one}))[-1].as_numpy("latents")
        np.testing.assert_allclose(together[one], alone, atol=TOGETHER)
        for other in together:
            assert one == other or np.abs(together[one] - together[other]).max() > 0.1


def test_a_name_that_is_none(server):
    with Talk(server, FIELDS | {"lora": ""}) as talk:
        assert talk.error() == "INVALID_ARG: lora: is empty"


@pytest.mark.parametrize("name", ["ben", "Ann"])
def test_an_adapter_that_is_not_there(server, name):
    with Talk(server, FIELDS | {"lora": name}) as talk:
        assert talk.error() == f'NOT_FOUND: lora: there is no registered adapter named "{name}"'
