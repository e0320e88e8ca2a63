#!/usr/bin/env python3
"""Streams with LoRA adapters, stock nano-vllm-voxcpm and dq_engine one after the other on one GPU.

    python3 benchmark/lora.py CHECKPOINT
    python3 benchmark/lora.py CHECKPOINT --engines engine --streams 1,64 --registered 32,256 --users 0

Closed loop: N streams at once without adapters ("base"), then with adapters, each request the next of those registered.
With more registered than --slots nearly every request's adapter has to be loaded first; with fewer all are on the
device after the warm-up. Then --users listeners (dq_engine only) for --seconds: each picks any adapter that is
registered, listens to the end and begins anew after up to a second. Into --out go lora.jsonl and the engines' logs.
DQ_ENGINE_PREFILL_GRAPH_LORA=1 in the environment measures dq_engine with that.
"""

import asyncio
import json
import math
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Annotated

import commands
import typer
from adapters import write_adapters
from drivers import Driver, Settings, make_driver
from engine_process import run_to_its_end
from load import READY_TIMEOUT_S, at_once, gpu_memory_mib, measure
from load_options import counts, span
from stream_metrics import StreamRecord, figures
from workload import Range, make_jobs

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
ENGINES = ("nano", "engine")
CHARACTERS = Range(14, 14)
WARM_UP_PATCHES = Range(8, 8)
TIMEOUT_S = 60.0
COLUMNS = {
    "TTFB p50": "ttfb_ms_p50",
    "p99 ms": "ttfb_ms_p99",
    "ms/patch": "patch_ms_p50",
    "gap ms": "gap_ms_max",
    "audio s/s": "audio_s_per_s",
    "underrun": "underrun",
    "failed": "failed",
    "loads": "loads",
}


async def closed_row(
    driver: Driver, streams: int, patches: Range, fewest: int, adapters: Iterator[str | None], seed: str
) -> dict:
    """One row: `streams` at once, after a short iteration as warm-up, until at least `fewest` have been measured."""

    async def iteration(number: int, length: Range) -> tuple[list[StreamRecord], float]:
        jobs = make_jobs(streams, CHARACTERS, length, 0, f"{seed} {number}")
        return await at_once(driver, [replace(job, lora=next(adapters)) for job in jobs], TIMEOUT_S)

    await iteration(-1, WARM_UP_PATCHES)
    records, wall_s, loads = [], 0.0, driver.lora_loads
    for number in range(math.ceil(fewest / streams)):
        more, seconds = await iteration(number, patches)
        records += more
        wall_s += seconds
    return _row(driver, records, wall_s, loads)


async def users_row(driver: Driver, users: int, seconds: float, patches: Range, names: list[str]) -> dict:
    """One row: listeners that come back as long as there is time."""
    records: list[StreamRecord] = []
    began, loads = time.perf_counter(), driver.lora_loads

    async def listen(user: int) -> None:
        rng = random.Random(user)
        for number in count():
            await asyncio.sleep(rng.random())
            if time.perf_counter() - began > seconds:
                return
            (job,) = make_jobs(1, CHARACTERS, patches, 0, f"user {user} {number}")
            job = replace(job, lora=rng.choice(names))
            records.append(await measure(driver, job, time.perf_counter(), TIMEOUT_S))

    await asyncio.gather(*(listen(user) for user in range(users)))
    return _row(driver, records, time.perf_counter() - began, loads)


def _row(driver: Driver, records: list[StreamRecord], wall_s: float, loads_before: int | None) -> dict:
    row = figures(records, wall_s)
    row["failed"] = row["refused"] + row["timeouts"] + row["errors"]
    row["loads"] = None if loads_before is None else driver.lora_loads - loads_before
    row["gpu_memory_mib"] = gpu_memory_mib()
    if messages := sorted({record.message for record in records if record.failure}):
        row["first_failure"] = messages[0][:300]
    return row


async def measure_engine(engine: str, model: str, folder: Path, options: dict, out: Path) -> None:
    """All rows of one engine into `out`."""

    def write(row: dict) -> None:
        with out.open("a") as file:
            file.write(json.dumps({"engine": engine, **row}) + "\n")
        print(f"{engine}: {line(row)}", flush=True)

    settings = Settings(
        max_num_seqs=max(*options["streams"], options["users"], 2),
        gpu_memory_utilization=options["memory"],
        lora_max_loras=options["slots"],
        lora_dir=str(folder),
    )
    driver, began = make_driver(engine, model, settings), time.perf_counter()
    await asyncio.wait_for(driver.start(), READY_TIMEOUT_S)
    write({"row": "start", "seconds": round(time.perf_counter() - began, 1)})
    patches, names = Range.parse(options["patches"]), sorted(path.name for path in folder.iterdir())
    try:
        registered = 0
        for number in [0, *options["registered"]]:
            began = time.perf_counter()
            for name in names[registered:number]:
                await driver.register(name, str(folder / name))
            if number > registered:
                write({"row": "register", "count": number, "seconds": round(time.perf_counter() - began, 1)})
            registered = number
            adapters = cycle(names[:number] or [None])
            for streams in options["streams"]:
                row = await closed_row(driver, streams, patches, options["fewest"], adapters, f"{number} {streams}")
                write({"row": "closed", "streams_at_once": streams, "registered": number, **row})
        if options["users"] and engine == "engine":
            row = await users_row(driver, options["users"], options["seconds"], patches, names[:registered])
            write({"row": "users", "streams_at_once": options["users"], "registered": registered, **row})
    finally:
        await driver.stop()


def line(row: dict) -> str:
    """A row on one line."""
    if row["row"] in ("start", "register", "failed"):
        return " ".join(f"{name} {value}" for name, value in row.items() if name != "engine")
    adapters = f"{row['registered']} registered" if row["registered"] else "base"
    values = (row[name] for name in COLUMNS.values())
    cells = "".join(("-" if value is None else f"{value:.4g}").rjust(10) for value in values)
    text = f"{row['row']:8}{row['streams_at_once']:4} {adapters:15}{cells}"
    return text + (f"  {row['first_failure']}" if row["failed"] else "")


def table(rows: list[dict]) -> str:
    """All rows, and under each with adapters how it compares with the same engine's base."""
    rows = [row for row in rows if row["row"] not in ("start", "register")]
    lines = [f"{'':38}" + "".join(title.rjust(10) for title in COLUMNS)]
    bases = {(r["engine"], r["streams_at_once"]): r for r in rows if r["row"] == "closed" and not r["registered"]}
    for row in rows:
        text = f"{row['engine']:10}{line(row)}"
        base = bases.get((row["engine"], row.get("streams_at_once")))
        if row["row"] == "closed" and row["registered"] and base and not row["failed"] and not base["failed"]:
            patch, first = (row[name] / base[name] for name in ("patch_ms_p50", "ttfb_ms_p50"))
            more = row["ttfb_ms_p50"] - base["ttfb_ms_p50"]
            text += f"   x base: ms/patch {patch:.2f}, TTFB {first:.2f} ({more:+.0f} ms)"
        lines.append(text)
    return "\n".join(lines)


@app.command()
def main(
    model: Annotated[Path, typer.Argument(help="checkpoint directory; best one that never stops by itself")],
    engines: Annotated[str, typer.Option(help="in this order")] = "nano,engine",
    streams: Annotated[str, typer.Option(help="at once")] = "1,8,16,32,64",
    registered: Annotated[str, typer.Option(help="numbers of registered adapters, ascending")] = "32,128,256",
    slots: Annotated[int, typer.Option(min=1, help="for adapters on the device")] = 64,
    fewest: Annotated[int, typer.Option(min=1, help="streams that a row measures")] = 8,
    patches: Annotated[str, typer.Option(help="of 160 ms that a stream makes: N or LOW:HIGH")] = "48",
    users: Annotated[int, typer.Option(min=0, help="listeners of the last row; 0 = none")] = 30,
    seconds: Annotated[float, typer.Option(min=1, help="of the last row")] = 60,
    memory: Annotated[float, typer.Option(min=0.01, max=1, help="gpu_memory_utilization")] = 0.6,
    engine_timeout: Annotated[float, typer.Option(min=1, help="seconds for one engine, its start included")] = 290,
    out: Annotated[Path, typer.Option(help="folder of the results; replaces earlier ones")] = Path("build/lora"),
    folder: Annotated[Path | None, typer.Option(hidden=True, help="of the adapters: measure one engine")] = None,
) -> None:
    """Compare streams with and without adapters on one GPU."""
    options = {
        "streams": counts(streams),
        "registered": sorted(counts(registered)),
        "slots": slots,
        "fewest": fewest,
        "patches": str(span(patches)),
        "users": users,
        "seconds": seconds,
        "memory": memory,
    }
    if not options["streams"] or not options["registered"]:
        raise typer.BadParameter("nothing to measure: give --streams and --registered")
    if folder is not None:
        asyncio.run(measure_engine(engines, str(model), folder, options, out / "lora.jsonl"))
        return
    names = engines.split(",")
    if unknown := [name for name in names if name not in ENGINES]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(ENGINES)}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "lora.jsonl").write_text("")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine's processes end with this one
    with tempfile.TemporaryDirectory(prefix="adapters-", dir=out.resolve()) as adapters:
        write_adapters(model, Path(adapters), options["registered"][-1])
        for name in names:
            given = {key: value for key, value in options.items() if key not in ("streams", "registered")}
            arguments = [f"--{key}={value}" for key, value in given.items()]
            arguments += [f"--streams={streams}", f"--registered={registered}", f"--out={out}", f"--folder={adapters}"]
            run_engine(name, [str(model), f"--engines={name}", *arguments], out, engine_timeout)
    rows = [json.loads(text) for text in (out / "lora.jsonl").read_text().splitlines()]
    print(f"\n{table(rows)}\n\n{out}/lora.jsonl")
    if any(row["row"] == "failed" for row in rows):
        raise typer.Exit(1)


def run_engine(name: str, arguments: list[str], out: Path, timeout_s: float) -> None:
    """One engine in a process of its own; a row "failed" if it does not end well in time."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    fault = run_to_its_end(command, out / f"{name}.log", timeout_s)
    if fault is not None:
        row = {"engine": name, "row": "failed", "error": f"{fault}; see {out}/{name}.log"}
        with (out / "lora.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    commands.run(app)
