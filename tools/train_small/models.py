"""The language models, LocEnc and LocDiT, trained together; and an adapter to one voice."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from train_small.batches import (
    LONG_PATCHES,
    LONG_TEXT,
    PAIR_PATCHES,
    PAIR_TEXT,
    REFERENCE_PATCHES,
    SHORT_PATCHES,
    SHORT_TEXT,
    Encoded,
    Layout,
)
from train_small.checkpoint import make_model, save_lora, save_model
from train_small.corpus import load_corpus
from train_small.flite import VOICES
from train_small.objective import embed_times_in_both_precisions, losses
from train_small.trainer import Batch, Budget, Kind, Trainer, make_optimizer
from train_small.vae import fast, load_vae

LORA = {"enable_lm": True, "enable_dit": True, "enable_proj": True, "r": 8, "alpha": 16, "dropout": 0.0}
_FIGURES = ["flow", "stop"]


@dataclass(frozen=True)
class ModelSettings:
    """Of the language models or an adapter.

    Args:
        rows: of a batch of short sentences; other kinds have fewer.
        rate: highest learning rate.
        pairs: continuations to make from the corpus.
    """

    rows: int = 256
    rate: float = 1e-3
    pairs: int = 8000


def train_models(
    checkpoint: Path, corpus: Path, out: Path, budget: Budget, settings: ModelSettings, device: torch.device, seed: int
) -> None:
    """Train all but the AudioVAE and write model.safetensors; weights that the checkpoint has are the start."""
    torch.manual_seed(seed)
    data = _encoded(checkpoint, corpus, VOICES, settings.pairs, device, seed)
    model = make_model(checkpoint, load_vae(checkpoint, device), device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = settings.rows
    layouts = {
        "short": (0.40, Layout(rows, SHORT_PATCHES, SHORT_TEXT)),
        "long": (0.15, Layout(rows // 2, LONG_PATCHES, LONG_TEXT, long=True)),
        "reference": (0.25, Layout(rows * 5 // 8, SHORT_PATCHES, SHORT_TEXT, REFERENCE_PATCHES)),
        "continuation": (0.14, Layout(rows // 2, PAIR_PATCHES, PAIR_TEXT, pairs=True)),
        "both": (0.06, Layout(rows // 4, PAIR_PATCHES, PAIR_TEXT, REFERENCE_PATCHES, pairs=True)),
    }
    trainer = _run("models", model, parameters, data, layouts, out, budget, settings.rate, device, seed)
    trainer.take_average()
    save_model(model, checkpoint / "model.safetensors")


def train_adapter(
    checkpoint: Path, corpus: Path, out: Path, budget: Budget, settings: ModelSettings, device: torch.device, seed: int
) -> None:
    """Train a LoRA adapter that says any text in the corpus's one voice, and write it to `out`/lora."""
    torch.manual_seed(seed)
    data = _encoded(checkpoint, corpus, None, 0, device, seed)
    model = make_model(checkpoint, load_vae(checkpoint, device), device, LORA)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = settings.rows
    layouts = {
        "short": (0.7, Layout(rows, SHORT_PATCHES, SHORT_TEXT, controlled=False)),
        "long": (0.3, Layout(rows // 2, LONG_PATCHES, LONG_TEXT, controlled=False, long=True)),
    }
    trainer = _run("adapter", model, parameters, data, layouts, out, budget, settings.rate, device, seed)
    trainer.take_average()
    save_lora(model, LORA, out / "lora")


def _encoded(
    checkpoint: Path, corpus: Path, voices: list[str] | None, pairs: int, device: torch.device, seed: int
) -> Encoded:
    """Without voices those of the corpus."""
    loaded, complete = load_corpus(corpus)
    if not complete:
        raise ValueError(f"{corpus} is not complete: run the data stage first")
    voices = voices or sorted({voice for _, voice in loaded.items})
    vae = load_vae(checkpoint, device)
    with fast(vae, device):
        return Encoded(loaded, vae, voices, pairs, device, seed)


def _run(
    name: str,
    model: nn.Module,
    parameters: list[nn.Parameter],
    data: Encoded,
    layouts: dict[str, tuple[float, Layout]],
    out: Path,
    budget: Budget,
    rate: float,
    device: torch.device,
    seed: int,
) -> Trainer:
    embed_times_in_both_precisions(model)
    model.train()
    optimizer = make_optimizer(parameters, (0.9, 0.98), 0.01)
    trainer = Trainer(name, out, model, parameters, [(optimizer, rate)], _FIGURES, seed)

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            loss, *parts = losses(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        return torch.stack([part.detach() for part in parts])

    def maker(layout: Layout) -> Callable[[], Batch]:
        return lambda: data.batch(layout)

    trainer.run({kind: Kind(share, maker(layout), step) for kind, (share, layout) in layouts.items()}, budget)
    return trainer
