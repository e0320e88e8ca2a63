#!/usr/bin/env python3
"""Requests at a fixed rate, whatever the engine does; options as of nano-vllm-voxcpm's script of this name.

    python3 benchmark/bench_open_loop_users.py --model CHECKPOINT --rps 30 --duration-s 60 \\
        --target-text-file text.txt --max-generate-length 2000

One request after the other, each 1 / --rps seconds after the one before. (load.py has random arrivals.)
"""

import asyncio
import time
from typing import Annotated

import typer
from bench_common import Bench, Common, command, drained
from stream_metrics import StreamRecord

WARM_UP_PATCHES = 500


async def run(
    common: Common,
    rps: Annotated[float, typer.Option(min=0.001, help="requests a second")] = 30.0,
    duration_s: Annotated[float, typer.Option(min=0.01)] = 60.0,
    warmup_s: Annotated[float, typer.Option(min=0, help="one request at a time before that")] = 5.0,
    max_inflight: Annotated[int, typer.Option(min=1, help="requests under way; further ones are dropped")] = 512,
    queue_on_overload: Annotated[bool, typer.Option("--queue-on-overload", help="or wait for one to end")] = False,
    drain_timeout_s: Annotated[float, typer.Option(min=0, help="for requests that run at the end")] = 600.0,
) -> None:
    """Measure a rate over a time."""
    async with Bench(common) as bench:
        print(f"{rps:g} a second, {warmup_s:g} s to warm up and {duration_s:g} s to measure", flush=True)
        warm = time.perf_counter() + warmup_s
        while time.perf_counter() < warm:
            await bench.request(time.perf_counter(), min(common.max_generate_length, WARM_UP_PATCHES))
        inflight = asyncio.Semaphore(max_inflight)
        tasks: list[asyncio.Task[StreamRecord]] = []
        began, dropped = time.perf_counter(), 0

        async def request(due: float) -> StreamRecord:
            try:
                return await bench.request(due)
            finally:
                inflight.release()

        for number in range(int(rps * duration_s)):
            due = began + number / rps
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if inflight.locked() and not queue_on_overload:
                dropped += 1
                continue
            await inflight.acquire()
            tasks.append(asyncio.create_task(request(due)))
        records = await drained(tasks, drain_timeout_s)
        scheduled = len(tasks) + dropped
        bench.report(records, time.perf_counter() - began, scheduled=scheduled, dropped=dropped)


if __name__ == "__main__":
    typer.run(command(run))
