"""A copy of the checkout in which tests run on an edited library, in a fork that has torch already.

Importing torch and pytest takes longer than most tests do, so one process imports them once and
forks for every run. Edits are applied to the copy and taken back, so that Python need not compile
the rest anew. Several processes may share a scratch directory: each has a copy of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn, Protocol

import hypothesis.stateful  # noqa: F401  (imported once, as the next two are, for all forks)
import pytest
import safetensors.torch  # noqa: F401
import torch._dynamo  # noqa: F401  (which an optimizer imports, and takes seconds)

from tests.mutation.mutation import ROOT, MutationError

TIMEOUT_S: Final = 300.0
"""For one run of tests, unless its caller says otherwise."""

_COPIED: Final = ("offload", "gds", "tests", "bench", "pyproject.toml")
_OWN: Final = ("tests", "offload", "gds", "bench")
"""Packages that a fork must import from the copy."""

_POLL_S: Final = 0.05
_PAUSE_S: Final = 5.0
"""Who sleeps so much too long was stopped, with the tests: what they then say does not count."""

_MEMORY_BYTES: Final = 8 << 30
"""Of address space, besides what is taken already: a loop that never ends must not take all."""

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

    def close(self) -> None:
        """Remove the copy."""
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

    def run(
        self,
        changes: Sequence[Change],
        tests: Sequence[str],
        *,
        timeout_s: float | None = None,
        options: Sequence[str] = STOP_AT_FIRST,
        plugins: Sequence[object] = (),
    ) -> Run:
        """Run tests on the copy with these changes, which are taken back afterwards.

        Args:
            changes: Of the library; none for the library as it is.
            tests: What pytest is to run, in this order.
            timeout_s: Seconds after which the run counts as hung.
            options: Of pytest.
            plugins: Of pytest; used in the process that runs the tests.
        """
        files = {self.copy / file for change in changes for file in change.files}
        before = {file: file.read_bytes() for file in files}
        try:
            for change in changes:
                change.apply(self.copy)
            forget_compiled(files)
            return self._pytest(tests, timeout_s or self._timeout_s, options, plugins)
        finally:
            for file, content in before.items():
                file.write_bytes(content)
            forget_compiled(files)

    def _pytest(
        self,
        tests: Sequence[str],
        timeout_s: float,
        options: Sequence[str],
        plugins: Sequence[object],
    ) -> Run:
        said = self.copy / "said"
        command = (*options, "-p", "no:cacheprovider", f"--basetemp={self.copy / 'tmp'}", *tests)
        while (status := self._ended(said, command, plugins, timeout_s)) == "stopped":
            shutil.rmtree(self.copy / "tmp", ignore_errors=True)
        if status is None:
            return Run("hung", f"no end within {timeout_s:g} s")
        if status == 0:
            return Run("passed", "")
        text = said.read_text(errors="replace")
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

    def _ended(
        self, said: Path, command: Sequence[str], plugins: Sequence[object], timeout_s: float
    ) -> int | Literal["stopped"] | None:
        """Return a status; None if there was no end; ``stopped`` if there may be another."""
        child = os.fork()
        if child == 0:
            _become_pytest(self.copy, said, command, plugins)
        try:
            until = time.monotonic() + timeout_s
            before = time.monotonic()
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                now = time.monotonic()
                if now > until or now - before > _PAUSE_S:
                    return "stopped" if now - before > _PAUSE_S else None
                before = now
                time.sleep(_POLL_S)
            return "stopped" if time.monotonic() - before > _PAUSE_S else ended[1]
        finally:
            # Also what a test has started and not ended: it would take time from those to come.
            end_group(child)


def end_group(leader: int) -> None:
    """Kill a process group, if there is anything left of it, and reap its leader."""
    try:
        os.killpg(leader, signal.SIGKILL)
        os.waitpid(leader, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def _become_pytest(
    copy: Path, said: Path, command: Sequence[str], plugins: Sequence[object]
) -> NoReturn:
    """Run pytest in this process, which has been forked, on the modules of a copy; then exit.

    A fork has imported torch and pytest already, which takes longer than most tests.
    """
    status = 3
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with who has started it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        _limit_memory()
        os.environ |= {"PYTHONPATH": str(copy), "OMP_WAIT_POLICY": "PASSIVE", "FULL_TESTS": "1"}
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no test here needs one
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # in the copy all runs import the same
        sys.dont_write_bytecode = False
        for name in [name for name in sys.modules if name.partition(".")[0] in _OWN]:
            del sys.modules[name]
        sys.path = [str(copy), *(path for path in sys.path if Path(path or ".") != ROOT)]
        offload = importlib.import_module("offload")
        if not str(offload.__file__).startswith(str(copy)):
            raise MutationError(f"tests would run with {offload.__file__}, not with {copy}")
        status = pytest.main([*command], plugins=[*plugins])
    except BaseException as error:  # noqa: BLE001  (whatever it is, this process must not go on)
        os.write(2, repr(error).encode())
    finally:
        sys.stdout.flush()
        os._exit(int(status))


def _limit_memory() -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY_BYTES, most))


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
