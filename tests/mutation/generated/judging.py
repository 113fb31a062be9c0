"""Finding out whether a test notices a mutant."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tests.mutation.generated.mutants import Mutant
from tests.mutation.generated.selection import Chosen
from tests.mutation.mutation import MutationError
from tests.mutation.workplace import Change, Run, Workplace, busy

Outcome = Literal["killed", "hung", "survived"]

UNREACHED: Final = "no test runs it"
LEFT_OUT: Final = "of those that run it, some were left out"

_LEAST_S: Final = 30.0
_TIMES: Final = 4.0
"""A run may take `_LEAST_S`, and `_TIMES` what its tests took when they were recorded."""

_PLAIN_S: Final = 60.0
"""Seconds that are expected of a test without a mutant: no test takes longer."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of a mutant."""

    name: str
    code: str
    """As of the mutant: of its function."""

    outcome: Outcome

    by: str
    """The test that noticed; for a survivor how thoroughly it was looked for."""

    seconds: float

    tests: str = ""
    """Digest of the tests that could have noticed, for a survivor: they may change."""


def judge(
    mutant: Mutant,
    chosen: Chosen,
    workplace: Workplace,
    *,
    trust: bool = False,
    fresh: bool = False,
) -> Judged:
    """Run the tests that were chosen for a mutant.

    A test that fails must fail twice: on a busy machine some tests fail now and then.

    Args:
        mutant: Applied to the workplace's copy, and taken back.
        chosen: The tests.
        workplace: Where they are run.
        trust: Believe the first failure, and do not run its test without the mutant.
        fresh: As of `Workplace.run`.

    Raises:
        MutationError: The test that noticed does not pass without the mutant, or cannot be run by
            itself; or the mutant cannot be applied.
    """
    started = time.monotonic()
    for tests in (chosen.first, chosen.rest):
        left = tests
        while left:
            run = run_tests(
                workplace, [mutant], left, chosen.seconds, chosen.longest_s, fresh=fresh
            )
            if run.how == "passed":
                break
            if run.how == "unusable":
                raise MutationError(run.by)
            if trust or _fails_again(mutant, run.by, chosen, workplace, fresh=fresh):
                if not trust:
                    require_passes(workplace, run.by)
                took_s = round(time.monotonic() - started, 1)
                outcome: Outcome = "hung" if run.how == "hung" else "killed"
                return Judged(mutant.name, mutant.code, outcome, run.by, took_s)
            if run.by not in left:
                raise MutationError(f"{run.by} failed once only, and is none of the tests chosen")
            left = left[left.index(run.by) + 1 :]
    how = UNREACHED if not chosen.num_known else f"{len(chosen.tests)} tests passed"
    if not chosen.is_complete:
        how += f"; {LEFT_OUT}: {chosen.num_known - len(chosen.tests)}"
    took_s = round(time.monotonic() - started, 1)
    return Judged(mutant.name, mutant.code, "survived", how, took_s)


def _fails_again(
    mutant: Mutant, test: str, chosen: Chosen, workplace: Workplace, *, fresh: bool
) -> bool:
    """Return whether a test that has failed on a mutant does so a second time, by itself.

    Raises:
        MutationError: It cannot be run by itself.
    """
    longest_s = chosen.longest_s
    run = run_tests(workplace, [mutant], [test], longest_s, longest_s, fresh=fresh)
    if run.how == "unusable":
        raise MutationError(run.by)
    return run.how != "passed"


def require_passes(workplace: Workplace, test: str) -> None:
    """Check that a test passes on the library as it is; looked up once.

    Raises:
        MutationError: It does not.
    """
    key = "plain-" + hashlib.sha256(test.encode()).hexdigest()[:16]
    plain = workplace.known(key, [test])
    if plain is None:
        run = run_tests(workplace, [], [test], _PLAIN_S, _PLAIN_S)
        plain = {"how": run.how, "by": run.by}
        if run.how == "passed":
            workplace.keep(key, [test], plain)
    if plain["how"] != "passed":
        raise MutationError(f"{test} does not pass without the mutant: {plain['by']}")


def run_tests(
    workplace: Workplace,
    changes: Sequence[Change],
    tests: Sequence[str],
    seconds: float,
    longest_s: float,
    *,
    fresh: bool = False,
) -> Run:
    """Run tests, and say which one it was where pytest could not.

    Args:
        workplace: Where.
        changes: Of the library.
        tests: In this order, up to the first failure.
        seconds: That they took when they were recorded; they are given some more, and still more
            while others keep the machine busy.
        longest_s: The same of the longest one.
        fresh: As of `Workplace.run`.
    """
    limit_s, one_s = (busy() * (_LEAST_S + _TIMES * took_s) for took_s in (seconds, longest_s))
    run = workplace.run(
        changes, tests, timeout_s=limit_s, test_timeout_s=min(limit_s, one_s), fresh=fresh
    )
    if run.how in ("passed", "failed", "unusable"):
        return run
    return Run(run.how, workplace.current.read_text() or tests[0])
