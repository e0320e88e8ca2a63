"""A checkpoint that cannot be served gives one error that says what is wrong with it and how to mend it."""

import json
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from reference.checkpoints import SHAPES
from reference.listening import hear
from safetensors.torch import load_file, save_file

from dq_engine.engine import DqCoreEngine, EngineConfig, Request
from dq_engine.errors import CheckpointError, RequestError

SHAPE = SHAPES[1]


def start(path: Path | str) -> DqCoreEngine:
    return DqCoreEngine(EngineConfig(model=str(path), device="cpu", threads=1, max_num_seqs=1)).start()


@pytest.fixture
def path(checkpoint, tmp_path) -> Path:
    """A copy, to be broken."""
    return Path(shutil.copytree(checkpoint(SHAPE)[0], tmp_path / "checkpoint"))


def refused(path: Path | str, *patterns: str) -> None:
    """Starting must fail with an error that has all these in it, and leave no thread behind."""
    before = set(threading.enumerate())
    with pytest.raises(CheckpointError) as caught:
        start(path)
    message = str(caught.value)
    for pattern in (re.escape(str(path)), *patterns):
        assert re.search(pattern, message), f"{pattern!r} is not in: {message}"
    assert message.isprintable() and len(message) < 1000, message
    assert set(threading.enumerate()) <= before


def edit_config(path: Path, change) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def edit_weights(file: Path, change) -> None:
    state = load_file(file)
    change(state)
    save_file(state, file)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json.*incomplete"),
        ("model.safetensors", r"has no \*\.safetensors.*incomplete"),
        ("audiovae.pth", "neither audiovae.safetensors nor audiovae.pth.*incomplete"),
        ("tokenizer.json", "has no tokenizer.json; copy"),
    ],
)
def test_missing_file(path, missing, message):
    (path / missing).unlink()
    refused(path, message)


def test_no_such_directory(tmp_path):
    refused(tmp_path / "nowhere", "neither a directory nor a hub id")


@pytest.mark.parametrize(
    "name",
    [
        "base_lm.embed_tokens.weight",
        "base_lm.layers.1.self_attn.k_proj.weight",
        "residual_lm.layers.0.mlp.up_proj.weight",
        "feat_encoder.special_token",
        "feat_decoder.estimator.delta_time_mlp.linear_2.bias",
        "stop_head.weight",
        "fsq_layer.in_proj.weight",
    ],
)
def test_missing_tensor(path, name):
    edit_weights(path / "model.safetensors", lambda state: state.pop(name))
    merged = name.replace("k_proj", "qkv_proj").replace("up_proj", "gate_up_proj")
    refused(path, rf"lacks 1 of \d+ tensors.*{re.escape(merged)}", "file of several may be missing")


def test_missing_tensor_of_the_vae(path):
    state = torch.load(path / "audiovae.pth", weights_only=True)["state_dict"]
    del state["decoder.model.0.bias"]
    torch.save({"state_dict": state}, path / "audiovae.pth")
    refused(path, r"audiovae\.pth lacks 1 tensors.*decoder\.model\.0\.bias")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_pickled_weights_only(path, file):
    torch.save(load_file(path / "model.safetensors"), path / file)
    (path / "model.safetensors").unlink()
    refused(path, re.escape(file), "only safetensors", "save_file")


def test_pickled_weights_beside_a_safetensors_vae(path):
    """The VAE's file is no file of the model's weights."""
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    save_file(torch.load(path / "audiovae.pth", weights_only=True)["state_dict"], path / "audiovae.safetensors")
    (path / "audiovae.pth").unlink()
    refused(path, "pytorch_model.bin", "only safetensors")


def test_mup(path):
    edit_config(path, lambda config: config["lm_config"].update(use_mup=True))
    refused(path, "use_mup.*not supported", "without mup")


def test_mup_is_the_default(path):
    """As in the official configuration: a file that does not say is one that uses it."""
    edit_config(path, lambda config: config["lm_config"].pop("use_mup"))
    refused(path, "use_mup.*not supported")


@pytest.mark.parametrize("architecture", ["voxcpm3", "LlamaForCausalLM"])
def test_other_architecture(path, architecture):
    edit_config(path, lambda config: config.update(architecture=architecture))
    refused(path, f'architecture "{architecture.lower()}"', '"voxcpm2", such as openbmb/VoxCPM2, and "voxcpm" are')


@pytest.mark.parametrize("text", ["", "{", "[1]", '"voxcpm2"', "\xff\xfe"])
def test_broken_config(path, text):
    (path / "config.json").write_bytes(text.encode("latin-1"))
    refused(path, "config.json")


def test_config_without_a_field(path):
    edit_config(path, lambda config: config["lm_config"].pop("hidden_size"))
    refused(path, r"lm_config\.hidden_size.*required")


def test_config_without_a_vae(path):
    edit_config(path, lambda config: config.pop("audio_vae_config"))
    refused(path, "no audio_vae_config", "own repository")


def test_config_of_another_checkpoint(path):
    edit_config(path, lambda config: config["lm_config"].update(intermediate_size=64))
    refused(path, r"down_proj\.weight has shape \[48, 104\], config\.json makes it \[48, 64\]", "belong together")


def test_vae_of_another_checkpoint(path, checkpoint):
    shutil.copy(checkpoint(SHAPES[0])[0] / "audiovae.pth", path)
    refused(path, r"audiovae\.pth and config\.json do not belong together")


def test_vae_for_other_latents(path):
    edit_config(path, lambda config: config["audio_vae_config"].update(latent_dim=8))
    refused(path, r"audio_vae_config\.latent_dim must equal feat_dim \(16\)")


@pytest.mark.parametrize("keep", [0, 7, 1000, -5], ids=lambda keep: f"{keep} bytes")
@pytest.mark.parametrize("file", ["model.safetensors", "audiovae.pth"])
def test_truncated_file(path, file, keep):
    data = (path / file).read_bytes()
    (path / file).write_bytes(data[:keep])
    refused(path, re.escape(file) if file == "model.safetensors" else "AudioVAE", "download it again")


def test_truncated_safetensors_vae(path):
    (path / "audiovae.safetensors").write_bytes(b"\x00" * 20)
    refused(path, "AudioVAE", "download it again")


def test_broken_tokenizer(path):
    (path / "tokenizer.json").write_text('{"model": 1}')
    refused(path, "tokenizer", "download it again")


class _Harm:
    def __reduce__(self):
        return (Path.touch, (Path("harm"),))


def test_a_pickle_cannot_do_anything(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": _Harm()}, path / "audiovae.pth")
    refused(path, "AudioVAE", r"audiovae\.pth is damaged or holds more than tensors")
    assert not (tmp_path / "harm").exists()


def speak(path: Path) -> np.ndarray:
    engine = start(path)
    try:
        result = hear(engine.submit(Request(text="oh", seed=1, max_generate_length=4, return_latents=True)))
    finally:
        engine.stop()
    return np.concatenate([result.latents.ravel(), result.audio])


@pytest.fixture(scope="module")
def expected(checkpoint) -> np.ndarray:
    return speak(checkpoint(SHAPE)[0])


def test_several_safetensors_files(path, expected):
    """Parts of one packed matrix lie in different files."""
    state = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(state)
    for index in range(3):
        save_file({name: state[name] for name in names[index::3]}, path / f"model-{index + 1:05}-of-00003.safetensors")
    np.testing.assert_array_equal(speak(path), expected)
    (path / "model-00002-of-00003.safetensors").unlink()
    refused(path, r"lacks \d+ of \d+ tensors", "a file of several may be missing")


def test_safetensors_vae(path, expected):
    """It goes before audiovae.pth, as in the official package."""
    save_file(torch.load(path / "audiovae.pth", weights_only=True)["state_dict"], path / "audiovae.safetensors")
    (path / "audiovae.pth").write_bytes(b"not read")
    np.testing.assert_array_equal(speak(path), expected)


def test_vae_without_a_state_dict_around_it(path, expected):
    torch.save(torch.load(path / "audiovae.pth", weights_only=True)["state_dict"], path / "audiovae.pth")
    np.testing.assert_array_equal(speak(path), expected)


def test_tensors_that_the_model_does_not_have_are_named_in_the_log(path, expected, caplog):
    edit_weights(path / "model.safetensors", lambda state: state.update({"lm_head.weight": torch.zeros(2, 2)}))
    np.testing.assert_array_equal(speak(path), expected)
    assert "1 tensors that the model does not have were ignored, the first is lm_head.weight" in caplog.text


def test_an_engine_that_has_not_started_says_so_and_needs_no_end(tmp_path):
    engine = DqCoreEngine(EngineConfig(model=str(tmp_path), device="cpu"))
    for call in (lambda: engine.submit(Request(text="a")), lambda: engine.encode(b"a", "prompt")):
        with pytest.raises(RequestError, match=r"^UNAVAILABLE: the engine has not been started$"):
            call()
    with pytest.raises(CheckpointError):
        engine.start()
    engine.stop()
