#!/usr/bin/env python3
"""What one engine worker speaks, and what several behind the same tritonserver do, at as many streams each.

    python3 benchmark/workers.py CHECKPOINT --devices 0,1 --streams 128

A tritonserver with a worker on the first device, then one with a worker on each. Listeners (listeners.py, in processes
of 64 at most) keep --streams running for each worker; audio is counted by the server's own metrics, for each worker
from one of their updates to another, about --seconds later. Into --out go workers.jsonl and the servers' logs.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import commands
import typer
from compare import ENTRYPOINT
from load_options import Characters, Entrypoint, Memory, Patches, Seed, span
from prometheus_client.parser import text_string_to_metric_families
from triton_server import ServerError, TritonServer  # compare.py has put tools/ on the path

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
LISTENERS = Path(__file__).resolve().with_name("listeners.py")
PER_PROCESS = 64
LOOK_S = 0.05
Figures = dict[str, dict[str, float]]
"""By metric and worker."""


@contextlib.contextmanager
def listeners(url: str, streams: int, characters: str, patches: str, seed: int) -> Iterator[list[dict]]:
    """Streams that go on until the end of the context; then the list holds how they ended, a dictionary a process.

    Raises:
        RuntimeError: a process of them ended before its time, or not well; it says why on standard error.
    """
    counts = [min(PER_PROCESS, streams - begun) for begun in range(0, streams, PER_PROCESS)]
    options = [f"--characters={characters}", f"--patches={patches}"]
    processes = [
        subprocess.Popen(
            [sys.executable, str(LISTENERS), url, f"--count={count}", f"--seed={seed * 1000 + number}", *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, count in enumerate(counts)
    ]
    ended: list[dict] = []
    try:
        yield ended
    finally:
        for process in processes:
            process.terminate()
        said = [process.communicate()[0] for process in processes]
    if codes := [process.returncode for process in processes if process.returncode]:
        raise RuntimeError(f"{len(codes)} of {len(processes)} processes of listeners ended with {codes[0]}")
    ended += [json.loads(line) for line in said]


def read_metrics(url: str) -> Figures:
    """audio_seconds, active_streams and steps of each worker."""
    with urllib.request.urlopen(f"http://{url}/metrics", timeout=5) as response:
        families = text_string_to_metric_families(response.read().decode())
    figures: Figures = {}
    for family in families:
        name = family.name.removeprefix("voxcpm2_")
        if name in ("audio_seconds", "active_streams", "steps"):
            figures[name] = {s.labels["worker"]: s.value for s in family.samples if "worker" in s.labels}
    return figures


def rates(url: str, seconds: float) -> dict[str, dict[str, float]]:
    """Of each worker: audio seconds and steps a second, and its streams on average.

    Metrics change about once a second, so a rate is from one change to the last one within the time.
    """
    seen: dict[str, list[tuple[float, Figures]]] = {}
    until = time.monotonic() + seconds
    before = read_metrics(url)
    while time.monotonic() < until:
        time.sleep(LOOK_S)
        now, at = read_metrics(url), time.monotonic()
        for worker, audio in now["audio_seconds"].items():
            if audio != before["audio_seconds"].get(worker):
                seen.setdefault(worker, []).append((at, now))
        before = now
    result = {}
    for worker, points in sorted(seen.items()):
        (began, first), (ended, last) = points[0], points[-1]
        took = max(ended - began, 1e-9)
        result[worker] = {
            "audio_s_per_s": (last["audio_seconds"][worker] - first["audio_seconds"][worker]) / took,
            "steps_per_s": (last["steps"][worker] - first["steps"][worker]) / took,
            "streams": sum(point["active_streams"][worker] for _, point in points) / len(points),
        }
    return result


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="checkpoint directory; best one that never stops by itself")],
    devices: Annotated[str, typer.Option(help="of the workers, as DQ_ENGINE_DEVICES takes them")] = "0,1",
    streams: Annotated[int, typer.Option(min=1, help="of each worker, all the time")] = 128,
    characters: Characters = "14",
    patches: Patches = "40:56",
    seconds: Annotated[float, typer.Option(min=2, help="of measuring")] = 10,
    settle: Annotated[float, typer.Option(min=0, help="seconds before")] = 5,
    memory: Memory = 0.6,
    entrypoint: Entrypoint = ENTRYPOINT,
    ready_timeout: Annotated[float, typer.Option(min=1, help="seconds for a server's start")] = 280,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="folder of the results; replaces earlier ones")] = Path("build/workers"),
) -> None:
    """Compare several workers with one."""
    options = str(span(characters)), str(span(patches))
    out.mkdir(parents=True, exist_ok=True)
    (out / "workers.jsonl").write_text("")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    all_devices, one = devices.split(","), None
    for number in (1, len(all_devices)):
        environment = {
            "DQ_ENGINE_DEVICES": ",".join(all_devices[:number]),
            "DQ_ENGINE_MAX_NUM_SEQS": str(2 * streams),
            "DQ_ENGINE_GPU_MEMORY_UTILIZATION": str(memory),
        }
        log = out / f"tritonserver_{number}.log"
        print(f"workers: {number}, starting", flush=True)
        server = TritonServer(
            model, environment=environment, entrypoint=entrypoint, log_path=log, ready_timeout_s=ready_timeout
        )
        try:
            with server, listeners(server.grpc_url, number * streams, *options, seed + number) as ended:
                time.sleep(settle)
                workers = rates(server.metrics_url, seconds)
        except ServerError as error:
            raise RuntimeError(f"{str(error).splitlines()[-1]}; see {log}") from None
        audio = sum(worker["audio_s_per_s"] for worker in workers.values())
        failures = sum(count for each in ended for what, count in each.items() if what != "end")
        row = {"workers": number, "streams": streams, "audio_s_per_s": audio, "failures": failures, "each": workers}
        with (out / "workers.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        each = ", ".join(f"{w['audio_s_per_s']:.4g} at {w['streams']:.0f} streams" for w in workers.values())
        ratio = f", {audio / one:.2f} x one" if one else ""
        print(f"workers: {number}, audio s/s: {audio:.4g}{ratio} ({each}), failures: {failures}", flush=True)
        one = one or audio


if __name__ == "__main__":
    commands.run(app)
