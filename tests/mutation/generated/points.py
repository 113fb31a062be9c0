"""Which statements a test runs, and which way its conditions went: written into the modules.

Each statement of the modules sets a byte of a file that is mapped into memory. That sees threads,
forks, programs that a test starts, and processes that are killed with SIGKILL, and adds no system
call that a tracer could count. A tracer of lines keeps nothing of a process that is killed.
"""

from __future__ import annotations

import ast
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import pytest

from tests.mutation.generated.statements import (
    Function,
    Source,
    Statement,
    functions,
    statements,
)
from tests.mutation.workplace import busy

Place: TypeAlias = Literal["at", "body", "else"]
"""Of a point: before a statement; within its block; where its condition is false."""

_MAP: Final = "_points"
_MODULE: Final = "_mutation_points"
_MODULE_TEXT: Final = '''\
"""Bytes of a file that every process of a test shares."""

import mmap
import pathlib

with pathlib.Path(__file__).with_suffix(".map").open("r+b") as file:
    points = mmap.mmap(file.fileno(), 0)
'''


@dataclass(frozen=True, slots=True)
class Instrumented:
    """What has been written into the modules of a copy."""

    names: tuple[str, ...]
    """Of the points, in the order of their bytes: `point_name`."""

    file: Path
    """The bytes."""


def point_name(module: str, statement: str, place: Place) -> str:
    """Return the name of a point."""
    return f"{module}.{statement}:{place}"


def function_of(point: str) -> str:
    """Return the name of the function that a point is in, with its module's."""
    return point.partition("/")[0]


def instrument(copy: Path, modules: dict[str, str]) -> Instrumented:
    """Rewrite modules of a copy of the checkout so that they say what of them was run.

    Args:
        copy: Of the checkout.
        modules: Path of each within the checkout, by short name.
    """
    names: list[str] = []
    for module, path in modules.items():
        source = Source((copy / path).read_text())
        for function in functions(source):
            _instrument(source, function, module, names)
        _import_map(source.tree)
        (copy / path).write_text(ast.unparse(ast.fix_missing_locations(source.tree)))
    (copy / f"{_MODULE}.py").write_text(_MODULE_TEXT)
    file = copy / f"{_MODULE}.map"
    file.write_bytes(bytes(max(len(names), 1)))
    return Instrumented(tuple(names), file)


def _instrument(source: Source, function: Function, module: str, names: list[str]) -> None:
    named = [(name, node) for name, node in statements(source, function)]
    before: dict[int, ast.stmt] = {}
    for name, node in named:
        for place in places(node):
            call = _set(len(names))
            names.append(point_name(module, name, place))
            if place == "at":
                before[id(node)] = call
            else:
                block = node.body if place == "body" else node.orelse  # type: ignore[union-attr]
                block.insert(0, call)
    _insert(function.node, before)


def places(statement: Statement) -> tuple[Place, ...]:
    """Return which points a statement has."""
    match statement:
        case ast.If():
            return ("at", "body", "else")
        case ast.While() | ast.For() | ast.AsyncFor() | ast.With() | ast.AsyncWith():
            return ("at", "body")
        case ast.ExceptHandler():
            return ("body",)
        case _:
            return ("at",)


def _insert(node: ast.AST, before: dict[int, ast.stmt]) -> None:
    for name in ("body", "handlers", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            for child in list(block):
                _insert(child, before)
            block[:] = _with_calls(block, before)
    for case in getattr(node, "cases", ()):
        for child in list(case.body):
            _insert(child, before)
        case.body = _with_calls(case.body, before)


def _with_calls(block: Sequence[ast.stmt], before: dict[int, ast.stmt]) -> list[ast.stmt]:
    out: list[ast.stmt] = []
    for child in block:
        out += [before[id(child)], child] if id(child) in before else [child]
    return out


def _set(number: int) -> ast.stmt:
    return ast.parse(f"{_MAP}[{number}] = 1").body[0]


def _import_map(tree: ast.Module) -> None:
    """Import the bytes behind the docstring and what is imported from the future."""
    at = 0
    for index, node in enumerate(tree.body):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            at = index + 1
    tree.body[at:at] = ast.parse(f"from {_MODULE} import points as {_MAP}").body


class Recorder:
    """A plugin of pytest: for each test that passes, its time and the points that were reached.

    What a fixture of a wider scope does, and the time it takes, counts for every test that uses it.

    Args:
        file: The bytes.
    """

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), 0)
        self._fixtures: dict[int, tuple[float, bytes]] = {}
        self._setting_up_s = 0.0
        self.found: dict[str, tuple[float, int]] = {}
        """By test: seconds, and the points as the bits of a number."""
        self.failed: list[str] = []
        """Tests that do not pass on the modules as rewritten."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Begin without any point, and take what there is in the end."""
        self._map[:] = bytes(len(self._map))
        self._seconds, self._setting_up_s, self._passed, self._ran = 0.0, 0.0, True, False
        result = yield
        if not self._passed:
            self.failed.append(item.nodeid)
        elif self._ran:
            info: Any = getattr(item, "_fixtureinfo", None)
            used = [d for ds in info.name2fixturedefs.values() for d in ds] if info else []
            seconds, bits = self._seconds - self._setting_up_s, _bits(bytes(self._map))
            for shared_s, points in (
                self._fixtures[id(d)] for d in used if id(d) in self._fixtures
            ):
                seconds, bits = seconds + shared_s, bits | _bits(points)
            self.found[item.nodeid] = (round(seconds, 3), bits)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        """Keep apart what a fixture does that serves more than one test."""
        if fixturedef.scope == "function":
            return (yield)
        before, started = bytes(self._map), time.perf_counter()
        self._map[:] = bytes(len(self._map))
        try:
            return (yield)
        finally:
            own, took_s = bytes(self._map), (time.perf_counter() - started) / busy()
            self._setting_up_s += took_s
            self._fixtures[id(fixturedef)] = took_s, own
            self._map[:] = bytes(a | b for a, b in zip(own, before, strict=True))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the time."""
        # While others keep the machine busy a test takes longer than it is worth.
        self._seconds += report.duration / busy()
        self._passed = self._passed and not report.failed
        self._ran = self._ran or (report.when == "call" and report.passed)


def _bits(points: bytes) -> int:
    """Return a number that has the bit `n` if the byte `n` is set."""
    return int("".join("1" if point else "0" for point in reversed(points)) or "0", 2)
