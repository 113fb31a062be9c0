"""The kernels compiled for devices by NVRTC, which needs neither a device nor a driver.

``make integration`` installs NVRTC, and there a missing one is a failure.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from offload.device.kernels.forms import Form
from offload.device.kernels.loading import OPTIONS, defines, digest_source, update_source
from offload.device.kernels.update import ARGUMENTS
from tests.campaigns import FULL
from tests.device.blocks import BF16, FP16, FP32
from tests.device.torch_sources import adam_math

_PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvrtc", "nvidia.cu12")


class Nvrtc:
    """The compiler, by the path or name of its library."""

    def __init__(self, library: str) -> None:
        for builtins in sorted(Path(library).parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins))  # which the compiler looks for by its name alone
        self._library = ctypes.CDLL(library)

    def compile(
        self, source: str, architecture: str, options: Sequence[str], what: str = "PTX"
    ) -> tuple[str, str]:
        """Return the compiler's messages, and PTX; it is empty after an error, and of a CUBIN."""
        library, program = self._library, ctypes.c_void_p()
        created = library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
        )
        assert created == 0
        try:
            arguments = [o.encode() for o in (f"--gpu-architecture={architecture}", *options)]
            result = library.nvrtcCompileProgram(
                program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments)
            )
            log = self._bytes(program, "ProgramLog").decode().rstrip("\0")
            code = self._bytes(program, "PTX") if what == "PTX" and not result else b""
            return log.strip("\0\n "), code.decode().rstrip("\0")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def ptx(self, source: str, architecture: str, options: Sequence[str]) -> str:
        log, ptx = self.compile(source, architecture, options)
        assert not log, log  # a warning here is a mistake: nothing but the kernels is compiled
        return ptx

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        text = ctypes.create_string_buffer(size.value)
        assert getattr(self._library, f"nvrtcGet{what}")(program, text) == 0
        return text.raw


def _candidates() -> Iterator[str]:
    if named := os.environ.get("NVRTC_LIBRARY"):
        yield named
        return
    for package in _PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for root in (spec.submodule_search_locations or []) if spec else []:
            yield from sorted(str(p) for p in Path(root).glob("lib/libnvrtc.so*"))
    if found := ctypes.util.find_library("nvrtc"):
        yield found


@pytest.fixture(scope="module")
def compiler() -> Nvrtc:
    for candidate in _candidates():
        try:
            return Nvrtc(candidate)
        except OSError:
            continue
    what = "no NVRTC: it comes with CUDA, or in nvidia-cuda-nvrtc; NVRTC_LIBRARY names it elsewhere"
    if FULL:
        pytest.fail(f"{what}. All tests were asked for, and these cannot do without it")
    pytest.skip(what)


# The oldest architecture of which the gpu extra's CUDA has all, and those of current servers. The
# last number is that of blocks of 256 threads that are to run on a multiprocessor at once.
FORMS = {
    "adamw-bf16": ("sm_90", Form("adamw", "foreach", BF16, BF16, "float32", "float32", 2), 3),
    "adamw-split-int8": ("sm_100", Form("adamw", "foreach", BF16, BF16, "split", "int8", 2), 3),
    "int8-amsgrad": ("sm_90", Form("adamw", "fused", BF16, FP32, "float32", "int8", 3), 2),
    "adam-fused-amsgrad": ("sm_80", Form("adam", "fused", FP16, FP32, "float32", "bfloat16", 3), 3),
    "sgd-fused": ("sm_80", Form("sgd", "fused", FP32, FP16, "own", "float32", 1), 3),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_update_compiles_to_what_was_meant(name, compiler):
    architecture, form, num_blocks = FORMS[name]
    options = OPTIONS + defines(form.macros)
    ptx = compiler.ptx(update_source(), architecture, options)
    (size,) = re.findall(r"\.param \.align 8 \.b8 update_param_0\[(\d+)\]", ptx)
    assert int(size) == ARGUMENTS.itemsize
    assert "ld.global.v4.u32" in ptx or form.state == "int8"
    assert "ld.global.v2.u32" in ptx
    assert not re.findall(r"(?:ld|st)\.local", ptx)
    if form.arithmetic == "foreach":  # powf, which `fused` needs, is not the kernel's own
        # products and sums without a rounding mode may be contracted, by the assembler
        assert not re.findall(r"\b(?:mul|add|sub)\.f(?:32|64)", ptx)
        assert re.findall(r"\b(?:mul|add)\.rn\.f32", ptx)
        # denormal numbers are kept, but by approximations, whose arguments are normal numbers
        assert ".ftz" not in re.sub(r"\br(?:cp|sqrt)\.approx\.ftz\b", "", ptx)
    # what CuPy's RawModule adds
    refusal, _ = compiler.compile(update_source(), architecture, (*options, "-ftz=true"))
    assert "denormal numbers must be kept" in refusal
    assert_in_registers(compiler, update_source(), architecture, options, num_blocks)


def assert_in_registers(compiler, source, architecture, options, num_blocks) -> None:
    """Check in machine code that all work is in registers, of which each thread has its share."""
    log, _ = compiler.compile(source, architecture, (*options, "--ptxas-options=-v"), "CUBIN")
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", log)]
    spilled = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)
    assert registers, log
    assert len(spilled) >= 3 * len(registers), log
    assert sum(map(int, spilled)) == 0
    assert max(registers) <= 65536 // (num_blocks * 256) // 8 * 8


def test_the_digests_compile_and_keep_their_work_in_registers(compiler):
    ptx = compiler.ptx(digest_source(), "sm_90", OPTIONS)
    names = ["digest_blocks", "digest_merge", "digest_scan"]
    assert sorted(re.findall(r"\.entry (\w+)", ptx)) == names
    assert not re.findall(r"(?:ld|st)\.local", ptx)
    assert_in_registers(compiler, digest_source(), "sm_90", OPTIONS, 2)


_WRAPPED = """
namespace std {
using ::fma;
__device__ __forceinline__ float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
__device__ __forceinline__ float sqrt(float a) { return ::sqrtf(a); }
__device__ __forceinline__ float max(float a, float b) { return a < b ? b : a; }
}
typedef unsigned char uint8_t;
#define C10_DEVICE __device__
"""

_ENTRY = """
extern "C" __global__ void step(float *r, float lr, float beta1, float beta2, float decay,
                                float eps, float correction1, float correction2) {
  float args[4][kILP] = {{r[0]}, {r[1]}, {r[2]}, {r[3]}};
  adam_math<float, float, 4, ADAM_MODE::MODE, false>(args, lr, beta1, beta2, decay, eps,
      false, nullptr, nullptr, correction1, correction2);
  r[0] = args[0][0], r[2] = args[2][0], r[3] = args[3][0];
}
"""

# ORIGINAL: decay and two for each moment; g * g, step size * average; the step size, the correction
# of the root, the quotient. ADAMW: lr * decay besides, a product and a difference without a
# rounding mode, which the assembler makes one FFMA of, as nvdisasm shows of torch's whole kernel.
CONTRACTED = {
    "ORIGINAL": Counter(fma=5, mul=2, div=3, sqrt=1, add=1, sub=1),
    "ADAMW": Counter(fma=4, mul=4, div=3, sqrt=1, add=1, sub=2),
}


@pytest.mark.parametrize("mode", CONTRACTED)
def test_torchs_source_is_contracted_as_the_kernel_spells_it_out(mode, compiler):
    """One element of Adam: both moments, the decay, and what remains to be rounded by itself."""
    source = _WRAPPED + adam_math() + _ENTRY.replace("MODE::MODE", f"MODE::{mode}")
    ptx = compiler.ptx(source, "sm_90", ("-std=c++17",))
    found = Counter(re.findall(r"\b(fma|mul|div|sqrt|add|sub)(?:\.rn)?\.f32", ptx))
    rounded = re.findall(r"\b(?:mul|add|sub)\.rn\.f32", ptx)
    assert (found, rounded) == (CONTRACTED[mode], [])
