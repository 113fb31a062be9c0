"""Runs a sample of the tests with other versions of Python and of torch, as far as they can be had.

    python -m tests.versions                  # every combination below
    python -m tests.versions 3.13:2.13.0      # one of them

Each combination gets an environment of its own in `.venv-versions`. torch is the CPU build, by its
exact version, so that no CUDA package is installed. If that build cannot be had, only tests that
need no torch are run; if there is no such Python, nothing is run. The last lines say what was run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".venv-versions"
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"

COMBINATIONS = ("3.11:2.11.0", "3.12:2.13.0", "3.13:2.13.0")
"""Versions of Python and torch. `make test` runs all tests with 3.11 and 2.13.0."""

WITHOUT_TORCH = ["tests/contract", "tests/gds_cli"]
"""All tests of `gds`, and those of the parts of `offload` that read stores."""

WITH_TORCH = [
    *WITHOUT_TORCH,
    "tests/format",
    "tests/numerics/test_bit_identity.py",
    "tests/numerics/test_overlap_bits.py",
    "tests/crash/test_sealing.py",
    "tests/crash/test_quarantine.py",
    "tests/exchange/test_reference.py",
    "tests/torch_contract/test_traps.py",
    "tests/torch_contract/test_scaling.py",
]

NEEDED = ["numpy", "xxhash", "typer", "rich", "pytest", "hypothesis", "packaging", "safetensors"]
"""Packages of the sample, besides torch; `constraints.txt` has their versions."""


def main() -> int:
    """Run the combinations; return 1 if a test fails, and 0 even if something cannot be had."""
    outcomes = {name: run(*name.split(":")) for name in sys.argv[1:] or COMBINATIONS}
    for name, (outcome, _) in outcomes.items():
        python, torch = name.split(":")
        print(f"Python {python}, torch {torch}: {outcome}")
    return int(any(failed for _, failed in outcomes.values()))


def run(python: str, torch: str) -> tuple[str, bool]:
    """Run the sample with one combination; return what happened, and whether a test has failed."""
    found = interpreter(python)
    if found is None:
        return f"not run: there is no python{python} here", False
    folder = ENVIRONMENTS / f"{python}-{torch}"
    own = folder / "bin/python"
    constraints = folder / "constraints.txt"
    if not own.exists():
        subprocess.run([found, "-m", "venv", folder], check=True)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")) + "\n")
    install = [own, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    build = [f"torch=={torch}+cpu", "--extra-index-url", CPU_BUILDS, "--retries", "1"]
    has_torch = subprocess.run([*install, *build], check=False).returncode == 0
    subprocess.run([*install, *NEEDED], check=True)
    command = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = WITH_TORCH if has_torch else without_torch()
    done = subprocess.run([*command, *tests], cwd=ROOT, check=False, capture_output=True, text=True)
    sys.stdout.write(done.stdout if done.returncode else "")
    said = done.stdout.strip().splitlines()[-1:] or done.stderr.strip().splitlines()[-1:]
    which = "the sample" if has_torch else "without this torch, which cannot be had here"
    return f"{which}: {''.join(said)}", done.returncode != 0


def interpreter(version: str) -> str | None:
    """Return the path of an interpreter of a version that starts, or None."""
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], check=False).returncode:
        return None
    return found


def without_torch() -> list[str]:
    """Return the files of `WITHOUT_TORCH` that do not import torch themselves."""
    files = [path for folder in WITHOUT_TORCH for path in sorted((ROOT / folder).glob("test_*.py"))]
    return [str(path) for path in files if "\nimport torch" not in path.read_text()]


if __name__ == "__main__":
    raise SystemExit(main())
