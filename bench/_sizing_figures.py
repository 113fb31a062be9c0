"""Figures of docs/sizing.md: step time and lost time against the size of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt

from offload.sizing import Cluster, Machine, Run, size

_MODELS = [1e9 * 10 ** (exponent / 8) for exponent in range(25)]
"""Numbers of parameters: 1 B to 1 T."""

_DRIVES = (
    ("drives that read 9.6 GB/s and write 5 GB/s", 9.6, 5.0),
    ("27 GB/s and 11 GB/s", 27.0, 11.0),
    ("48 GB/s and 26 GB/s", 48.0, 26.0),
)
_MTTF_S = 8 * 3600.0
_STORAGE_GBPS = 20.0
_LINK_GBPS = 25.0


def draw(folder: Path) -> list[Path]:
    """Draw the figures, and return their paths. The same formulas give the same files.

    Args:
        folder: Folder for the SVG files; made if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    steps = [
        (
            name,
            [
                size(n, machine=Machine(read_gbps=read, write_gbps=write)).steps[1].seconds or 0
                for n in _MODELS
            ],
        )
        for name, read, write in _DRIVES
    ]
    plans = [
        size(
            n,
            machine=Machine(link_gbps=_LINK_GBPS),
            cluster=Cluster(storage_gbps=_STORAGE_GBPS),
            run=Run(mttf_s=_MTTF_S),
        )
        for n in _MODELS
    ]
    names = [interval.name for interval in plans[0].intervals]
    lost = [
        (name, [100 * (plan.intervals[row].waste or 0) for plan in plans])
        for row, name in enumerate(names)
    ]
    return [
        _lines(
            "Time of a step on one rank",
            "seconds",
            steps,
            folder / "sizing-step.svg",
        ),
        _lines(
            f"Time lost at the best interval: failure every {_MTTF_S / 3600:g} h, storage "
            f"{_STORAGE_GBPS:g} GB/s, link {_LINK_GBPS:g} GB/s",
            "per cent of the run",
            lost,
            folder / "sizing-lost.svg",
        ),
    ]


def _lines(title: str, unit: str, lines: Sequence[tuple[str, Sequence[float]]], path: Path) -> Path:
    mpl.rcParams.update({"svg.hashsalt": "ssd-offload", "font.size": 9, "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    figure.patch.set_facecolor("white")
    for label, values in lines:
        axes.plot([n / 1e9 for n in _MODELS], values, linewidth=1.5, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("billions of parameters")
    axes.set_ylabel(unit)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(title, loc="left")
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
    return path
