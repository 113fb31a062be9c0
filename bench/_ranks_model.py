"""The model of several ranks on one drive, beside what was measured on 1, 2 and 4 ranks.

The rates are those that `bench.sizing` has recorded on the same kind of machine, for one process.
Ranks on one drive, and on the cores of one machine, divide these rates; so the model says that more
of them make nothing faster. It does not count what ranks send to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench._harness import count
from offload.sizing import Cluster, Machine, size

_KINDS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP2"}


class Times(NamedTuple):
    """Seconds of one call of all ranks."""

    step: float
    seal: float
    restore: float


def predicted(
    rates: Mapping[str, float], parameters: int, chunk_bytes: int, ranks: int, cores: int
) -> Times:
    """Return the times of the model.

    Args:
        rates: Medians that `bench.sizing` has recorded.
        parameters: Number of parameters, of 16 bits.
        chunk_bytes: Size of a chunk of one FP32 array.
        ranks: Number of ranks that share the drive and the cores.
        cores: Number of cores.
    """

    def plan(shared_by: int) -> Any:
        return size(
            parameters,
            machine=Machine(
                read_gbps=rates["drive_read_gbps"] / shared_by,
                write_gbps=rates["drive_write_gbps"] / shared_by,
                mixed_gbps=rates["drive_mixed_gbps"] / shared_by,
                update_gbps=rates["update_gbps"] / shared_by,
                copy_gbps=rates["copy_gbps"] * min(1.0, cores / shared_by),
                sync_s=rates["sync_s"],
            ),
            cluster=Cluster(gpus=shared_by, sharded=True),
            chunk_bytes=chunk_bytes,
        )

    divided = plan(ranks)
    # Each parameter byte is read on one rank, so all ranks together read as much as one process.
    return Times(divided.steps[1].seconds, divided.seal_s, plan(1).resume_s)


def measured(medians: Mapping[str, float], kind: str, ranks: int) -> Times:
    """Return the times that `bench.ranks_step` has recorded for some ranks."""
    return Times(*(medians[f"{kind}_{ranks}_{call}_s"] for call in Times._fields))


def alone(medians: Mapping[str, float], kind: str, ranks: int) -> Times:
    """Return the times of one process that were recorded in turns with those of some ranks."""
    return Times(*(medians[f"{kind}_{ranks}_one_{call}_s"] for call in Times._fields))


def rows(one: Mapping[str, Any], sizing: Mapping[str, Any]) -> list[Sequence[str]]:
    """Return the rows of a table: predicted and measured times, and their ratio.

    Args:
        one: A result of `bench.ranks_step`.
        sizing: A result of `bench.sizing`.
    """
    settings, medians = one["settings"], one["medians"]
    chunk_bytes = int(settings["chunk_mib"] * (1 << 20))
    cores = one["machine"]["cores"]
    cases = [
        (kind, int(ranks))
        for ranks in settings["ranks"].split(",")
        for kind in settings["kinds"].split(",")
    ]
    found: list[Sequence[str]] = []
    for kind, ranks in cases:
        if not found:
            first = predicted(sizing["medians"], settings["parameters"], chunk_bytes, 1, cores)
            found.append(("one process", *_cells(first, alone(medians, kind, ranks))))
        model = predicted(sizing["medians"], settings["parameters"], chunk_bytes, ranks, cores)
        who = f"{ranks} ranks, {_KINDS[kind]}"
        found.append((who, *_cells(model, measured(medians, kind, ranks))))
    return found


def rates_for(
    one: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the result of `bench.sizing` of the same machine with most parameters, if any."""
    found = [
        run
        for run in runs
        if run["bench"] == "sizing"
        and all(run["machine"][key] == one["machine"][key] for key in ("cpu", "cores", "kernel"))
    ]
    return max(found, key=lambda run: count(str(run["settings"]["parameters"])), default=None)


def _cells(model: Times, real: Times) -> list[str]:
    return [f"{a:.3g} / {b:.3g} s ({a / b:.2f})" for a, b in zip(model, real, strict=True)]
