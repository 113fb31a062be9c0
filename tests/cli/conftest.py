"""The command line in this process, and a copy of the store that a module has trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from offload.cli import main
from tests.command_line import Run, runner


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; gives its status, standard output and error."""
    return runner("offload", main, monkeypatch, capsys)


@pytest.fixture
def store(trained: Path, tmp_path: Path) -> Path:
    """A copy of the module's store, to be changed or damaged."""
    return Path(shutil.copytree(trained, tmp_path / "store"))
