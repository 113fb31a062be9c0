"""Which tests run which statement: recorded once for each test file, and kept outside of git.

A recording is used as long as its test file, and what that imports of the tests, is the same. The
modules may have changed since: points have names that survive edits elsewhere, and for a statement
that is new the tests of its function count.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutation.generated.points import Recorder, function_of, instrument
from tests.mutation.generated.targets import MODULES, NOT_FOR_MUTANTS, TEST_FOLDERS
from tests.mutation.mutation import ROOT, MutationError
from tests.mutation.workplace import Workplace, forget_compiled, with_imports, write_whole

_OPTIONS: Final = ("-q", "--no-header", "--tb=short", "-rfE")
_MOST_S: Final = 3600.0
"""For all tests of one file."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A test, as of its recording."""

    name: str
    """As pytest takes it."""

    seconds: float
    """With what it shares with others of its file."""

    num_points: int
    """How much of the modules it runs: one that runs little is to the point."""


class Recording:
    """Which tests reach which point.

    Args:
        directory: Has a file for each test file: `record`.
        files: The test files.
    """

    def __init__(self, directory: Path, files: Sequence[str]) -> None:
        self._points: dict[str, list[Recorded]] = {}
        self._functions: dict[str, dict[str, Recorded]] = {}
        self._known = set[str]()
        self._versions = {file: _path(directory, file).name for file in files}
        self.num_tests = 0
        for file in files:
            found = json.loads(_path(directory, file).read_text())
            names: list[str] = found["points"]
            self._known.update(names)
            for name, (seconds, digits) in found["tests"].items():
                bits = int(digits, 16)
                test = Recorded(name, seconds, bits.bit_count())
                self.num_tests += 1
                while bits:
                    number = (bits & -bits).bit_length() - 1
                    bits &= bits - 1
                    self._points.setdefault(names[number], []).append(test)
                    self._functions.setdefault(function_of(names[number]), {})[name] = test

    def of_point(self, point: str) -> list[Recorded] | None:
        """Return the tests that reach a point; None if none is known to."""
        return self._points.get(point)

    def knows(self, point: str) -> bool:
        """Return whether a point was there to be reached when tests were recorded."""
        return point in self._known

    def version(self, file: str) -> str:
        """Return what changes when a test file, or what it imports, does."""
        return self._versions.get(file, "")

    def of_function(self, function: str) -> list[Recorded]:
        """Return the tests that run any of a function, given with its module's short name."""
        return [*self._functions.get(function, {}).values()]

    def of_module(self, module: str) -> list[Recorded]:
        """Return the tests that run anything of a module."""
        found = {
            test.name: test
            for function, tests in self._functions.items()
            if function.partition(".")[0] == module
            for test in tests.values()
        }
        return [*found.values()]


def test_files() -> list[str]:
    """Return the test files that are recorded, as paths within the checkout."""
    found = (file for folder in TEST_FOLDERS for file in sorted((ROOT / folder).glob("test_*.py")))
    return [name for name in (f"{file.relative_to(ROOT)}" for file in found) if _is_for(name)]


def _is_for(name: str) -> bool:
    return name not in NOT_FOR_MUTANTS


def record(
    scratch: Path, files: Sequence[str], say: Callable[[str], None], *, again: bool = False
) -> Recording:
    """Record what has not been recorded, and return all of it.

    Several processes may do this at once: each takes files that no other is at.

    Args:
        scratch: Where recordings are kept.
        files: The test files.
        say: Told what has been done, a line each.
        again: Record everything anew.

    Raises:
        MutationError: The tests of a file cannot be run.
    """
    directory = scratch / "recorded"
    directory.mkdir(parents=True, exist_ok=True)
    started = time.time()
    workplace: Workplace | None = None
    try:
        for wait in (False, True):
            for file in files:
                path = _path(directory, file)
                if _is_done(path, started if again else 0.0):
                    continue
                with claim(path.with_suffix(".lock"), wait=wait) as claimed:
                    if not claimed or _is_done(path, started if again else 0.0):
                        continue
                    workplace = workplace or _instrumented(scratch / "recording")
                    _record(workplace, file, path, say)
    finally:
        if workplace is not None:
            workplace.close()
    return Recording(directory, files)


def _is_done(path: Path, since: float) -> bool:
    return path.exists() and path.stat().st_mtime >= since


@contextmanager
def claim(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Take something for this process, until the block ends or the process does.

    Yields whether it was to be had; with `wait`, waits until it is.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _instrumented(scratch: Path) -> Workplace:
    workplace = Workplace(scratch)
    names = instrument(workplace.copy, MODULES).names
    (workplace.copy / "points.json").write_text(json.dumps(names))
    forget_compiled(workplace.copy / path for path in MODULES.values())
    return workplace


def _record(workplace: Workplace, file: str, path: Path, say: Callable[[str], None]) -> None:
    started = time.monotonic()
    recorder = _Writer(workplace.copy)
    shutil.rmtree(workplace.copy / "tmp", ignore_errors=True)
    run = workplace.run([], [file], timeout_s=_MOST_S, options=_OPTIONS, plugins=[recorder])
    output = workplace.copy / _Writer.OUTPUT
    if run.how in ("hung", "broken") or not output.exists():
        raise MutationError(f"{file} could not be recorded: {run.how} {run.by}")
    found = json.loads(output.read_text())
    output.unlink()
    write_whole(path, json.dumps(found))
    failed = (
        f", {len(found['failed'])} fail: {', '.join(found['failed'])}" if found["failed"] else ""
    )
    took = f"{time.monotonic() - started:.0f} s"
    say(f"recorded {file}: {len(found['tests'])} tests in {took}{failed}")


class _Writer(Recorder):
    """Writes at the end what has been recorded: it was another process that did."""

    OUTPUT: Final = "recorded.json"

    def __init__(self, copy: Path) -> None:
        super().__init__(copy / "_mutation_points.map")
        self._copy = copy

    def pytest_sessionfinish(self) -> None:
        """Write it."""
        found = {
            "points": json.loads((self._copy / "points.json").read_text()),
            "tests": {name: [seconds, f"{bits:x}"] for name, (seconds, bits) in self.found.items()},
            "failed": self.failed,
        }
        (self._copy / self.OUTPUT).write_text(json.dumps(found))


def _path(directory: Path, file: str) -> Path:
    digest = hashlib.sha256(" ".join(MODULES).encode())
    for used in sorted(with_imports({ROOT / file})):
        digest.update(f"{used.relative_to(ROOT)}\0".encode() + used.read_bytes())
    name = re.sub(r"\W", "_", file.removeprefix("tests/").removesuffix(".py"))
    return directory / f"{name}-{digest.hexdigest()[:16]}.json"
