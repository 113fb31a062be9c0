"""One optimizer step of a block in device memory, in a single pass.

The arithmetic is torch's on CUDA: that of its foreach step or, with ``fused=True`` in the group,
that of its fused kernel. `docs/device.md` specifies the results to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from offload.device.kernels.forms import DeviceBlock, DeviceScalars, Form, Launch, launches
from offload.device.kernels.loading import Kernel, load
from offload.device.kernels.sources import defines, update_source

_THREADS = 256
_LANES = 8
_BLOCKS_PER_PROCESSOR = 32
"""Maximal number of thread blocks to launch per multiprocessor, which runs 5 or 6 at a time. With
fewer blocks, a thread steps more elements with values that it computes once, such as the bias
corrections of `fused`."""


def update_block(
    optimizer_class: type[torch.optim.Optimizer],
    group: Mapping[str, Any],
    block: DeviceBlock,
    *,
    stream: int,
    step: int,
    seed: int = 0,
    rounding_step: int | None = None,
    scalars: DeviceScalars | None = None,
) -> None:
    """Enqueue one step of a block on a stream; returns before it has run.

    The caller keeps the tensors alive until the step has run, and orders the stream after all work
    that writes them.

    Args:
        optimizer_class: `torch.optim.Adam`, `AdamW` or `SGD`.
        group: Hyper-parameters, as in ``param_groups``, as numbers in host memory. ``fused``
            selects the arithmetic.
        block: Block to step. All its tensors are on the current device.
        stream: Raw handle of a stream, as in torch's ``Stream.cuda_stream``.
        step: Value of torch's ``step`` after this step: from 1.
        seed: Seed of stochastic rounding.
        rounding_step: Step number of the store, for stochastic rounding; `step` if None.
        scalars: Factors of the gradient, and whether to skip the step.

    Raises:
        ValueError: There is no kernel for the group, or the tensors do not fit together. The
            message says why.
    """
    for launch in launches(
        optimizer_class,
        group,
        block,
        step=step,
        seed=seed,
        rounding_step=rounding_step,
        scalars=scalars,
    ):
        _enqueue(launch, block.live.device.index or 0, stream)


def compile_form(form: Form, device: int = 0) -> None:
    """Compile a variant now rather than in the first step that needs it."""
    _kernel(form, device)


def _enqueue(launch: Launch, device: int, stream: int) -> None:
    num_processors = _num_processors(device)
    needed = -(-launch.num_groups * _LANES // _THREADS)
    grid = max(1, min(needed, num_processors * _BLOCKS_PER_PROCESSOR))
    _kernel(launch.form, device).launch(grid, _THREADS, (launch.arguments,), stream=stream)


@cache
def _kernel(form: Form, device: int) -> Kernel:
    return load(update_source(), ["update"], device, defines(form.macros))[0]


@cache
def _num_processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
