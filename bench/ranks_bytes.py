"""Bytes that each of several ranks reads and writes, and the memory that it takes.

Bytes are the kernel's count of what a process has read from and written to storage. With P
parameters and W ranks, a step moves the state of P/W parameters each way on each rank. A seal
writes, and a restore reads, the parameters of the model once over all ranks. The memory of a rank
beyond the model and its gradients is the ring and a constant, whatever the size of the model: it is
measured at two sizes, in turns.

    python -m bench.ranks_bytes --directory DIR
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence

from bench._harness import (
    BenchError,
    Parser,
    Result,
    count,
    mebi,
    require_space,
    run,
    say,
    scratch,
    size,
    words,
)
from bench._ranks import RankProcesses, threads_of
from bench._ranks_child import Kind, RankSetting
from bench._streamed import exact_state_bytes

_BYTES_LIMIT = 1.01
_MEMORY_LIMIT = 1.1
"""Largest ratio of a rank's memory at the larger size to that at the smaller one."""

KINDS: dict[str, tuple[Kind, int, int, str]] = {
    "ddp": ("ddp", 12, 2, "DistributedDataParallel"),
    "fsdp2": ("fsdp2", 12, 2, "FSDP2, 16-bit shards"),
    "mixed": ("mixed", 8, 4, "FSDP2, FP32 shards under a mixed-precision policy"),
}
"""Of each kind of ranks: its name as a setting, bytes of state and of the model for each parameter,
and what it is in words."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    with scratch(args.directory) as directory:
        require_space(directory, 5 * exact_state_bytes(args.parameters))
        result = Result("ranks_bytes", args, directory)
        result.fact("parameters", args.parameters)
        result.fact("small_parameters", args.small)
        for kind in words(args.kinds):
            paths = [os.path.join(directory, f"{kind}-{which}") for which in ("large", "small")]
            with (
                _ranks(args, paths[0], kind, args.parameters) as large,
                _ranks(args, paths[1], kind, args.small) as small,
            ):
                _measure(args, result, kind, large, small)
            for path in paths:
                shutil.rmtree(path)
        result.write()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("ranks_bytes", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default="64Mi", help="in bytes' counts (default: %(default)s)")
    add("--small", type=count, default="32Mi", help="the smaller model (default: %(default)s)")
    add("--tensors", type=int, default=8, help="parameter tensors (default: %(default)s)")
    add("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    add("--kinds", default=",".join(KINDS), help="kinds of ranks (default: %(default)s)")
    add("--chunk-mib", type=float, default=4, help="of one FP32 array (default: %(default)s)")
    add("--ring", type=int, default=4, help="chunks in a rank's memory (default: %(default)s)")
    quick = {"parameters": "1Mi", "small": "512Ki", "tensors": 2, "chunk_mib": 0.125}
    args = parser.read(arguments, quick=quick)
    unknown = {*words(args.kinds)} - {*KINDS}
    if unknown:
        raise BenchError(f"--kinds {args.kinds}: give some of {', '.join(KINDS)}")
    args.what = args.what or f"{mebi(args.small)}-{mebi(args.parameters)}-{args.ranks}"
    return args


def _ranks(
    args: argparse.Namespace, directory: str, kind: str, num_parameters: int
) -> RankProcesses:
    say(f"preparing {args.ranks} ranks: {KINDS[kind][3]}, {mebi(num_parameters)} parameters")
    setting = RankSetting(
        directory=directory,
        kind=KINDS[kind][0],
        parameters=num_parameters,
        tensors=args.tensors,
        chunk_bytes=int(args.chunk_mib * (1 << 20)),
        ring_chunks=args.ring,
        threads=2,
        compute_threads=threads_of(args.ranks),
    )
    return RankProcesses(setting, args.ranks)


def _measure(
    args: argparse.Namespace,
    result: Result,
    kind: str,
    large: RankProcesses,
    small: RankProcesses,
) -> None:
    """Measure bytes and memory of one kind of ranks."""
    _, state_bytes, model_bytes, title = KINDS[kind]
    per_rank = state_bytes * args.parameters // args.ranks
    whole = model_bytes * args.parameters
    moved: dict[str, list[float]] = {
        f"{kind}_{name}_bytes": []
        for name in ("step_read", "step_written", "seal_written", "restore_read")
    }
    memory: dict[str, list[float]] = {f"{kind}_large_bytes": [], f"{kind}_small_bytes": []}
    for ranks in (large, small):
        for _ in range(2):
            ranks.ask("seal")  # makes the other slot
        ranks.ask("restore")
        ranks.ask("memory")
    for number in range(args.rounds):
        large.ask("step", 1)  # after a restore: it fills the ring as well
        steps = large.ask("io_of", "step", 1)
        for name in ("read", "written"):
            moved[f"{kind}_step_{name}_bytes"].append(max(one[name] for one in steps))
        seals = large.ask("io_of", "seal_now")
        moved[f"{kind}_seal_written_bytes"].append(sum(one["written"] for one in seals))
        restores = large.ask("io_of", "restore")
        moved[f"{kind}_restore_read_bytes"].append(sum(one["read"] for one in restores))
        for which, ranks in (("large", large), ("small", small)):
            ranks.ask("seal")
            ranks.ask("restore")
            found = ranks.ask("memory")
            if not all(one["resettable"] for one in found):
                raise BenchError("the kernel does not reset the peak of memory (clear_refs)")
            memory[f"{kind}_{which}_bytes"].append(max(one["above_model"] for one in found))
            result.fact(f"{kind}_{which}_ring_bytes", max(one["ring"] for one in found))
        newest = ", ".join(f"{name} {size(values[-1])}" for name, values in moved.items())
        say(f"  round {number + 1}/{args.rounds}: {newest}")
    result.add_samples(moved)
    result.add_samples(memory)
    for name, expected, where in (
        ("step_read", per_rank, f"that a rank reads in a step, beside {state_bytes} P/W"),
        ("step_written", per_rank, f"that a rank writes in a step, beside {state_bytes} P/W"),
        ("seal_written", whole, f"that all ranks write in a seal, beside {model_bytes} P"),
        ("restore_read", whole, f"that all ranks read in a restore, beside {model_bytes} P"),
    ):
        values = moved[f"{kind}_{name}_bytes"]
        result.claim(
            f"bytes {where} ({title})",
            [value / expected for value in values],
            numerator=f"{kind}_{name}_bytes",
            denominator=f"{expected} bytes",
            limit=_BYTES_LIMIT,
            smallest=min(values) / expected,
            largest=max(values) / expected,
        )
    both = zip(memory[f"{kind}_large_bytes"], memory[f"{kind}_small_bytes"], strict=True)
    for which, values in memory.items():
        beyond = max(values) - result.facts[which.replace("_bytes", "_ring_bytes")]
        result.fact(which.replace("_bytes", "_beyond_ring_bytes"), beyond)
    result.claim(
        f"memory of a rank beyond its model at {mebi(args.parameters)} parameters, beside "
        f"{mebi(args.small)} ({title})",
        [large_bytes / small_bytes for large_bytes, small_bytes in both],
        numerator=f"{kind}_large_bytes",
        denominator=f"{kind}_small_bytes",
        limit=_MEMORY_LIMIT,
    )


if __name__ == "__main__":
    run(main)
