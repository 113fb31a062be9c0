"""Run by the Python of an environment that has the package and no compiler: does it work?

    python -I installed_wheel.py [DIGEST]

DIGEST is that of the sources of the kernel, which are not in a wheel. Without it the package must
have no kernel. This file imports nothing else of the tests, which must not be on the path.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import offload

COMPILERS = ("cc", "gcc", "clang", "c++", "g++", "clang++")
VARIANTS = {
    "update_avx2.so": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
    "update_avx512.so": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
"""The libraries, and instructions that a processor must have, as in /proc/cpuinfo."""


def main() -> None:
    """Try everything; an assertion fails if something does not work."""
    package = Path(offload.__file__).parent
    assert package.is_relative_to(sys.prefix), f"{package} is not what was installed"
    assert not [name for name in COMPILERS if shutil.which(name)], "there is a compiler on PATH"
    digest = sys.argv[1] if sys.argv[1:] else None
    load(package / "update/kernel/lib", digest)
    said = steps(has_kernel=digest is not None)
    commands()
    print(f"ssd-offload {importlib.metadata.version('ssd-offload')}, {said}")


def load(folder: Path, digest: str | None) -> None:
    """Load the libraries that this processor can run, and compare their sources."""
    found = {path.name for path in folder.glob("*")}
    assert found == (set() if digest is None else {*VARIANTS}), found
    flags = set(Path("/proc/cpuinfo").read_text().split())
    for name in sorted(found):
        if missing := VARIANTS[name] - flags:
            print(f"{name}: not loaded, this processor lacks {', '.join(sorted(missing))}")
            continue
        source = ctypes.CDLL(str(folder / name)).offload_kernel_source
        source.restype = ctypes.c_char_p
        assert source().decode() == digest, f"{name} was compiled from other sources"
        print(f"{name}: loaded")


def steps(*, has_kernel: bool) -> str:
    """Take two steps and compare them with torch's; return a line that says so."""
    start = torch.linspace(-1, 1, 1000)
    gradient = torch.linspace(1, -2, 1000)
    own, reference = (torch.nn.Parameter(start.clone()) for _ in range(2))
    own.grad, reference.grad = gradient.clone(), gradient.clone()
    torchs = torch.optim.AdamW([reference], lr=1e-2)
    torchs.step()  # the first step of a parameter is always torch's own
    torchs.step()
    with tempfile.TemporaryDirectory() as folder:
        optimizer = offload.AdamW([own], lr=1e-2, directory=f"{folder}/store")
        optimizer.step()
        optimizer.step()
        optimizer.checkpoint().result()
        code = optimizer.stats().update_code
        optimizer.close()
    assert torch.equal(own, reference)
    instructions = torch.backends.cpu.get_cpu_capability()
    if has_kernel and instructions in ("AVX2", "AVX512"):
        assert code == f"kernel ({instructions})", code
    else:
        assert code.startswith("torch ("), code
    return f"two steps with the bits of torch's by {code}"


def commands() -> None:
    """Run both commands by name, and a demo that is killed and resumes."""
    version = importlib.metadata.version("ssd-offload")
    for name in ("offload", "gds"):
        assert run(name, "--version") == f"{name} {version}\n"
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/demo"
        demo = ("--model", "tiny", "--steps", "6", "--directory", store, "--allow-volatile")
        report = json.loads(run("offload", "demo", *demo, "--json"))
        run("offload", "verify", report["store"])
    print(f"offload {version}: the demo's training went on after it was killed")


def run(*command: str) -> str:
    """Run a command that must succeed; return its standard output."""
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, command
    return done.stdout


if __name__ == "__main__":
    main()
