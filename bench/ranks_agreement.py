"""Time that the agreement of several ranks adds to a seal.

Every rank makes its part of a checkpoint durable and reports it. Rank 0 then writes the manifest,
renames the checkpoint into place, and tells the others. The time measured is that from the last
report to the moment at which the handles of all ranks have returned, without rank 0's renames and
syncs in between. The machine does nothing else before a seal.

    python -m bench.ranks_agreement --directory DIR
    python -m bench.ranks_agreement --directory DIR --ranks 2
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from bench._harness import Parser, Result, count, mebi, require_space, run, say, scratch
from bench._ranks import RankProcesses, threads_of
from bench._ranks_child import RankSetting
from bench._statistics import median
from bench._streamed import exact_state_bytes

_WARM_UP_SEALS = 3
"""Seals that are not measured: each of them may make a slot."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    with scratch(args.directory) as directory:
        require_space(directory, 4 * exact_state_bytes(args.parameters))
        result = Result("ranks_agreement", args, directory)
        setting = RankSetting(
            directory=os.path.join(directory, "store"),
            kind="ddp",
            parameters=args.parameters,
            tensors=args.tensors,
            chunk_bytes=1 << 20,
            ring_chunks=3,
            threads=2,
            compute_threads=threads_of(args.ranks),
        )
        with RankProcesses(setting, args.ranks) as ranks:
            for _ in range(_WARM_UP_SEALS):
                ranks.ask("agreement", 0.0)
            found = []
            for number in range(args.rounds):
                found.append(agreement(ranks.ask("agreement", args.pause_s)))
                say(f"  seal {number + 1}/{args.rounds}: {1e3 * found[-1]['agreement_s']:.2f} ms")
        result.add_samples({name: [one[name] for one in found] for name in found[0]})
        result.fact("median_agreement_s", median([one["agreement_s"] for one in found]))
        limit_s = args.limit_ms / 1e3
        result.claim(
            f"the agreement of {args.ranks} ranks in a seal, beside {args.limit_ms:g} ms",
            [one["agreement_s"] / limit_s for one in found],
            numerator="agreement_s",
            denominator=f"{args.limit_ms:g} ms",
            limit=1.0,
        )
        result.write()


def agreement(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the times of one seal.

    Args:
        ranks: What each rank answers, by rank; rank 0 decides.

    Returns:
        ``agreement_s``, and the two times that it is the difference of: ``decided_s``, from the
        last report to the last handle, and ``durable_s``, the part of it in which rank 0 renames
        and syncs.
    """
    first = max(moment for one in ranks for moment in one["reported"])
    last = max(one["ended"] for one in ranks)
    durable = sum(
        max(0.0, min(end, last) - max(start, first)) for start, end in ranks[0]["durable"]
    )
    return {
        "agreement_s": last - first - durable,
        "decided_s": last - first,
        "durable_s": durable,
    }


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("ranks_agreement", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default="4Mi", help="bf16 parameters (default: %(default)s)")
    add("--tensors", type=int, default=8, help="parameter tensors (default: %(default)s)")
    add("--ranks", type=int, default=4, help="processes (default: %(default)s)")
    add("--pause-s", type=float, default=0.2, help="before each seal (default: %(default)s)")
    add("--limit-ms", type=float, default=20, help="of the median (default: %(default)s)")
    parser.set_defaults(rounds=30)
    quick = {"parameters": "16Ki", "tensors": 2, "ranks": 2, "pause_s": 0.0}
    args = parser.read(arguments, quick=quick)
    args.what = args.what or f"{mebi(args.parameters)}-{args.ranks}"
    return args


if __name__ == "__main__":
    run(main)
