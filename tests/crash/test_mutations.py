"""The mutations of the protocol follow the source: none may rot unnoticed.

Whether tests notice them takes minutes to find out: ``python -m tests.mutation``.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.mutation import MUTATIONS
from tests.mutation.generated.mutants import mutants_of
from tests.mutation.generated.results import RECORD, read_record, reasons
from tests.mutation.mutation import RESULT, ROOT, Edit, Mutation, MutationError


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_edit_fits_and_is_python(mutation: Mutation) -> None:
    sources: dict[str, str] = {}
    for edit in mutation.edits:
        source = sources.get(edit.file) or (ROOT / edit.file).read_text()
        sources[edit.file] = edit.apply(source)
    for file, source in sources.items():
        compile(source, file, "exec")
        assert source != (ROOT / file).read_text()


def test_tests_that_are_to_notice_exist() -> None:
    named = {test for mutation in MUTATIONS for test in mutation.tests}
    for test in named:
        path, *rest = test.split("::")
        source = (ROOT / path).read_text()
        for name in rest:
            name = name.partition("[")[0]
            defined = (f"def {name}(", f"class {name}:", f"class {name}(")
            assert any(words in source for words in defined), test


def test_names_are_given_once() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert sorted(set(names)) == sorted(names)


def test_an_edit_that_does_not_fit_says_so() -> None:
    for source in ("nothing of it", "twice twice"):
        with pytest.raises(MutationError, match=r"there (0|2) times, expected once"):
            Edit("x.py", "twice", "").apply(source)


def test_the_score_that_is_quoted_is_that_of_the_last_complete_run() -> None:
    guarantees = (ROOT / "docs" / "guarantees.md").read_text()
    quoted = re.findall(r"mutation score: (\d+) of (\d+)", guarantees)
    if not RESULT.exists():
        assert quoted == [], "there is no result that this could be quoted from"
        return
    found = json.loads(RESULT.read_text())
    needed = found["mutations"] - found["redundant"]
    assert found["noticed"] == needed
    assert quoted == [(str(needed), str(needed))]


def test_every_generated_mutant_that_survived_the_last_full_run_has_a_reason() -> None:
    record = read_record()
    if not record.is_complete:
        pytest.skip("the full run is not complete")
    survived = [one.name for one in record.judged.values() if one.outcome == "survived"]
    assert [name for name in survived if name not in reasons()] == []


def test_a_reason_to_survive_is_of_a_mutant_that_exists_and_that_nothing_has_noticed() -> None:
    mutants = {mutant.name: mutant for mutant in mutants_of()}
    assert [name for name in reasons() if name not in mutants] == []
    noticed = [one for one in read_record().judged.values() if one.outcome != "survived"]
    still = {one.name for one in noticed if one.code == mutants[one.name].code}
    assert [name for name in reasons() if name in still] == []


def test_the_number_of_generated_mutants_that_is_quoted_is_that_of_the_last_full_run() -> None:
    guarantees = (ROOT / "docs" / "guarantees.md").read_text()
    quoted = re.findall(
        r"([\d,]+) of ([\d,]+) generated mutants have been judged.*?\s([\d,]+) were noticed",
        guarantees,
        re.DOTALL,
    )
    found = json.loads(RECORD.read_text())
    assert quoted == [tuple(f"{found[key]:,}" for key in ("judged", "mutants", "noticed"))]
