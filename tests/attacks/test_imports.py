"""Every hostile file for `offload import` is refused in one line, in bounded memory and time.

A short run tries a few files of different kinds; FULL_TESTS=1 all of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.importing import SOME, chosen
from tests.attacks.imports import CASES, Hostile
from tests.campaigns import FULL
from tests.dying import dying

SHARES = ["0/3", "1/3", "2/3"] if FULL else ["some"]


def complaints(case: Hostile, found: dict[str, object]) -> list[str]:
    """Return what is wrong with how a file was met; one that takes too long is killed."""
    err, code = str(found["err"]), found["code"]
    wrong = []
    if case.reason or case.arguments:
        if code not in (1, 2):
            wrong.append(f"status {code}")
        if not re.search(case.reason, err, re.DOTALL):
            wrong.append("another reason")
        if code == 1 and (not err.startswith("error: ") or err.count("\n") != 1):
            wrong.append("not one line")
        if found["sealed"]:
            wrong.append("sealed")
    else:
        if code != 0:
            wrong.append("refused")
        if not found["sealed"] or found.get("listed") != found["sealed"]:
            wrong.append("sealed under a name that no reader finds")
    if found["pwned"]:
        wrong.append("something was run")
    if found["grown_bytes"] > case.most_bytes:  # type: ignore[operator]
        wrong.append(f"{found['grown_bytes'] >> 20} MiB")  # type: ignore[operator]
    return [f"{case.name}: {', '.join(wrong)}: {err[-400:]}"] if wrong else []


@pytest.mark.parametrize("share", SHARES)
def test_every_file_is_refused_or_imported(
    share: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.name for case in CASES} >= SOME
    cases = chosen(share)
    done = subprocess.run(
        dying([sys.executable, "-m", "tests.attacks.importing", str(tmp_path), share]),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["name"] for one in found] == [case.name for case in cases]
    wrong = [w for case, one in zip(cases, found, strict=True) for w in complaints(case, one)]
    assert wrong == []
    record_property("attacks", sum(bool(case.reason) for case in cases))
