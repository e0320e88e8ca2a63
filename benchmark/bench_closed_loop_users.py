#!/usr/bin/env python3
"""Users that send their next request when the last has ended; options as of nano-vllm-voxcpm's script of this name.

    python3 benchmark/bench_closed_loop_users.py --model CHECKPOINT --num-users 60 --duration-s 60 --warmup-s 5 \\
        --target-text-file text.txt --max-generate-length 2000

What begins within --duration-s after the warm-up is measured, to its end.
"""

import asyncio
import time
from typing import Annotated

import typer
from bench_common import Bench, Common, command, drained
from stream_metrics import StreamRecord


async def run(
    common: Common,
    num_users: Annotated[int, typer.Option(min=1)] = 100,
    warmup_s: Annotated[float, typer.Option(min=0)] = 5.0,
    duration_s: Annotated[float, typer.Option(min=0.01)] = 60.0,
    drain_timeout_s: Annotated[float, typer.Option(min=0, help="for requests that run at the end")] = 600.0,
) -> None:
    """Measure a number of users over a time."""
    async with Bench(common) as bench:
        print(f"{num_users} users, {warmup_s:g} s to warm up and {duration_s:g} s to measure", flush=True)
        start = time.perf_counter() + warmup_s
        end = start + duration_s
        records: list[StreamRecord] = []
        last: set[asyncio.Task[StreamRecord]] = set()

        async def user() -> None:
            while (now := time.perf_counter()) < end:
                request = asyncio.create_task(bench.request(now))
                last.add(request)
                await asyncio.wait([request], timeout=max(0.0, end - time.perf_counter()))
                if not request.done():
                    return
                last.discard(request)
                records.append(request.result())
                if records[-1].failure:
                    await asyncio.sleep(0.1)  # who is refused does not ask thousands of times a second

        await asyncio.gather(*(user() for _ in range(num_users)))
        records += await drained(last, drain_timeout_s)
        measured = [record for record in records if start <= record.due < end or record.failure == "timeout"]
        heard = [(at, seconds) for record in records for at, seconds in record.arrivals if start <= at < end]
        bench.report(
            measured,
            time.perf_counter() - start,
            started=len(measured),
            started_per_s=len(measured) / duration_s,
            audio_s_per_s_in_the_window=sum(seconds for _, seconds in heard) / duration_s,
        )


if __name__ == "__main__":
    typer.run(command(run))
