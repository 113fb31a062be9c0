"""Runs the demo and tests where there is no C++ compiler and no update kernel.

    python -m tests.without_compiler                # the demo with the small model, and a sample
    python -m tests.without_compiler tests          # these tests instead of the sample, no demo

The checkout is copied without the libraries that were built in it, and everything on PATH is there
but compilers. So all updates run torch's own code, and tests that compile are skipped. The last
lines say which code has updated the state, and what was run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.dying import dying

ROOT = Path(__file__).parent.parent

SAMPLE = [
    "tests/cli/test_demo.py",
    "tests/install",
    "tests/numerics/test_bit_identity.py",
    "tests/update_kernel",
]
"""Tests that are run unless others are named: of updates, of the demo and of the installation."""

COMPILER = re.compile(r"(.+-)?(cc|c89|c99|gcc|g\+\+|c\+\+|clang|clang\+\+)(-[\d.]+)?")
"""Names of programs that compile C or C++, with a target before and a version after."""

_CODE = """
import shutil
import torch
from offload.update.kernel_check import choose_kernel
for name in ("cc", "gcc", "clang", "c++", "g++", "clang++"):
    assert shutil.which(name) is None, f"there is a compiler: {shutil.which(name)}"
print(choose_kernel(torch.optim.AdamW, "float32").code)
"""


def main() -> int:
    """Run what the command line names; return 1 if something fails."""
    tests = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        checkout = copied(Path(scratch, "checkout"))
        environment = without_compilers(Path(scratch, "bin"), checkout)
        code = _run(checkout, environment, ["-c", _CODE], capture=True).stdout.strip()
        if not code.startswith("torch (the kernel was not built"):
            raise SystemExit(f"the kernel is used all the same: {code}")
        outcomes = []
        if not tests:
            demo = _run(checkout, environment, ["-m", "offload.cli", "demo", "--model", "tiny"])
            outcomes.append(("offload demo --model tiny", demo.returncode))
        workers = ["--numprocesses", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
        chosen = tests or SAMPLE
        done = _run(checkout, environment, ["-m", "pytest", "-q", *workers, *chosen])
        outcomes.append((" ".join(["pytest", *chosen]), done.returncode))
    print(f"updates by: {code}")
    for what, status in outcomes:
        print(f"{what}: {'passed' if status == 0 else f'ended with status {status}'}")
    return int(any(status for _, status in outcomes))


def copied(checkout: Path) -> Path:
    """Copy the files of the checkout that git knows or does not ignore; return the copy."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, names)):
        if (ROOT / name).is_file():  # git also lists files that were removed
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)
    return checkout


def without_compilers(folder: Path, checkout: Path) -> dict[str, str]:
    """Return an environment whose PATH is a folder of links to all programs but compilers.

    Args:
        folder: The folder, which is made.
        checkout: Where Python finds the packages.
    """
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*") if place else ():
            link = folder / program.name
            if not (COMPILER.fullmatch(program.name) or link.is_symlink()):
                link.symlink_to(program)
    environment = {
        **os.environ,
        "PATH": str(folder),
        "PYTHONPATH": str(checkout),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }
    for name in ("CXX", "OFFLOAD_KERNEL", "OFFLOAD_UPDATE"):
        environment.pop(name, None)
    return environment


def _run(
    checkout: Path,
    environment: dict[str, str],
    arguments: Sequence[str],
    *,
    capture: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run this Python in the copy of the checkout."""
    return subprocess.run(
        dying([sys.executable, *arguments]),
        cwd=checkout,
        env=environment,
        check=False,
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
