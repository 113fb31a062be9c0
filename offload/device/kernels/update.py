"""One optimizer step of pieces of parameters in device memory, in a single pass.

The arithmetic is torch's on CUDA: that of its foreach step or, with ``fused=True`` in the group,
that of its fused kernel. `docs/device.md` specifies the results to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from offload.device.kernels.forms import THREADS, Form
from offload.device.kernels.launches import DeviceRun, launches
from offload.device.kernels.loading import Kernel, load
from offload.device.kernels.sources import defines, update_source

_TILES_PER_PROCESSOR = 32
"""Maximal number of thread blocks to launch per multiprocessor, which runs 2 to 4 at a time. With
fewer blocks, a thread steps more elements with values that it computes once, such as the bias
corrections of `fused`, and requests more of them while it computes."""


def update_run(
    optimizer_class: type[torch.optim.Optimizer],
    group: Mapping[str, Any],
    run: DeviceRun,
    *,
    stream: int,
    step: int,
    factors: Sequence[float] = (),
) -> None:
    """Enqueue one step of a run on a stream; returns before it has run.

    The caller keeps the tensors alive until the step has run, and orders the stream after all work
    that writes them. If there is no state yet, the stream must be torch's current one.
    """
    if run.is_new:
        for array in run.arrays.values():
            array.zero_()
    device = run.live[0].device.index or 0
    max_tiles = _num_processors(device) * _TILES_PER_PROCESSOR
    for launch in launches(
        optimizer_class, group, run, step=step, factors=factors, max_tiles=max_tiles
    ):
        kernel = _kernel(launch.form, device)
        kernel.launch(launch.num_tiles, THREADS, (launch.arguments,), stream=stream)


def compile_form(form: Form, device: int = 0) -> None:
    """Compile a variant now rather than in the first step that needs it."""
    _kernel(form, device)


@cache
def _kernel(form: Form, device: int) -> Kernel:
    return load(update_source(), ["update"], device, defines(form.macros))[0]


@cache
def _num_processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
