"""The kernels' machine code, without a device: what is loaded when, registers, instructions.

It says nothing of how fast the kernels are: that has not been measured on any device.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from bench import kernel as bench
from offload.device.kernels.forms import Form
from offload.device.kernels.sources import OPTIONS, defines, digest_source, update_source
from tests.device import nvrtc
from tests.device.blocks import BF16, FP16, FP32
from tests.device.sass import Code, distances

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")

MEASURED = {
    f"{name}{' fused' if fused else ''}": Form(
        "adamw", "fused" if fused else "foreach", BF16, BF16, master, state, 2
    )
    for name, master, state in (
        ("exact", "float32", "float32"),
        ("split", "split", "float32"),
        ("bf16-state", "float32", "bfloat16"),
        ("split-int8", "split", "int8"),
    )
    for fused in (False, True)
}
"""The forms that `bench.kernel` measures."""

OTHERS = {
    "fp32": Form("adamw", "foreach", FP32, FP32, "own", "float32", 2),
    "fp16-amsgrad": Form("adam", "foreach", FP16, FP32, "float32", "float32", 3),
    "int8-amsgrad": Form("adamw", "fused", BF16, FP32, "float32", "int8", 3),
    "sgd": Form("sgd", "foreach", BF16, BF16, "float32", "float32", 1),
    "sgd-fused": Form("sgd", "fused", FP32, FP16, "own", "float32", 1),
}

LOADS, STORES = ("LDG.E.64", "LDG.E.128"), ("STG.E.64", "STG.E.128")
DISTANCE = 40
"""Instructions between a load and its first use: a multiprocessor issues other work meanwhile."""

BLOCKS = {"int8-amsgrad": 2}
"""Blocks of 256 threads that are to run on a multiprocessor at once, if they are not three."""

AHEAD = "if (!is_last) load_group(rest, at + TURN, next);"
TURNS = 2
"""Quads that a thread steps in one turn of the loop in the machine code."""


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """Return a function that compiles and disassembles a form."""
    compiler, disassembler = nvrtc.find(), nvrtc.find_disassembler()

    @cache
    def compiled(form: Form, architecture: str) -> tuple[nvrtc.Binary, Code]:
        options = OPTIONS + defines(form.macros)
        binary = compiler.binary(update_source(), architecture, options)
        directory = tmp_path_factory.mktemp("cubin")
        return binary, Code(nvrtc.disassembled(disassembler, binary, directory))

    return compiled


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", [*MEASURED, *OTHERS])
def test_all_work_is_in_registers(name, architecture, code):
    binary, found = code({**MEASURED, **OTHERS}[name], architecture)
    assert binary.num_spilled_bytes == 0
    assert binary.num_registers <= 65536 // (BLOCKS.get(name, 3) * 256) // 8 * 8
    assert found.count("LDL", "STL") == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_digests_are_in_registers(architecture):
    binary = nvrtc.find().binary(digest_source(), architecture, OPTIONS)
    assert binary.num_spilled_bytes == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("form", [*MEASURED.values(), *OTHERS.values()], ids=[*MEASURED, *OTHERS])
def test_all_loads_are_issued_before_the_first_use_of_any(form, architecture, code):
    """So memory is waited for once per quad, and hardly then: the thread computes meanwhile."""
    loop = code(form, architecture)[1].loop(LOADS, STORES)
    arrays = [form.live, form.gradient, *([FP32] if form.master == "float32" else [])]
    arrays += [BF16] if form.master == "split" else []
    arrays += {"float32": [FP32], "bfloat16": [BF16], "int8": []}[form.state] * form.num_moments
    found = distances(loop)
    assert len(found) == TURNS * len(arrays)
    assert min(found) >= DISTANCE
    loads = [at for at, i in enumerate(loop) if i.operation.startswith(LOADS)]
    for first in range(0, len(found), len(arrays)):
        quad = slice(first, first + len(arrays))
        uses = [at + distance for at, distance in zip(loads[quad], found[quad], strict=True)]
        assert min(uses) > max(loads[quad])


def test_loads_without_a_quad_in_between_are_noticed(tmp_path):
    """A check of the test above: the same kernel, but a quad is loaded when it is needed."""
    source = update_source()
    assert source.count(AHEAD) == 1
    body, rest = source.split(AHEAD)
    stores, after = rest.split("\n}\n", 1)  # the end of the same function
    source = f"{body}{stores}\n  {AHEAD}\n}}\n{after}"
    compiler, disassembler = nvrtc.find(), nvrtc.find_disassembler()
    form = MEASURED["exact"]
    binary = compiler.binary(source, "sm_90", OPTIONS + defines(form.macros))
    text = nvrtc.disassembled(disassembler, binary, tmp_path)
    assert min(distances(Code(text).loop(LOADS, STORES))) < DISTANCE


@pytest.mark.parametrize("name", MEASURED)
def test_the_benchmarks_limits_are_those_of_the_instructions(name, code):
    form = MEASURED[name]
    loops = [code(form, architecture)[1].loop(LOADS, STORES) for architecture in ARCHITECTURES]
    for (
        loop
    ) in loops:  # the path goes through the arithmetic of four elements, and through the codecs
        operations = [i.operation.split(".")[0] for i in loop]
        is_int8 = form.state == "int8"
        # two divisions and a root; for codes and blocks, an inverse root and a reciprocal
        assert operations.count("MUFU") == TURNS * (12 + 10 * is_int8)
        assert operations.count("LDS") == TURNS * 4 * is_int8
    counts = [len(loop) / (4 * TURNS) for loop in loops]
    assert max(counts) <= bench.INSTRUCTIONS[name]
    # a limit that is too generous hides a kernel that has become slower
    assert max(counts) > 0.97 * bench.INSTRUCTIONS[name] - 0.5


def test_the_forms_are_those_that_are_measured():
    for name, form in MEASURED.items():
        master, state = bench._FORMS[name.removesuffix(" fused")]
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
        assert (form.master, dtypes[form.state]) == (master, state)
