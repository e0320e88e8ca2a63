"""The files of a checkpoint, and the official model in training."""

import contextlib
import io
import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaTokenizerFast

from train_small.official import LoRAConfig, VoxCPM2Model, VoxCPMConfig
from train_small.tokenizer import VOCABULARY, write_tokenizer

_NOT_SAVED = ("audio_vae", "inv_freq", "cached")
_HEAD = 128
"""Channels of an attention head, as in the full model."""


def model_config(vae_config: dict) -> dict:
    """config.json of the small model."""
    factors = [1.0] * (_HEAD // 2)
    local = {"num_heads": 2, "kv_channels": _HEAD}
    return {
        "architecture": "voxcpm2",
        "lm_config": {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000,
            "use_mup": False,
            "scale_emb": 12,
            "dim_model_base": 256,
            "scale_depth": 1.4,
            "rope_scaling": {
                "type": "longrope",
                "long_factor": factors,
                "short_factor": factors,
                "original_max_position_embeddings": 4096,
            },
            "hidden_size": 256,
            "intermediate_size": 640,
            "num_attention_heads": 2,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "kv_channels": _HEAD,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
        },
        "patch_size": 4,
        "feat_dim": 64,
        "residual_lm_num_layers": 2,
        "residual_lm_no_rope": True,
        "scalar_quantization_latent_dim": 128,
        "scalar_quantization_scale": 9,
        "encoder_config": {"hidden_dim": 128, "ffn_dim": 320, "num_layers": 2, **local},
        "dit_config": {
            "hidden_dim": 192,
            "ffn_dim": 512,
            "num_layers": 4,
            **local,
            "cfm_config": {
                "sigma_min": 1e-06,
                "solver": "euler",
                "t_scheduler": "log-norm",
                "inference_cfg_rate": 2.0,
            },
        },
        "audio_vae_config": vae_config,
        "max_length": 1024,
        "device": "cuda",
        "dtype": "bfloat16",
    }


def write_config(folder: Path, vae_config: dict) -> None:
    """Write config.json and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(vae_config), indent=1))
    write_tokenizer(folder)


def make_model(folder: Path, vae: nn.Module, device: torch.device, lora: dict | None = None) -> nn.Module:
    """The official VoxCPM2Model in float32 with the folder's configuration, and its weights if there are any.

    Args:
        lora: fields of the official LoRAConfig.
    """
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float32", "device": device.type}
    tokenizer = LlamaTokenizerFast.from_pretrained(folder)
    with contextlib.redirect_stderr(io.StringIO()):  # it tells of its device
        adapter = None if lora is None else LoRAConfig(**lora)
        model = VoxCPM2Model(VoxCPMConfig(**config), tokenizer, vae, adapter, device.type).to(device)
    for parameter in vae.parameters():
        parameter.requires_grad_(False)
    if (folder / "model.safetensors").exists():
        weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        missing = [name for name in missing if "lora_" not in name and not any(part in name for part in _NOT_SAVED)]
        if missing or unexpected:
            raise ValueError(f"{folder} does not fit: {missing} are missing, {unexpected} are not known")
    return model


def save_model(model: nn.Module, path: Path) -> None:
    """Write model.safetensors, in bfloat16."""
    weights = {
        name: tensor.to(torch.bfloat16).contiguous().cpu()
        for name, tensor in model.state_dict().items()
        if not any(part in name for part in _NOT_SAVED)
    }
    part = path.with_suffix(".part")
    save_file(weights, part)
    os.replace(part, path)


def save_lora(model: nn.Module, lora: dict, folder: Path) -> None:
    """Write an adapter as the official training does: lora_weights.safetensors and lora_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16).cpu() for name, tensor in model.get_lora_state_dict().items()}
    save_file(weights, folder / "lora_weights.safetensors")
    (folder / "lora_config.json").write_text(json.dumps({"base_model": "models/small", "lora_config": lora}, indent=2))
