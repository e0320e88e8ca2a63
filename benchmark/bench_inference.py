#!/usr/bin/env python3
"""Requests in iterations, --concurrency at once; the options are those of nano-vllm-voxcpm's script of this name.

python3 benchmark/bench_inference.py --model CHECKPOINT --concurrency 4 --iters 5 --warmup 1 --seed 42
python3 benchmark/bench_inference.py --url localhost:8001 --concurrency 4
"""

import asyncio
import time
from typing import Annotated

import typer
from bench_common import Bench, Common, command
from stream_metrics import StreamRecord


async def run(
    common: Common,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once")] = 1,
    warmup: Annotated[int, typer.Option(min=0, help="iterations before that do not count")] = 1,
    iters: Annotated[int, typer.Option(min=1, help="iterations that do")] = 5,
) -> None:
    """Measure iterations of requests at once."""
    async with Bench(common) as bench:
        records: list[StreamRecord] = []
        wall_s = 0.0
        for number in range(warmup + iters):
            began = time.perf_counter()
            some = await asyncio.gather(*(bench.request(began) for _ in range(concurrency)))
            seconds = time.perf_counter() - began
            audio_s = sum(record.audio_s for record in some)
            kind = "warm-up" if number < warmup else f"iteration {number - warmup + 1}"
            print(f"{kind}: {seconds:.3f} s, {audio_s:.2f} s of audio", flush=True)
            if number >= warmup:
                records += some
                wall_s += seconds
        bench.report(records, wall_s)


if __name__ == "__main__":
    typer.run(command(run))
