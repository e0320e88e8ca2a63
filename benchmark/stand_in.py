#!/usr/bin/env python3
"""Writes a checkpoint of VoxCPM2's size with random weights, to measure speed. Its streams never stop by themselves.

    make setup-test; .venv/bin/python benchmark/stand_in.py /tmp/stand-in

2.3 billion parameters in bfloat16. What it says is noise; the tokenizer is models/small's, a token for each byte.
"""

import contextlib
import io
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Annotated

import commands
import torch
import typer
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import LlamaTokenizerFast

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))
SMALL = ROOT / "models" / "small"
_LOCAL = {"hidden_dim": 1024, "ffn_dim": 4096, "num_heads": 16, "num_layers": 12}
VOXCPM2 = {
    "lm_config": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "vocab_size": 73448,
        "max_position_embeddings": 32768,
    },
    "residual_lm_num_layers": 8,
    "scalar_quantization_latent_dim": 512,
    "encoder_config": _LOCAL,
    "dit_config": _LOCAL,
    "audio_vae_config": {"encoder_dim": 128, "decoder_dim": 2048},
    "max_length": 8192,
}
"""What of its config.json is another than models/small's."""


def write_checkpoint(folder: Path, sizes: dict, seed: int) -> int:
    """Write a checkpoint.

    Args:
        folder: must not be there yet.
        sizes: as VOXCPM2.
        seed: of the weights.

    Returns:
        The number of parameters, the AudioVAE's aside.

    Raises:
        FileExistsError: the folder is there.
    """
    from train_small.official import AudioVAE, VoxCPM2Model, VoxCPMConfig

    folder.mkdir(parents=True)
    config = json.loads((SMALL / "config.json").read_text())
    for name, value in sizes.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SMALL / name, folder / name)
    generator = torch.Generator().manual_seed(seed)
    settings = VoxCPMConfig.model_validate(config)
    with torch.random.fork_rng(), contextlib.redirect_stderr(io.StringIO()):  # it tells of its device
        torch.manual_seed(seed)
        vae = AudioVAE(settings.audio_vae_config)
        with torch.device("meta"):
            model = VoxCPM2Model(settings, LlamaTokenizerFast.from_pretrained(SMALL), vae, device="cpu")
    shapes = {
        name: parameter.shape for name, parameter in model.named_parameters() if not name.startswith("audio_vae.")
    }
    named = tqdm(shapes.items(), "drawing weights", unit="", leave=False, disable=None)
    weights = {name: _weight(name, shape, generator) for name, shape in named}
    save_file(weights, folder / "model.safetensors")
    torch.save({"state_dict": vae.state_dict()}, folder / "audiovae.pth")
    return sum(weight.numel() for weight in weights.values())


def _weight(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if name == "stop_head.weight":  # equal logits, of which the first, to go on, is taken
        return torch.zeros(shape, dtype=torch.bfloat16)
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.bfloat16)
    scale = 1.0 if "embed_tokens" in name or "special_token" in name else 1 / math.sqrt(shape[-1])
    return (scale * torch.randn(shape, generator=generator)).to(torch.bfloat16)


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="folder that is not there yet")],
    seed: Annotated[int, typer.Option(min=0, help="of the weights")] = 0,
) -> None:
    """Write a checkpoint of VoxCPM2's size with random weights."""
    if out.exists():
        raise typer.BadParameter(f"{out} is there already")
    count = write_checkpoint(out, VOXCPM2, seed)
    print(f"{out}: {count / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    commands.run(app)
