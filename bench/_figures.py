"""Figures of the page of measurements. Only this module needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt


def draw_losses(title: str, losses: dict[str, list[float]], path: Path) -> None:
    """Draw the training losses of several runs, and below them their differences from the first.

    Args:
        title: Title above the figure.
        losses: Losses of each run, by label. The other runs are compared with the first.
        path: Path of the SVG to write. The same losses give the same file.
    """
    mpl.rcParams.update({"svg.hashsalt": "ssd-offload", "font.size": 9, "svg.fonttype": "none"})
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 5), sharex=True, layout="constrained", height_ratios=[3, 2]
    )
    figure.patch.set_facecolor("white")
    baseline = next(iter(losses.values()))
    for label, values in losses.items():
        steps = range(1, len(values) + 1)
        above.plot(steps, values, linewidth=1, label=label)
        away = [a - b for a, b in zip(values, baseline, strict=True)]
        below.plot(steps, away, linewidth=1)
    above.set_ylabel("training loss")
    below.set_ylabel("less that of FP32 state")
    below.set_xlabel("step")
    above.legend(fontsize=7, frameon=False)
    above.set_title(title, loc="left")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
