"""Figures of the page of measurements. Only this module needs matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt

_COLOURS = {"met": "#2b7a3d", "met within noise": "#b07d12", "NOT MET": "#b3261e"}
_NEUTRAL = "#44546a"
_LABEL_WIDTH = 46


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


def draw_ratios(title: str, claims: list[tuple[str, dict[str, Any]]], path: Path) -> None:
    """Draw each ratio with its interval and its limit, one below the other.

    Args:
        title: Title above the figure.
        claims: Label of the run and recorded claim, for each ratio.
        path: Path of the SVG to write. The same claims give the same file.
    """
    # No date and no random names, so that the file changes only with the measurements.
    mpl.rcParams.update({"svg.hashsalt": "ssd-offload", "font.size": 9, "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.52 * len(claims)), layout="constrained")
    figure.patch.set_facecolor("white")
    smallest = min(claim["interval90"][0] for _, claim in claims)
    largest = max(claim["interval90"][1] for _, claim in claims)
    labels = []
    for row, (what, claim) in enumerate(claims):
        low, high = claim["interval90"]
        colour = _COLOURS.get(claim["verdict"], _NEUTRAL)
        axes.plot([low, high], [row, row], color=colour, linewidth=3, solid_capstyle="round")
        axes.plot(claim["median"], row, "o", color=colour, markersize=6)
        if claim["limit"] is not None:
            axes.plot([claim["limit"]] * 2, [row - 0.35, row + 0.35], color="black", linewidth=1.5)
        labels.append("\n".join(textwrap.wrap(f"{claim['claim']} ({what})", _LABEL_WIDTH)))
    if smallest > 0 and largest / smallest > 30:
        axes.set_xscale("log")
    elif smallest > 0:
        axes.set_xlim(left=0)
    axes.axvline(1, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ratio: median and 90 % interval; the black line is the limit")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
