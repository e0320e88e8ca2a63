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


def adapter_sizes(checkpoint: Path, shape: AdapterShape) -> dict[str, torch.Size]:
    """Names and shapes of an adapter's tensors."""
    return {name: t.shape for name, t in load_official(checkpoint, shape).model.get_lora_state_dict().items()}


def random_weights(sizes: dict[str, torch.Size], shape: AdapterShape) -> dict[str, torch.Tensor]:
    """Tensors of these shapes; none is zero."""
    generator = torch.Generator().manual_seed(shape.seed)
    state = {}
    for name, size in sizes.items():
        # Each of A and B brings unit variance to unit variance; then the adapter's own scaling.
        values = torch.randn(size, generator=generator) / size[1] ** 0.5
        state[name] = values * (shape.scale * shape.rank / shape.alpha) if name.endswith("lora_B") else values
    return state


def write_adapter(path: Path, state: dict[str, torch.Tensor], shape: AdapterShape, kind: str = "safetensors") -> Path:
    """Write an adapter into a new folder, as "safetensors" or "ckpt"."""
    path.mkdir(parents=True)
    if kind == "safetensors":
        save_file(state, path / "lora_weights.safetensors")
    else:
        torch.save({"state_dict": state}, path / "lora_weights.ckpt")
    config = {"base_model": "openbmb/VoxCPM2", "lora_config": shape.official.model_dump()}
    (path / "lora_config.json").write_text(json.dumps(config))
    return path
