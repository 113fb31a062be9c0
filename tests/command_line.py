"""The command lines of both packages, called in the process of the test."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main

Result = tuple[int, str, str]
"""Exit status, standard output and standard error."""

Run = Callable[..., Result]

built_once = functools.cache(typer.main.get_command)
"""In the place of typer's own: it builds all commands anew with each call, which takes longer than
most of them do."""


def runner(
    program: str,
    main: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Return what calls a command line with the arguments that it is given.

    Args:
        program: What it is called by.
        main: Its entry point, which exits.
        monkeypatch: Of the test.
        capsys: Of the test.
    """
    monkeypatch.setattr(typer.main, "get_command", built_once)

    def run(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
        capsys.readouterr()  # of what the test did before
        with pytest.raises(SystemExit) as exited:
            main()
        code = exited.value.code
        streams = capsys.readouterr()
        return (0 if code is None else int(code)), streams.out, streams.err

    return run
