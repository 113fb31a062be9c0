"""Memory of a GPU and of its host, and traffic of the drives, by where the parts of training are.

What may be outside of the GPU are the state, the gradients, and the parameters of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from offload.format.layout import Layout
from offload.sizing.figures import ROOM_FOR_ACTIVATIONS, Fit, Verdict
from offload.sizing.hardware import CARDS
from offload.sizing.inputs import Cluster, Machine, Run
from offload.sizing.models import ModelSize
from offload.sizing.state import Precision

_BLOCK_BUFFERS = 3
"""Number of blocks that are on the GPU at once if their parameters are outside of it."""

_ALIGNMENT = 64
"""Alignment in bytes of each parameter in a buffer of a block."""

_IN_A_BLOCK = re.compile(r"(?:(.*?)\.)?(\d+)\.(.+)")
"""Name of a tensor in a numbered module: the list, the number, and the name in the module."""


class _Way(NamedTuple):
    """One way of training: bytes in memory, and bytes that a step moves, with its micro-batches."""

    name: str
    gpu: float
    read: float
    written: float
    host: float = 0.0
    sealed: float = 0.0
    """Bytes that a seal writes."""

    grows: bool = True
    """Whether the GPU's memory grows with the number of parameters, and not of blocks alone."""


def fits_of(
    found: ModelSize, precision: Precision, machine: Machine, cluster: Cluster, run: Run
) -> list[Fit]:
    """Return the memory of each GPU for each way of training, by what it gives up, least first."""
    ways = [*_ways(found, precision)]
    if cluster.gpus > 1:
        ways = ways[:2]
    else:
        ways += _outside(found, run)
    holders = cluster.gpus if cluster.sharded else cluster.tp * cluster.pp
    return [_fit(way, ways[0].gpu, found, machine, holders, cluster.gpus) for way in ways]


def _ways(found: ModelSize, precision: Precision) -> Iterable[_Way]:
    """Return the ways in which only state may be outside of the GPU."""
    parameters, state = found.parameter_bytes, found.state_bytes
    gradients = precision.gradient_bytes * found.num_parameters or found.gradient_bytes
    yield _Way("all in memory", parameters + gradients + found.memory_state_bytes, 0, 0)
    on_gpu = parameters + found.gradient_bytes
    yield _Way("state on drives", on_gpu, state, state, sealed=parameters)


def _outside(found: ModelSize, run: Run) -> Iterable[_Way]:
    """Return the ways in which gradients, or parameters as well, are outside of the GPU."""
    parameters, gradients, state = found.parameter_bytes, found.gradient_bytes, found.state_bytes
    yield _Way('gradients="host"', parameters, state, state, gradients, parameters)
    if run.micro_batches == 1:
        yield _Way('overlap="backward"', parameters, state, state, sealed=parameters)
    sizes = found.layout and _block_sizes(found.layout)
    if not sizes:
        return
    outside, block = parameters - sum(size.nbytes for size in sizes), max(s.padded for s in sizes)
    gpu = outside + _BLOCK_BUFFERS * block
    host = sum(size.padded for size in sizes) + gradients
    yield _Way('parameters="host"', gpu, state, state, host, parameters, grows=False)
    # Forward and backward of each micro-batch read the parameters, and the step does once more.
    # Each micro-batch writes the gradients, and the next one, or the step, reads them.
    times = run.micro_batches
    read = state + (2 * times + 1) * parameters + times * gradients
    written = state + parameters + times * gradients
    yield _Way('parameters="drive"', gpu, read, written, block, grows=False)


class _BlockSize(NamedTuple):
    nbytes: int
    padded: int
    """Bytes that the block takes in a buffer."""


def _block_sizes(layout: Layout) -> list[_BlockSize]:
    """Return the size of the parameters of each block; none if the names show no blocks.

    Blocks are modules of a list, numbered from 0, that have tensors of the same names in modules of
    their own. Lists within a block belong to it.
    """
    lists: dict[str, dict[int, dict[str, int]]] = {}
    for tensor in layout.model:
        match = _IN_A_BLOCK.fullmatch(tensor.name)
        if match is not None and not tensor.aliases:  # what is tied stays on the GPU
            blocks = lists.setdefault(match[1] or "", {})
            blocks.setdefault(int(match[2]), {})[match[3]] = tensor.nbytes
    sizes = []
    for blocks in lists.values():
        shared = set.intersection(*({*block} for block in blocks.values()))
        if sorted(blocks) == [*range(len(blocks))] != [0] and any("." in name for name in shared):
            for block in blocks.values():
                padded = [-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in block.values()]
                sizes.append(_BlockSize(sum(block.values()), sum(padded)))
    return sizes


def _fit(
    way: _Way, all_bytes: float, found: ModelSize, machine: Machine, holders: int, gpus: int
) -> Fit:
    gpu_bytes = way.gpu / holders
    needed = gpu_bytes / (1 - ROOM_FOR_ACTIVATIONS)
    left = largest = life = None
    verdict: Verdict | None = None
    if machine.gpu_memory is not None:
        left = machine.gpu_memory - gpu_bytes
        verdict = "fits" if machine.gpu_memory >= needed else "tight"
        if left < 0:
            verdict = "does not fit"
        elif machine.host_memory is not None and way.host > machine.host_memory:
            verdict = "no host memory"
        if way.grows:
            largest = found.num_parameters * machine.gpu_memory / needed
    if machine.drive_tbw is not None and way.written:
        life = machine.drive_tbw * gpus / (way.written + way.sealed)
    return Fit(
        way.name,
        way.gpu / found.num_parameters,
        gpu_bytes,
        all_bytes / way.gpu,
        min((gb * 10**9 for gb in CARDS.values() if gb * 1e9 >= needed), default=None),
        host_bytes=way.host,
        step_read_bytes=way.read,
        step_written_bytes=way.written,
        drives_s=machine.drives_s(way.read / gpus, way.written / gpus) if way.written else None,
        steps_of_life=life,
        largest=largest,
        left_bytes=left,
        verdict=verdict,
    )
