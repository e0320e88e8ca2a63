"""Random LoRA adapters of a checkpoint's own size, as the official training writes them."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 32
DISTINCT = 8
"""Adapters with weights of their own; the others are further names of their files."""


def write_adapters(checkpoint: Path, folder: Path, count: int) -> list[str]:
    """Write adapters of q, k, v and o of both language models and LocDiT in bfloat16; their names in the folder."""
    shapes = _shapes(json.loads((checkpoint / "config.json").read_text()))
    names = [f"adapter-{index:03d}" for index in range(count)]
    config = {"lora_config": {"enable_lm": True, "enable_dit": True, "r": RANK, "alpha": RANK}}
    for index, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        (folder / name / "lora_config.json").write_text(json.dumps(config))
        file = folder / name / "lora_weights.safetensors"
        if index >= DISTINCT:
            os.link(folder / names[index % DISTINCT] / file.name, file)
            continue
        generator = torch.Generator().manual_seed(index)
        state = {}
        for target, (outputs, inputs) in shapes.items():
            a = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, RANK, generator=generator) * 0.1 / RANK**0.5
            state[f"{target}.lora_A"], state[f"{target}.lora_B"] = a.bfloat16(), b.bfloat16()
        save_file(state, file)
    return names


def _shapes(config: dict) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each projection of the attention layers, by its name."""
    lm, dit = config["lm_config"], config["dit_config"]
    kv_heads, head = lm["num_key_value_heads"], lm.get("kv_channels") or lm["hidden_size"] // lm["num_attention_heads"]
    models = [
        ("base_lm", lm["num_hidden_layers"], lm["hidden_size"], lm["num_attention_heads"], head),
        ("residual_lm", config["residual_lm_num_layers"], lm["hidden_size"], lm["num_attention_heads"], head),
        (
            "feat_decoder.estimator.decoder",
            dit["num_layers"],
            dit["hidden_dim"],
            dit["num_heads"],
            dit.get("kv_channels") or dit["hidden_dim"] // dit["num_heads"],
        ),
    ]
    shapes = {}
    for name, layers, hidden, heads, width in models:
        for layer in range(layers):
            prefix = f"{name}.layers.{layer}.self_attn"
            shapes[f"{prefix}.q_proj"] = heads * width, hidden
            shapes[f"{prefix}.k_proj"] = shapes[f"{prefix}.v_proj"] = kv_heads * width, hidden
            shapes[f"{prefix}.o_proj"] = hidden, heads * width
    return shapes
