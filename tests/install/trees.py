"""Copies of the checkout, and builds of them by the backend that pip calls."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import hatch_build

ROOT = Path(__file__).parent.parent.parent
KERNEL = Path(hatch_build.KERNEL)
LIBRARIES = {*hatch_build.VARIANTS}

TINY = """\
extern "C" __attribute__((visibility("default")))
const char *offload_kernel_source(void) { return SOURCE_DIGEST; }
"""
"""A source that takes no time to compile."""

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, hatch_build.COMPILERS))
    or (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason=f"needs a C++ compiler on PATH ({', '.join(hatch_build.COMPILERS)}), on x86_64 Linux",
)
"""For tests that compile."""


@dataclass(frozen=True, slots=True)
class Build:
    """What became of a build."""

    status: int
    path: Path
    """The wheel or the sdist; a folder if there is none."""
    said: str
    """Standard error."""

    @property
    def names(self) -> set[str]:
        """The files of a wheel."""
        with zipfile.ZipFile(self.path) as wheel:
            return {*wheel.namelist()}

    @property
    def libraries(self) -> set[str]:
        """The names of the libraries in a wheel."""
        return {name.rpartition("/")[2] for name in self.names if name.endswith(".so")}


def copy_checkout(folder: Path, source: str | None = None) -> Path:
    """Copy what is built, without what was built; return the folder.

    Args:
        folder: Is made.
        source: Takes the place of all sources of the kernel.
    """
    ignored = shutil.ignore_patterns("__pycache__", "lib")
    for name in ("offload", "gds"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in (".gitignore", "LICENSE", "README.md", "hatch_build.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    if source is not None:
        for path in (folder / KERNEL / "source").iterdir():
            path.unlink()
        (folder / KERNEL / "source/update.cpp").write_text(source)
    return folder


def build(
    tree: Path,
    target: str = "wheel",
    *,
    compiler: str | Path | None = None,
    on_path: bool = False,
    asked: str | None = None,
    under: tuple[str, ...] = (),
) -> Build:
    """Build a tree as pip does, with the hatchling of this environment.

    Args:
        tree: The folder that has ``pyproject.toml``.
        target: ``wheel``, ``editable`` or ``sdist``.
        compiler: The environment variable ``CXX``.
        on_path: Whether ``PATH`` is that of the tests; else nothing is on it.
        asked: The environment variable ``OFFLOAD_KERNEL``.
        under: A command that runs the build.
    """
    out = tree / "dist" / target
    out.mkdir(parents=True, exist_ok=True)
    report = out / "report"
    report.unlink(missing_ok=True)
    environment: Mapping[str, str | None] = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "PATH": os.environ["PATH"] if on_path else str(out),
        "CXX": None if compiler is None else str(compiler),
        "OFFLOAD_KERNEL": asked,
    }
    code = (
        "import json, pathlib, sys, hatchling.build;"
        f"name = hatchling.build.build_{target}({str(out)!r});"
        f"pathlib.Path({str(report)!r}).write_text(json.dumps(name))"
    )
    done = subprocess.run(
        [*under, sys.executable, "-c", code],
        cwd=tree,
        env={name: value for name, value in environment.items() if value is not None},
        check=False,
        capture_output=True,
        text=True,
    )
    name = json.loads(report.read_text()) if report.exists() else ""
    return Build(done.returncode, out / name, done.stderr)


def script(path: Path, text: str) -> Path:
    """Write a program for the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
