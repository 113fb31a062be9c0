"""A copy of the checkout in which tests run on an edited library, in a fork that has torch already.

Importing torch and pytest takes longer than most tests do, so one process imports them once and
forks for every run. Edits are applied to the copy and taken back, so that Python need not compile
the rest anew. Several processes may share a scratch directory: each has a copy of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

import hypothesis.stateful  # noqa: F401  (imported once, as the next two are, for all forks)
import pytest
import safetensors.torch  # noqa: F401
import torch._dynamo  # noqa: F401  (which an optimizer imports, and takes seconds)

from tests.mutation.collected import NOT_SWAPPED, Collected, Request
from tests.mutation.forks import Ended, become_pytest, wait_for
from tests.mutation.mutation import ROOT

TIMEOUT_S: Final = 300.0
"""For one run of tests, unless its caller says otherwise."""

_COPIED: Final = ("offload", "gds", "tests", "bench", "pyproject.toml")
_IMPORT: Final = re.compile(
    r"^from (tests\.[\w.]+) import (?:\(\s*([\w\s,]+)\)|([\w ,]+))", re.MULTILINE
)
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", re.MULTILINE)
_NOT_COLLECTED: Final = re.compile(r"^ERROR (\S+\.py)(?: - |$)", re.MULTILINE)
_TIMED_OUT: Final = re.compile(r"Timeout \(\d+:\d\d:\d\d")
"""What pytest's faulthandler says when it ends the process."""

_NO_TESTS: Final = (4, 5)
"""Statuses of pytest: a test that was named is not there, or none is."""

STOP_AT_FIRST: Final = ("-x", "-q", "--no-header", "--tb=line", "-rfE")
"""Options of pytest for judging: one failure is enough."""


class Change(Protocol):
    """An edit of the library, applied to a copy of the checkout."""

    @property
    def files(self) -> tuple[str, ...]:
        """Paths within the checkout that it changes."""

    def apply(self, root: Path) -> None:
        """Edit the files of a copy; raises `MutationError` if it does not fit."""


@dataclass(frozen=True, slots=True)
class Run:
    """How a run of tests has ended."""

    how: Literal["passed", "failed", "broken", "hung", "unusable"]
    """``broken``: pytest could not go on, or the process died; ``unusable``: no such tests."""

    by: str
    """The first test that failed; or what pytest said; empty if all have passed."""


class Workplace:
    """A scratch directory with a copy of the checkout, and what is known about this state of it.

    Args:
        directory: The scratch directory, created if missing.
        timeout_s: For a run whose caller gives no time limit.
    """

    def __init__(self, directory: Path, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self._library = library_digest()
        self.copy = self.directory / f"copy.{os.getpid()}"
        shutil.rmtree(self.copy, ignore_errors=True)
        self.copy.mkdir()
        for part in _COPIED:
            if (ROOT / part).is_dir():
                # Without the compiled kernel: the mutants are of torch's code, which runs then.
                ignored = shutil.ignore_patterns("__pycache__", "results", "*.so")
                shutil.copytree(ROOT / part, self.copy / part, ignore=ignored)
            else:
                shutil.copy(ROOT / part, self.copy / part)
        self._said = self.copy / "said"
        self.current = self.copy / "current"
        """File with the name of the test that runs, or was the last one to."""
        self._collected: Collected | None = None

    def close(self) -> None:
        """Remove the copy."""
        if self._collected is not None:
            self._collected.close()
        shutil.rmtree(self.copy, ignore_errors=True)

    def known(self, name: str, tests: Sequence[str]) -> dict[str, object] | None:
        """Return what an earlier run of the same tests on the same library has found."""
        path = self._path(name, tests)
        return json.loads(path.read_text()) if path.exists() else None

    def keep(self, name: str, tests: Sequence[str], found: object) -> None:
        """Keep what has been found, for other runs."""
        write_whole(self._path(name, tests), json.dumps(found))

    def _path(self, name: str, tests: Sequence[str]) -> Path:
        digest = hashlib.sha256(f"{self._library}\0{tests}".encode())
        for file in sorted(with_imports({ROOT / test.partition("::")[0] for test in tests})):
            digest.update(file.read_bytes())
        return self.directory / f"{name}-{digest.hexdigest()[:16]}.json"

    def collect(self, files: Sequence[str]) -> None:
        """Collect tests once, so that `run` need not import the library and them for each run.

        What a module computes when it is imported is then that of the library without any change.

        Raises:
            MutationError: They cannot be collected.
        """
        command = self._command(STOP_AT_FIRST, files)
        self._collected = Collected(self.copy, self._said, command, _Current(self.current))

    def run(
        self,
        changes: Sequence[Change],
        tests: Sequence[str],
        *,
        timeout_s: float | None = None,
        test_timeout_s: float | None = None,
        options: Sequence[str] = STOP_AT_FIRST,
        plugins: Sequence[object] = (),
        fresh: bool = False,
    ) -> Run:
        """Run tests on the copy with these changes, which are taken back afterwards.

        Args:
            changes: Of the library; none for the library as it is.
            tests: What pytest is to run, in this order.
            timeout_s: Seconds after which the run counts as hung.
            test_timeout_s: Seconds after which one test does.
            options: Of pytest.
            plugins: Of pytest; used in the process that runs the tests.
            fresh: Import the library, changed as it is, and the tests anew.
        """
        limit_s = timeout_s or self._timeout_s
        files = {self.copy / file for change in changes for file in change.files}
        before = {file: file.read_text() for file in files}
        self.current.write_text("")
        try:
            for change in changes:
                change.apply(self.copy)
            forget_compiled(files)
            if not (fresh or plugins) and options is STOP_AT_FIRST:
                one_s = test_timeout_s or limit_s
                run = self._by_collected(before, tests, limit_s, one_s)
                if run is not None:
                    return run
            if test_timeout_s is not None:
                options = (*options, "-o", f"faulthandler_timeout={test_timeout_s:g}")
            return self._pytest(tests, limit_s, options, plugins)
        finally:
            for file, content in before.items():
                file.write_text(content)
            forget_compiled(files)

    def _by_collected(
        self, before: Mapping[Path, str], tests: Sequence[str], limit_s: float, one_s: float
    ) -> Run | None:
        """Return how tests end in a process that has collected them; None if it cannot do it."""
        names = self._collected.names(tests) if self._collected is not None else None
        if self._collected is None or names is None:
            return None
        edits = {str(file): (text, file.read_text()) for file, text in before.items()}
        request = Request(edits, names, limit_s, one_s)
        while (status := self._collected.run(request)) == "stopped":
            pass
        return None if status == NOT_SWAPPED << 8 else self._ended(status, limit_s)

    def _pytest(
        self,
        tests: Sequence[str],
        timeout_s: float,
        options: Sequence[str],
        plugins: Sequence[object],
    ) -> Run:
        command = self._command(options, tests)
        status: Ended = "stopped"
        while status == "stopped":
            shutil.rmtree(self.copy / "tmp", ignore_errors=True)
            child = os.fork()
            if child == 0:
                plugins = [_Current(self.current), *plugins]
                become_pytest(self.copy, self._said, command, plugins)
            status = wait_for(child, timeout_s)
        return self._ended(status, timeout_s)

    def _command(self, options: Sequence[str], tests: Sequence[str]) -> tuple[str, ...]:
        return (*options, "-p", "no:cacheprovider", f"--basetemp={self.copy / 'tmp'}", *tests)

    def _ended(self, status: int | None, timeout_s: float) -> Run:
        """Return what a status of pytest, and what it has said, mean."""
        if status is None:
            return Run("hung", f"no end within {timeout_s:g} s")
        if status == 0:
            return Run("passed", "")
        text = self._said.read_text(errors="replace")
        failed = _FAILED.search(text)
        if os.waitstatus_to_exitcode(status) == 1 and failed is not None:
            return Run("failed", failed[1])
        if _TIMED_OUT.search(text):
            return Run("hung", f"one test did not end:\n{text[-3000:]}")
        uncollected = _NOT_COLLECTED.search(text)
        if uncollected is not None:
            return Run("broken", f"{uncollected[1]} cannot be imported")
        if os.waitstatus_to_exitcode(status) in _NO_TESTS:
            return Run("unusable", text[-3000:])
        return Run("broken", f"pytest ended with status {status:#x}:\n{text[-3000:]}")


class _Current:
    """A plugin of pytest that notes which test runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note it."""
        self._path.write_text(nodeid)


def busy() -> float:
    """Return how many times as long as by itself a process takes at this moment, about."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody ever finds a part of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.rename(path)


def forget_compiled(files: Iterable[Path]) -> None:
    """Remove what was compiled of files: within a second, Python takes an edit for no edit."""
    for file in files:
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()


def library_digest() -> str:
    """Return a digest of the library."""
    digest = hashlib.sha256()
    for part in ("offload", "gds"):
        for file in sorted((ROOT / part).rglob("*.py")):
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def with_imports(files: set[Path]) -> set[Path]:
    """Return test files, and all files of `tests` that they import."""
    found, new = set[Path](), files
    while new:
        found |= new
        modules = {ROOT / "tests/crash/children.py"} if new == files else set[Path]()
        found_in = {match for file in new for match in _IMPORT.findall(file.read_text())}
        for module, *names in found_in:
            path = ROOT / module.replace(".", "/")
            modules.add(path.with_suffix(".py"))
            modules |= {path / f"{name}.py" for name in re.findall(r"\w+", " ".join(names))}
        new = {module for module in modules if module.exists()} - found
    return found
