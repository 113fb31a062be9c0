"""The full run: every mutant is judged, once for as long as its function stays as it is.

It goes on where it stopped, however it was stopped, and any number of processes may run at once on
one scratch directory: each takes mutants that no other is at.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.mutation.generated.judging import Judged, judge
from tests.mutation.generated.mutants import Mutant, mutants_of
from tests.mutation.generated.operators import OPERATORS, SAMPLED
from tests.mutation.generated.recording import Recorded, Recording, claim, record, test_files
from tests.mutation.generated.results import (
    RECORD,
    read_record,
    reasons,
    write_record,
)
from tests.mutation.generated.selection import (
    LIMIT_S,
    Noticing,
    choose,
    in_order,
)
from tests.mutation.mutation import MutationError
from tests.mutation.workplace import Workplace, write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done."""

    scratch: Path
    """Where recordings and outcomes are kept."""

    only: str = ""
    """Beginnings of names, with commas; empty for all."""

    tests: str = ""
    """Test files to look at, with commas; empty for all. Who survives them is kept by itself."""

    sampled: bool = False
    """Judge what the operators make that are left out otherwise, to see whether rightly."""

    share: str = "1/1"
    """Where among the mutants to begin: the second of three processes says 2/3."""

    limit_s: float = LIMIT_S
    """Seconds of tests for one mutant."""

    again: str = ""
    """Which outcomes are not believed: ``all``, ``survivors``, or nothing."""

    record_again: bool = False
    """Whether tests are recorded anew."""

    write: bool = False
    """Judge nothing: write what is known so far into the record."""

    output: Path = RECORD

    @property
    def judged(self) -> Path:
        """The directory for outcomes that hold with all tests."""
        return self.scratch / "judged"

    @property
    def survived(self) -> Path:
        """The directory for mutants that survive the tests of this run."""
        if not self.tests:
            return self.judged
        return self.scratch / f"survived-{hashlib.sha256(self.tests.encode()).hexdigest()[:16]}"

    @property
    def is_complete(self) -> bool:
        """Whether it judges all mutants, by all tests."""
        return not self.only and not self.tests and not self.sampled

    def mutants(self) -> list[Mutant]:
        """Return the mutants to be judged.

        Raises:
            MutationError: There are none.
        """
        every = mutants_of(operators=SAMPLED if self.sampled else OPERATORS)
        found = [mutant for mutant in every if is_chosen(mutant, self.only)]
        if not found:
            raise MutationError(f"no mutant's name begins with {self.only}")
        return found


class Outcomes:
    """What is known of mutants: from this scratch directory, and from the record in git.

    Args:
        plan: Says where they are, and which are not believed.
        recording: Says whether the tests of a survivor are still the same.
    """

    def __init__(self, plan: Plan, recording: Recording) -> None:
        self._judged, self._survived = plan.judged, plan.survived
        for directory in (self._judged, self._survived):
            directory.mkdir(parents=True, exist_ok=True)
        self._record = read_record(plan.output)
        self._some_tests = bool(plan.tests)
        self._recording = recording
        self._reasons = reasons()
        self._again = plan.again
        self._started = time.time()

    def of(self, mutant: Mutant) -> Judged | None:
        """Return what is known, if it still holds."""
        found = self._found(mutant)
        if found is None or self._is_of_this_run(mutant):
            return found
        if self._again == "all" or (self._again == "survivors" and found.outcome == "survived"):
            return None
        if found.outcome == "survived" and mutant.name not in self._reasons:
            return found if found.tests == tests_digest(mutant, self._recording) else None
        return found

    def _found(self, mutant: Mutant) -> Judged | None:
        for path in reversed(self._paths(mutant)):
            if path.exists():
                return Judged(**json.loads(path.read_text()))
        known = self._record.judged.get(mutant.name)
        if known is None or known.code != mutant.code:
            return None
        return None if self._some_tests and known.outcome == "survived" else known

    def _is_of_this_run(self, mutant: Mutant) -> bool:
        paths = [path for path in self._paths(mutant) if path.exists()]
        return any(path.stat().st_mtime >= self._started for path in paths)

    def keep(self, mutant: Mutant, one: Judged) -> None:
        """Keep an outcome: what some tests notice, all of them do."""
        survived, judged = self._paths(mutant)
        write_whole(survived if one.outcome == "survived" else judged, json.dumps(asdict(one)))
        if one.outcome != "survived" and survived != judged:
            survived.unlink(missing_ok=True)

    def lock(self, mutant: Mutant) -> Path:
        """Return the file that a process holds while it is at a mutant."""
        return self._paths(mutant)[0].with_suffix(".lock")

    def _paths(self, mutant: Mutant) -> tuple[Path, Path]:
        digest = hashlib.sha256(f"{mutant.name}\0{mutant.code}".encode()).hexdigest()[:16]
        return self._survived / f"{digest}.json", self._judged / f"{digest}.json"


def tests_digest(mutant: Mutant, recording: Recording) -> str:
    """Return a digest of the test files that reach a mutant, which changes when one does."""
    known = recording.of_point(mutant.point) or recording.of_function(mutant.function)
    files = sorted({recording.version(test.name.partition("::")[0]) for test in known})
    return hashlib.sha256("\0".join(files).encode()).hexdigest()[:16]


def run(plan: Plan, say: Callable[[str], None]) -> int:
    """Judge all mutants that are not known; returns 1 if one survives without a reason."""
    mutants = plan.mutants()
    files = plan.tests.split(",") if plan.tests else test_files()
    recording = record(plan.scratch, files, say, again=plan.record_again)
    outcomes = Outcomes(plan, recording)
    noticing = Noticing()
    for mutant in mutants:
        if (known := outcomes.of(mutant)) is not None and known.outcome == "killed":
            noticing.add(mutant.function, known.by)
    if plan.write:
        judged = {m.name: one for m in mutants if (one := outcomes.of(m)) is not None}
        if plan.tests:  # others may notice what these do not
            judged = {name: one for name, one in judged.items() if one.outcome != "survived"}
        _write(plan, mutants, judged, recording, noticing)
        say(f"{len(judged)} of {len(mutants)} mutants are judged: written to {plan.output}")
        return 0
    failures: dict[str, str] = {}
    with closing(Workplace(plan.scratch)) as workplace:
        if any(outcomes.of(mutant) is None for mutant in mutants):
            workplace.collect(files)
        # What another process is at is waited for in the end.
        for wait in (False, True):
            for number, mutant in enumerate(_from_share(mutants, plan.share), 1):
                if outcomes.of(mutant) is not None or mutant.name in failures:
                    continue
                with claim(outcomes.lock(mutant), wait=wait) as claimed:
                    if not claimed or outcomes.of(mutant) is not None:
                        continue
                    chosen = choose(mutant, recording, noticing, plan.limit_s)
                    try:
                        one = judge(mutant, chosen, workplace)
                    except MutationError as error:
                        failures[mutant.name] = str(error)
                        say(f"{number}/{len(mutants)} {mutant.name}: NOT JUDGED: {error}")
                        continue
                    if one.outcome == "survived":
                        one = replace(one, tests=tests_digest(mutant, recording))
                    elif one.outcome == "killed":
                        noticing.add(mutant.function, one.by)
                    outcomes.keep(mutant, one)
                say(f"{number}/{len(mutants)} {_line(mutant, one)}")
    judged = {m.name: one for m in mutants if (one := outcomes.of(m)) is not None}
    return _conclude(plan, mutants, judged, recording, noticing, failures, say)


def _conclude(
    plan: Plan,
    mutants: Sequence[Mutant],
    judged: Mapping[str, Judged],
    recording: Recording,
    noticing: Noticing,
    failures: Mapping[str, str],
    say: Callable[[str], None],
) -> int:
    if failures:
        say("\n".join(f"NOT JUDGED {name}: {why}" for name, why in failures.items()))
        return 1
    if plan.is_complete:
        _write(plan, mutants, judged, recording, noticing)
        say(f"written to {plan.output}")
    return report(mutants, judged, say)


def _write(
    plan: Plan,
    mutants: Sequence[Mutant],
    judged: Mapping[str, Judged],
    recording: Recording,
    noticing: Noticing,
) -> None:
    tests: dict[str, Sequence[Recorded]] = {
        function: in_order(recording.of_function(function), function, noticing)
        for function in {mutant.function for mutant in mutants}
    }
    write_record(plan.output, mutants, judged, tests, test_files())


def report(
    mutants: Sequence[Mutant], judged: Mapping[str, Judged], say: Callable[[str], None]
) -> int:
    """Say the score, and what survived; returns 1 if one of them has no reason."""
    known = reasons()
    survived = [m for m in mutants if judged[m.name].outcome == "survived"]
    without = [m for m in survived if m.name not in known]
    for mutant in without:
        say(f"SURVIVED {_line(mutant, judged[mutant.name])}")
    say(
        f"of {len(mutants)} mutants {len(mutants) - len(survived)} were noticed; "
        f"{len(survived) - len(without)} survive for a reason, and {len(without)} without one"
    )
    if without:
        say("write a test for each, or its reason into tests/mutation/generated/reasons")
    return int(bool(without))


def _line(mutant: Mutant, one: Judged) -> str:
    return f"{mutant.name}: {one.outcome} ({one.seconds:.0f} s) {one.by}\n    {mutant}"


def is_chosen(mutant: Mutant, only: str) -> bool:
    """Return whether the name of a mutant begins with one of some names, given with commas."""
    return not only or mutant.name.startswith(tuple(only.split(",")))


def _from_share(mutants: Sequence[Mutant], share: str) -> Sequence[Mutant]:
    """Return all mutants, from that of a share on: whoever is done goes on with the others'."""
    index, _, num_shares = share.partition("/")
    start = (int(index) - 1) * len(mutants) // int(num_shares)
    return [*mutants[start:], *mutants[:start]]
