"""Training curves as a picture."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  after the backend without a screen is chosen


def plot_curves(curves: list[Path], picture: Path) -> None:
    """Write a PNG with a panel for each stage: its figures against minutes, on a logarithmic scale."""
    figure, panels = plt.subplots(1, len(curves), figsize=(5.5 * len(curves), 4.5), layout="constrained", squeeze=False)
    for axes, path in zip(panels[0], curves, strict=True):
        curve = json.loads(path.read_text())
        steps, seconds, *columns = zip(*curve["rows"], strict=True)
        for name, values in zip(curve["columns"][2:], columns, strict=True):
            axes.plot([second / 60 for second in seconds], values, label=name)
        axes.set(title=f"{curve['name']}, {steps[-1]:,} steps", xlabel="minutes", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(picture, dpi=100)
    plt.close(figure)
