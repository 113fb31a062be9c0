"""The kernel where torch uses other instructions than it would here, each in a process of its own.

MKL is told the same, since torch's FP32 square root is MKL's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parent.relative_to(ROOT)
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
"""Instructions that a processor must have for the second library, as in /proc/cpuinfo."""

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def in_process(command: list[str], environment: dict[str, str]) -> str:
    """Run Python in the root of the checkout, and return what it wrote."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


TRAINED = """
import torch, offload
from gds import MemoryBackend
values = torch.linspace(-3, 3, 1600)
for optimizer_class in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
    for kind in (torch.float32, torch.bfloat16):
        live = torch.nn.Parameter(values.to(kind))
        master = torch.nn.Parameter(live.detach().float())
        reference = optimizer_class([master], lr=0.1)
        optimizer = offload.OffloadedOptimizer(
            optimizer_class, [live], lr=0.1, directory="/s",
            options=offload.Options(backend=MemoryBackend(), allow_volatile=True),
        )
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            live.grad = torch.randn(1600, generator=generator).to(kind)
            master.grad = live.grad.float()
            optimizer.step()
            reference.step()
        assert torch.equal(live.detach(), master.detach().to(kind))
        print(optimizer.stats().update_code)
        optimizer.checkpoint().result()
        optimizer.close()
"""


def codes(environment: dict[str, str]) -> set[str]:
    """Return the code that steps have used, after a comparison with torch in memory."""
    lines = in_process(["-c", TRAINED], environment).splitlines()
    return {line for line in lines if line.startswith(("torch", "kernel"))}


@pytest.fixture(scope="module", autouse=True)
def with_library() -> None:
    if not (ROOT / "offload" / "update" / "kernel" / "lib" / "update_avx2.so").exists():
        pytest.skip("the kernel was not built when this package was installed")


def test_torch_without_vector_instructions_runs_its_own_code() -> None:
    (code,) = codes({"ATEN_CPU_CAPABILITY": "default"})
    assert code.startswith("torch (torch runs its ")
    assert code.endswith(" code, and the kernel needs AVX2 or AVX-512)")


def require_avx512() -> None:
    """Skip a test on a processor without AVX-512; torch would die there, as it is told."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if missing := AVX512 - flags:
        pytest.skip(
            "this processor has no AVX-512, so no test has run the kernel's code for it: "
            f"{', '.join(sorted(missing))} are missing"
        )


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512"])
def test_the_kernel_has_the_instructions_that_torch_uses(instructions: str) -> None:
    if instructions == "AVX512":
        require_avx512()
    told = {"ATEN_CPU_CAPABILITY": instructions.lower(), "MKL_ENABLE_INSTRUCTIONS": instructions}
    assert codes(told) == {f"kernel ({instructions})"}


@pytest.mark.parametrize("mkl", ["SSE4_2", "AVX2"])
def test_another_square_root_of_mkl_has_torchs_bits(mkl: str) -> None:
    """MKL may take other instructions than torch, as on processors of other makers."""
    assert all(code.startswith("kernel") for code in codes({"MKL_ENABLE_INSTRUCTIONS": mkl}))


def test_avx2_gives_torchs_bits_to_many_parameters_of_every_form() -> None:
    chosen = [
        f"{TESTS}/test_compressed_state.py::test_many_parameters_in_chunks_on_several_threads",
        f"{TESTS}/test_compressed_state.py::test_scales_and_codes_of_every_kind",
    ]
    options = ["-p", "no:cacheprovider", "-q", "-n", "0", "-k", "wide or scales"]
    found = in_process(["-m", "pytest", *options, *chosen], AVX2)
    assert " passed" in found
    assert "torch's code" not in found
