"""Installs wheels and sdists, each into a fresh environment without a compiler, and tries them.

    python -m tests.install.try_wheel dist/ssd_offload-*

`make wheel` runs this. The packages that they need are those of constraints.txt.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
KERNEL = ROOT / "offload/update/kernel"


def main() -> int:
    """Try what the command line names; return 1 if something does not work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", type=Path, nargs="+", help="wheels and sdists")
    parser.add_argument("--torch-index", help="index that torch is installed from")
    given = parser.parse_args()
    torch = ["--index-url", given.torch_index] if given.torch_index else []
    failed = [package for package in given.packages if not works(package, torch)]
    return int(bool(failed))


def works(package: Path, torch: Sequence[str]) -> bool:
    """Say whether a wheel or an sdist works in an environment of its own; print the answer."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "environment").resolve()
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install(folder, "torch", *torch)
        install(folder, str(package.resolve()))
        done = run_in(folder, Path(__file__).with_name("installed_wheel.py"), *digest(package))
    print(f"{package.name}: {'it does not work' if done else 'it works without a compiler'}")
    return done == 0


def digest(package: Path) -> Sequence[str]:
    """Return the digest of the sources if it is a wheel with a kernel, else nothing."""
    if package.suffix != ".whl":
        return []
    with zipfile.ZipFile(package) as opened:
        if not [name for name in opened.namelist() if name.endswith(".so")]:
            return []
    return [runpy.run_path(str(KERNEL / "sources.py"))["source_digest"](KERNEL / "source")]


def install(folder: Path, *arguments: str) -> None:
    """Install something into the environment, within the pinned versions."""
    pins = str(ROOT / "constraints.txt")
    command = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", pins]
    if run_in(folder, *command, *arguments):
        raise SystemExit(f"pip could not install {arguments[0]}")


def run_in(folder: Path, *arguments: str | Path) -> int:
    """Run the environment's Python where the checkout is not on its path; return its status."""
    environment = {**os.environ, "PATH": str(folder / "bin")}
    for name in ("CXX", "OFFLOAD_KERNEL", "PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    command = [folder / "bin/python", "-I", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
