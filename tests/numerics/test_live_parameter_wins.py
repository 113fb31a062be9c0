"""Edits of the live parameters between steps count, as in plain torch, and nothing else changes.

Parameters are rounded masters. One that is not what its master rounds to has been edited, and the
edited value becomes the master; all other masters keep the bits that rounding hid.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tests.numerics.models import EMPTY_STEP, FIRST_LATE_STEP, Mixed, trainable
from tests.numerics.pairs import CASES, CUTS, ON_DRIVE, Case, Pair, memory_pair
from tests.numerics.reference import assert_same_bits, read_state

NUM_STEPS = 15


def clamp(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.6, 0.6)


def edit_one_element(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 1 and parameter.numel() > 10:
            parameter[10] = 7.0
        elif parameter.dim() == 2 and parameter.numel():
            parameter[-1, 3] = -5.0


def load_other_weights(model: torch.nn.Module) -> None:
    model.load_state_dict(Mixed(seed=42).state_dict())


def halve_through_data(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)  # which torch's version counters do not see


def replace_through_data(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def overflow(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 1 and parameter.numel() > 10:
            parameter[5] = float("inf")
            parameter[6] = float("-inf")
            parameter[7] = -0.0


EDITS = {
    "clamping": clamp,
    "one-element": edit_one_element,
    "loading-weights": load_other_weights,
    "writing-through-data": halve_through_data,
    "replacing-data": replace_through_data,
    "infinities-and-zeros": overflow,
}


@pytest.mark.parametrize(
    ("edit", "name", "cut"),
    [
        ("clamping", "adamw", 0),
        ("one-element", "sgd-momentum-in-some-groups", 0),
        ("loading-weights", "adamw", 2),
        ("writing-through-data", "sgd-momentum-in-some-groups", 1),
        ("replacing-data", "adamw", 1),
        ("infinities-and-zeros", "sgd-momentum-in-some-groups", 2),
        ("one-element", "adamw", ON_DRIVE),
        ("replacing-data", "sgd-momentum-in-some-groups", ON_DRIVE),
    ],
)
def test_an_edit_between_steps_becomes_the_master(edit, name, cut):
    """Also just before a checkpoint, after it, and between a restore and the next step."""
    pair = memory_pair(CASES[name], CUTS[cut] if isinstance(cut, int) else cut)
    # Before the first step, when some have state and some have none, and twice in a row.
    steps = (0, 3, 5, FIRST_LATE_STEP - 1, FIRST_LATE_STEP, 9, EMPTY_STEP, EMPTY_STEP + 1)
    for step in range(NUM_STEPS):
        if step in steps:
            pair.edit(EDITS[edit])
        if step in (0, 5, 9):
            path = pair.optimizer.checkpoint().result().path
            assert_holds(path, pair)
        if step == 9:
            pair.reopen()
            assert pair.optimizer.restore().step == step
            pair.assert_same_parameters()
            pair.edit(EDITS[edit])
        pair.step(step)
        pair.assert_same_parameters()
    pair.assert_same_state()


def assert_holds(path: str, pair: Pair) -> None:
    """Check that the model file of a checkpoint has the live values."""
    stored = read_state(path, pair.backend).model
    for name, parameter in pair.live.named_parameters():
        if name in stored:
            assert_same_bits(stored[name], parameter, name)


def test_averaged_weights_swapped_in_and_out_again_leave_no_trace():
    pair = memory_pair(CASES["adamw"], CUTS[0])
    averages = {n: p.detach().float().clone() for n, p in trainable(pair.live).items()}
    for step in range(NUM_STEPS):
        pair.step(step)
        with torch.no_grad():
            live = trainable(pair.live)
            for name, average in averages.items():
                average.lerp_(live[name].float(), 0.1)
            if step % 5 == 4:  # evaluate with the averages
                backup = copy.deepcopy(pair.live.state_dict())
                for name, average in averages.items():
                    live[name].copy_(average)
                assert not torch.equal(live["matrix"], backup["matrix"])
                pair.live.load_state_dict(backup)
        pair.assert_same_parameters()
    pair.assert_same_state()


def test_a_tied_parameter_is_edited_through_either_name():
    pair = memory_pair(Case(torch.optim.SGD, {"momentum": 0.9}), CUTS[0])

    def edit(model: Mixed) -> None:
        model.tied_again.weight[4, 4] = 3.0
        model.tied.weight[5, 5] = 3.0

    for step in range(6):
        if step == 3:
            pair.edit(edit)
        pair.step(step)
        pair.assert_same_parameters()
    pair.assert_same_state()
