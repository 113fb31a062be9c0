"""Stored forms: the kernel's bytes are those of the codecs that a CPU uses.

What is stored is decoded with `offload.update.coding`, stepped as plain FP32 arrays
(`test_update_arithmetic.py` shows that that is torch's step), and encoded with the codecs again.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from offload.device.kernels.forms import Form
from offload.device.kernels.update import (
    MAX_PIECES,
    DeviceRun,
    form_of_run,
    launches,
)
from offload.format import rounding_keys
from offload.update.coding import blocks8, rounding
from offload.update.coding.coder import take_edits
from offload.update.scratch import Scratch
from tests.device.blocks import (
    BF16,
    BLOCK,
    FP16,
    FP32,
    DeviceBlock,
    State,
    bits,
    contents,
    different,
    keys_of,
    odd,
)
from tests.device.test_update_arithmetic import CLASSES, group_of

SEED, STEP, STORE_STEP = 77, 12, 19
NUMS = [1, 3, 31, 32, 33, 1000, 4099]
KINDS = ["normal", "wide", "odd"]

# Every form of everything, though not every combination.
FORMS = {
    "bf16-float32": Form("adamw", "foreach", BF16, BF16, "float32", "float32", 2),
    "fp16-fp32-gradient": Form("adamw", "fused", FP16, FP32, "float32", "float32", 2),
    "bf16-fp16-gradient": Form("adam", "foreach", BF16, FP16, "float32", "float32", 3),
    "fp32-bf16-state": Form("adamw", "fused", FP32, FP32, "own", "bfloat16", 2),
    "bf16-bf16-state": Form("adamw", "foreach", BF16, BF16, "float32", "bfloat16", 3),
    "split": Form("adamw", "foreach", BF16, BF16, "split", "float32", 2),
    "split-int8": Form("adamw", "fused", BF16, BF16, "split", "int8", 2),
    "fp16-int8-amsgrad": Form("adamw", "foreach", FP16, FP16, "float32", "int8", 3),
    "sgd-split-int8": Form("sgd", "foreach", BF16, BF16, "split", "int8", 1),
    "sgd-fp16-no-state": Form("sgd", "foreach", FP16, FP16, "float32", "float32", 0),
}
PLAIN = {
    f: Form(f.rule, f.arithmetic, FP32, FP32, "own", "float32", f.num_moments)
    for f in FORMS.values()
}


UNSCALED = {
    name: dataclasses.replace(FORMS[name], gradient=FP32)
    for name in ("bf16-float32", "split-int8", "sgd-split-int8")
}


def optimizer(form: Form, **more):
    """Return the class and the hyper-parameters of a form."""
    name = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}[form.rule]
    options: dict = {"weight_decay": 0.05}
    if form.rule == "sgd":
        options["momentum"] = 0.9 * form.num_moments
    else:
        options["amsgrad"] = form.num_moments == 3
    return CLASSES[name], group_of(name, options, fused=form.arithmetic == "fused", **more)


@pytest.fixture(scope="module")
def all_kernels(kernels):
    kernels.prepare([*FORMS.values(), *PLAIN.values(), *UNSCALED.values()])
    return kernels


def decoded(form: Form, block: DeviceBlock) -> DeviceBlock:
    """Return the block as FP32 arrays, with edits taken."""
    scratch, num = Scratch(), len(block.live)
    master = torch.empty(num)
    if form.master == "split" and not block.is_new:
        rounding.join_master(block.live, block.arrays["master_low"], master, scratch=scratch)
    elif form.master == "float32" and not block.is_new:
        master.copy_(block.arrays["master"])
        take_edits(master, block.live.clone(), master.to(form.live))
    else:
        master.copy_(block.live)
    arrays = {}
    for name in form.moments:
        stored = block.arrays[name]
        arrays[name] = torch.zeros(num)
        if block.is_new:
            continue
        if form.state == "int8":
            blocks8.decode_blocks(
                stored, block.arrays[name + "_scale"], arrays[name], scratch=scratch
            )
        else:
            arrays[name].copy_(stored)
    gradient = block.gradient.float()
    return DeviceBlock(live=master, gradient=gradient, arrays=arrays, is_new=block.is_new)


def encoded(form: Form, plain: DeviceBlock, block: DeviceBlock) -> dict[str, torch.Tensor]:
    """Return what is to be stored of it, where the block is."""
    scratch, num, master = Scratch(), len(plain.live), plain.live
    found = {"live": master}
    if form.master == "float32":
        found = {"live": master.to(form.live), "master": master}
    elif form.master == "split":
        found = {"live": torch.empty(num, dtype=BF16), "master_low": torch.empty(num).short()}
        rounding.split_master(master, found["live"], found["master_low"], scratch=scratch)
    for name, values in plain.arrays.items():
        found[name] = values
        if form.state == "bfloat16":
            found[name] = torch.empty(num, dtype=BF16)
            number = rounding_keys.name_numbers([block.parameter])
            key = rounding_keys.ParameterKeys(number, SEED, name, STORE_STEP).of(0)
            rounding.round_stochastic(
                values, found[name], key=key, first_element=block.first_element, scratch=scratch
            )
        elif form.state == "int8":
            signed = name in ("exp_avg", "momentum_buffer")
            found[name] = torch.empty(num, dtype=torch.int8 if signed else torch.uint8)
            scales = found[name + "_scale"] = torch.empty(-(-num // BLOCK), dtype=BF16)
            blocks8.encode_blocks(values, found[name], scales, scratch=scratch)
    return found


def step_both(kernels, form: Form, block: DeviceBlock) -> dict[str, int]:
    """Step a block, and decode, step and encode it; return how many values differ in a bit."""
    optimizer_class, group = optimizer(form)
    assert form_of_run(optimizer_class, group, block.run()) == form
    plain = decoded(form, block)
    kernels.update_block(optimizer_class, group, plain, step=STEP)
    expected = encoded(form, plain, block)
    gradient = block.gradient.clone()
    kernels.update_block(
        optimizer_class, group, block, step=STEP, seed=SEED, rounding_step=STORE_STEP
    )
    assert torch.equal(bits(block.gradient), bits(gradient))
    return different(contents(block), expected)


@pytest.mark.parametrize("name", FORMS)
def test_what_is_stored_is_what_a_cpu_stores_to_the_bit(name, all_kernels):
    form = FORMS[name]
    for number, (kind, num) in enumerate(itertools.product(KINDS, NUMS)):
        state = State(kind, num, form.num_moments)
        parameter = "layers.3.norm.weight" if number % 2 else "weight"
        block = state.stored(form, first=10 * num + 1, parameter=parameter)
        assert step_both(all_kernels, form, block) == {}, (kind, num)


@pytest.mark.parametrize("name", FORMS)
def test_unaligned_memory_first_steps_and_edits(name, all_kernels):
    form = FORMS[name]
    for offset in (1, 2, 4):
        block = State("normal", 517, form.num_moments).stored(form, offset=offset)
        assert step_both(all_kernels, form, block) == {}, offset
    block = State("normal", 700, form.num_moments).stored(form, is_new=True)
    for array in block.arrays.values():
        bits(array).fill_(-1)
    assert step_both(all_kernels, form, block) == {}, "the first step makes state of nothing"
    for kind in KINDS if form.master != "own" else ():
        block = State(kind, 999, form.num_moments).stored(form)
        before = block.live.clone()
        block.live[::3] = odd(999, 50).to(form.live)[::3]
        block.live[1::7] = -block.live[1::7]
        assert (bits(block.live) != bits(before)).sum() > 300
        assert step_both(all_kernels, form, block) == {}, "an edited parameter wins"


@pytest.mark.parametrize("name", ["bf16-bf16-state", "split-int8", "fp16-int8-amsgrad"])
def test_masters_between_two_parameters_are_rounded_as_on_a_cpu(name, all_kernels):
    """Ties above all: a step of length zero leaves every master where it is."""
    form = FORMS[name]
    optimizer_class, group = optimizer(form, lr=0.0, weight_decay=0.0)
    state = State("normal", 3 << 16, form.num_moments)
    low = torch.arange(1 << 16, dtype=torch.int32)
    # odd and even upper halves, and halfway between FP16 numbers as well
    uppers = (0x3F80_0000, 0xBF81_0000 - (1 << 32), 0x477F_0000)
    state.master = torch.cat([low + upper for upper in uppers]).view(torch.float32)
    block, before = state.stored(form), state.stored(form)
    all_kernels.update_block(optimizer_class, group, block, step=STEP)
    masters = [n for n in ("live", "master", "master_low") if n in contents(before)]
    found, expected = ({n: contents(b)[n] for n in masters} for b in (block, before))
    assert different(found, expected) == {}


def test_stochastic_rounding_depends_on_the_element_alone(all_kernels):
    form = FORMS["bf16-bf16-state"]
    for first in (0, 1, (1 << 33) - 100, (1 << 33) - 99, (5 << 33) - 1):
        block = State("normal", 300, 3).stored(form, first=first)
        assert step_both(all_kernels, form, block) == {}, first


def test_where_a_block_is_cut_makes_no_difference(all_kernels):
    for form in FORMS.values():
        optimizer_class, group = optimizer(form)
        state = State("odd", 2000, form.num_moments)
        whole, parts = (state.stored(form, parameter="weight") for _ in range(2))
        all_kernels.update_block(optimizer_class, group, whole, step=STEP, seed=SEED)
        for start, stop in ((0, 96), (96, 1024), (1024, 2000)):
            cut = slice(start, stop)
            blocks = slice(start // BLOCK, -(-stop // BLOCK))
            part = DeviceBlock(
                live=parts.live[cut],
                gradient=parts.gradient[cut],
                arrays={
                    n: a[blocks if n.endswith("_scale") else cut] for n, a in parts.arrays.items()
                },
                first_element=start,
                parameter=parts.parameter,
            )
            all_kernels.update_block(optimizer_class, group, part, step=STEP, seed=SEED)
        assert different(contents(parts), contents(whole)) == {}


MANY = {
    # three launches, few pieces of them aligned
    "short": ([1 + 7 * n % 97 for n in range(130)], 7),
    "aligned": ([64 * (1 + n % 5) for n in range(50)], 1 << 16),
    "one long, many tiles": ([32, 40_000, 5, 2048], 7),
}


@pytest.mark.parametrize(("lengths", "max_tiles"), MANY.values(), ids=MANY)
@pytest.mark.parametrize("name", ["bf16-bf16-state", "split-int8", "sgd-fp16-no-state"])
def test_many_pieces_in_one_call_are_stepped_as_one_by_one(name, lengths, max_tiles, all_kernels):
    form = FORMS[name]
    optimizer_class, group = optimizer(form)
    singles = []
    for number, length in enumerate(lengths):
        state = State("normal", length + 1, form.num_moments)
        for values in (state.master, state.gradient, *state.moments):
            values += values[0].item()  # other values in each piece
        state.master, state.gradient = state.master[1:], state.gradient[1:]
        state.moments = [m[1:] for m in state.moments]
        block = state.stored(form, parameter=f"layers.{number}", first=32 * number)
        singles.append(block)
    arrays = {n: torch.cat([b.arrays[n] for b in singles]) for n in singles[0].arrays}
    names = [block.parameter for block in singles]
    run = DeviceRun(
        live=[block.live.clone() for block in singles],
        gradients=[block.gradient for block in singles],
        arrays=arrays,
        first_elements=[block.first_element for block in singles],
        keys=keys_of(names, [*arrays], SEED, STORE_STEP),
    )
    found = list(
        launches(optimizer_class, group, run, step=STEP, factors=[0.5], max_tiles=max_tiles)
    )
    assert len(found) == -(-sum(length > 0 for length in lengths) // MAX_PIECES)
    for launch in found:
        all_kernels.launch(launch)
    for block in singles:
        all_kernels.update_block(
            optimizer_class,
            group,
            block,
            step=STEP,
            seed=SEED,
            rounding_step=STORE_STEP,
            factors=[0.5],
        )
    together = {"live": torch.cat([*run.live]), **arrays}
    one_by_one = {
        "live": torch.cat([b.live for b in singles]),
        **{n: torch.cat([b.arrays[n] for b in singles]) for n in arrays},
    }
    assert different(together, one_by_one) == {}


def test_nothing_beyond_the_block_is_touched(all_kernels):
    for form in FORMS.values():
        optimizer_class, group = optimizer(form)
        small = State("normal", 45, form.num_moments).stored(form)
        around = {}
        for name, values in contents(small).items():
            memory = torch.zeros(len(values) + 16, dtype=values.dtype)
            bits(memory).fill_(0x5A)
            memory[8 : 8 + len(values)] = values
            around[name] = memory
        block = DeviceBlock(
            live=around["live"][8:53],
            gradient=small.gradient,
            arrays={n: around[n][8 : 8 + len(a)] for n, a in small.arrays.items()},
        )
        all_kernels.update_block(optimizer_class, group, block, step=STEP)
        for memory in around.values():
            assert (bits(memory[:8]) == 0x5A).all()
            assert (bits(memory[-8:]) == 0x5A).all()


@pytest.mark.parametrize("name", UNSCALED)
def test_the_gradient_is_unscaled_and_clipped_in_fp32(name, all_kernels):
    form = FORMS[name]
    optimizer_class, group = optimizer(form)
    state = State("normal", 500, form.num_moments)
    block = state.stored(form)
    factors = (1 / 1024, 0.37)
    state.gradient = (block.gradient.float() * factors[0]) * factors[1]
    expected = state.stored(form)
    expected = DeviceBlock(live=expected.live, gradient=state.gradient, arrays=expected.arrays)
    all_kernels.update_block(optimizer_class, group, expected, step=STEP)

    all_kernels.update_block(optimizer_class, group, block, step=STEP, factors=factors)
    assert different(contents(block), contents(expected)) == {}
    with pytest.raises(ValueError, match="2 factors, not by 3"):
        all_kernels.update_block(optimizer_class, group, block, step=STEP, factors=[1.0] * 3)
