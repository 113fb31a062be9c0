"""A plan: sizes, times and intervals of a training run on given hardware.

`size` composes it from the model, the precision, the machine and the cluster. docs/sizing.md has
the formulas. A figure for which an input is missing is None.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gds import ALIGNMENT
from offload.errors import SizingError
from offload.sizing.clusters import Cluster, Copies, Restores, copies_of, restores_of
from offload.sizing.failures import interval_for, optimal_interval, overhead, waste
from offload.sizing.machine import Machine, require_positive
from offload.sizing.models import ModelSize, model_size, slot_bytes
from offload.sizing.published import remarks
from offload.sizing.runs import Run
from offload.sizing.state import Precision
from offload.sizing.step_time import StepBytes, device_parts, host_parts, storage_parts

CHUNK_BYTES = 32 << 20
TRAIN_STATE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on a GPU for each parameter, without activations."""

    in_memory: float
    """Parameters, gradients, masters and moments, if all are on the GPU."""

    offloaded: float
    """Parameters and gradients, if the optimizer state is on drives."""

    largest_in_memory: float | None
    """Number of parameters of the largest model for the GPU's memory."""

    largest_offloaded: float | None

    @property
    def ratio(self) -> float:
        """How many times larger a model fits with the optimizer state on drives."""
        return self.in_memory / self.offloaded


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
    """Bytes and seconds of a step with the state updated in one place, for each rank."""

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


@dataclass(frozen=True, slots=True)
class Interval:
    """Checkpoint intervals of one way of making checkpoints, in seconds."""

    name: str
    stall_s: float
    overhead: float | None
    """Share of time that checkpoints add at the given interval."""

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

    memory: Memory
    disk: Disk
    steps: list[StepTime]
    seal_s: float | None
    """Seconds in which a seal writes the parameters, beside training."""

    resume_s: float | None
    """Seconds in which a resume reads the parameters; each rank of a replica reads its part."""

    gathered_bytes: float
    """Bytes of updated parameters that each rank receives in a step."""

    hide_s: float | None
    """Seconds of the model's own work that a step may run beside, if forward or backward is given.
    """

    steps_of_life: float | None
    """Number of steps, each of them sealed, until the drives have been written as often as they
    are rated for."""

    days_of_life: float | None
    training_s: float | None
    """Seconds of arithmetic of the whole run: 6 operations per parameter and token."""

    writers: int
    writer_bytes: float
    """Bytes that one writer of a copying system writes."""

    writer_gbps: float | None
    node_gbps: float | None
    peak_gbps: float | None
    """Rate that the shared storage must have on paper to reach the given one."""

    least_gbps: float | None
    """Rate of the storage with which a full copy keeps within the budget."""

    copies: list[Copies]
    restores: Restores
    intervals: list[Interval]
    remarks: list[str]
    """Published figures about this model that contradict each other, and the side taken."""

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values; infinity becomes None."""
        value: dict[str, Any] = _plain(
            asdict(self) | {"memory": asdict(self.memory) | {"ratio": self.memory.ratio}}
        )
        return value


def size(
    model: int | float | str | os.PathLike[str],
    *,
    precision: Precision | None = None,
    machine: Machine | None = None,
    cluster: Cluster | None = None,
    run: Run | None = None,
    shares: tuple[int, ...] = (1,),
    num_groups: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    train_state_bytes: int = TRAIN_STATE_BYTES,
    checkpoint_bytes_per_parameter: float | None = None,
) -> Plan:
    """Return the sizes, times and intervals of a training run. Imports no torch.

    Args:
        model: Number of parameters (``7e9`` or ``"7B"``), or the path of a ``config.json`` of
            Hugging Face, of a safetensors file, of a directory with either, or of a store.
        precision: Dtypes and optimizer; bf16 with AdamW by default. A store has its own.
        machine: Rates and sizes of the machine of one rank.
        cluster: GPUs, parallelism and shared storage.
        run: Intervals, budgets and times of the run.
        shares: Shares of the state on each drive of a rank.
        num_groups: Number of parameter groups. A store has its own.
        chunk_bytes: ``Options(chunk_bytes=)`` of the store.
        train_state_bytes: ``Options(train_state_bytes=)`` of the store. An existing store has its
            own.
        checkpoint_bytes_per_parameter: Bytes per parameter that a copying system saves; None for
            parameters and state.

    Raises:
        SizingError: A value is not possible, or the model cannot be read. The message says why.
    """
    precision, machine = precision or Precision(), machine or Machine()
    cluster, run = cluster or Cluster(), run or Run()
    require_positive("checkpoint_bytes_per_parameter", checkpoint_bytes_per_parameter)
    if not shares or not all(type(share) is int and share >= 1 for share in shares):
        raise SizingError(f"shares is {shares!r}, expected whole numbers of at least 1")
    if chunk_bytes < ALIGNMENT:
        raise SizingError(f"chunk_bytes is {chunk_bytes!r}, expected at least {ALIGNMENT}")
    found = model_size(
        model, precision, chunk_elements=chunk_bytes // ALIGNMENT * (ALIGNMENT // 4), shares=shares
    )
    number = found.num_parameters
    if checkpoint_bytes_per_parameter is None:
        saved = found.parameter_bytes + found.memory_state_bytes
    else:
        saved = number * checkpoint_bytes_per_parameter
    steps = _steps(found, machine, cluster)
    own = next((s.seconds for s in steps if s.place == "host"), None)
    copies = copies_of(
        saved,
        found.parameter_bytes,
        cluster,
        link_gbps=machine.link_gbps,
        drive_gbps=machine.write_gbps,
        stall_s=run.stall_s,
        interval_s=run.interval_s,
        host_memory=machine.host_memory,
    )
    rate = cluster.write_gbps
    life = None
    if machine.drive_tbw is not None:
        written = found.state_bytes + found.parameter_bytes
        life = machine.drive_tbw * cluster.gpus / written
    iteration = run.iteration_s or own
    hidden = [s for s in (run.forward_s, run.backward_s) if s is not None]
    return Plan(
        source=found.source,
        num_parameters=number,
        parameter_bytes=found.parameter_bytes,
        state_bytes=found.state_bytes,
        checkpoint_bytes=saved,
        memory=_memory(found, precision, machine),
        disk=_disk(found, run, shares, num_groups, train_state_bytes, cluster),
        steps=steps,
        seal_s=_seconds(found.parameter_bytes / cluster.gpus, machine.write_gbps),
        resume_s=_seconds(found.parameter_bytes / cluster.writers, machine.read_gbps),
        gathered_bytes=found.parameter_bytes * (cluster.gpus - 1) / cluster.gpus,
        hide_s=sum(hidden) if hidden else None,
        steps_of_life=life,
        days_of_life=None if life is None or iteration is None else life * iteration / 86400,
        training_s=(
            None
            if run.tokens is None or run.tflops is None
            else 6 * number * run.tokens / (run.tflops * 1e12 * cluster.gpus)
        ),
        writers=cluster.writers,
        writer_bytes=saved / cluster.writers,
        writer_gbps=rate and rate / cluster.writers,
        node_gbps=rate and rate / cluster.writers * cluster.gpus_per_node,
        peak_gbps=rate and rate / cluster.efficiency,
        least_gbps=(
            None
            if run.budget is None or run.interval_s is None
            else saved / (run.budget * run.interval_s) / 1e9
        ),
        copies=copies,
        restores=restores_of(
            saved, found.parameter_bytes, cluster, drive_read_gbps=machine.read_gbps
        ),
        intervals=[_interval(c.name, c.stall_s, run) for c in copies if c.stall_s is not None],
        remarks=remarks(number),
    )


def _memory(found: ModelSize, precision: Precision, machine: Machine) -> Memory:
    gradients = precision.gradient_bytes * found.num_parameters or found.gradient_bytes
    everything = found.parameter_bytes + gradients + found.memory_state_bytes
    in_memory = everything / found.num_parameters
    offloaded = (found.parameter_bytes + found.gradient_bytes) / found.num_parameters
    memory = machine.gpu_memory
    return Memory(
        in_memory, offloaded, memory and memory / in_memory, memory and memory / offloaded
    )


def _disk(
    found: ModelSize,
    run: Run,
    shares: tuple[int, ...],
    num_groups: int,
    train_state_bytes: int,
    cluster: Cluster,
) -> Disk:
    """Return the space for all slots. The sizes of files are exact for one rank only."""
    slots = run.keep + 1
    if run.upload_s is not None:
        if run.interval_s is None:
            raise SizingError("upload_s needs interval_s: the seconds between two checkpoints")
        slots += math.ceil(run.upload_s / run.interval_s)
    exact = found.layout is not None and cluster.gpus == 1
    if found.layout is not None and exact:
        if found.num_groups is not None:
            num_groups = found.num_groups
        if found.train_state_bytes is not None:
            train_state_bytes = found.train_state_bytes
        each: list[float] = [*slot_bytes(found.layout, num_groups, train_state_bytes)]
    else:
        state = [found.state_bytes / cluster.gpus * share / sum(shares) for share in shares]
        each = [state[0] + found.parameter_bytes / cluster.gpus, *state[1:]]
    one = sum(each) * cluster.gpus
    return Disk(slots, one, slots * one, tuple(slots * nbytes for nbytes in each), exact)


def _steps(found: ModelSize, machine: Machine, cluster: Cluster) -> list[StepTime]:
    """Return the time of a step in each place where the state can be updated."""
    parameters, gradients, state = (
        found.parameter_bytes,
        found.gradient_bytes,
        found.state_bytes,
    )
    ranks = cluster.gpus
    one = StepBytes(
        state=round(state / ranks),
        gradients=round(gradients / ranks),
        parameters=round(parameters / ranks),
    )
    drives, link = machine.both_ways_gbps, machine.link_gbps
    host = device = storage = None
    if drives is not None:
        update = machine.update_gbps
        host = host_parts(
            one, drive_gbps=drives, update_gbps=update, to_host_gbps=link, to_device_gbps=link
        )
        storage = storage_parts(
            one, drive_gbps=drives, update_gbps=update, network_gbps=machine.network_gbps
        )
        if link is not None:
            device = device_parts(one, drive_gbps=drives, to_host_gbps=link, to_device_gbps=link)
    return [
        _step_time("device", 2 * state, found.num_parameters, device),
        _step_time("host", gradients + 2 * parameters, found.num_parameters, host),
        _step_time("storage", gradients + parameters, found.num_parameters, storage),
    ]


def _step_time(
    place: str, link_bytes: float, num_parameters: int, parts: Mapping[str, float] | None
) -> StepTime:
    each = link_bytes / num_parameters
    if parts is None:
        return StepTime(place, each, link_bytes, None, None, None)
    slowest = max(parts, key=parts.__getitem__)
    return StepTime(place, each, link_bytes, parts, parts[slowest], slowest)


def _interval(name: str, stall_s: float, run: Run) -> Interval:
    optimal = None if run.mttf_s is None else optimal_interval(stall_s, run.mttf_s)
    return Interval(
        name,
        stall_s,
        None if run.interval_s is None else overhead(stall_s, run.interval_s),
        None if run.budget is None else interval_for(stall_s, run.budget),
        optimal,
        None if optimal is None or run.mttf_s is None else waste(stall_s, optimal, run.mttf_s),
    )


def _seconds(nbytes: float, gbps: float | None) -> float | None:
    return None if gbps is None else nbytes / 1e9 / gbps


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value
