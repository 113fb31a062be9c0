"""Installs a wheel into a fresh environment that has no compiler, and tries it there.

    python -m tests.install.try_wheel dist/ssd_offload-*.whl

`make wheel` runs this. The packages that the wheel needs are those of constraints.txt.
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
    """Try the wheel that the command line names; return 1 if it does not work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch-index", help="index that torch is installed from")
    parser.add_argument("--folder", type=Path, help="where the environment is made, and kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.folder or Path(scratch, "environment")).resolve()
        torch = ["--index-url", given.torch_index] if given.torch_index else []
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install(folder, "torch", *torch)
        install(folder, str(given.wheel.resolve()))
        done = run_in(folder, Path(__file__).with_name("installed_wheel.py"), *digest(given.wheel))
    print(f"{given.wheel.name}: {'it does not work' if done else 'it works without a compiler'}")
    return int(done != 0)


def digest(wheel: Path) -> Sequence[str]:
    """Return the digest of the sources if the wheel is one with a kernel, else nothing."""
    with zipfile.ZipFile(wheel) as opened:
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
