"""What the three bench_*.py have in common: their options, the engine behind them, and the results.

The options are those of nano-vllm-voxcpm's own benchmark scripts, with the same names and meanings. What is new:
--engine, and that --url is a tritonserver's gRPC (host:port) and not the address of an HTTP service.
"""

import asyncio
import dataclasses
import enum
import inspect
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Annotated

import commands
import typer
from bench_drivers import PoolDriver, ServerDriver
from load import gpu_memory_mib, measure
from stream_metrics import StreamRecord, figures
from workload import Job

TEXT = "peter sells nine green toys and rachel wants five pretty flowers, but thomas sees ten white rings"


class Engine(str, enum.Enum):
    nano = "nano"
    engine = "engine"


@dataclasses.dataclass(frozen=True)
class Common:
    """Options of every script."""

    model: Annotated[str | None, typer.Option(help="checkpoint directory or hub id, for an engine in here")] = None
    url: Annotated[str | None, typer.Option(help="host:port of a running tritonserver's gRPC, in place of that")] = None
    engine: Annotated[Engine, typer.Option(help="of --model: ours, or stock nano-vllm-voxcpm")] = Engine.engine
    devices: Annotated[str, typer.Option(help="of the engine's workers: 0 or 0,1; dq_engine takes cpu too")] = "0"
    inference_timesteps: Annotated[int, typer.Option(min=1)] = 10
    max_num_batched_tokens: Annotated[int, typer.Option(min=2)] = 16384
    max_num_seqs: Annotated[int, typer.Option(min=1)] = 512
    max_model_len: Annotated[int, typer.Option(min=1)] = 4096
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.01, max=1)] = 0.9
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager")] = False
    target_text: Annotated[str, typer.Option(help="of every request")] = TEXT
    target_text_file: Annotated[Path | None, typer.Option(help="UTF-8, in place of --target-text")] = None
    max_generate_length: Annotated[int, typer.Option(min=1, help="patches")] = 2000
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 1.0
    cfg_value: Annotated[float, typer.Option(min=0, max=10)] = 2.0
    seed: Annotated[int | None, typer.Option(help="of every request; drawn if not given")] = None
    max_loras: Annotated[int, typer.Option(min=0, help="adapters on the device; each request has one")] = 0
    max_lora_rank: Annotated[int, typer.Option(min=1)] = 8
    lora_path: Annotated[str, typer.Option(help="the adapter, registered under all names")] = "models/adapters/kal"
    lora_name_prefix: Annotated[str | None, typer.Option(help="of the names")] = None
    num_lora_names: Annotated[int | None, typer.Option(min=1, help="as many as --max-loras if not given")] = None
    lora_random_seed: Annotated[int | None, typer.Option(help="of who gets which")] = None
    sample_rate: Annotated[int | None, typer.Option(min=1, help="of the audio, in place of the engine's own")] = None
    http_timeout_s: Annotated[float, typer.Option(min=0.1, help="with --url: when a request is given up")] = 600.0
    http_consume_full: Annotated[
        bool, typer.Option("--http-consume-full", help="as always: all of the audio is taken")
    ] = False
    print_top_errors: Annotated[int, typer.Option(min=0, help="how many of the messages to show")] = 5
    json_out: Annotated[Path | None, typer.Option(help="write settings, summary and every request here")] = None

    @property
    def text(self) -> str:
        """Raises typer.BadParameter: the file cannot be read, or there is no text."""
        try:
            text = self.target_text if self.target_text_file is None else self.target_text_file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"--target-text-file: {error}") from None
        if not text.strip():
            raise typer.BadParameter("--target-text is empty")
        return text.strip()

    @property
    def lora_names(self) -> list[str]:
        prefix = f"bench-{os.getpid()}" if self.lora_name_prefix is None else self.lora_name_prefix
        return [f"{prefix}-{index}" for index in range(self.num_lora_names or self.max_loras)] if self.max_loras else []


def command(run: Callable[..., Coroutine]) -> Callable:
    """A command line of `run(common, ...)`: its own options, and before them those of Common."""
    own = list(inspect.signature(run).parameters.values())[1:]
    common = list(inspect.signature(Common).parameters.values())

    def call(**values: object) -> None:
        shared = Common(**{option.name: values.pop(option.name) for option in common})
        if (shared.model is None) == (shared.url is None):
            raise typer.BadParameter("give either --model or --url")
        with commands.errors_in_one_line():
            asyncio.run(run(shared, **values))

    options = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in [*common, *own]]
    call.__signature__ = inspect.Signature(options)
    call.__annotations__ = {option.name: option.annotation for option in options}
    call.__doc__ = run.__doc__
    return call


class Bench:
    """An engine that is asked for one text again and again.

    Args:
        common: the options.
    """

    def __init__(self, common: Common) -> None:
        self.common, self._text = common, common.text
        self._names, self._chance = common.lora_names, random.Random(common.lora_random_seed)

    async def __aenter__(self) -> "Bench":
        self._driver = (PoolDriver if self.common.url is None else ServerDriver)(self.common)
        if self.common.json_out is not None:
            self.common.json_out.parent.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        try:
            await self._driver.start()
        except Exception as error:  # each engine has its own
            raise RuntimeError(f"the engine did not start: {commands.one_line(error)}") from error
        try:
            for name in self._names:
                await self._driver.register(name, self.common.lora_path)
        except BaseException:
            await self._driver.stop()
            raise
        print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._driver.stop()

    async def request(self, due: float, patches: int | None = None) -> StreamRecord:
        """One, from now to its end; waiting is counted from `due`."""
        most = self.common.max_generate_length if patches is None else patches
        lora = self._chance.choice(self._names) if self._names else None
        timeout_s = math.inf if self.common.url is None else self.common.http_timeout_s
        return await measure(self._driver, Job(self._text, most, None, lora), due, timeout_s)

    def report(self, records: list[StreamRecord], wall_s: float, **more: object) -> None:
        """Print what came of the requests, and write --json-out.

        Raises:
            RuntimeError: every one failed.
        """
        summary = {**more, **(figures(records, wall_s) if records else {}), "gpu_memory_mib": gpu_memory_mib()}
        for name, value in summary.items():
            print(f"  {name}: {value}")
        messages = Counter(record.message for record in records if record.failure)
        for message, count in messages.most_common(self.common.print_top_errors):
            print(f"  {count} x {message}")
        if self.common.json_out is not None:
            options = {name: _json(value) for name, value in dataclasses.asdict(self.common).items()}
            result = {"options": options, "summary": summary, "requests": [_request(r) for r in records]}
            self.common.json_out.write_text(json.dumps(result, indent=1))
            print(f"  {self.common.json_out}")
        if records and all(record.failure for record in records):
            raise RuntimeError("every request failed")


async def drained(tasks: Iterable[asyncio.Task[StreamRecord]], timeout_s: float) -> list[StreamRecord]:
    """The records of requests that are under way, waited for so long; whoever takes longer counts as a timeout."""
    tasks = list(tasks)
    done, late = await asyncio.wait(tasks, timeout=timeout_s) if tasks else (set(), set())
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    now = time.perf_counter()
    lost = [StreamRecord(now, now, failure="timeout", message=f"not done {timeout_s:g} s after the end") for _ in late]
    return [task.result() for task in done] + lost


def _request(record: StreamRecord) -> dict:
    ended = record.arrivals[-1][0] if record.arrivals else None
    return {
        "waited_ms": 1e3 * (record.sent - record.due),
        "ttfb_ms": 1e3 * record.ttfb_s if record.arrivals else None,
        "wall_s": None if ended is None else ended - record.due,
        "audio_s": record.audio_s,
        "chunks": len(record.arrivals),
        "failure": record.failure,
        "message": record.message,
    }


def _json(value: object) -> object:
    return value if isinstance(value, int | float | str | None) else str(value)
