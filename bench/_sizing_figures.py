"""Figures of docs/sizing.md and docs/ranks.md: times of models, and of numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
_RANKS = [2**exponent for exponent in range(3, 13)]
"""Numbers of ranks: 8 to 4,096."""

_RANKS_MODEL = 70e9
_RANK_READ_GBPS, _RANK_WRITE_GBPS = 6.0, 4.0
_SHARED_READ_GBPS, _SHARED_WRITE_GBPS = 400.0, 200.0
_RANK_NETWORK_GBPS = 12.5
_RANK_MTTF_S = 3 * 365 * 86400.0
_RESTART_S = 120.0

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
        _ranks(folder / "sizing-ranks.svg"),
    ]


class Scaled(NamedTuple):
    """Seconds of one model on one number of ranks."""

    step: float
    seal: float
    restore_each: float
    """Every replica reads the parameters from storage."""

    restore_once: float
    """Each parameter is read once, and sent to the other replicas."""

    lost_per_failure: float
    """Half of the interval that wastes least, the restart of the job, and the restore."""


def scaled(ranks: int, *, shared: bool) -> Scaled:
    """Return the times of the model of the figure on a number of ranks.

    Args:
        ranks: Number of ranks, eight of which hold one replica of the model.
        shared: Whether all ranks share one storage; otherwise each rank has drives of its own.
    """
    read, write = _RANK_READ_GBPS, _RANK_WRITE_GBPS
    if shared:
        read = min(_SHARED_READ_GBPS / ranks, _RANK_NETWORK_GBPS)
        write = min(_SHARED_WRITE_GBPS / ranks, _RANK_NETWORK_GBPS)
    plan = size(
        _RANKS_MODEL,
        machine=Machine(read_gbps=read, write_gbps=write),
        cluster=Cluster(gpus=ranks, tp=8, sharded=True),
        run=Run(mttf_s=_RANK_MTTF_S / ranks),
    )
    in_place = plan.intervals[-1]
    each, once = plan.restores.parameters_s or 0, plan.restores.parameters_once_s or 0
    interval = max(in_place.optimal_s or 0, plan.seal_s or 0, plan.steps[1].seconds or 0)
    return Scaled(
        plan.steps[1].seconds or 0,
        plan.seal_s or 0,
        each,
        once,
        interval / 2 + _RESTART_S + once,
    )


def _ranks(path: Path) -> Path:
    panels = (
        ("a step", ["step"]),
        ("a seal", ["seal"]),
        ("a restore of all replicas", ["restore_each", "restore_once"]),
        ("lost in a failure", ["lost_per_failure"]),
    )
    labels = {"restore_each": ", read by each", "restore_once": ", read once"}
    _settings()
    figure, grid = plt.subplots(1, 4, figsize=(12, 3.2), layout="constrained")
    figure.patch.set_facecolor("white")
    for axes, (title, names) in zip(grid, panels, strict=True):
        for shared in (False, True):
            times = [scaled(ranks, shared=shared) for ranks in _RANKS]
            for name, style in zip(names, ("-", "--"), strict=False):
                label = ("shared storage" if shared else "own drives") + labels.get(name, "")
                values = [getattr(time, name) for time in times]
                color = f"C{int(shared)}"
                axes.plot(_RANKS, values, style, color=color, linewidth=1.5, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.set_title(f"Seconds of {title}" if title[0] == "a" else "Seconds lost in a failure")
        axes.legend(fontsize=7, frameon=False)
        _frame(axes)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
    return path


def _settings() -> None:
    mpl.rcParams.update({"svg.hashsalt": "ssd-offload", "font.size": 9, "svg.fonttype": "none"})


def _frame(axes: Any) -> None:
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _lines(title: str, unit: str, lines: Sequence[tuple[str, Sequence[float]]], path: Path) -> Path:
    _settings()
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
    _frame(axes)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
    return path
