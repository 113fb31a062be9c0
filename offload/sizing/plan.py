"""Figures of a training run on given hardware.

`size` composes them from the model, the precision, the machine and the cluster. docs/sizing.md has
the formulas. A figure for which an input is missing is None.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace

from gds import ALIGNMENT
from offload.format.manifest import MAX_DIRECTORIES, slot_sizes
from offload.format.part_file import part_sizes
from offload.options import Options
from offload.sizing.checkpoint_time import (
    copies_of,
    interval_of,
    num_seal_syncs,
    restores_of,
    resume_parts,
    seal_parts,
)
from offload.sizing.checks import (
    MAX_COUNT,
    FieldError,
    require_count,
    require_positive,
    shown,
)
from offload.sizing.figures import (
    Disk,
    Plan,
    StepTime,
    TypicalStep,
)
from offload.sizing.fit import fits_of
from offload.sizing.hardware import TYPICAL_DRIVES
from offload.sizing.inputs import Cluster, Machine, Run
from offload.sizing.models import ModelSize, model_size
from offload.sizing.state import Precision
from offload.sizing.step_time import StepBytes, device_parts, host_parts, storage_parts

_DEFAULTS = Options()
_MAX_SHARES = 1024
_GPUS_PER_NODE = 8


def size(
    model: int | float | str | os.PathLike[str],
    *,
    precision: Precision | None = None,
    machine: Machine | None = None,
    cluster: Cluster | None = None,
    run: Run | None = None,
    shares: tuple[int, ...] = (1,),
    num_groups: int = 1,
    chunk_bytes: int = _DEFAULTS.chunk_bytes,
    train_state_bytes: int = _DEFAULTS.train_state_bytes,
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
    if (
        not 1 <= len(shares) <= MAX_DIRECTORIES
        or not all(type(share) is int and share >= 1 for share in shares)
        or sum(shares) > _MAX_SHARES
    ):
        raise FieldError(
            f"{{shares}} is {{value}}, expected up to {MAX_DIRECTORIES} whole numbers of at least "
            f"1, and at most {_MAX_SHARES} together",
            value=shown(shares),
        )
    require_count("chunk_bytes", chunk_bytes, least=ALIGNMENT)
    require_count("num_groups", num_groups)
    require_count("train_state_bytes", train_state_bytes)
    chunk_elements = Options(chunk_bytes=chunk_bytes).chunk_elements
    found = model_size(model, precision, chunk_elements=chunk_elements, shares=shares)
    number = found.num_parameters
    if found.layout is None:
        arrays = precision.arrays
    else:  # a store has shares and arrays of its own
        shares, arrays = found.layout.shares, found.layout.array_names
    saved = found.parameter_bytes + found.memory_state_bytes
    if checkpoint_bytes_per_parameter is not None:
        saved = number * checkpoint_bytes_per_parameter
    steps = _steps(found, machine, cluster)
    seal = seal_parts(
        found.parameter_bytes / cluster.gpus,
        machine,
        num_syncs=num_seal_syncs(len(arrays), len(shares)),
        step_bytes=found.state_bytes / cluster.gpus,
    )
    held = found.parameter_bytes / (cluster.tp * cluster.pp)
    resume = resume_parts(held, machine)
    copies = copies_of(saved, found.parameter_bytes, cluster, machine, run, _sum(seal))
    fits = fits_of(found, precision, machine, cluster, run)
    life = fits[1].steps_of_life
    iteration = run.iteration_s or next(s.seconds for s in steps if s.place == "host")
    rate = cluster.write_gbps
    hidden = [s for s in (run.forward_s, run.backward_s) if s is not None]
    return Plan(
        source=found.source,
        num_parameters=number,
        parameter_bytes=found.parameter_bytes,
        state_bytes=found.state_bytes,
        checkpoint_bytes=saved,
        gpus=cluster.gpus,
        fits=fits,
        disk=_disk(found, _num_slots(run), shares, num_groups, train_state_bytes, cluster.gpus),
        steps=steps,
        typical_steps=_typical_steps(found, machine, cluster),
        seal_s=_sum(seal),
        seal_parts_s=seal,
        resume_s=_sum(resume),
        resume_parts_s=resume,
        gathered_bytes=held * (cluster.replicas - 1) / cluster.replicas,
        hide_s=sum(hidden) if hidden else None,
        steps_of_life=life,
        days_of_life=None if life is None or iteration is None else life * iteration / 86400,
        iteration_s=run.iteration_s,
        training_s=(
            None
            if run.tokens is None or run.tflops is None
            else 6 * number * run.tokens / (run.tflops * 1e12 * cluster.gpus)
        ),
        writers=cluster.writers,
        writer_bytes=saved / cluster.writers,
        writer_gbps=rate and rate / cluster.writers,
        node_gbps=rate and rate / cluster.writers * min(_GPUS_PER_NODE, cluster.writers),
        efficiency=cluster.efficiency,
        peak_gbps=rate and rate / cluster.efficiency,
        least_gbps=(
            None
            if run.budget is None or run.interval_s is None
            else saved / (run.budget * run.interval_s) / 1e9
        ),
        machine=machine,
        copies=copies,
        restores=restores_of(saved, found.parameter_bytes, cluster, machine.read_gbps),
        intervals=[interval_of(c.name, c.stall_s, run) for c in copies if c.stall_s is not None],
        remarks=_remarks(number),
    )


def _sum(parts: Mapping[str, float] | None) -> float | None:
    return None if parts is None else sum(parts.values())


def _num_slots(run: Run) -> int:
    """Return the number of slots: for what is kept, for one to write, and for running uploads."""
    slots = run.keep + 1
    if run.upload_s is None:
        return slots
    if run.interval_s is None:
        raise FieldError("{upload_s} needs {interval_s}: the seconds between two checkpoints")
    slots += math.ceil(run.upload_s / run.interval_s)
    if slots > MAX_COUNT:
        raise FieldError("{upload_s} is too many times {interval_s}: no disk holds the slots")
    return slots


def _disk(
    found: ModelSize,
    slots: int,
    shares: tuple[int, ...],
    num_groups: int,
    train_state_bytes: int,
    gpus: int,
) -> Disk:
    """Return the space for all slots. The sizes of files are exact for one rank only."""
    layout = found.layout
    exact = layout is not None and gpus == 1
    if layout is not None and exact:
        first = slot_sizes(
            layout,
            found.num_groups or num_groups,
            train_state_bytes=found.train_state_bytes or train_state_bytes,
        )
        others = [part_sizes(layout, drive) for drive in range(1, len(layout.shares))]
        each: list[float] = [sum(sizes.values()) for sizes in (first, *others)]
    else:
        state = [found.state_bytes / gpus * share / sum(shares) for share in shares]
        each = [state[0] + found.parameter_bytes / gpus, *state[1:]]
    one = sum(each) * gpus
    return Disk(slots, one, slots * one, tuple(slots * nbytes for nbytes in each), exact)


def _steps(found: ModelSize, machine: Machine, cluster: Cluster) -> list[StepTime]:
    """Return the time of a step in each place where the state can be updated."""
    parameters, gradients, state = found.parameter_bytes, found.gradient_bytes, found.state_bytes
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

    def time(
        place: str, link_bytes: float, parts: Mapping[str, float] | None, gbps: float | None
    ) -> StepTime:
        """Return the time of a step in one place, whose link has the rate `gbps`."""
        slowest = None if parts is None else max(parts, key=parts.__getitem__)
        sealed = 0 if place == "storage" else parameters
        resumed = parameters * cluster.replicas
        return StepTime(
            place,
            link_bytes / found.num_parameters,
            link_bytes,
            parts,
            None if parts is None or slowest is None else parts[slowest],
            slowest,
            seal_link_bytes=sealed,
            seal_link_s=None if gbps is None else sealed / ranks / 1e9 / gbps,
            resume_link_bytes=resumed,
            resume_link_s=None if gbps is None else resumed / ranks / 1e9 / gbps,
        )

    return [
        time("device", 2 * state, device, link),
        time("host", gradients + 2 * parameters, host, link),
        time("storage", gradients + parameters, storage, machine.network_gbps),
    ]


def _typical_steps(found: ModelSize, machine: Machine, cluster: Cluster) -> list[TypicalStep]:
    """Return the time of a step on the host with each of the typical drives."""
    steps = []
    for drives, gbps in TYPICAL_DRIVES.items():
        host = _steps(found, replace(machine, mixed_gbps=gbps), cluster)[1]
        if machine.both_ways_gbps is None and host.seconds is not None:
            steps.append(TypicalStep(drives, gbps, host.seconds))
    return steps


_CONTRADICTIONS: dict[tuple[float, float], tuple[str, ...]] = {
    (174e9, 176e9): (
        (
            'GPT-3 (175 B parameters): slides give both 350 GB and "more than 500 GB" for its '
            "parameters. This tool takes 350 GB, which is 16 bits for each; no dtype gives the "
            "other."
        ),
        (
            'GPT-3 (175 B): "50 seconds" for a checkpoint at 273 GB/s is the time of 13.8 TB, '
            "which is a model of 1 T parameters. This tool computes 8.8 s for 2.4 TB."
        ),
        (
            'GPT-3 (175 B): "300 years on one A100" is Megatron\'s figure for a V100. This tool '
            "computes 6 x parameters x tokens: 71 years at 140 TFLOPS, 95 with recomputation."
        ),
        (
            "GPT-3 (175 B) on 1,024 GPUs: slides give TP 8 and PP 16 (128 writers, 8 replicas),"
            " a blog TP 8 and PP 8 (64 writers, 16 replicas). Restores then read 19.6 TB or "
            "39.2 TB; this tool takes the tp and pp that it is given."
        ),
    ),
    (529e9, 545e9): (
        (
            "The row of 544 B parameters (1,088 GB) in slides is probably the model of 530 B "
            "parameters. This tool takes the number that it is given."
        ),
    ),
    (0.99e12, 1.01e12): (
        (
            "1 T parameters: 13.8 TB is published for a checkpoint, which is 13.77 bytes per "
            "parameter. This tool takes 14 with Adam: 2 for parameters, 4 each for masters and "
            "two moments. checkpoint_bytes_per_parameter=13.77 gives the published figure."
        ),
        (
            '1 T parameters: "50 seconds" to restore cannot be at the cited 1 TB/s, at which 6 '
            "replicas read for 82.8 s. This tool computes the time from the rate."
        ),
        (
            '1 T parameters: "one pipeline group writes the checkpoint" holds only if the '
            "optimizer is replicated. This tool counts one writer for each GPU if sharded is "
            "set."
        ),
    ),
}
"""Published figures that cannot all be right, by the least and the most parameters of the model."""


def _remarks(num_parameters: float) -> list[str]:
    return [
        text
        for (least, most), texts in _CONTRADICTIONS.items()
        if least <= num_parameters <= most
        for text in texts
    ]
