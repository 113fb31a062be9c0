"""`make gpu WHEELS=folder` uses the torch of the machine, also if that is in an environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SEEN = "import importlib.util, sys; print(importlib.util.find_spec(sys.argv[1]).origin)"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    return made


def share(environment: Path) -> None:
    command = [sys.executable, "-m", "tests.install.share_packages", str(environment)]
    subprocess.run(command, cwd=ROOT, check=True)


def seen_in(environment: Path, name: str) -> str:
    """Return where an environment's Python finds a package; empty if nowhere."""
    command = [environment / "bin" / "python", "-c", SEEN, name]
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=environment, env=clean, capture_output=True, text=True)
    return done.stdout.strip()


def test_packages_of_this_python_are_seen(environment: Path) -> None:
    here = seen_in(Path(sys.prefix), "torch")
    assert here
    assert seen_in(environment, "torch") != here, "so there is something to share"
    share(environment)
    assert seen_in(environment, "torch") == here
    assert seen_in(environment, "numpy") == seen_in(Path(sys.prefix), "numpy")


def test_what_the_environment_has_itself_comes_first(environment: Path) -> None:
    (own,) = environment.glob("lib/python*/site-packages")
    (own / "numpy.py").write_text("")
    share(environment)
    share(environment)  # again, as after an interrupted make
    assert seen_in(environment, "numpy") == str(own / "numpy.py")
