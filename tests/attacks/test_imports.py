"""Every hostile file for `offload import` is refused in one line.

A short run tries a few files of different kinds; FULL_TESTS=1 all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import offload
from tests.attacks.importing import attempt
from tests.attacks.imports import CASES, Hostile
from tests.campaigns import FULL
from tests.forking import Children

SOME = {
    *("good-folder", "evil", "evil-distributed", "attributes-of-a-class", "state-is-large"),
    *("index-escapes", "weights-are-a-device", "lr-nan", "expanded", "state-step=nan"),
    *("no-groups", "no-params", "deep-state", "name-with-a-surrogate", "group-key", "step=-5"),
    *("state-is-no-json", "step-is-a-fraction", "index-missing", "model-has-other-keys"),
}


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    made = Children("tests.attacks.importing")
    yield made
    made.close()


def test_every_file_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.name for case in CASES} >= SOME


@pytest.mark.parametrize(
    "case", [case for case in CASES if FULL or case.name in SOME], ids=lambda case: case.name
)
def test_a_file_is_refused_or_imported(
    case: Hostile,
    children: Children,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    (tmp_path / "case").write_text(case.name)
    ended = children.run(attempt, tmp_path)
    assert ended.status == 0, ended.output[-2000:]
    found = json.loads(ended.output.splitlines()[-1])
    code, err = found["code"], found["err"]
    sealed = [path.name for path in tmp_path.glob("store/step-*")]
    if case.reason or case.arguments:
        assert code in (1, 2), err
        assert re.search(case.reason, err, re.DOTALL), err
        assert code == 2 or (err.startswith("error: ") and err.count("\n") == 1), err
        assert sealed == []
    else:
        assert code == 0, err
        listed = offload.list_checkpoints(tmp_path / "store")
        assert [Path(one.path).name for one in listed if one.valid] == sealed != []
    assert not (tmp_path / "PWNED").exists(), "something was run"
    record_property("attacks", int(bool(case.reason)))
