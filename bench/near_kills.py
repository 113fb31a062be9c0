"""Trainings on a server: the client, the server or both killed in a step, a seal or a restore.

After every kill, what is dead is started again, and the training goes on from the newest
checkpoint. Every step must have the bits of a training without kills, and no checkpoint may be lost
that the client was told of.

    python -m bench.near_kills --directory DIR
    python -m bench.near_kills --directory DIR --ranks      # two, each with a server
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench._harness import BenchError, Parser, Result, run, say, scratch

_KILLS_PER_RUN = 4


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill, count, print and write the result."""
    try:
        from tests.near.kills import WHEN, WHO, Killing
        from tests.near.ranks import kill_many
    except ImportError as error:
        raise BenchError(f"run this in a checkout with the extra `test`: {error}") from error
    args = _arguments(arguments)
    with scratch(args.directory) as directory:
        result = Result("near_kills", args, directory)
        if args.ranks:
            _kill_ranks(kill_many, args, Path(directory), result)
            return
        killing = Killing(Path(directory), random.Random(args.seed))
        try:
            for who in WHO:
                for when in WHEN:
                    before = killing.kills
                    while left := before + args.kills - killing.kills:
                        killing.train(f"{who}-{when}-{left}", who, when, min(left, _KILLS_PER_RUN))
                    say(f"{killing.kills - before} kills of {who} in a {when}")
                    result.fact(f"kills_of_{who}_in_{when}", killing.kills - before)
        except AssertionError as error:
            raise BenchError(f"something was lost: {error}") from error
        finally:
            killing.close()
        result.fact("checkpoints_lost", 0)
        result.fact("steps_with_other_bits", 0)
        result.fact("tracebacks_of_the_server", killing.server.said().count("Traceback"))
        result.write()


def _kill_ranks(
    kill_many: Callable[..., Iterator[tuple[str, str]]],
    args: argparse.Namespace,
    directory: Path,
    result: Result,
) -> None:
    """Kill one of two ranks, or of their servers, and write the result."""
    kills = Counter[tuple[str, str]]()
    try:
        for who, when in kill_many(directory, args.kills, args.seed):
            kills[who, when] += 1
            if kills[who, when] == args.kills:
                say(f"{args.kills} kills of {who} in a {when}")
    except AssertionError as error:
        raise BenchError(f"something was lost: {error}") from error
    for (who, when), number in kills.items():
        result.fact(f"kills_of_{who.replace(' ', '_')}_in_{when}", number)
    result.fact("checkpoints_lost", 0)
    result.fact("steps_with_other_bits", 0)
    result.write()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("near_kills", __doc__ or "")
    add = parser.add_argument
    add("--kills", type=int, default=7, help="kills of each kind (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the random times (default: %(default)s)")
    add("--ranks", action="store_true", help="kill one of two ranks with a server each")
    args = parser.read(arguments, quick={"kills": 1})
    args.what = args.what or f"{'ranks-' if args.ranks else ''}{args.kills}"
    return args


if __name__ == "__main__":
    run(main)
