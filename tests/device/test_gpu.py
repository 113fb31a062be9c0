"""The kernels on a device: the bytes of the CPU's compilation of them, and torch's own steps."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from packaging.version import Version

from bench import kernel
from offload.device.compute import compute_on
from offload.device.kernels import digest
from offload.device.kernels.update import form_of_run, update_run
from offload.format.digests import LEAF_BYTES, leaf_digests
from offload.update.device_step import why_not_trusted
from offload.update.rules import UpdateRule
from tests.device.blocks import DeviceBlock, State, bits, contents, different, ulps
from tests.device.test_digest import LEAVES, LONG, SHORT, content
from tests.device.test_update_arithmetic import ADAM, ADAM_CASES, CLASSES, SGD, group_of
from tests.device.test_update_forms import FORMS, SEED, STEP, STORE_STEP, optimizer

pytestmark = pytest.mark.gpu
IS_THE_MODEL = Version(torch.__version__).release[:2] == (2, 13)
"""Whether this is the version of torch whose formulas the kernels have. Others may have others."""

OPTIONS = {"step": STEP, "seed": SEED, "rounding_step": STORE_STEP}


def update_block(optimizer_class, group, block, *, seed=0, rounding_step=0, **options) -> None:
    """Step a block of one parameter on the device."""
    update_run(optimizer_class, group, block.run(seed, rounding_step), **options)


@pytest.fixture(autouse=True)
def device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("cupy", reason="cupy compiles the kernels")


def moved(block: DeviceBlock, where: str) -> DeviceBlock:
    return DeviceBlock(
        live=block.live.to(where),
        gradient=block.gradient.to(where),
        arrays={name: array.to(where) for name, array in block.arrays.items()},
        first_element=block.first_element,
        parameter=block.parameter,
        is_new=block.is_new,
    )


def on_device(optimizer_class, group, block: DeviceBlock, **options) -> DeviceBlock:
    """Step a copy of a block on the device; return it, on the CPU."""
    there = moved(block, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        update_block(optimizer_class, group, there, stream=stream.cuda_stream, **options)
    stream.synchronize()
    return moved(there, "cpu")


FOREACH = [name for name in FORMS if FORMS[name].arithmetic == "foreach"]


@pytest.mark.parametrize("name", FOREACH)
def test_a_device_stores_what_the_cpu_does_to_the_bit(name, kernels):
    form = FORMS[name]
    optimizer_class, group = optimizer(form)
    for is_new, kind, num in itertools.product((False, True), ("normal", "wide"), (1, 33, 100_003)):
        block = State(kind, num, form.num_moments).stored(form, is_new=is_new, first=num)
        block.live[::5] = -block.live[::5]
        found = on_device(optimizer_class, group, block, **OPTIONS)
        kernels.update_block(optimizer_class, group, block, **OPTIONS)
        assert different(contents(found), contents(block)) == {}


@pytest.mark.parametrize("name", [n for n in FORMS if FORMS[n].arithmetic == "fused"])
def test_fused_differs_from_the_cpu_by_its_power_function_alone(name, kernels):
    form = FORMS[name]
    optimizer_class, group = optimizer(form)
    block = State("normal", 10_000, form.num_moments).stored(form)
    found = on_device(optimizer_class, group, block, **OPTIONS)
    kernels.update_block(optimizer_class, group, block, **OPTIONS)
    # neither moment depends on it
    assert not different(contents(found), contents(block)).keys() - {"live", "master", "master_low"}


def flags_of(name: str, case: str, fused: bool) -> dict:
    return {**(SGD if name == "SGD" else ADAM)[case], "fused": fused, "foreach": not fused}


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize(("name", "case"), [*ADAM_CASES, *(("SGD", case) for case in SGD)])
def test_it_is_torchs_step_of_the_same_flags(name, case, fused):
    options = flags_of(name, case, fused)
    parameter = torch.randn(100_000, device="cuda")
    instance = CLASSES[name]([parameter], **options)
    group = group_of(name, options, fused=fused)
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])]
    if name == "SGD":
        names = ["momentum_buffer"] if group["momentum"] else []
    block = DeviceBlock(
        live=parameter.clone(),
        gradient=torch.empty_like(parameter),
        arrays={n: torch.empty_like(parameter) for n in names},
        is_new=True,
    )
    for step in range(1, 6):
        parameter.grad = torch.randn_like(parameter)
        block.gradient.copy_(parameter.grad)
        instance.step()
        stream = torch.cuda.current_stream().cuda_stream
        update_block(CLASSES[name], group, block, stream=stream, step=step)
        block = DeviceBlock(live=block.live, gradient=block.gradient, arrays=block.arrays)
    state = {n: instance.state[parameter][n] for n in names}
    pairs = [(block.live, parameter), *((block.arrays[n], state[n]) for n in names)]
    form = form_of_run(CLASSES[name], group, block.run())
    rule = UpdateRule(CLASSES[name], {})
    doubt = why_not_trusted(compute_on(torch.device("cuda", 0)), rule, form)
    exact = not doubt and (name, fused) != ("SGD", True)
    for found, expected in pairs:
        if exact:
            assert torch.equal(bits(found), bits(expected))
        else:  # the kernel is not used with this version of torch, or its difference is said
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    if name == "SGD":
        assert all(ulps(f.cpu(), e.cpu()) <= 8 for f, e in pairs)


@pytest.mark.parametrize("name", FOREACH)
def test_a_form_is_compared_with_torch_when_it_is_first_used(name):
    rule = UpdateRule(optimizer(FORMS[name])[0], {})
    found = why_not_trusted(compute_on(torch.device("cuda", 0)), rule, FORMS[name])
    assert found == "" or not IS_THE_MODEL


def test_factors_are_multiplied_there(kernels):
    form = FORMS["bf16-float32"]
    optimizer_class, group = optimizer(form)
    block = State("normal", 5000, form.num_moments).stored(form)
    factors = (1 / 512, 0.7)
    found = on_device(optimizer_class, group, block, factors=factors, **OPTIONS)
    kernels.update_block(optimizer_class, group, block, factors=factors, **OPTIONS)
    assert different(contents(found), contents(block)) == {}


@pytest.mark.parametrize("num_bytes", [*SHORT[::7], *LONG, *LEAVES, 64 * LEAF_BYTES + 12_345])
def test_digests_of_a_device_are_those_of_the_cpu(num_bytes):
    data = content(num_bytes, num_bytes)
    there = data.cuda()
    workspace = torch.empty(digest.workspace_bytes(num_bytes), dtype=torch.uint8, device="cuda")
    out = torch.empty(digest.num_leaves(num_bytes), dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    digest.leaf_digests(there, workspace, out, stream=stream.cuda_stream)
    stream.synchronize()
    assert out.cpu().numpy().tobytes() == leaf_digests(memoryview(data.numpy()))


def test_the_measurement_runs(tmp_path):
    kernel.main(["--quick", "--directory", str(tmp_path), "--output", str(tmp_path / "results")])
    (path,) = (tmp_path / "results").iterdir()
    found = json.loads(path.read_text())
    assert len(found["claims"]) == 9
    assert found["facts"]["exact_bytes_per_parameter"] == 30
    assert all(claim["gbps"] > 0 for claim in found["claims"])
