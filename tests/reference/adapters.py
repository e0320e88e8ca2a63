"""Random adapters as the official training writes them, and the official model with one of them loaded."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from reference.official import Official, quiet, voxcpm2
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
BETWEEN = ("enc_to_lm_proj", "lm_to_dit_proj", "res_to_dit_proj", "fusion_concat_proj")


@dataclass(frozen=True)
class AdapterShape:
    """What a random adapter looks like; `lm`, `dit`, `between` are its targets (the engine's settings of that name)."""

    seed: int
    rank: int = 8
    alpha: float = 16
    lm: tuple[str, ...] = ATTENTION
    dit: tuple[str, ...] = ATTENTION
    between: tuple[str, ...] = BETWEEN
    scale: float = 0.6
    """Of what an adapter adds, against what the layer gives."""

    @property
    def official(self) -> voxcpm2.LoRAConfig:
        return voxcpm2.LoRAConfig(
            enable_lm=bool(self.lm),
            enable_dit=bool(self.dit),
            enable_proj=bool(self.between),
            r=self.rank,
            alpha=self.alpha,
            target_modules_lm=list(self.lm),
            target_modules_dit=list(self.dit),
            target_proj_modules=list(self.between),
        )


def load_official(checkpoint: Path, shape: AdapterShape, adapter: Path | None = None) -> Official:
    """The official model with an adapter's layers, and its weights if they are there already."""
    official = Official(checkpoint)
    with quiet():
        official.model.lora_config = shape.official
        official.model._apply_lora()
        if adapter is not None:
            loaded, skipped = official.model.load_lora_weights(str(adapter))
            assert loaded and not skipped
    official.model.eval()
    return official


def make_adapter(path: Path, checkpoint: Path, shape: AdapterShape, kind: str = "safetensors") -> Path:
    """Write an adapter for a checkpoint into a new folder.

    Args:
        kind: "safetensors" or "ckpt".
    """
    path.mkdir(parents=True)
    official = load_official(checkpoint, shape)
    generator = torch.Generator().manual_seed(shape.seed)
    state = {}
    for name, parameter in official.model.get_lora_state_dict().items():
        values = torch.randn(parameter.shape, generator=generator)
        # Each of A and B brings unit variance to unit variance; then the adapter's own scaling.
        values /= parameter.size(1) ** 0.5
        state[name] = values * (shape.scale * shape.rank / shape.alpha) if name.endswith("lora_B") else values
    if kind == "safetensors":
        save_file(state, path / "lora_weights.safetensors")
    else:
        torch.save({"state_dict": state}, path / "lora_weights.ckpt")
    config = {"base_model": "openbmb/VoxCPM2", "lora_config": shape.official.model_dump()}
    (path / "lora_config.json").write_text(json.dumps(config))
    return path
