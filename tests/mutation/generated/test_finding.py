"""What is found of mutants: which tests reach them, in which order they run, and what is kept."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tests.mutation.generated.full import Outcomes, Plan, report
from tests.mutation.generated.full import tests_digest as digest_of_tests
from tests.mutation.generated.judging import UNREACHED, Judged, judge
from tests.mutation.generated.mutants import Mutant, mutate
from tests.mutation.generated.points import instrument
from tests.mutation.generated.recording import Recorded, Recording, claim
from tests.mutation.generated.results import read_record, reasons, write_record
from tests.mutation.generated.selection import Chosen, Noticing, choose, in_order
from tests.mutation.mutation import ROOT, MutationError
from tests.mutation.workplace import Run, Workplace

MODULE = '''\
"""A module."""

from __future__ import annotations

import os
import signal
import sys
import threading


def check(a: int) -> int:
    """Check."""
    if a > 1:
        a -= 1
    elif a < 0:
        raise ValueError(a)
    for _ in range(a):
        a += 1
    try:
        return int("1" * a)
    except ValueError:
        return 0


class Store:
    def run(self) -> None:
        worker = threading.Thread(target=check, args=(2,))
        worker.start()
        worker.join()

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    exec(sys.argv[1])
'''


def reached(directory: Path, code: str, *, status: int = 0) -> set[str]:
    """Run code in an instrumented module, in a process of its own; return what it reached."""
    (directory / "m.py").write_text(MODULE)
    points = instrument(directory, {"m": "m.py"})
    done = subprocess.run([sys.executable, "m.py", code], cwd=directory, check=False)
    assert done.returncode == status
    hit = points.file.read_bytes()
    return {name for name, byte in zip(points.names, hit, strict=True) if byte}


def functions_reached(directory: Path, code: str, *, status: int = 0) -> set[str]:
    """Return what was reached by function and place alone."""
    names = reached(directory, code, status=status)
    return {name.partition("/")[0] + name[name.rindex(":") :] for name in names}


def test_statements_that_run_are_seen_on_all_threads(tmp_path: Path) -> None:
    assert functions_reached(tmp_path, "Store().run()") == {
        "m.Store.run:at",
        "m.check:at",
        "m.check:body",
    }


def test_statements_of_a_process_that_is_killed_are_seen(tmp_path: Path) -> None:
    assert functions_reached(tmp_path, "Store().end()", status=-signal.SIGKILL) == {
        "m.Store.end:at"
    }


def test_a_condition_that_is_false_is_seen_also_without_an_else(tmp_path: Path) -> None:
    assert "m.check:else" in functions_reached(tmp_path, "check(0)")
    assert "m.check:else" not in functions_reached(tmp_path, "check(2)")


def test_an_except_clause_is_seen_only_if_it_is_entered(tmp_path: Path) -> None:
    (clause,) = (m for m in mutants() if "/no-except/" in m.name)
    for a, entered in ((0, True), (1, False)):
        assert (clause.point in reached(tmp_path, f"check({a})")) == entered


def mutants() -> list[Mutant]:
    return [*mutate(MODULE, "m", "m.py", {})]


def recording(directory: Path, tests: dict[str, tuple[float, list[str]]]) -> Recording:
    """Return a recording of one test file: seconds and points for each test."""
    points = sorted({point for _, several in tests.values() for point in several})
    found = {
        "points": [*points, "m.check/000000:at"],
        "tests": {
            f"tests/conftest.py::{name}": [
                seconds,
                f"{sum(1 << points.index(point) for point in several):x}",
            ]
            for name, (seconds, several) in tests.items()
        },
    }
    empty = Recording(directory, [])
    assert empty.of_function("m.check") == []
    (directory / _recorded_as()).write_text(json.dumps(found))
    return Recording(directory, ["tests/conftest.py"])


def _recorded_as() -> str:
    from tests.mutation.generated.recording import _path

    return _path(Path(), "tests/conftest.py").name


def test_only_tests_that_reach_a_mutant_are_run(tmp_path: Path) -> None:
    mutant = mutants()[0]
    found = recording(tmp_path, {"near": (0.1, [mutant.point]), "far": (0.1, ["m.check/0:at"])})
    chosen = choose(mutant, found, Noticing())
    assert chosen.tests == ("tests/conftest.py::near",)
    assert chosen.is_complete


def test_a_statement_newer_than_the_recordings_is_left_to_the_tests_of_its_function(
    tmp_path: Path,
) -> None:
    mutant = replace(mutants()[0], function="m.check", point="m.check/123456:at")
    found = recording(tmp_path, {"function": (0.1, ["m.check/0:at"]), "no": (0.1, ["m.a/0:at"])})
    assert choose(mutant, found, Noticing()).tests == ("tests/conftest.py::function",)
    other = replace(mutant, function="m.new", point="m.new/123456:at")
    assert len(choose(other, found, Noticing()).tests) == 2  # of the module


def test_a_statement_that_nothing_reaches_has_no_tests(tmp_path: Path) -> None:
    mutant = replace(mutants()[0], point="m.check/000000:at")
    found = recording(tmp_path, {"function": (0.1, ["m.check/0:at"])})
    assert choose(mutant, found, Noticing()).num_known == 0


def test_tests_that_cost_more_than_the_limit_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    mutant = mutants()[0]
    costs = {"a": 1.0, "b": 8.0, "c": 30.0, "d": 100.0}
    found = recording(tmp_path, {name: (cost, [mutant.point]) for name, cost in costs.items()})
    chosen = choose(mutant, found, Noticing(), limit_s=40.0)
    names = [test.partition("::")[2] for test in chosen.tests]
    assert (names, chosen.first) == (["a", "b", "c"], ("tests/conftest.py::a",))
    assert not chosen.is_complete
    assert chosen.longest_s == 30.0


def test_what_has_noticed_comes_first_then_what_is_cheap_and_different() -> None:
    tests = [
        Recorded(name, seconds, 1)
        for name, seconds in (
            ("t::a[1]", 0.1),
            ("t::a[2]", 0.1),
            ("t::a[3]", 0.1),
            ("t::b", 0.2),
            ("t::c", 1.0),
            ("t::d", 9.0),
            ("t::e", 9.5),
        )
    ]
    noticing = Noticing()
    noticing.add("m.g", "t::c")
    noticing.add("m.f", "t::e")
    names = [test.name.removeprefix("t::") for test in in_order(tests, "m.f", noticing)]
    assert names == ["e", "c", "a[1]", "b", "a[2]", "a[3]", "d"]


def test_what_one_process_is_at_is_not_taken_by_another(tmp_path: Path) -> None:
    with claim(tmp_path / "x.lock") as first, claim(tmp_path / "x.lock") as second:
        assert (first, second) == (True, False)
    with claim(tmp_path / "x.lock") as third:
        assert third


def test_what_some_tests_notice_counts_for_all_and_what_survives_them_does_not(
    tmp_path: Path,
) -> None:
    one, other = mutants()[:2]
    found = recording(tmp_path, {})
    some = Plan(scratch=tmp_path, tests="tests/conftest.py", output=tmp_path / "result.json")
    outcomes = Outcomes(some, found)
    outcomes.keep(one, Judged(one.name, one.code, "killed", "t::a", 1.0))
    tests = digest_of_tests(other, found)
    outcomes.keep(other, Judged(other.name, other.code, "survived", UNREACHED, 1.0, tests))
    assert [outcomes.of(m) is not None for m in (one, other)] == [True, True]
    for plan in (replace(some, tests=""), replace(some, tests="tests/test_docs.py")):
        known = Outcomes(plan, found)
        assert [known.of(m) is not None for m in (one, other)] == [True, False]


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    every = [replace(mutant, file="offload/store/poison.py") for mutant in mutants()]
    judged = {
        mutant.name: Judged(mutant.name, mutant.code, "killed", f"t::{number}", 1.5)
        for number, mutant in enumerate(every)
    }
    survivor = every[1].name
    judged[survivor] = Judged(survivor, every[1].code, "survived", "3 tests passed", 2.0)
    tests = {every[0].function: [Recorded("t::9", 0.5, 1), Recorded("t::0", 0.25, 1)]}
    path = tmp_path / "result.json"
    write_record(path, every, judged, tests, ["tests/conftest.py"])
    record = read_record(path)
    assert record.judged == judged
    assert record.tests[every[0].function] == ["t::9", "t::0"]
    assert (record.seconds["t::9"], record.seconds["t::0"]) == (0.5, 0.25)
    assert {*record.sources} == {"offload/store/poison.py"}
    assert {*record.test_files} == {"tests/conftest.py"}
    assert json.loads(path.read_text())["noticed"] == len(every) - 1
    assert record.is_complete
    del judged[survivor]
    write_record(path, every, judged, tests, ["tests/conftest.py"])
    assert read_record(path).judged == judged
    assert not read_record(path).is_complete


def test_mutants_may_share_a_reason(tmp_path: Path) -> None:
    assert reasons(tmp_path) == {}
    (tmp_path / "store.toml").write_text(
        '[[reason]]\nmutants = ["Store.f/true/123456", "Store.g/false/123456"]\n'
        'why = """\nTwo\nlines."""\n'
    )
    assert reasons(tmp_path) == {
        "store.Store.f/true/123456": "Two lines.",
        "store.Store.g/false/123456": "Two lines.",
    }


@pytest.mark.parametrize(
    ("mutants_with_it", "why", "refusal"),
    [('["f/true/1"]', " ", "no reason is given for f/true/1"), ('["f", "f"]', "x", "two reasons")],
)
def test_a_reason_has_words_and_is_the_only_one(
    tmp_path: Path, mutants_with_it: str, why: str, refusal: str
) -> None:
    (tmp_path / "store.toml").write_text(
        f'[[reason]]\nmutants = {mutants_with_it}\nwhy = "{why}"\n'
    )
    with pytest.raises(MutationError, match=refusal):
        reasons(tmp_path)


TWICE = """
import sys
from tests.mutation.__main__ import main
first = main(sys.argv[1:])
print("AGAIN")
sys.exit(first + 2 * main(sys.argv[1:]))
"""


def test_a_mutant_is_judged_once_and_what_is_known_is_not_judged_again(tmp_path: Path) -> None:
    arguments = [
        "--generated",
        "--only=poison.Poison.require_healthy/true",
        f"--scratch={tmp_path}",
        f"--output={tmp_path / 'result.json'}",
    ]
    arguments += ["--tests=tests/crash/test_protocol_steps.py"]
    done = subprocess.run(
        [sys.executable, "-c", TWICE, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    first, _, second = done.stdout.partition("AGAIN")
    assert "recorded tests/crash/test_protocol_steps.py: " in first, done
    assert re.search(
        r"require_healthy/true/\w+: killed \(\d+ s\) tests/crash/test_protoc", first
    ), done
    assert "killed" not in second
    assert "of 1 mutants 1 were noticed" in second
    assert done.returncode == 0


def test_a_survivor_without_a_reason_is_a_failure() -> None:
    every = mutants()
    judged = {m.name: Judged(m.name, m.code, "killed", "t::a", 1.0) for m in every}
    said: list[str] = []
    assert report(every, judged, said.append) == 0
    judged[every[0].name] = replace(judged[every[0].name], outcome="survived", by=UNREACHED)
    assert report(every, judged, said.append) == 1
    assert any(f"SURVIVED {every[0].name}" in line and UNREACHED in line for line in said)


class ScriptedWorkplace:
    """Tests that fail as often as it says: by name, once for each run."""

    def __init__(self, current: Path, failures: dict[str, int]) -> None:
        self.current = current
        self.failures = failures
        self.runs: list[tuple[int, list[str]]] = []

    def run(self, changes: Sequence[object], tests: Sequence[str], **_: object) -> Run:
        """Run tests up to the first that still has to fail, on a mutant alone."""
        self.runs.append((len(changes), [*tests]))
        if changes and [*tests] == ["not alone"]:
            return Run("unusable", "no such test: not alone")
        for test in tests if changes else ():
            if self.failures.get(test, 0):
                self.failures[test] -= 1
                return Run("failed", test)
        return Run("passed", "")

    def known(self, name: str, tests: Sequence[str]) -> None:
        """Know nothing."""

    def keep(self, name: str, tests: Sequence[str], found: object) -> None:
        """Keep nothing."""


@pytest.mark.parametrize("failures", [1, 2])
def test_a_test_notices_a_mutant_only_if_it_fails_twice(tmp_path: Path, failures: int) -> None:
    place = ScriptedWorkplace(tmp_path / "current", {"a": 0, "b": failures, "c": 0, "d": 0})
    chosen = Chosen(("a", "b", "c"), ("d",), 1.0, 0.5, 4)
    judged = judge(mutants()[0], chosen, cast("Workplace", place))
    first = [(1, ["a", "b", "c"]), (1, ["b"])]
    if failures == 2:
        assert (judged.outcome, judged.by) == ("killed", "b")
        assert place.runs == [*first, (0, ["b"])]
    else:
        assert judged.outcome == "survived"
        assert place.runs == [*first, (1, ["c"]), (1, ["d"])]


def test_in_a_hurry_the_first_failure_is_believed(tmp_path: Path) -> None:
    place = ScriptedWorkplace(tmp_path / "current", {"a": 1})
    judged = judge(
        mutants()[0], Chosen(("a",), (), 1.0, 1.0, 1), cast("Workplace", place), trust=True
    )
    assert (judged.outcome, len(place.runs)) == ("killed", 1)


def test_a_test_that_cannot_be_run_by_itself_is_no_verdict(tmp_path: Path) -> None:
    place = ScriptedWorkplace(tmp_path / "current", {"not alone": 1})
    chosen = Chosen(("a", "not alone"), (), 1.0, 1.0, 2)
    with pytest.raises(MutationError, match="no such test"):
        judge(mutants()[0], chosen, cast("Workplace", place))
