"""The kernel reads and writes nothing beside its arrays, and no operation of it is undefined."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload.update.kernel.loading import _SOURCES

ROOT = Path(__file__).parents[2]
SANITIZED = (
    *("-O1", "-g", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno"),
    *("-fno-exceptions", "-fvisibility=hidden"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
VARIANTS = {
    "avx2": ("AVX2", ["-march=x86-64-v3"]),
    "avx512": ("AVX512", ["-march=x86-64-v4", "-mprefer-vector-width=512"]),
}


@pytest.fixture(scope="module")
def runtimes() -> str:
    """Return the sanitizers' libraries, as LD_PRELOAD takes them."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor has no AVX2")
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = ["g++", f"-print-file-name={name}"]
        path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"g++ has no {name}")
        found.append(path)
    return " ".join(found)


def stepped(source: Path, variant: str, runtimes: str, last: int) -> subprocess.CompletedProcess:
    """Build the sources with sanitizers, and step every length to `last` with the library."""
    instructions, options = VARIANTS[variant]
    if torch.backends.cpu.get_cpu_capability() == "AVX2" and instructions == "AVX512":
        pytest.skip("this processor has no AVX-512")
    command = ["g++", *SANITIZED, *options, '-DSOURCE_DIGEST="none"', "-o", "sanitized.so"]
    subprocess.run([*command, "update.cpp", "-lm"], cwd=source, check=True)
    program = Path(__file__).with_name("every_length.py")
    environment = {
        "PYTHONPATH": str(ROOT),
        "OMP_WAIT_POLICY": "PASSIVE",
        "LD_PRELOAD": runtimes,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "PYTHONMALLOC": "malloc",
        "ATEN_CPU_CAPABILITY": variant,
    }
    return subprocess.run(
        [sys.executable, str(program), str(source / "sanitized.so"), instructions, str(last)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_byte_beside_the_arrays_is_read_or_written(
    variant: str, runtimes: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(_SOURCES, source)
    done = stepped(source, variant, runtimes, 100)
    assert done.returncode == 0, done.stdout[-5000:]
    assert done.stdout.strip().endswith("steps")
