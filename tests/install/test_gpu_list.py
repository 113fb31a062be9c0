"""The list of packages for `make gpu` without a network, against what its steps import."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import gpu

ROOT = Path(__file__).parents[2]
OURS = ("offload", "gds", "bench", "tests")
OF_THE_MACHINE = {"torch", "numpy"}
"""Packages that the machine with the GPU has, as the list says."""

NAMED_OTHERWISE = {"hypothesis": "hypothesis", "pytest": "pytest", "cupy": "cupy-cuda13x"}


def imported_at_once(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run when a module is imported."""
    left: list[ast.stmt] = list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            left += node.body + node.orelse
        elif isinstance(node, ast.Try | ast.With):
            left += node.body


def names_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.module is not None
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def files_of(name: str) -> Iterator[Path]:
    """Yield the files that run when one of our modules is imported, its packages' among them."""
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        place = ROOT.joinpath(*parts[:number])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.exists():
                yield path


def packages_imported(starts: list[Path]) -> dict[str, Path]:
    """Return the packages of others that files import, each with a file that does."""
    found: dict[str, Path] = {}
    left, seen = list(starts), set(starts)
    while left:
        path = left.pop()
        for node in imported_at_once(ast.parse(path.read_text())):
            for name in names_of(node):
                package = name.partition(".")[0]
                if package in OURS:
                    new = set(files_of(name)) - seen
                    seen |= new
                    left += new
                elif package not in sys.stdlib_module_names:
                    found.setdefault(package, path)
    return found


def test_everything_that_tests_and_benchmarks_import_is_in_the_list() -> None:
    steps = gpu.steps("somewhere", "results", quick=True)
    arguments = [word for step in steps for word in step.arguments]
    folders = [ROOT / "tests" / name for name in gpu.TESTS]
    assert {*map(str, folders)} <= {*arguments}
    modules = [word for word in arguments if word.startswith("bench.")]
    scripts = [ROOT / f"{module.replace('.', '/')}.py" for module in modules]
    assert len(scripts) > 3
    tests = [path for folder in folders for path in folder.rglob("*.py")]
    imported = packages_imported([*tests, *scripts, ROOT / "tests" / "conftest.py"])
    lines = (ROOT / "requirements-gpu.txt").read_text().splitlines()
    listed = {re.sub(r"[-_.]+", "-", line).lower() for line in lines if line[:1] not in ("", "#")}
    missing = {
        package: str(path.relative_to(ROOT))
        for package, path in imported.items()
        if package not in OF_THE_MACHINE
        and NAMED_OTHERWISE.get(package, package).lower() not in listed
    }
    assert missing == {}
