"""The page on performance: what most people ask, with the recorded times as bars."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench._bars import draw_bars

_WIDTH = 118

_INTRODUCTION = """\
# Performance

Five questions, and the times that answer them. All bars of a figure were measured in one run, in
turns, on a virtual machine with two cores and a drive of 2.4 GB/s; shorter is better. On another
machine the times differ, so look at how the bars compare, and measure there with `make bench`.
[All ratios](../bench/results/README.md) have their intervals, their limits, and a list of the
limits that were missed.
"""


class _Figure(NamedTuple):
    """Bars of times that one run has measured, below the question that they answer."""

    bench: str
    title: str
    rows: Sequence[tuple[str, str, bool]]
    """Label, name of the median, and whether it is this project's."""

    question: str
    answer: str


_FIGURES = (
    _Figure(
        "step",
        "One optimizer step of 134 million parameters",
        (
            ("fio, for as many bytes", "fio_s", False),
            ("a step", "step_s", True),
        ),
        "How long does a step take?",
        "As long as the drive needs for its bytes. A step reads 12 bytes for each parameter and "
        "writes as many, and computes meanwhile. [Smaller state](options.md) moves fewer bytes, "
        "several drives share them, and [a step beside the model](options.md#hiding-the-step) "
        "hides behind the forward or the backward pass.",
    ),
    _Figure(
        "peers",
        "One training iteration, with the optimizer's state on the drive",
        (
            ("DeepSpeed ZeRO-Infinity", "exact_deepspeed_s", False),
            ("offload", "exact_offload_s", True),
            ('offload, master="split"', "split_offload_s", True),
            ('offload, state_dtype="int8"', "int8_offload_s", True),
            ("offload, both", "split+int8_offload_s", True),
        ),
        "How does that compare?",
        "The first bar of `offload` has exact state: after each step the parameters are those "
        "of torch's own optimizer, to the last bit. The others change little: in a [fine-tune]"
        "(../bench/results/README.md#what-smaller-state-does-to-a-fine-tune) no training loss was "
        "more than 0.003 away, and a learning rate that is a tenth higher moved one by 0.065.",
    ),
    _Figure(
        "checkpoint",
        "Training stands still for a checkpoint of 134 million parameters",
        (
            ("torch.save", "torch_save_128Mi_stall_s", False),
            ("async_save of torch", "dcp_async_reused_128Mi_stall_s", False),
            ("offload", "offload_128Mi_stall_s", True),
        ),
        "How long does training wait for a checkpoint?",
        "Milliseconds. torch's `async_save` copies everything into memory first, which takes 14 "
        "bytes for each parameter. `offload` needs no such memory, because the state is on the "
        "drive already.",
    ),
    _Figure(
        "checkpoint",
        "The same checkpoint, until all of it is on the drive",
        (
            ("torch.save", "torch_save_128Mi_durable_s", False),
            ("async_save of torch", "dcp_async_reused_128Mi_durable_s", False),
            ("offload", "offload_128Mi_seal_s", True),
        ),
        "How soon is the checkpoint safe?",
        "`offload` writes 2 bytes for each parameter, and the others write 14.",
    ),
    _Figure(
        "resume",
        "Until the parameters of a checkpoint are in place",
        (
            ("torch.distributed.checkpoint", "dcp_load_s", False),
            ("torch.load", "torch_load_s", False),
            ("offload", "offload_s", True),
        ),
        "How soon does a run go on?",
        "Resuming reads the parameters alone. The first step reads the state, as every step does.",
    ),
)


def render(runs: Sequence[dict[str, Any]], folder: Path, figures: Path) -> str:
    """Draw the figures, and return the page as Markdown.

    Args:
        runs: Recorded runs. A figure without a run that has all its times is left out.
        folder: Folder of the page, which links are relative to.
        figures: Folder that gets the figures.
    """
    parts = [_INTRODUCTION]
    for number, figure in enumerate(_FIGURES, start=1):
        names = {name for _, name, _ in figure.rows}
        for one in runs:
            if one["bench"] == figure.bench and names <= one["medians"].keys():
                break
        else:
            continue
        rows = [(label, one["medians"][name], is_own) for label, name, is_own in figure.rows]
        path = figures / f"performance-{number}.svg"
        draw_bars(figure.title, rows, path)
        parts += [
            f"## {figure.question}\n",
            f"![{figure.title}]({_link(path, folder)})\n",
            textwrap.fill(
                f"{figure.answer} ([run of {one['date']}]({_link(one['path'], folder)}))",
                _WIDTH,
                break_long_words=False,
                break_on_hyphens=False,
            )
            + "\n",
        ]
    return "\n".join(parts)


def _link(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()
