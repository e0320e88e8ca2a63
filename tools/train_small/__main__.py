"""Make the small model, stage by stage: python -m train_small --help (with tools/ on PYTHONPATH)."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="a corpus of the data stage")]
Checkpoint = Annotated[Path, typer.Argument(help="a checkpoint's folder; what the stage makes goes into it")]
Out = Annotated[Path, typer.Option(help="folder of the curves and of the state to go on from")]
Minutes = Annotated[float, typer.Option(min=0.01, help="of training; an interrupted run goes on")]
Steps = Annotated[int, typer.Option(min=1, help="at most so many steps; what makes a run repeatable")]
Seed = Annotated[int, typer.Option(help="of everything that is drawn")]


def _device():
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@app.command()
def data(
    out: Annotated[Path, typer.Argument(help="folder of the corpus")],
    matrix: Annotated[int, typer.Option(min=0, help="matrix sentences")] = 16_000,
    free: Annotated[int, typer.Option(min=0, help="free sentences")] = 20_000,
    seed: Seed = 1,
    voice: Annotated[
        list[str] | None,
        typer.Option(help="in turn, as often as named; for an adapter one alone; by default slt, rms, awb"),
    ] = None,
    held_out: Annotated[bool, typer.Option(help="sentences that are not trained on")] = False,
    processes: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
) -> None:
    """Speak sentences with flite (Debian: libflite1)."""
    from train_small.corpus import plan, write_corpus
    from train_small.flite import LIBRARIES, VOICES

    if unknown := [name for name in voice or () if name not in LIBRARIES]:
        raise typer.BadParameter(f"--voice: {unknown[0]!r} is not one of {', '.join(LIBRARIES)}")
    write_corpus(out, plan(matrix, free, seed, held_out, voice or VOICES), processes)


@app.command()
def vae(
    corpus: Folder,
    checkpoint: Checkpoint,
    out: Out,
    minutes: Minutes = 3,
    steps: Steps = 10**9,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(min=1, help="crops of a step")] = 24,
    rate: Annotated[float, typer.Option(help="highest learning rate")] = 1e-3,
) -> None:
    """Train an AudioVAE to reconstruct; goes on from the checkpoint's audiovae.pth if there is one."""
    from train_small.trainer import Budget
    from train_small.vae import VaeSettings, train_vae

    settings = VaeSettings(batch, rate=rate)
    train_vae(checkpoint, corpus, out, Budget(minutes, steps), settings, _device(), seed)


@app.command()
def decoder(
    corpus: Folder,
    checkpoint: Checkpoint,
    out: Out,
    minutes: Minutes = 2.5,
    steps: Steps = 10**9,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(min=1, help="crops of a step")] = 24,
    frames: Annotated[int, typer.Option(min=8, help="of 40 ms in a crop")] = 32,
    rate: Annotated[float, typer.Option(help="highest learning rate")] = 3e-4,
    adversaries: Annotated[
        bool, typer.Option(help="against discriminators; without them a step takes a fifth of a CPU's time")
    ] = True,
) -> None:
    """Go on with the AudioVAE's decoder, against discriminators. The latents stay, and with them the trained models."""
    from train_small.trainer import Budget
    from train_small.vae import VaeSettings, load_vae, save_vae, train_decoder

    device, settings = _device(), VaeSettings(batch, frames, rate, noise=0.3, adversaries=adversaries)
    trained = load_vae(checkpoint, device)
    train_decoder(trained, corpus, out, Budget(minutes, steps), settings, device, seed)
    save_vae(trained, checkpoint / "audiovae.pth")


@app.command()
def models(
    corpus: Folder,
    checkpoint: Checkpoint,
    out: Out,
    minutes: Minutes = 5,
    steps: Steps = 10**9,
    seed: Seed = 0,
    rows: Annotated[int, typer.Option(min=8, help="short sentences of a step")] = 256,
    rate: Annotated[float, typer.Option(help="highest learning rate; lower it to go on from trained weights")] = 1e-3,
    pairs: Annotated[int, typer.Option(min=1, help="continuations made of the corpus")] = 8000,
) -> None:
    """Train the language models, LocEnc and LocDiT; goes on from the checkpoint's model.safetensors if there is one."""
    from train_small.models import ModelSettings, train_models
    from train_small.trainer import Budget

    settings = ModelSettings(rows, rate, pairs)
    train_models(checkpoint, corpus, out, Budget(minutes, steps), settings, _device(), seed)


@app.command()
def adapter(
    corpus: Folder,
    checkpoint: Annotated[Path, typer.Argument(help="the checkpoint that it adapts")],
    out: Out,
    minutes: Minutes = 1.8,
    steps: Steps = 10**9,
    seed: Seed = 0,
    rows: Annotated[int, typer.Option(min=8, help="short sentences of a step")] = 128,
    rate: Annotated[float, typer.Option(help="highest learning rate")] = 3e-3,
) -> None:
    """Train a LoRA adapter on a corpus of one voice; writes OUT/lora in the official form."""
    from train_small.models import ModelSettings, train_adapter
    from train_small.trainer import Budget

    settings = ModelSettings(rows, rate, pairs=0)
    train_adapter(checkpoint, corpus, out, Budget(minutes, steps), settings, _device(), seed)


@app.command()
def curves(
    out: Annotated[Path, typer.Argument(help="folder of the curves")],
    picture: Annotated[Path, typer.Argument(help="PNG to write")],
) -> None:
    """Draw the curves of the stages that were run."""
    from train_small.curves import plot_curves

    order = ("vae", "decoder", "models", "adapter")
    paths = [path for name in order if (path := out / f"{name}.curve.json").exists()]
    if not paths:
        raise typer.BadParameter(f"{out} has no curve of a stage")
    plot_curves(paths, picture)


if __name__ == "__main__":
    try:
        app()
    except OSError as error:  # a folder that is none of a corpus, or of a checkpoint
        sys.exit(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
