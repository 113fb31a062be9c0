"""Time of a step by several ranks on one drive, beside one process's step for the same state.

The ranks are processes on this machine that train into one store on one drive. Each steps its share
of the state; with DistributedDataParallel it also sends the new values of its share to the others.
A step, a seal and a restore of one process alternate with those of the ranks, in adjacent pairs.
The gradients are fixed, so a step is the optimizer's work alone. Each rank computes on its share of
the processor's cores.

    python -m bench.ranks_step --directory DIR                   # 2 and 4 ranks
    python -m bench.ranks_step --directory DIR --ranks 2 --kinds ddp
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from functools import partial

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
from bench._ranks_child import RankSetting
from bench._statistics import alternate, ratios
from bench._streamed import exact_state_bytes

_LIMITED_RANKS = 2
"""Number of ranks for which a step has a limit."""

NAMES = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP2"}
"""Names of the kinds of ranks, in words."""

_CALLS = ("step", "seal", "restore")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    with scratch(args.directory) as directory:
        # Two stores at a time, of two slots each, with the model in each slot.
        require_space(directory, 4 * (exact_state_bytes(args.parameters) + 2 * args.parameters))
        result = Result("ranks_step", args, directory)
        result.fact("state_bytes", exact_state_bytes(args.parameters))
        result.fact("one_process_threads", threads_of(1))
        with _ranks(args, os.path.join(directory, "one"), "ddp", 1) as alone:
            for num_ranks in map(int, words(args.ranks)):
                for kind in words(args.kinds):
                    path = os.path.join(directory, f"{kind}-{num_ranks}")
                    with _ranks(args, path, kind, num_ranks) as ranks:
                        _compare(args, result, alone, ranks)
                    shutil.rmtree(path)
        result.write()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("ranks_step", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default="64Mi", help="bf16 parameters (default: %(default)s)")
    add("--tensors", type=int, default=8, help="parameter tensors (default: %(default)s)")
    add("--ranks", default="2,4", help="numbers of ranks, with commas (default: %(default)s)")
    add("--kinds", default="ddp,fsdp2", help="ddp, fsdp2, with commas (default: %(default)s)")
    add("--chunk-mib", type=float, default=16, help="of one FP32 array (default: %(default)s)")
    add("--ring", type=int, default=6, help="chunks in a rank's memory (default: %(default)s)")
    add("--threads", type=int, default=3, help="of a rank's reads, and writes")
    add("--steps", type=int, default=2, help="steps in one sample (default: %(default)s)")
    add("--limit", type=float, default=1.15, help="of a step on 2 ranks (default: %(default)s)")
    quick = {"parameters": "64Ki", "tensors": 2, "chunk_mib": 0.0625, "steps": 1, "ranks": "2"}
    args = parser.read(arguments, quick=quick)
    unknown = {*words(args.kinds)} - {*NAMES}
    if unknown or not all(word.isdigit() and int(word) > 1 for word in words(args.ranks)):
        raise BenchError(
            f"--kinds {args.kinds} --ranks {args.ranks}: give kinds of {', '.join(NAMES)}, and "
            "numbers of at least 2 ranks"
        )
    args.what = args.what or mebi(args.parameters)
    return args


def _ranks(args: argparse.Namespace, directory: str, kind: str, num_ranks: int) -> RankProcesses:
    who = "one process" if num_ranks == 1 else f"{num_ranks} ranks with {NAMES[kind]}"
    say(f"preparing {who}: {size(exact_state_bytes(args.parameters))} of FP32 state")
    setting = RankSetting(
        directory=directory,
        kind="ddp" if kind == "ddp" else "fsdp2",
        parameters=args.parameters,
        tensors=args.tensors,
        chunk_bytes=int(args.chunk_mib * (1 << 20)),
        ring_chunks=args.ring,
        threads=args.threads,
        compute_threads=threads_of(num_ranks),
    )
    return RankProcesses(setting, num_ranks)


def _compare(
    args: argparse.Namespace, result: Result, alone: RankProcesses, ranks: RankProcesses
) -> None:
    """Measure what ranks do in adjacent pairs with what one process does."""
    kind, num_ranks = ranks.setting.kind, ranks.num_ranks
    key = f"{kind}_{num_ranks}"
    for call in _CALLS:
        given = (args.steps,) if call == "step" else ()
        works = {
            f"{key}_one_{call}_s": partial(alone.slowest, call, *given),
            f"{key}_{call}_s": partial(ranks.slowest, call, *given),
        }
        if call == "seal":
            for work in works.values():
                work()  # makes the other slot, whose space is only reserved
        samples = alternate(works, args.rounds, report=say)
        result.add_samples(samples)
        result.claim(
            f"a {call} by {num_ranks} ranks with {NAMES[kind]}, beside one process's",
            ratios(samples[f"{key}_{call}_s"], samples[f"{key}_one_{call}_s"]),
            numerator=f"{key}_{call}_s",
            denominator=f"{key}_one_{call}_s",
            limit=args.limit if call == "step" and num_ranks == _LIMITED_RANKS else None,
        )


if __name__ == "__main__":
    run(main)
