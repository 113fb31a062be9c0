"""Break the library in a copy of the checkout, and see whether a test notices.

    python -m tests.mutation                         # the list that was written by hand
    python -m tests.mutation --only seal-no-data-sync,open-shared-lock
    python -m tests.mutation --check                 # does every edit still fit? (a second)

    python -m tests.mutation --generated             # mutants of every statement, made by rule
    python -m tests.mutation --generated --only store.Store.commit,parts
    python -m tests.mutation --generated --list      # what they are

    python -m tests.mutation --ci                    # what has changed, and a sample: ten minutes

A mutation that no test notices *survives*: the step is untested, or not needed. The list takes
about 15 minutes of one core; the generated ones take hours the first time, and after that only
those of functions that have changed are judged. What is known is kept beside the copy: a run goes
on where it stopped, and several may share a scratch directory, each on its `--share` (1/2, 2/2).
With `--write`, what is known so far is written into the record in git, and counts elsewhere too.
Before anything is believed of a mutation, the test that noticed must pass without it.

A generated mutant that nothing need notice has its reason in tests/mutation/generated/reasons.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from tests.mutation import MUTATIONS, ci, listed
from tests.mutation.generated import full
from tests.mutation.generated.results import RECORD
from tests.mutation.generated.selection import LIMIT_S
from tests.mutation.mutation import RESULT
from tests.mutation.workplace import TIMEOUT_S, Workplace

_SCRATCH: Final = "/var/tmp/offload-mutation"


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge mutations, print and write the result; 1 if one survives."""
    args = _arguments(arguments)
    if args.check:
        listed.check_all()
        print(f"{len(MUTATIONS)} mutations fit")
        return 0
    if args.ci:
        return ci.run(ci.make_plan(Path(args.scratch), args.seed, args.minutes, args.processes))
    if args.generated:
        return _generated(args)
    return _listed(args)


def _generated(args: argparse.Namespace) -> int:
    plan = full.Plan(
        scratch=Path(args.scratch),
        only=args.only,
        tests=args.tests,
        sampled=args.left_out,
        share=args.share,
        limit_s=args.limit,
        again=args.again,
        record_again=args.record,
        write=args.write,
        output=Path(args.output or RECORD),
    )
    if args.list:
        for mutant in plan.mutants():
            print(f"{mutant.name}\n    {mutant}")
        return 0
    return full.run(plan, lambda line: print(line, flush=True))


def _listed(args: argparse.Namespace) -> int:
    chosen = [m for m in MUTATIONS if not args.only or m.name in args.only.split(",")]
    index, _, num_shares = args.share.partition("/")
    chosen = chosen[int(index) - 1 :: int(num_shares)]
    judged = []
    with closing(Workplace(Path(args.scratch), args.timeout)) as workplace:
        for number, mutation in enumerate(chosen, 1):
            one = listed.judge(mutation, workplace)
            judged.append(one)
            print(
                f"{number}/{len(chosen)} {one.name}: {one.outcome} ({one.seconds:.0f} s) {one.by}",
                flush=True,
            )
    print(listed.summary(judged))
    if len(chosen) == len(MUTATIONS):
        listed.write(judged, Path(args.output or RESULT))
    return int(any(one.outcome not in ("killed", "hung", "redundant") for one in judged))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--check", action="store_true", help="only check that every edit of the list fits")
    add("--generated", action="store_true", help="the generated mutants, not the list")
    add("--ci", action="store_true", help="as much of both as there is time for")
    add("--only", default="", help="names, with commas; of generated ones, their beginnings")
    add("--share", default="1/1", help="for several runs at once: 1/2, 2/2")
    add("--scratch", default=_SCRATCH, help="where to work (%(default)s)")
    add("--output", default="", help="file for the result of a complete run")
    add("--timeout", type=float, default=TIMEOUT_S, help="of the list: seconds for one")
    of_generated = parser.add_argument_group("of generated mutants").add_argument
    of_generated("--list", action="store_true", help="only say what they are")
    of_generated(
        "--left-out",
        action="store_true",
        help="those of operators that are left out, to see whether rightly",
    )
    of_generated("--tests", default="", help="test files to look at, with commas; else all")
    of_generated(
        "--limit", type=float, default=LIMIT_S, help="seconds of tests for one (%(default)s)"
    )
    of_generated(
        "--again",
        choices=("", "survivors", "all"),
        default="",
        help="judge these anew although they are known",
    )
    of_generated("--write", action="store_true", help="write what is known, and judge nothing")
    of_generated("--record", action="store_true", help="record anew which tests run what")
    of_ci = parser.add_argument_group("of --ci").add_argument
    of_ci("--minutes", type=float, default=ci.MINUTES, help="in all (%(default)s)")
    of_ci("--seed", default="", help="of the sample; by default a digest of the sources")
    of_ci("--processes", type=int, default=0, help="by default one for each core, at most 8")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
