"""The rules' arithmetic against torch's: its CUDA sources where the bits must be the same."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from offload.device.kernels.forms import why_no_kernel
from offload.device.kernels.update import form_of_run
from tests.device.blocks import DeviceBlock, State, bits, contents, same_numbers, ulps

NUM = 3001
STEPS = (1, 2, 1000)
KINDS = ["normal", "wide", "odd"]

ADAM = {
    "defaults": {},
    "no-decay": {"weight_decay": 0.0},
    "decay": {"weight_decay": 0.1, "lr": 0.02},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "small-betas": {"betas": (0.3, 0.2), "weight_decay": 0.1},
    "no-second-beta": {"betas": (0.9, 0.0)},
}
SGD = {
    "defaults": {},
    "decay-maximize": {"weight_decay": 0.1, "maximize": True},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "maximize": True},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
CLASSES = {c.__name__: c for c in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)}
ADAM_CASES = list(itertools.product(["Adam", "AdamW"], ADAM))


def group_of(name: str, options: dict, **more) -> dict:
    instance = CLASSES[name]([torch.zeros(1)], **options)
    more.setdefault("fused", None)
    return {**instance.defaults, **more, "fused": more["fused"] or None}  # torch's default: foreach


def plain_block(state: State, names) -> DeviceBlock:
    arrays = {name: m.clone() for name, m in zip(names, state.moments, strict=False)}
    return DeviceBlock(live=state.master.clone(), gradient=state.gradient.clone(), arrays=arrays)


def adam_block(kind: str, amsgrad: bool) -> DeviceBlock:
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 2 + amsgrad]
    return plain_block(State(kind, NUM, len(names)), names)


def run_torch(name: str, group: dict, block: DeviceBlock, step: int) -> dict[str, torch.Tensor]:
    """Run torch's step of that number on copies; return the parameter and its state."""
    parameter = block.live.clone()
    options = {k: v for k, v in group.items() if k not in ("fused", "decoupled_weight_decay")}
    instance = CLASSES[name]([parameter], **options)
    parameter.grad = block.gradient.clone()
    state = {k: v.clone() for k, v in block.arrays.items()}
    if name != "SGD":
        state["step"] = torch.tensor(float(step - 1))
    if not block.is_new:
        instance.state[parameter] = state
    instance.step()
    found = {k: instance.state[parameter][k] for k in block.arrays}
    return {"live": parameter, **found}


@pytest.fixture(scope="module")
def all_kernels(kernels):
    """Compile what this file needs at once."""
    blocks = [
        (
            CLASSES[name],
            group_of(name, ADAM[case], fused=fused),
            adam_block("normal", "ams" in case),
        )
        for (name, case), fused in itertools.product(ADAM_CASES, (False, True))
    ]
    for case, fused in itertools.product(SGD, (False, True)):
        names = ("momentum_buffer",) if "momentum" in SGD[case] else ()
        block = plain_block(State("normal", NUM, len(names)), names)
        blocks.append((CLASSES["SGD"], group_of("SGD", SGD[case], fused=fused), block))
    kernels.prepare([form_of_run(c, g, block.run()) for c, g, block in blocks])
    return kernels


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, bool]:
    return {name: same_numbers(found[name], expected[name]) for name in found}


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize(("name", "case"), ADAM_CASES)
def test_adam_is_torchs_on_cuda_to_the_bit(name, case, fused, all_kernels, torch_arithmetic):
    group = group_of(name, ADAM[case], fused=fused)
    for kind, step in itertools.product(KINDS, STEPS):
        block = adam_block(kind, group["amsgrad"])
        if fused:
            arrays = {"live": block.live, "gradient": block.gradient, **block.arrays}
            expected = {n: a.clone() for n, a in arrays.items()}
            torch_arithmetic.adam([*expected.values()], group, decoupled=name == "AdamW", step=step)
        else:
            with torch_arithmetic.foreach():
                expected = run_torch(name, {**group, "foreach": True}, block, step)
        all_kernels.update_block(CLASSES[name], group, block, step=step)
        assert False not in same(contents(block), expected).values(), (kind, step)


def sgd_block(case: str, kind: str, is_new: bool) -> DeviceBlock:
    names = ("momentum_buffer",) if "momentum" in SGD[case] else ()
    return replace(plain_block(State(kind, NUM, len(names)), names), is_new=is_new)


@pytest.mark.parametrize("is_new", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("case", SGD)
def test_sgd_is_torchs_to_the_bit(case, is_new, all_kernels):
    group = group_of("SGD", SGD[case])
    for kind in KINDS:
        block = sgd_block(case, kind, is_new)
        expected = run_torch("SGD", group, block, 1)
        all_kernels.update_block(torch.optim.SGD, group, block, step=1)
        assert False not in same(contents(block), expected).values(), kind


@pytest.mark.parametrize("is_new", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("case", SGD)
def test_fused_sgd_is_that_of_fp64_but_for_the_last_bit(case, is_new, all_kernels):
    group = group_of("SGD", SGD[case], fused=True)
    block = sgd_block(case, "normal", is_new)
    p, g = (t.double().numpy() for t in (block.live, block.gradient))
    g = np.float32(g + group["weight_decay"] * p).astype(np.float64)
    expected = {}
    if block.arrays:
        buffer = block.arrays["momentum_buffer"].double().numpy()
        buffer = g if is_new else group["momentum"] * buffer + (1 - group["dampening"]) * g
        expected["momentum_buffer"] = torch.from_numpy(buffer.astype(np.float32))
        g = g + group["momentum"] * buffer if group["nesterov"] else buffer
        g = np.float32(g).astype(np.float64)
    change = group["lr"] * g
    p = p + change if group["maximize"] else p - change
    expected["live"] = torch.from_numpy(p.astype(np.float32))
    all_kernels.update_block(torch.optim.SGD, group, block, step=1)
    found = contents(block)
    assert all(ulps(found[name], expected[name]) <= 1 for name in expected)
    assert sum(int((bits(found[n]) != bits(expected[n])).sum()) for n in expected) < NUM // 1000


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("case", ["decay", "amsgrad"])
def test_adam_is_that_of_the_cpu_but_for_a_few_last_bits(case, fused, all_kernels):
    """What a store's state goes through if the step moves between the host and a device."""
    group = group_of("AdamW", ADAM[case])
    block = adam_block("normal", group["amsgrad"])
    before = block.live.clone()
    expected = run_torch("AdamW", {**group, "foreach": False}, block, 1000)
    all_kernels.update_block(torch.optim.AdamW, {**group, "fused": fused or None}, block, step=1000)
    if not fused:
        assert torch.equal(block.arrays["exp_avg"], expected["exp_avg"])
        assert ulps(block.arrays["exp_avg_sq"], expected["exp_avg_sq"]) <= 1
    # of sums that may cancel: relative to their larger term
    for name in ("exp_avg", "exp_avg_sq"):
        error = (block.arrays[name] - expected[name]).abs()
        assert (error <= 1e-6 * block.gradient.abs().clamp_min(1.0)).all()
    change = (expected["live"] - before).abs()
    error = (block.live - expected["live"]).abs()
    unit = torch.finfo(torch.float32).eps
    assert (error <= 2 * unit * before.abs() + (2e-5 if fused else 1e-6) * change).all()


RATE = torch.tensor(1e-3)
HAS_KERNEL = [
    (torch.optim.AdamW, [{}, {"foreach": True}, {"fused": True}]),
    (torch.optim.AdamW, [{"fused": False, "foreach": True}]),
    (torch.optim.AdamW, [{"lr": RATE, "foreach": True}, {"lr": RATE, "fused": True}]),
    (torch.optim.SGD, [{"lr": RATE}]),
]
HAS_NONE = [
    (torch.optim.AdamW, [{"foreach": False}, {"fused": False}, {"lr": RATE}]),
    (torch.optim.Adam, [{"lr": RATE}]),
    (torch.optim.SGD, [{"fused": False}]),
    (torch.optim.RMSprop, [{}]),
]


def test_there_is_a_kernel_where_torch_would_not_take_its_single_tensor_step():
    for table, has_kernel in ((HAS_KERNEL, True), (HAS_NONE, False)):
        for optimizer_class, groups in table:
            for given in groups:
                group = {"lr": 1e-3, "foreach": None, "fused": None, **given}
                found = not why_no_kernel(optimizer_class, group)
                assert found is has_kernel, (optimizer_class, given)
    # and for every step that the tests on a device compare with torch's
    for name, case in [*ADAM_CASES, *itertools.product(["SGD"], SGD)]:
        for fused in (False, True):
            flags = {**(SGD if name == "SGD" else ADAM)[case], "fused": fused, "foreach": not fused}
            assert why_no_kernel(CLASSES[name], group_of(name, flags, fused=fused)) == ""
