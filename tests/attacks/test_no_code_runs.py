"""Nothing in a store can run code: as Python's own audit events have it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.campaigns import FULL
from tests.dying import dying


def test_reading_hostile_stores_executes_imports_and_unpickles_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        dying(
            [sys.executable, "-m", "tests.attacks.audited", str(tmp_path), "1" if FULL else "12"]
        ),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert any(what.startswith("exec ") for what in report["seen"]), "the hook did not work"
    assert report["noted"] == []
    assert report["marks"] == []
    assert report["num"] > (30 if FULL else 4)
