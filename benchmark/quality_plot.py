"""Rows of quality.py as a picture: what is right, against streams at once."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  after the backend without a screen is chosen

_FIGURES = {"words_right": "words right", "voice_right": "the right voice", "stopped_in_time": "stopped in time"}


def plot(rows: list[dict], path: Path) -> None:
    """Write a PNG with a panel for each figure and a line for each mode."""
    figure, panels = plt.subplots(1, len(_FIGURES), figsize=(15, 4.5), layout="constrained", sharey=True)
    loads = [row["streams"] for row in rows]
    for axes, (name, title) in zip(panels, _FIGURES.items(), strict=True):
        for mode in rows[0]["modes"]:
            values = [row["modes"][mode][name] for row in rows]
            if None not in values:
                axes.plot(loads, [100 * value for value in values], marker="o", label=mode)
        axes.set(title=title, xlabel="streams at once")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    panels[0].set_ylabel("%")
    figure.savefig(path, dpi=110)
    plt.close(figure)
