#!/usr/bin/env python3
"""Listeners of a running tritonserver: each asks for a stream, listens to its end and begins anew, until it is ended.

    python3 benchmark/listeners.py localhost:8001 --count 64

So the server always has as many streams, all at different places. Printed at the end: a line of JSON, what failed.
"""

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter
from itertools import count as numbers
from typing import Annotated

import commands
import typer
from drivers import TritonDriver
from load import measure
from load_options import Characters, Patches, Seed, Timeout, span
from workload import Range, make_jobs


async def listen(url: str, count: int, characters: Range, patches: Range, timeout_s: float, seed: int) -> Counter[str]:
    """How often what went wrong, and streams that were heard to their "end", until SIGTERM."""
    driver, ended = TritonDriver(url), Counter()
    await driver.start()

    async def listener(index: int) -> None:
        for number in numbers():
            (job,) = make_jobs(1, characters, patches, 0, f"{seed} {index} {number}")
            record = await measure(driver, job, time.perf_counter(), timeout_s)
            ended[record.message if record.failure else "end"] += 1
            if record.failure:
                await asyncio.sleep(1)

    tasks = [asyncio.create_task(listener(index)) for index in range(count)]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await driver.stop()
    return ended


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    url: Annotated[str, typer.Argument(help="host:port of a tritonserver's gRPC")],
    count: Annotated[int, typer.Option(min=1, help="listeners")] = 64,
    characters: Characters = "14",
    patches: Patches = "40:56",
    timeout: Timeout = 60,
    seed: Seed = 0,
) -> None:
    """Keep so many streams running."""
    ended = asyncio.run(listen(url, count, span(characters), span(patches), timeout, seed))
    print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    commands.run(app)
