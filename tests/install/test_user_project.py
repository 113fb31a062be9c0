"""A user's project is checked by the type checkers that people use, from outside of this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wings import ROOT

PROJECT = ROOT / "tests" / "user_project"

WRONG = """
import offload

offload.AdamW([], "x", directory="run")
offload.SGD([], 0.1, directory="run", momentun=0.9)
offload.open_checkpoint("run").stepp
"""
"""One error in each of the last three lines, which are seen only if nothing is of type `Any`."""

LINES = (4, 5, 6)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project in a directory of its own, and a file with errors beside it."""
    found = Path(shutil.copytree(PROJECT, tmp_path / "project"))
    (found / "wrong.py").write_text(WRONG)
    return found


def test_mypy_is_strict_with_it(project: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "."]
    # A user has the package among the installed ones; this path also finds it in a copy.
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line.partition(": ")[0] for line in errors] == [f"wrong.py:{n}" for n in LINES], (
        done.stdout + done.stderr
    )


def test_pyright_is_strict_with_it(project: Path) -> None:
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not installed")
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "strict", "include": ["."]}
    (project / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [pyright, "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    found = {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in json.loads(done.stdout)["generalDiagnostics"]
        if one["severity"] == "error"
    }
    assert found == {("wrong.py", line) for line in LINES}, done.stdout
