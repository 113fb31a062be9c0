"""A directory that a program serves (FUSE): bindfs shows another directory through itself."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def why_not() -> str:
    """Say why nothing can be mounted through FUSE here; empty if it can."""
    if missing := [name for name in ("bindfs", "fusermount3") if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    with tempfile.TemporaryDirectory() as directory:
        try:
            with mounted(Path(directory)):
                return ""
        except subprocess.CalledProcessError as error:
            return f"bindfs cannot mount here: {(error.stderr or '').strip()}"


@contextlib.contextmanager
def mounted(directory: Path) -> Iterator[Path]:
    """Mount ``directory/below`` at ``directory/fuse`` for the body; returns the latter."""
    below, point = directory / "below", directory / "fuse"
    below.mkdir()
    point.mkdir()
    _call("bindfs", below, point)
    try:
        yield point
    finally:
        _call("fusermount3", "-u", "-z", point)
        if os.path.ismount(point):
            raise RuntimeError(f"{point} is still mounted")


def _call(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
