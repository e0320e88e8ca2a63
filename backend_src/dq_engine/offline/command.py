"""The command `voxcpm-generate`."""

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from tqdm import tqdm

from dq_engine.config import EngineConfig
from dq_engine.errors import CheckpointError, RequestError
from dq_engine.offline.manifest import Item, ManifestError, fingerprint, read_manifest, versions
from dq_engine.offline.results import Results, ResultsError

_DAY_S = 24 * 3600.0
_QUEUE_SIZE = 1024
"""More than `speak_all` has waiting."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def generate(
    manifest: Annotated[Path, typer.Argument(help="a .jsonl, .csv or .tsv file: id, text, and more fields")],
    outdir: Annotated[Path, typer.Argument(help="folder of the wav files, results.csv and results.jsonl")],
    model: Annotated[
        str | None, typer.Option(help="checkpoint directory or hub id; by default DQ_ENGINE_MODEL")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="of items that have none; by default each draws its own")] = None,
    lora: Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help="an adapter; may be repeated")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="a field that may be there; may be repeated")] = None,
) -> None:
    """Speak every item of a manifest into OUTDIR/<id>.wav.

    What is there already is left alone, so a run that was broken off goes on where it was; an item whose text, settings
    or model have changed is spoken anew. An item that fails is reported in results.csv, and the others go on. All
    settings of the engine are taken from DQ_ENGINE_<NAME>, but for those of its queue; DQ_ENGINE_REALTIME is 0 here
    unless it is set.
    """
    try:
        items = read_manifest(manifest, frozenset(ignore or ()))
        config = _config(model, lora or [])
        results = Results(outdir)
    except (ManifestError, ResultsError, ValueError) as error:
        typer.echo(f"voxcpm-generate: {error}", err=True)
        raise typer.Exit(2) from None
    items = [_with_seed(item, seed) for item in items]
    errors = {item.line: item.error for item in items if item.error is not None}
    fault = None
    try:
        fault = _speak(items, errors, config, lora or [], manifest.parent, results)
    finally:  # Ctrl-C too
        try:
            results.write_table(items, errors)
        except OSError as error:
            fault = fault or f"the table cannot be written: {error}"
        results.close()
    for item in items:
        if item.line in errors:
            typer.echo(f"line {item.line}{f' ({item.id})' if item.id else ''}: {errors[item.line]}", err=True)
    if fault is not None:
        typer.echo(f"voxcpm-generate: {fault}", err=True)
    raise typer.Exit(1 if fault is not None or errors else 0)


def _config(model: str | None, lora: list[str]) -> EngineConfig:
    settings = {"model": model or "", "realtime": False}
    if lora:
        settings |= {"lora_max_loras": min(len(lora), 256), "lora_dir": "/"}
    config = EngineConfig.from_parameters(settings)
    # How many may wait, and how long, is for servers: an item is not to fail because others are spoken.
    update = {"queue_size": _QUEUE_SIZE, "queue_timeout_s": _DAY_S} | ({} if model is None else {"model": model})
    return config.model_copy(update=update)


def _engine_and_adapters(config: EngineConfig, lora: list[str]) -> tuple[EngineConfig, list[tuple[str, Path]]]:
    """The engine's settings, and what is to be registered: those of the command line may lie anywhere."""
    if not lora:
        return config, []
    # Those that the environment names are below its folder, which may be reached by links.
    folder = Path(os.path.abspath(Path(config.lora_dir).expanduser()))
    named = {n: folder.resolve() / os.path.relpath(folder / p, folder) for n, p in config.adapters_to_preload.items()}
    return config.model_copy(update={"lora_dir": "/", "lora_preload": ""}), [*named.items(), *map(_adapter, lora)]


def _adapter(pair: str) -> tuple[str, Path]:
    """Name and path, of NAME=PATH."""
    name, _, path = pair.partition("=")
    return name, Path(path or name).resolve()


def _with_seed(item: Item, seed: int | None) -> Item:
    if item.row is None or item.row.seed is not None:
        return item
    return Item(item.line, item.id, msgspec.structs.replace(item.row, seed=seed))


def _speak(
    items: list[Item], errors: dict[int, str], config: EngineConfig, lora: list[str], folder: Path, results: Results
) -> str | None:
    """Speak what has to be spoken.

    Args:
        errors: gets those of the items, by line.

    Returns:
        What ended it before its time, if anything did.
    """
    adapters = {name: [str(path), versions(path)] for name, path in map(_adapter, lora)}
    model = [config.model, versions(Path(config.model).expanduser()), config.inference_timesteps]
    voices = Path(config.voices_dir).expanduser() if config.voices_dir else None
    rows = [item for item in items if item.row is not None]
    prints = {i.line: fingerprint(i.row, folder, voices, [*model, adapters.get(i.row.lora)]) for i in rows}
    todo = [item for item in rows if not results.is_done(item.id, prints[item.line])]
    if not todo:
        typer.echo(f"nothing to speak: {len(rows)} done before, {len(errors)} failed")
        return None
    # These import torch, which takes seconds: after everything that can fail at once.
    from dq_engine.engine import DqCoreEngine
    from dq_engine.offline.batch import EngineStoppedError, speak_all

    spoken, audio_s, began, fault = 0, 0.0, time.monotonic(), None
    try:
        todo.sort(key=lambda item: -len(item.row.text))  # long ones last would leave the other slots empty at the end
        for item in todo:
            results.discard(item.id)
        settings, to_register = _engine_and_adapters(config, lora)
        engine = DqCoreEngine(settings)
        with tqdm(bar_format="{desc}", leave=False, disable=None) as loading:  # a line, on terminals only
            engine.start(lambda stage, done: loading.set_description_str(stage))
        with contextlib.ExitStack() as stack:
            stack.callback(engine.stop)
            for name, path in to_register:
                engine.register_lora(name, path)
            began = time.monotonic()
            with tqdm(total=len(todo), unit=" items", mininterval=0.5) as bar:
                for outcome in speak_all(engine, todo, folder):
                    line, id = outcome.item.line, outcome.item.id
                    if outcome.error is not None:
                        errors[line] = str(outcome.error)
                    else:
                        stats = {**outcome.last.stats, "finish_reason": outcome.last.finish_reason}
                        results.save(id, prints[line], outcome.samples, engine.sample_rate, stats)
                        spoken, audio_s = spoken + 1, audio_s + stats["audio_s"]
                    bar.set_postfix_str(f"{audio_s / (time.monotonic() - began):.1f} s of audio a second", False)
                    bar.update()
    except (CheckpointError, EngineStoppedError, OSError, RequestError, ValueError) as error:
        fault = str(error)
    took = time.monotonic() - began
    typer.echo(
        f"{spoken} spoken, {len(rows) - len(todo)} done before, {len(errors)} failed; "
        f"{audio_s:.1f} s of audio in {took:.1f} s ({audio_s / took:.1f} a second)"
    )
    return fault


if __name__ == "__main__":
    app()
