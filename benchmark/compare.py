#!/usr/bin/env python3
"""Stock nano-vllm-voxcpm and dq_engine, one after the other on one GPU, with the same requests at the same times.

    python3 benchmark/compare.py CHECKPOINT
    python3 benchmark/compare.py CHECKPOINT --closed 1,64 --rates 20,40 --references 0,10 --out /tmp/compare
    python3 benchmark/compare.py CHECKPOINT --characters 14,200 --patches 48,10:80 --engine-timeout 900
    python3 benchmark/compare.py CHECKPOINT --engines nano,engine,triton,triton-mp3

Each engine is loaded in a process of its own (load.py), which ends before the next one starts; for triton a
tritonserver is started with --entrypoint, and load.py is its gRPC client in another process. Into --out go
compare.jsonl (every row as it is measured), compare.md (as in the README), compare.png and the engines' logs; the table
comes last on the screen. An engine that fails, or takes longer than --engine-timeout, gets a row that says so, and the
others still run. --resume measures only what an earlier run with the same options has not, --quick the rows that tell
most, within 6 minutes.
"""

import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import commands
import typer
from engine_process import run_to_its_end
from load import BURST_BESIDE
from load_options import (
    Bursts,
    Closed,
    Entrypoint,
    Lengths,
    MaxNumSeqs,
    Memory,
    Rates,
    References,
    Seconds,
    Seed,
    Streams,
    Texts,
    Timeout,
    counts,
    numbers,
    spans,
)
from plots import plot
from table import USUAL_CHARACTERS, USUAL_PATCHES, markdown, table

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))
from triton_server import ServerError, TritonServer  # noqa: E402  it is no package

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
LOAD = Path(__file__).resolve().with_name("load.py")
ENTRYPOINT = ROOT / "docker/entrypoint.sh"
ENGINES = {
    "nano": ["nano"],
    "engine": ["engine"],
    "engine-offline": ["engine", "--offline", "--rates=", "--bursts="],
    "triton": ["triton"],
    "triton-mp3": ["triton", "--output-format=mp3"],
}


def run_engine(name: str, target: str, options: list[str], out: Path, timeout_s: float) -> None:
    """One engine's rows into compare.jsonl; a row "failed" if its process does not end well in time."""
    engine, *flags = ENGINES[name]
    log = out / f"{name}.log"
    command = [sys.executable, str(LOAD), engine, target, *options, *flags, "--json", str(out / "compare.jsonl")]
    fault = run_to_its_end(command, log, timeout_s)
    if fault is not None:
        last_lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
        note_failure(name, f"{fault}: {' | '.join(last_lines)[-500:]}", out)


def run_server(
    names: list[str],
    server: TritonServer,
    options: list[str],
    seed: int,
    out: Path,
    timeout_s: float,
) -> None:
    """The rows of engines that are one tritonserver, asked for different formats."""
    began = time.monotonic()
    try:
        with server:
            print(f"tritonserver: ready after {time.monotonic() - began:.1f} s", flush=True)
            for number, name in enumerate(names):  # the same requests again would come from the server's cache
                run_engine(name, server.grpc_url, [*options, f"--seed={seed + number}"], out, timeout_s)
    except ServerError as error:
        note_failure(names[0], str(error)[:500], out)


def note_failure(name: str, error: str, out: Path) -> None:
    """A row that says what went wrong."""
    with (out / "compare.jsonl").open("a") as file:
        file.write(json.dumps({"row": "failed", "engine": name, "error": error}) + "\n")
    print(f"{name}: FAILED, {error}", flush=True)


def chosen_engines(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ENGINES]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(ENGINES)}")
    return names


QUICK = {"closed": "1,64,256", "rates": "20,40", "references": "0,10", "seconds": 6, "streams": 4}


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="checkpoint directory; best one that never stops by itself")],
    engines: Annotated[str, typer.Option(help="in this order; ratios are to the first")] = "nano,engine",
    closed: Closed = "1,8,16,32,64,128,256",
    rates: Rates = "5,10,20,30",
    bursts: Bursts = "",
    seconds: Seconds = 10,
    characters: Texts = USUAL_CHARACTERS,
    patches: Lengths = USUAL_PATCHES,
    references: References = "0",
    streams: Streams = 8,
    max_num_seqs: MaxNumSeqs = None,
    memory: Memory = 0.6,
    timeout: Timeout = 60,
    entrypoint: Entrypoint = ENTRYPOINT,
    engine_timeout: Annotated[float, typer.Option(min=1, help="seconds for one engine, its start included")] = 280,
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option(help=f"as with {' '.join(f'--{k} {v}' for k, v in QUICK.items())}")] = False,
    resume: Annotated[bool, typer.Option(help="keep the rows that are there, measure the others")] = False,
    out: Annotated[Path, typer.Option(help="folder of the results; replaces earlier ones")] = Path("build/benchmark"),
) -> None:
    """Compare engines on one GPU in one run."""
    began = time.monotonic()
    names = chosen_engines(engines)
    for check, text in ((spans, characters), (spans, patches), (numbers, references)):
        check(text)  # here, and not in each engine's process
    if "engine-offline" in names and not counts(closed):
        raise typer.BadParameter("engine-offline is measured in closed loops: give --closed")
    if quick:
        closed, rates, references = QUICK["closed"], QUICK["rates"], QUICK["references"]
        seconds, streams = QUICK["seconds"], QUICK["streams"]
    if max_num_seqs is None:
        at_once = [*counts(closed), *(BURST_BESIDE + n for n in counts(bursts))]
        at_once += [math.ceil(rate * seconds) for rate in numbers(rates)]  # of an engine that ends none meanwhile
        max_num_seqs = max(256, *at_once)
    options = {
        "rates": rates,
        "bursts": bursts,
        "seconds": seconds,
        "characters": characters,
        "patches": patches,
        "references": references,
        "streams": streams,
        "memory": memory,
        "timeout": timeout,
        "seed": seed,
        "closed": closed,
        "max-num-seqs": max_num_seqs,
    }
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    out.mkdir(parents=True, exist_ok=True)
    rows_path = out / "compare.jsonl"
    kept = []
    if resume and rows_path.exists():
        kept = [line for line in rows_path.read_text().splitlines() if json.loads(line)["row"] != "failed"]
        arguments.append("--resume")
    rows_path.write_text("".join(f"{line}\n" for line in kept))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine's processes end with this one
    for name in names:
        if not name.startswith("triton"):
            run_engine(name, model, arguments, out, engine_timeout)
    if of_server := [name for name in names if name.startswith("triton")]:
        server = TritonServer(
            model,
            environment={
                "DQ_ENGINE_MAX_NUM_SEQS": str(max_num_seqs),
                "DQ_ENGINE_GPU_MEMORY_UTILIZATION": str(memory),
            },
            entrypoint=entrypoint,
            log_path=out / "tritonserver.log",
            ready_timeout_s=engine_timeout,
        )
        run_server(of_server, server, arguments, seed, out, engine_timeout)
    rows = [json.loads(line) for line in rows_path.read_text().splitlines()]
    print(f"\n{table(rows, names)}\n\n{out}/compare.*; {time.monotonic() - began:.0f} s in all")
    (out / "compare.md").write_text(markdown(rows, names) + "\n")
    plot(rows, names, out / "compare.png")
    if all(any(row["row"] == "failed" and row["engine"] == name for row in rows) for name in names):
        raise typer.Exit(1)


if __name__ == "__main__":
    commands.run(app)
