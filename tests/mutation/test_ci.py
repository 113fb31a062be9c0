"""What CI tries of the mutations, and what it makes of what it finds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutation import MUTATIONS, ci, listed
from tests.mutation.generated.judging import Judged
from tests.mutation.generated.mutants import Mutant, mutate
from tests.mutation.generated.results import Record, source_digests
from tests.mutation.generated.selection import Noticing
from tests.mutation.mutation import ROOT, Edit, Mutation

STORE, PARTS = "offload/store/store.py", "offload/store/slots/part.py"
LISTED = [
    Mutation(f"{number}", "a step", (Edit(file, "a", "b"),), ("tests/conftest.py",))
    for number, file in enumerate([STORE] * 6 + [PARTS] * 6)
]
MUTANTS = [*mutate("def f(a, b):\n    a.x()\n    b.x()\n    b.y()\n", "m", "m.py", {})]


def names(seed: str, touched: set[str], excused: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    return [task.what.name for task in ci.tasks(seed, LISTED, MUTANTS, touched, excused)]


def test_the_sample_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    first, again, other = (names(seed, {STORE}) for seed in ("one", "one", "two"))
    assert first == again != other
    assert sorted(first) == sorted(other)


def test_everything_is_tried_once_if_there_is_time() -> None:
    assert sorted(names("one", {STORE})) == sorted(m.name for m in (*LISTED, *MUTANTS))


def test_listed_mutations_of_files_that_have_changed_come_first_with_others_between() -> None:
    order = names("one", {STORE})
    of_touched = [name in {m.name for m in LISTED[:6]} for name in order]
    assert of_touched == [True, True, False] * 3 + [False] * (len(order) - 9)


def test_a_mutant_with_a_reason_is_not_tried() -> None:
    excused = MUTANTS[0].name
    assert excused not in names("one", set(), {excused})


def test_the_seed_is_that_of_the_sources_unless_one_is_given(tmp_path: Path) -> None:
    first, again = (ci.make_plan(tmp_path, "", 1.0, 1).seed for _ in range(2))
    assert first == again
    assert ci.make_plan(tmp_path, "mine", 1.0, 1).seed == "mine"


def test_files_that_have_changed_are_known_by_their_digests(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    files = {file for mutation in MUTATIONS for file in mutation.files}
    assert listed.touched(result) == files  # there is no result
    digests = source_digests(files)
    result.write_text(json.dumps({"sources": digests}))
    assert listed.touched(result) == set()
    result.write_text(json.dumps({"sources": {**digests, STORE: "0"}}))
    assert listed.touched(result) == {STORE}


def record(mutant: Mutant, outcome: str = "killed") -> Record:
    found = Judged(mutant.name, mutant.code, outcome, "t::noticed", 1.0)  # type: ignore[arg-type]
    seconds = {"t::noticed": 20.0, "t::a": 1.0, "t::b": 2.0, "t::long": 40.0, "t::module": 1.0}
    tests = {mutant.function: ["t::a", "t::long", "t::b", "t::removed"]}
    return Record(judged={mutant.name: found}, tests=tests, seconds=seconds)


THERE = {"t::noticed", "t::a", "t::b", "t::long", "t::module"}


def test_the_test_that_noticed_comes_first_and_what_takes_too_long_or_is_gone_is_left_out() -> None:
    chosen = ci.choose(MUTANTS[0], record(MUTANTS[0]), Noticing(), THERE)
    assert chosen.tests == ("t::noticed", "t::a", "t::b")


def test_a_survivor_is_tried_with_the_tests_of_its_function() -> None:
    chosen = ci.choose(MUTANTS[0], record(MUTANTS[0], "survived"), Noticing(), THERE)
    assert chosen.tests == ("t::a", "t::long", "t::b")


def test_a_function_newer_than_the_record_is_tried_with_the_tests_of_its_module() -> None:
    noticing = Noticing()
    noticing.add("m.other", "t::module")
    mutant = replace(MUTANTS[0], name="m.new/delete/123456", function="m.new")
    assert ci.choose(mutant, record(MUTANTS[0]), noticing, THERE).tests == ("t::module",)


def found(kind: str) -> dict[str, str]:
    return {"kind": "generated", "name": "m.f/x/1", "found": kind, "by": "t::a", "shown": "m.py:1"}


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        (["noticed", "noticed"], 0),
        (["noticed", "unfinished"], 0),
        (["noticed", "survived"], 1),
        (["broken"], 1),
        ([], 0),
    ],
)
def test_a_survivor_is_a_failure_and_lack_of_time_is_none(
    kinds: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ci.report([found(kind) for kind in kinds], 10) == status
    said = capsys.readouterr().out
    assert f"tried {len(kinds)} of 10 mutations" in said
    assert ("m.f/x/1" in said) == bool(status)


def test_ci_runs_the_mutations_after_the_tests_and_for_ten_minutes_at_most() -> None:
    assert "\nmake test-full\n" in (ROOT / ".ci" / "run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    full = makefile[makefile.index("test-full: lint\n") :]
    assert full.startswith("test-full: lint\n\t$(PYTEST)\n\t$(MAKE) mutants\n")
    assert "$(BIN)/python -m tests.mutation --ci\n" in makefile
    assert ci.MINUTES == 10.0


def test_before_the_full_run_is_complete_only_what_it_has_come_to_counts() -> None:
    mutant, other = MUTANTS[:2]
    assert record(mutant).is_settled(mutant)
    assert not record(mutant).is_settled(other)
    assert not record(mutant, "survived").is_settled(mutant)
    assert not record(mutant).is_settled(replace(mutant, code="another"))
    assert Record(is_complete=True).is_settled(mutant)
