"""Options that several commands under benchmark/ share, and what is written in them."""

import math
from pathlib import Path
from typing import Annotated

import typer
from workload import Range


def numbers(text: str) -> list[float]:
    """The numbers of "1,8,32"."""
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,8,32") from None
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise typer.BadParameter(f"{text!r}: every number must be at least 0")
    return list(dict.fromkeys(values))  # the same row a second time would come from the cache


def counts(text: str) -> list[int]:
    values = numbers(text)
    if any(value != int(value) or value < 1 for value in values):
        raise typer.BadParameter(f"{text!r}: whole numbers from 1 are needed")
    return [int(value) for value in values]


def span(text: str) -> Range:
    try:
        return Range.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def spans(text: str) -> list[Range]:
    return list(dict.fromkeys(span(part) for part in text.split(",")))


Closed = Annotated[str, typer.Option(help="closed loop: streams at once, such as 1,8,64")]
Rates = Annotated[str, typer.Option(help="open loop: requests a second, such as 5,10")]
Bursts = Annotated[str, typer.Option(help="requests at once beside 32 running streams, such as 200")]
Seconds = Annotated[float, typer.Option(min=0.1, max=3600, help="of arrivals in an open loop")]
Characters = Annotated[str, typer.Option(help="of a text: N or LOW:HIGH")]
Texts = Annotated[str, typer.Option(help="characters of a text: N or LOW:HIGH; 14,200: all rows with both")]
Patches = Annotated[str, typer.Option(help="of 160 ms, the most a stream makes: N or LOW:HIGH")]
Lengths = Annotated[str, typer.Option(help="the same; 48,10:80: all rows with both")]
References = Annotated[str, typer.Option(help="seconds of each request's own reference; 0,10: all rows with both")]
Streams = Annotated[int, typer.Option(min=1, help="fewest streams that a closed row measures")]
MaxNumSeqs = Annotated[int | None, typer.Option(min=1, help="of the engine; its own default if not given")]
Memory = Annotated[float, typer.Option(min=0.01, max=1, help="gpu_memory_utilization of the engine")]
Timeout = Annotated[float, typer.Option(min=0.1, max=3600, help="seconds after which a stream is given up")]
Entrypoint = Annotated[Path, typer.Option(help="what starts tritonserver, as docker/entrypoint.sh does")]
Seed = Annotated[int, typer.Option(help="of texts, references, lengths and arrivals")]
