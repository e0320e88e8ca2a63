"""Rows of load.py as a picture: latency and underruns against arrivals, throughput against streams at once."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  after the backend without a screen is chosen
from matplotlib.axes import Axes  # noqa: E402
from table import LOADS, load_name  # noqa: E402


def plot(rows: list[dict], engines: list[str], path: Path) -> None:
    """Write a PNG; a panel for which nothing was measured stays empty, and infinite figures are left out."""
    figure, (ttfb, underrun, throughput) = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    kinds = list(dict.fromkeys(_kind(row) for row in rows if "reference_s" in row))
    for number, engine in enumerate(engines):
        for kind, marker in zip(kinds, "os^vDP*X" * len(kinds), strict=False):
            label = ", ".join([engine, *([kind] if kind else [])])
            style = {"color": f"C{number}", "marker": marker}
            own = [row for row in rows if row["engine"] == engine and "reference_s" in row and _kind(row) == kind]
            arrivals = [row for row in own if row["row"] == "open"]
            _line(ttfb, arrivals, "ttfb_ms_p50", 1, label=f"{label}: p50", linestyle="--", **style)
            _line(ttfb, arrivals, "ttfb_ms_p99", 1, label=f"{label}: p99", **style)
            _line(underrun, arrivals, "underrun", 100, label=label, **style)
            _line(throughput, [row for row in own if row["row"] == "closed"], "audio_s_per_s", 1, label=label, **style)
    ttfb.set(title="Time to first audio", xlabel="requests a second", ylabel="ms", yscale="log")
    ttfb.yaxis.set_major_formatter("{x:g}")
    ttfb.yaxis.set_minor_formatter("{x:g}")
    underrun.set(title="Streams that ran dry or failed", xlabel="requests a second", ylabel="%", ylim=(-3, 103))
    throughput.set(title="Throughput", xlabel="streams at once", ylabel="seconds of audio a second")
    throughput.set_xscale("log", base=2)
    throughput.xaxis.set_major_formatter("{x:g}")
    for axes in (ttfb, underrun, throughput):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _kind(row: dict) -> str:
    """What requests a row is of: its load's name without the load."""
    return load_name(row).removeprefix(f"{row['load']:g} {LOADS[row['row']]}").strip()


def _line(axes: Axes, rows: list[dict], name: str, scale: float, **style) -> None:
    points = sorted((row["load"], scale * row[name]) for row in rows if row[name] is not None)
    if points:
        axes.plot(*zip(*points, strict=True), **style)
