"""Tests that were collected once notice edits, also those that need a fresh import."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.dying import dying
from tests.mutation.mutation import ROOT

FILE = "tests/format/test_digests.py"
TEST = f"{FILE}::test_leaves_do_not_depend_on_the_pieces_that_bytes_arrive_in"
DIGEST = "xxhash.xxh3_64_digest(leaf)[::-1]"
WRONG_ORDER = (DIGEST, "xxhash.xxh3_64_digest(leaf)")
NO_END = (f"return {DIGEST}", "\n    while True:\n        pass\n    return b''")
NO_SIZE = ("LEAF_BYTES = 1 << 20", "LEAF_BYTES = 0")

RUNS: dict[str, tuple[tuple[str, str] | None, list[str], dict[str, float]]] = {
    "nothing": (None, [FILE], {}),
    "function": (WRONG_ORDER, [TEST], {}),
    "nothing, after an edit": (None, [FILE], {}),
    "constant": (NO_SIZE, [FILE], {}),
    "tests of no bytes": (
        WRONG_ORDER,
        [f"{TEST}[several-leaves-0]", f"{TEST}[parts-of-leaves-0]"],
        {},
    ),
    "no end": (NO_END, [TEST], {"timeout_s": 20, "test_timeout_s": 1}),
    "no such test": (None, [f"{FILE}::test_nothing"], {}),
}
"""By name: an edit, the tests that are run, and their limits."""

# In a process of its own: pytest watches the time of this one by a thread, which no fork has.
PROGRAM = """
import json, sys
from contextlib import closing
from pathlib import Path
from tests.mutation.mutation import Edit, Mutation
from tests.mutation.workplace import Workplace

directory, file, runs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
found = {}
with closing(Workplace(Path(directory))) as workplace:
    workplace.collect([file])
    for name, (edit, tests, limits) in runs.items():
        edits = () if edit is None else (Edit("offload/format/digests.py", *edit),)
        changes = [Mutation(name, "", edits, ())] if edits else []
        run = workplace.run(changes, tests, **limits)
        found[name] = {"how": run.how, "by": run.by, "current": workplace.current.read_text()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("workplace")
    done = subprocess.run(
        dying([sys.executable, "-c", PROGRAM, str(directory), FILE, json.dumps(RUNS)]),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=240,
    )
    return json.loads(done.stdout)


def test_tests_pass_on_the_library_as_it_is_also_after_an_edit(outcomes: Any) -> None:
    assert outcomes["nothing"]["how"] == "passed"
    assert outcomes["nothing, after an edit"]["how"] == "passed"


def test_an_edit_of_a_function_is_noticed_and_the_test_named(outcomes: Any) -> None:
    assert outcomes["function"]["how"] == "failed"
    assert outcomes["function"]["by"] == f"{TEST}[parts-of-leaves-1]"


def test_an_edit_of_a_constant_is_noticed_in_a_fresh_import(outcomes: Any) -> None:
    # Its tests cannot even be collected, which a process that has collected them would not see.
    assert outcomes["constant"]["how"] == "broken"


def test_only_the_tests_that_were_chosen_are_run_in_their_order(outcomes: Any) -> None:
    assert outcomes["tests of no bytes"]["how"] == "passed"
    assert outcomes["tests of no bytes"]["current"] == f"{TEST}[parts-of-leaves-0]"


def test_a_test_that_does_not_end_is_named(outcomes: Any) -> None:
    assert outcomes["no end"]["how"] == "hung"
    assert outcomes["no end"]["current"] == f"{TEST}[parts-of-leaves-1]"


def test_a_test_that_is_not_there_is_said_to_be_missing(outcomes: Any) -> None:
    assert outcomes["no such test"]["how"] == "unusable"
