"""What CI has time for: the mutations of what has changed, and a sample of all others.

What has changed is known by the digests in the recorded results, not by git. The order is drawn
from a seed, by default a digest of the sources: it differs from change to change, and can be drawn
again. When the time is up the rest is left out, and that is no failure.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pytest

from tests.mutation import MUTATIONS, listed
from tests.mutation.generated.judging import judge, run_tests
from tests.mutation.generated.mutants import Mutant, mutants_of
from tests.mutation.generated.recording import test_files
from tests.mutation.generated.results import Record, read_record, reasons, source_digests
from tests.mutation.generated.selection import FIRST_S, Chosen, Noticing
from tests.mutation.mutation import RESULT, Mutation, MutationError
from tests.mutation.workplace import Workplace, library_digest

MINUTES: Final = 10.0
_END_S: Final = 20.0
"""Kept of the time, for ending what still runs."""

_LIMIT_S: Final = 45.0
"""Seconds of recorded tests for one mutant."""

_NEW_TESTS_S: Final = 60.0
"""For tests that are newer than the record, and for a mutation of the list."""

_LISTED_TO_OTHERS: Final = 2
"""So many listed mutations of files that have changed are tried for each one of the sample."""

Found = Literal["noticed", "survived", "unfinished", "broken"]


@dataclass(frozen=True, slots=True)
class Task:
    """One mutation to be tried."""

    what: Mutation | Mutant

    @property
    def kind(self) -> str:
        """For people."""
        return "listed" if isinstance(self.what, Mutation) else "generated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done, by how many, and until when."""

    scratch: Path
    seed: str
    deadline: float
    """As of `time.monotonic`."""

    num_processes: int


def default_seed() -> str:
    """Return the seed for the library as it is."""
    return library_digest()


def tasks(
    seed: str,
    mutations: Sequence[Mutation],
    mutants: Sequence[Mutant],
    touched: set[str],
    excused: set[str],
) -> list[Task]:
    """Return what to try, in order: as much of it as there is time for.

    Args:
        seed: Draws the order.
        mutations: All of the list.
        mutants: All that are generated.
        touched: Files that have changed since the list was last tried in full.
        excused: Names of mutants that survive for a reason that is known.
    """
    drawn = random.Random(seed)
    of_touched = [Task(m) for m in mutations if touched.intersection(m.files)]
    others = [Task(m) for m in mutations if not touched.intersection(m.files)]
    others += [Task(m) for m in mutants if m.name not in excused]
    drawn.shuffle(of_touched)
    drawn.shuffle(others)
    out: list[Task] = []
    while of_touched or others:
        out += [of_touched.pop() for _ in range(min(_LISTED_TO_OTHERS, len(of_touched)))]
        if others:
            out.append(others.pop())
    return out


def choose(mutant: Mutant, record: Record, noticing: Noticing, there: set[str]) -> Chosen:
    """Return the tests for a mutant by the record: that which noticed it first.

    Args:
        mutant: Perhaps newer than the record.
        record: Of the last full run.
        noticing: As of that.
        there: All tests that there are.
    """
    known = record.judged.get(mutant.name)
    module = mutant.function.partition(".")[0]
    names = [known.by] if known is not None and known.outcome != "survived" else []
    names += record.tests.get(mutant.function, ())
    if mutant.function not in record.tests:
        names += noticing.of_module(module)
    first: list[str] = []
    rest: list[str] = []
    seconds = longest_s = 0.0
    for name in (name for name in dict.fromkeys(names) if name in there):
        took_s = record.seconds.get(name, 1.0)
        if seconds + took_s > _LIMIT_S and (first or rest):
            continue
        (first if not rest and seconds + took_s <= FIRST_S else rest).append(name)
        seconds += took_s
        longest_s = max(longest_s, took_s)
    return Chosen((*first,), (*rest,), seconds, longest_s, len(first) + len(rest))


def run(plan: Plan) -> int:
    """Try as many mutations as there is time for; returns 1 if one survives without a reason."""
    print(f"seed {plan.seed}: repeat it with --ci --seed {plan.seed}", flush=True)
    record = read_record()
    touched = listed.touched(RESULT)
    every = mutants_of() if record.judged else []
    mutants = [mutant for mutant in every if record.is_settled(mutant)]
    if not record.is_complete:
        print(
            f"the full run of the generated mutants is not complete: {len(mutants)} of "
            f"{len(every)} may be tried",
            flush=True,
        )
    chosen = tasks(plan.seed, MUTATIONS, mutants, touched, {*reasons()})
    num_touched = sum(bool(touched.intersection(m.files)) for m in MUTATIONS)
    print(
        f"{len(touched)} files that the list edits have changed since it was tried in full: "
        f"{num_touched} of {len(MUTATIONS)} mutations come first",
        flush=True,
    )
    plan.scratch.mkdir(parents=True, exist_ok=True)
    outcomes = plan.scratch / f"ci.{os.getpid()}"
    outcomes.write_text("")
    counter = plan.scratch / f"ci.{os.getpid()}.next"
    counter.write_text("0")
    try:
        there = _collected(plan)
        workers = [
            _start_worker(plan, chosen, record, there, outcomes, counter)
            for _ in range(plan.num_processes)
        ]
        failed = _wait(workers, plan.deadline)
        found = [json.loads(line) for line in outcomes.read_text().splitlines()]
    finally:
        outcomes.unlink()
        counter.unlink()
    return max(report(found, len(chosen)), int(failed))


def report(found: Sequence[dict[str, str]], num_all: int) -> int:
    """Say what was found; returns 1 if a mutation survives, or could not be tried."""
    counts = Counter(one["found"] for one in found)
    bad = [one for one in found if one["found"] in ("survived", "broken")]
    for one in bad:
        print(
            f"{one['found'].upper()} {one['kind']} {one['name']}: {one['by']}\n    {one['shown']}"
        )
    print(
        f"tried {len(found)} of {num_all} mutations in the time: {counts['noticed']} were noticed, "
        f"{counts['survived']} survive, {counts['unfinished']} were not finished"
    )
    if bad:
        print(
            "a mutation survives that had no reason to: write a test, or, where nothing need "
            "notice it, the reason into tests/mutation/generated/reasons. Try it with "
            "python -m tests.mutation --generated --only NAME (of the list: without --generated)"
        )
    return int(bool(bad))


def _collected(plan: Plan) -> set[str]:
    """Return the names of all tests."""
    with closing(Workplace(plan.scratch)) as workplace:
        file = workplace.copy / "collected"
        options = ("--collect-only", "-q")
        run = workplace.run([], test_files(), options=options, plugins=[_Collected(file)])
        if run.how != "passed":
            raise MutationError(f"tests cannot be collected: {run.by}")
        return set(file.read_text().splitlines())


class _Collected:
    """Writes down the tests that there are."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write them."""
        self._file.write_text("\n".join(item.nodeid for item in session.items))


def _start_worker(
    plan: Plan,
    chosen: Sequence[Task],
    record: Record,
    there: set[str],
    outcomes: Path,
    counter: Path,
) -> int:
    sys.stdout.flush()
    worker = os.fork()
    if worker:
        return worker
    status = 1
    try:
        # Ends with its tests and its copy of the checkout.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        _work(plan, chosen, record, there, outcomes, counter)
        status = 0
    except SystemExit:
        status = 0
    except BaseException:  # noqa: BLE001  (a fork must not run its parent's code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _work(
    plan: Plan,
    chosen: Sequence[Task],
    record: Record,
    there: set[str],
    outcomes: Path,
    counter: Path,
) -> None:
    noticing = Noticing()
    for one in record.judged.values():
        if one.outcome == "killed":
            noticing.add(one.name.partition("/")[0], one.by)
    now = source_digests(test_files())
    changed = {file for file, digest in now.items() if record.test_files.get(file) != digest}
    new = sorted(test for test in there if test.partition("::")[0] in changed)
    with closing(Workplace(plan.scratch)) as workplace:
        workplace.collect(test_files())
        while (number := _next(counter)) < len(chosen):
            task = chosen[number]
            started = time.monotonic()
            for fresh in (False, True):  # what is to be told as a survivor is looked at again
                found, by = _try(task.what, workplace, record, noticing, there, new, fresh=fresh)
                if found == "noticed":
                    break
            one = {
                "kind": task.kind,
                "name": task.what.name,
                "found": found,
                "by": by,
                "shown": task.what.lost if isinstance(task.what, Mutation) else str(task.what),
            }
            with outcomes.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(json.dumps(one) + "\n")
            took_s = time.monotonic() - started
            print(f"{number + 1} {task.what.name}: {found} ({took_s:.0f} s) {by}", flush=True)


def _next(counter: Path) -> int:
    with counter.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        number = int(file.read())
        file.seek(0)
        file.write(str(number + 1))
        return number


def _try(
    what: Mutation | Mutant,
    workplace: Workplace,
    record: Record,
    noticing: Noticing,
    there: set[str],
    new: Sequence[str],
    *,
    fresh: bool,
) -> tuple[Found, str]:
    """Return whether a test notices; all tests have just passed without any mutation."""
    if isinstance(what, Mutation):
        one = listed.judge(what, workplace, timeout_s=2 * _NEW_TESTS_S, trust=True, fresh=fresh)
        if one.outcome in ("killed", "hung", "redundant"):
            return "noticed", one.by
        return ("survived" if one.outcome == "survived" else "broken"), one.by
    chosen = choose(what, record, noticing, there)
    try:
        judged = judge(what, chosen, workplace, trust=True, fresh=fresh)
        if judged.outcome != "survived":
            return "noticed", judged.by
        others = [test for test in new if test not in chosen.tests]
        if not others:
            return ("survived" if chosen.tests else "unfinished"), judged.by
        ended = run_tests(workplace, [what], others, _NEW_TESTS_S, _NEW_TESTS_S, fresh=fresh)
    except MutationError as error:
        return "broken", str(error)
    if ended.how == "passed":
        return "survived", f"{len(chosen.tests) + len(others)} tests passed"
    return ("unfinished" if ended.how == "hung" else "noticed"), ended.by


def _wait(workers: Sequence[int], deadline: float) -> bool:
    """Wait for processes until the time is up, then end them; return whether one has failed."""
    left, failed = set(workers), False
    for how, until in (
        (None, deadline),
        (signal.SIGTERM, deadline + _END_S / 2),
        (signal.SIGKILL, deadline + _END_S),
    ):
        for worker in left:
            if how is not None:
                os.kill(worker, how)
        while left and time.monotonic() < until:
            ended = {worker: os.waitpid(worker, os.WNOHANG) for worker in left}
            failed |= any(status for pid, status in ended.values() if pid and how is None)
            left -= {worker for worker, (pid, _) in ended.items() if pid}
            time.sleep(0.1)
    return failed


def make_plan(scratch: Path, seed: str, minutes: float, num_processes: int) -> Plan:
    """Return a plan that ends in time.

    Args:
        scratch: Where to work.
        seed: Empty for that of the sources.
        minutes: In all.
        num_processes: 0 for one on each core, and at most eight.
    """
    return Plan(
        scratch=scratch,
        seed=seed or default_seed(),
        deadline=time.monotonic() + 60 * minutes - _END_S,
        num_processes=num_processes or min(len(os.sched_getaffinity(0)), 8),
    )
