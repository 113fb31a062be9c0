"""Fixtures of the tests of stores with several owners."""

from __future__ import annotations

import pytest

from offload.cli import main
from tests.command_line import Run, runner


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; gives its status, standard output and error."""
    return runner("offload", main, monkeypatch, capsys)
