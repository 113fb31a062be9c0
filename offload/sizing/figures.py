"""Figures of a plan: memory, disk, steps and intervals of a training run.

A figure for which an input is missing is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from offload.sizing.inputs import Machine

Verdict = Literal["fits", "tight", "no host memory", "does not fit"]

ROOM_FOR_ACTIVATIONS = 0.2
"""Share of a GPU's memory that must be left if a model is to fit. What activations take is not
known: it depends on the model, the batch and the length of sequences."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory of each GPU with one way of training; activations are not counted.

    ``parameters="host"`` is with ``gradients="host"``, and ``parameters="drive"`` is with
    ``gradients="drive"``.
    """

    name: str
    bytes_per_parameter: float
    """Bytes on GPUs: of parameters, and of gradients and state if they are there."""

    gpu_bytes: float
    """Those bytes of the parameters that one GPU holds."""

    times_larger: float
    """How many times larger a model fits than with all in memory."""

    least_gpu_bytes: int | None
    """Memory of the smallest GPU in the list of `offload.sizing.hardware` that the model fits on;
    None if it fits on none."""

    host_bytes: float
    """Bytes of host memory for gradients and parameters; the ring of a step comes on top."""

    step_read_bytes: float
    """Bytes that a step reads from drives, with forward and backward of its micro-batches."""

    step_written_bytes: float
    """Bytes that it writes to drives."""

    drives_s: float | None
    """Seconds that drives take for these bytes; None if their rates are not given."""

    steps_of_life: float | None
    """Number of steps, each of them sealed, until the drives have been written as often as they
    are rated for; None if that is not given."""

    largest: float | None = None
    """Number of parameters of the largest model that fits; None if the GPU's memory is not given,
    as are those below, or if the number of blocks does not change what is needed."""

    left_bytes: float | None = None
    """Bytes left for activations; negative if the model does not fit."""

    verdict: Verdict | None = None
    """``tight`` if less than `ROOM_FOR_ACTIVATIONS` is left; ``no host memory`` if only
    `Machine.host_memory` is too small."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Space on the drives of all ranks together, in bytes."""

    slots: int
    """Number of slots: one for each checkpoint that is kept, and one that steps write."""

    slot_bytes: float
    total_bytes: float
    on_each_drive: tuple[float, ...]
    """Bytes on each drive of a rank, the first one first."""

    exact: bool
    """Whether headers, manifests and padding are counted, and the figures are those of the files;
    otherwise only data is."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Bytes and seconds with the state updated in one place; seconds are those of one rank."""

    place: str
    """``host``, ``device`` or ``storage``."""

    bytes_per_parameter: float
    """Bytes that cross the link between GPU and state for each parameter, both ways added up."""

    link_bytes: float
    """Bytes that cross that link in a step, over all ranks and both ways."""

    parts_s: Mapping[str, float] | None
    """Seconds of each part; the parts happen at the same time. None if a rate is not given."""

    seconds: float | None
    limited_by: str | None
    """The slowest part."""

    seal_link_bytes: float
    """Bytes that cross the link in a seal, over all ranks. Next to the storage there are none,
    because the parameters of the last step are there already."""

    seal_link_s: float | None
    """Seconds that these bytes take on the link; None if its rate is not given."""

    resume_link_bytes: float
    """Bytes that cross the link in a resume, over all ranks: parameters for every replica."""

    resume_link_s: float | None


@dataclass(frozen=True, slots=True)
class TypicalStep:
    """Seconds of a step on the host with drives whose rate is assumed, not measured."""

    drives: str
    gbps: float
    """Rate of reads and writes of equal size at the same time, both added up."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Copies:
    """One way of making checkpoints, and its cost for one checkpoint."""

    name: str
    written_bytes: float
    """Bytes written to storage."""

    link_bytes: float
    """Bytes that cross the links between GPUs and hosts."""

    host_bytes: float
    """Bytes of host memory that hold the checkpoint until it is written."""

    stall_s: float | None
    """Seconds for which training stands still."""

    durable_s: float | None
    """Seconds until the checkpoint is on the storage that it is meant for."""

    fills_memory_s: float | None = None
    """Seconds until waiting copies fill the host memory; infinity if they never do. None if
    interval, storage or memory is not given."""


@dataclass(frozen=True, slots=True)
class Restores:
    """Bytes and seconds of restoring all replicas of a model from storage."""

    replicas: int
    each_bytes: float
    """Bytes read if every replica reads a whole checkpoint."""

    each_s: float | None
    once_s: float | None
    """Seconds if one replica reads the checkpoint and sends it to the others."""

    parameters_bytes: float
    """Bytes read if every replica reads the 16-bit parameters alone, as this library does."""

    parameters_s: float | None
    parameters_once_s: float | None

    equal_time_gbps: float | None
    """Rate of reads in GB/s with which a restore by every replica takes as long as a write."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Checkpoint intervals of one way of making checkpoints, in seconds."""

    name: str
    stall_s: float
    overhead: float | None
    """Time that checkpoints add at the given interval, as a share of the time of training."""

    wall_share: float | None
    """The same time as a share of all time, checkpoints included."""

    for_budget_s: float | None
    """Shortest interval within the budget."""

    optimal_s: float | None
    """Interval that wastes the least time at the given mean time to failure."""

    waste: float | None
    """Share of time that is lost at the optimal interval, in checkpoints and in undone work."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Figures of a training run; times in seconds, sizes in bytes."""

    source: str
    num_parameters: int
    parameter_bytes: float
    """Bytes of the 16-bit parameters: what a seal writes and a resume reads."""

    state_bytes: float
    """Bytes of the optimizer state: what a step reads, and what it writes."""

    checkpoint_bytes: float
    """Bytes of a checkpoint of a copying system: parameters, and state as FP32."""

    gpus: int
    fits: list[Fit]
    """One for each way of training, by what it gives up, least first: with all in memory, and with
    the state on drives. With one GPU also with ``gradients="host"``; with ``overlap="backward"``,
    unless there are several micro-batches; and with ``parameters="host"`` and ``"drive"``, if the
    model is given with the names of its tensors, and has blocks."""

    disk: Disk
    steps: list[StepTime]
    typical_steps: list[TypicalStep]
    """Steps with typical drives; none if the rates of the drives are given."""

    seal_s: float | None
    """Seconds of a seal, beside training: the sum of `seal_parts_s`."""

    seal_parts_s: Mapping[str, float] | None
    """Seconds of each part of a seal; the parts follow each other. Only writing is counted if
    neither `Machine.copy_gbps` nor `Machine.sync_s` is given."""

    resume_s: float | None
    """Seconds of a resume of all replicas from the ranks' drives: the sum of `resume_parts_s`.
    Each rank receives the parameters that it holds in forward, sharded or not."""

    resume_parts_s: Mapping[str, float] | None
    """Seconds of each part of a resume; the parts follow each other. Only reading is counted if
    `Machine.copy_gbps` is not given."""

    gathered_bytes: float
    """Bytes of updated parameters that each rank receives in a step: those that it holds in
    forward, without its own share."""

    hide_s: float | None
    """Seconds of the model's own work that a step may run beside, if forward or backward is given.
    """

    steps_of_life: float | None
    """Number of steps, each of them sealed, until the drives have been written as often as they
    are rated for."""

    days_of_life: float | None
    """Days until then, if a step is made every `iteration_s`; steps on the host that follow each
    other at once if that is not given."""

    iteration_s: float | None
    """Seconds from one step to the next, if given."""

    training_s: float | None
    """Seconds of arithmetic of the whole run: 6 operations per parameter and token."""

    writers: int
    writer_bytes: float
    """Bytes that one writer of a copying system writes."""

    writer_gbps: float | None
    """Rate in GB/s at which one writer writes to the shared storage."""

    node_gbps: float | None
    """Rate in GB/s at which the writers of a node of 8 GPUs write to the shared storage."""

    efficiency: float
    """Share of the storage's peak rate that checkpoints reach."""

    peak_gbps: float | None
    """Rate that the shared storage must have on paper to reach the given one."""

    least_gbps: float | None
    """Rate of the storage with which a full copy keeps within the budget."""

    machine: Machine
    """Rates and sizes that the plan was made with."""

    copies: list[Copies]
    restores: Restores
    intervals: list[Interval]
    remarks: list[str]
    """Published figures about this model that contradict each other, and the side taken."""

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values; infinity becomes None."""
        value: dict[str, Any] = _plain(asdict(self))
        return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value
