"""The page about sizing shows the output of its commands as it is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from offload.cli import main
from tests.command_line import runner

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"
SHOWN = re.findall(r"```text\n\$ offload (.*?[^\\])\n(.*?)\n```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[c.split()[1] for c, _ in SHOWN])
def test_output_on_the_page(
    command: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = runner("offload", main, monkeypatch, capsys)
    code, out, err = run(*shlex.split(command.replace("\\\n", " ")))
    assert (code, err) == (0, "")
    assert out.rstrip() == shown


def test_the_page_shows_commands() -> None:
    assert SHOWN
