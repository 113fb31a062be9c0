"""On a system that is not Linux, everything says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SAID = "ssd-offload requires Linux"


@pytest.fixture(params=["darwin", "win32"])
def system(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The environment of a Python that takes itself for one of another system."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.platform = {request.param!r}\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "SYSTEM": request.param}


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("statement", [
    "import gds", "import offload", "from offload import AdamW", "import gds.cli",
    "from gds.kvikio import KvikioBackend",
])  # fmt: skip
def test_an_import_raises_an_error_that_says_so(system: dict[str, str], statement: str) -> None:
    ran = run(system, sys.executable, "-c", statement)
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {SAID}")
    assert f"this Python runs on {system['SYSTEM']}" in last
    assert "fcntl" not in ran.stderr
    assert "During handling" not in ran.stderr


@pytest.mark.parametrize("name", ["gds", "offload"])
def test_a_command_says_so_and_nothing_else(
    system: dict[str, str], name: str, tmp_path: Path
) -> None:
    script = f"import sys; from {name}.cli import main; sys.exit(main())"  # as pip makes it
    for path in (name, f"{name}-script.py"):
        (tmp_path / path).write_text(script)
    commands = [
        [sys.executable, str(tmp_path / name), "--help"],
        [sys.executable, str(tmp_path / f"{name}-script.py"), "--help"],
        [sys.executable, "-m", f"{name}.cli", "--help"],
    ]
    for command in commands:
        ran = run(system, *command)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert ran.stderr.startswith(f"error: {SAID}")
        assert ran.stderr.count("\n") == 1
