"""Mounts that a test makes and takes away."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(where: Path, *arguments: object, read_only: bool = False) -> Iterator[None]:
    """Mount something for a while; skip the test if that is not allowed."""
    commands = [["mount", *map(str, arguments), str(where)]]
    if read_only:
        commands.append(["mount", "-o", "remount,bind,ro", str(where)])
    for number, command in enumerate(commands):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            if number:
                subprocess.run(["umount", str(where)], check=True)
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(where)], check=True)
