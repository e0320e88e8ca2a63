#!/usr/bin/env python3
"""Puts one engine under load and says what its callers notice. One line of JSON a row, appended to --json.

    python3 benchmark/load.py engine models/small --closed 1,4 --rates 0.5 --seconds 10
    python3 benchmark/load.py nano CHECKPOINT --closed 1,8,64 --rates 5,10
    python3 benchmark/load.py triton localhost:8001 --closed 1,8,64

Closed loop: N requests at once, and when all have ended again, until --streams have been measured. Open loop: Poisson
arrivals for --seconds, sent when they are due whatever the engine does, and counted from then. Burst: N requests at
once beside 32 streams that began half a second before and make four times as much; a row for either. Before each row a
short iteration of as many streams at once is thrown away.
"""

import asyncio
import contextlib
import enum
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import commands
import typer
from drivers import Driver, Refused, Settings, make_driver
from load_options import (
    Bursts,
    Closed,
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
from stream_metrics import StreamRecord, figures
from table import USUAL_CHARACTERS, USUAL_PATCHES, load_name
from workload import Job, Range, make_jobs, poisson_arrivals

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
WARM_UP_PATCHES = 12
BURST_BESIDE, BURST_AFTER_S, BURST_LENGTHS = 32, 0.5, 4
READY_TIMEOUT_S, STOP_TIMEOUT_S = 300, 30


class Engine(str, enum.Enum):
    nano = "nano"
    engine = "engine"
    triton = "triton"


class OutputFormat(str, enum.Enum):
    f32 = "f32"
    pcm16 = "pcm16"
    mp3 = "mp3"


@dataclass(frozen=True)
class Plan:
    """What is asked of every engine alike, in one row."""

    characters: Range
    patches: Range
    seconds: float
    streams: int
    timeout_s: float
    seed: int


async def measure(driver: Driver, job: Job, due: float, timeout_s: float) -> StreamRecord:
    """One request, from now to its end or the timeout."""
    record = StreamRecord(due, time.perf_counter())

    async def listen() -> None:
        async with contextlib.aclosing(driver.speak(job)) as chunks:
            async for seconds in chunks:
                if seconds > 0:
                    record.arrivals.append((time.perf_counter(), seconds))

    try:
        await asyncio.wait_for(listen(), timeout_s)
        if not record.arrivals:
            record.failure, record.message = "error", "the stream ended without audio"
    except Refused as error:
        record.failure, record.message = "refused", str(error)
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        record.failure, record.message = "timeout", f"given up after {timeout_s:g} s"
    except Exception as error:  # whatever an engine raises is counted, and told once a row
        record.failure, record.message = "error", f"{type(error).__name__}: {error}"
    return record


async def at_once(driver: Driver, jobs: list[Job], timeout_s: float) -> tuple[list[StreamRecord], float]:
    """All requests at the same time. Returns the records and the seconds to the end of the last."""
    began = time.perf_counter()
    records = await asyncio.gather(*(measure(driver, job, began, timeout_s) for job in jobs))
    return records, time.perf_counter() - began


async def as_they_come(
    driver: Driver, jobs: list[Job], times: list[float], timeout_s: float
) -> tuple[list[StreamRecord], float]:
    """Each request at its time, in seconds from now. Returns as `at_once`."""
    began, tasks = time.perf_counter(), []
    for job, at in zip(jobs, times, strict=True):
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        tasks.append(asyncio.create_task(measure(driver, job, began + at, timeout_s)))
    records = await asyncio.gather(*tasks)
    return records, time.perf_counter() - began


async def measure_rows(driver: Driver, plan: Plan, mode: str, load: float, reference_s: float) -> list[dict]:
    """Rows of the table: of `load` streams at once ("closed"), requests a second ("open") or requests in a "burst".

    Each has its name in "row" and its "load"; a burst gives one more, of the streams that were "running".
    """
    kind = f"{plan.characters} {plan.patches} {reference_s}"
    seed = f"{plan.seed} {mode} {load} {kind}"  # so every engine gets the same requests, and no row another's

    def jobs(count: int, what: str, patches: Range = plan.patches) -> list[Job]:
        return make_jobs(count, plan.characters, patches, reference_s, f"{seed} {what}")

    warm_up = Range(min(WARM_UP_PATCHES, plan.patches.low), min(WARM_UP_PATCHES, plan.patches.high))
    await at_once(driver, jobs(math.ceil(load), "warm-up", warm_up), plan.timeout_s)
    cached_before, prefills_before = driver.cached_tokens, driver.prefills
    groups: dict[tuple[str, float], list[StreamRecord]] = {}
    if mode == "closed":
        records, wall_s = [], 0.0
        for iteration in range(math.ceil(plan.streams / load)):
            more, seconds = await at_once(driver, jobs(int(load), str(iteration)), plan.timeout_s)
            records += more
            wall_s += seconds
        groups["closed", load] = records
    elif mode == "open":
        times = poisson_arrivals(load, plan.seconds, f"{seed} arrivals")
        groups["open", load], wall_s = await as_they_come(driver, jobs(len(times), "open"), times, plan.timeout_s)
    else:
        long = Range(BURST_LENGTHS * plan.patches.low, BURST_LENGTHS * plan.patches.high)
        both = jobs(BURST_BESIDE, "running", long) + jobs(int(load), "burst")
        times = [0.0] * BURST_BESIDE + [BURST_AFTER_S] * int(load)
        records, wall_s = await as_they_come(driver, both, times, plan.timeout_s)
        groups = {("running", BURST_BESIDE): records[:BURST_BESIDE], ("burst", load): records[BURST_BESIDE:]}
    rows = []
    for (name, its_load), records in groups.items():
        row = {"row": name, "load": its_load, "reference_s": reference_s}
        row |= {"characters": str(plan.characters), "patches": str(plan.patches), **figures(records, wall_s)}
        row["cached_tokens"] = None if cached_before is None else driver.cached_tokens - cached_before
        if prefills_before is not None:
            hits, fallbacks = (now - before for now, before in zip(driver.prefills, prefills_before, strict=True))
            row["prefill_graph_hits"], row["prefill_graph_fallbacks"] = hits, fallbacks
        row["gpu_memory_mib"] = gpu_memory_mib()
        if messages := sorted({record.message for record in records if record.failure}):
            row["first_failure"] = messages[0][:300]
        rows.append(row)
    return rows


def gpu_memory_mib() -> int | None:
    """Memory in use on the first GPU, by all processes; None without nvidia-smi."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def summary(row: dict) -> str:
    """A row on one line."""

    def shown(name: str) -> str:
        return "never" if row[name] is None else f"{row[name]:.4g}"

    failed = row["refused"] + row["timeouts"] + row["errors"]
    text = (
        f"TTFB p50 {shown('ttfb_ms_p50')} p99 {shown('ttfb_ms_p99')} ms, {shown('patch_ms_p50')} ms a patch, "
        f"RTF {shown('rtf_p50')}, underrun {100 * row['underrun']:.1f}%, {shown('audio_s_per_s')} audio s/s, "
        f"failed {failed} of {row['streams']}"
    )
    if failed:
        text += f" ({row['first_failure']})"
    if row["first_chunk_one_patch"] not in (None, 1):
        text += f", NOTE: the first chunk is one patch in {100 * row['first_chunk_one_patch']:.1f}% of the streams only"
    if row["cached_tokens"]:
        text += f", NOTE: {row['cached_tokens']} prompt tokens came from a cache"
    return text


async def run(
    driver: Driver, rows: list[tuple[Plan, str, float, float]], write: Callable[[dict], None], common: dict
) -> None:
    """Start the engine, measure the rows (plan, mode, load, seconds of reference), stop it."""
    began = time.perf_counter()
    print(f"{common['engine']}: starting", flush=True)
    settings = await asyncio.wait_for(driver.start(), READY_TIMEOUT_S)
    ready_s = time.perf_counter() - began
    write({"row": "start", **common, "ready_s": round(ready_s, 1), "settings": settings})
    print(f"{common['engine']}: ready after {ready_s:.1f} s, {len(rows)} rows", flush=True)
    try:
        for plan, mode, load, reference_s in rows:
            for row in await measure_rows(driver, plan, mode, load, reference_s):
                write({**common, **row})
                print(f"{common['engine']}: {load_name(row)}: {summary(row)}", flush=True)
    finally:
        await _stop(driver.stop())


def measured(path: Path, common: dict) -> set[tuple[str, str, str, float, float]]:
    """The rows (characters, patches, mode, load, seconds of reference) that a file has of an engine."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    same = [row for row in rows if all(row.get(name) == value for name, value in common.items())]
    names = ("characters", "patches", "row", "load", "reference_s")
    return {tuple(row[name] for name in names) for row in same if "reference_s" in row}


async def _stop(stopping: Coroutine) -> None:
    """What an engine does when it ends is not measured: it must not take long, nor hide an error of a row."""
    try:
        await asyncio.wait_for(stopping, STOP_TIMEOUT_S)
    except Exception as error:
        print(f"stopping the engine: {type(error).__name__}: {error}", file=sys.stderr)


@app.command()
def main(
    engine: Annotated[Engine, typer.Argument(help="what to put under load")],
    target: Annotated[str, typer.Argument(help="a checkpoint directory; for triton host:port of its gRPC")],
    closed: Closed = "",
    rates: Rates = "",
    bursts: Bursts = "",
    seconds: Seconds = 10,
    characters: Texts = USUAL_CHARACTERS,
    patches: Lengths = USUAL_PATCHES,
    references: References = "0",
    streams: Streams = 8,
    max_num_seqs: MaxNumSeqs = None,
    memory: Memory = 0.6,
    offline: Annotated[bool, typer.Option(help="engine: EngineConfig.realtime off, for most throughput")] = False,
    output_format: Annotated[
        OutputFormat, typer.Option(help="triton: of the audio that comes back")
    ] = OutputFormat.f32,
    timeout: Timeout = 60,
    seed: Seed = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", callback=commands.in_a_folder, help="append the rows to this file")
    ] = None,
    resume: Annotated[bool, typer.Option(help="leave out the rows that the file has")] = False,
) -> None:
    """Put one engine under load and say what its callers notice."""
    loads = [("closed", float(n)) for n in counts(closed)] + [("open", rate) for rate in numbers(rates) if rate > 0]
    loads += [("burst", float(n)) for n in counts(bursts)]
    kinds = [
        (c, p, reference_s) for c in spans(characters) for p in spans(patches) for reference_s in numbers(references)
    ]
    rows = [
        (Plan(c, p, seconds, streams, timeout, seed), mode, load, reference_s)
        for c, p, reference_s in kinds
        for mode, load in loads
    ]
    if not rows:
        raise typer.BadParameter("nothing to measure: give --closed, --rates or --bursts, and --references")
    if output_format is not OutputFormat.f32 and engine is not Engine.triton:
        raise typer.BadParameter("an output format is for triton; an engine alone gives samples")
    variant = "-offline" if offline else "" if output_format is OutputFormat.f32 else f"-{output_format.value}"
    common = {
        "engine": engine.value + variant,
        "realtime": not offline if engine is Engine.engine else None,
        "seconds": seconds,
        "seed": seed,
    }

    if resume and json_path is not None and json_path.exists():
        done = measured(json_path, common)
        rows = [row for row in rows if (str(row[0].characters), str(row[0].patches), *row[1:]) not in done]
        if not rows:
            print(f"{common['engine']}: every row is there", flush=True)
            return

    def write(row: dict) -> None:
        if json_path is not None:
            with json_path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    settings = Settings(max_num_seqs, memory, realtime=not offline)
    driver = make_driver(engine.value, target, settings, output_format.value)
    asyncio.run(run(driver, rows, write, common))


if __name__ == "__main__":
    commands.run(app)
