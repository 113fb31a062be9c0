"""The kernels compiled for devices, without one: what is in the code that they become."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from offload.device.kernels.forms import Form
from offload.device.kernels.launches import ARGUMENTS
from offload.device.kernels.sources import OPTIONS, defines, digest_source, update_source
from tests.device import nvrtc
from tests.device.blocks import BF16, FP16, FP32
from tests.device.torch_sources import adam_math

# The oldest architecture of which the gpu extra's CUDA has all, and those of current servers.
FORMS = {
    "adamw-bf16": ("sm_90", Form("adamw", "foreach", BF16, BF16, "float32", "float32", 2)),
    "adamw-split-int8": ("sm_90", Form("adamw", "foreach", BF16, BF16, "split", "int8", 2)),
    "adam-fused-amsgrad": ("sm_80", Form("adam", "fused", FP16, FP32, "float32", "bfloat16", 3)),
    "sgd-fused": ("sm_80", Form("sgd", "fused", FP32, FP16, "own", "float32", 1)),
}

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


@pytest.fixture(scope="session")
def compiler() -> nvrtc.Nvrtc:
    return nvrtc.find()


@pytest.mark.parametrize("name", FORMS)
def test_the_update_compiles_and_keeps_its_work_in_registers(name, compiler):
    architecture, form = FORMS[name]
    ptx = compiler.ptx(update_source(), architecture, OPTIONS + defines(form.macros))
    (size,) = re.findall(r"\.param \.align 8 \.b8 update_param_0\[(\d+)\]", ptx)
    assert int(size) == ARGUMENTS.itemsize
    assert not re.findall(r"(?:ld|st)\.local", ptx)
    assert "ld.global.v4.u32" in ptx or form.state == "int8"
    assert "ld.global.v2.u32" in ptx


def test_the_digests_compile_and_keep_their_work_in_registers(compiler):
    ptx = compiler.ptx(digest_source(), "sm_90", OPTIONS)
    assert sorted(re.findall(r"\.entry (\w+)", ptx)) == [
        "digest_blocks",
        "digest_merge",
        "digest_scan",
    ]
    assert not re.findall(r"(?:ld|st)\.local", ptx)


def test_torchs_source_is_contracted_as_the_kernel_spells_it_out(compiler):
    """One element of Adam: both moments, the decay, and what remains to be rounded by itself."""
    expected = {
        # decay and two for each moment; g * g, step size * average; the step size, the correction
        # of the root, the quotient
        "ORIGINAL": Counter(fma=5, mul=2, div=3, sqrt=1, add=1, sub=1),
        # lr * decay besides. The decay is a product and a difference without a rounding mode,
        # which the assembler makes one FFMA of: so nvdisasm shows of torch's whole kernel
        "ADAMW": Counter(fma=4, mul=4, div=3, sqrt=1, add=1, sub=2),
    }
    for mode, counts in expected.items():
        source = _WRAPPED + adam_math() + _ENTRY.replace("MODE::MODE", f"MODE::{mode}")
        ptx = compiler.ptx(source, "sm_90", ("-std=c++17",))
        found = Counter(re.findall(r"\b(fma|mul|div|sqrt|add|sub)(?:\.rn)?\.f32", ptx))
        rounded = re.findall(r"\b(?:mul|add|sub)\.rn\.f32", ptx)
        assert (found, rounded) == (counts, []), mode


def test_no_operation_of_the_update_may_be_contracted(compiler):
    """Products and sums without a rounding mode may be, by the assembler."""
    for architecture, form in FORMS.values():
        if form.arithmetic == "foreach":  # powf, which `fused` needs, is not the kernel's own
            ptx = compiler.ptx(update_source(), architecture, OPTIONS + defines(form.macros))
            assert not re.findall(r"\b(?:mul|add|sub)\.f(?:32|64)", ptx)
            assert re.findall(r"\b(?:mul|add)\.rn\.f32", ptx)


def test_denormal_numbers_are_kept_or_it_does_not_compile(compiler):
    for architecture, form in FORMS.values():
        options = OPTIONS + defines(form.macros)
        if form.arithmetic == "foreach":  # powf, which `fused` needs, minds them itself
            ptx = compiler.ptx(update_source(), architecture, options)
            # of approximations, whose arguments are normal numbers
            assert ".ftz" not in re.sub(r"\br(?:cp|sqrt)\.approx\.ftz\b", "", ptx)
        # what CuPy's RawModule adds
        refusal = compiler.refusal(update_source(), architecture, (*options, "-ftz=true"))
        assert "denormal numbers must be kept" in refusal


def test_what_is_missing_is_a_failure_where_all_tests_are_asked_for(monkeypatch):
    monkeypatch.setenv("NVRTC_LIBRARY", "/nonexistent/libnvrtc.so")
    monkeypatch.setenv("NVDISASM", "")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(nvrtc, "_roots", lambda: iter(()))
    for find in (nvrtc.find, nvrtc.find_disassembler):
        for full, outcome in ((True, pytest.fail.Exception), (False, pytest.skip.Exception)):
            monkeypatch.setattr(nvrtc, "FULL", full)
            with pytest.raises(outcome, match=r"no (NVRTC|nvdisasm)"):
                find()
