"""What is known to go wrong when something stands in for a torch optimizer, and does not here.

Others of these have a place where they belong: precision of loaded state in `tests/exchange`, data
types and edits of parameters in `tests/numerics`, scalers in `test_scaling.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import offload
from gds import MemoryBackend
from offload.errors import CheckpointError
from tests.numerics.reference import Reference, assert_same_bits, assert_same_parameters
from tests.stores.small import (
    give_gradients,
    make_mixed_model,
    make_model,
    make_optimizer,
    options,
    step,
)


def make(seed: int = 0, **hyper: Any) -> tuple[torch.nn.Module, offload.OffloadedOptimizer]:
    model = make_mixed_model(seed)
    return model, make_optimizer(model, MemoryBackend(), **hyper)


def assert_same_state(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    assert expected
    for number, state in expected.items():
        assert found[number].keys() == state.keys()
        for key, value in state.items():
            assert_same_bits(found[number][key], value, f"{key} of {number}")


def test_libraries_replace_the_dicts_of_groups() -> None:
    """torch's own load_state_dict does, so nothing may hold on to one."""
    model, optimizer = make(lr=0.01)
    expected = make_mixed_model()
    plain = Reference(torch.optim.AdamW, expected.parameters(), lr=0.01)
    for number in range(4):
        if number == 2:
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
            optimizer.param_groups[0]["lr"] = 0.1
            plain.inner.param_groups[0]["lr"] = 0.1
        for one in (model, expected):
            give_gradients(one.parameters(), number)
        optimizer.step()
        plain.step()
        assert_same_parameters(model.named_parameters(), expected.named_parameters())
    (group,) = optimizer.param_groups
    params = group["params"]
    optimizer.checkpoint().result()
    optimizer.restore()
    assert optimizer.param_groups[0] is group
    assert group["params"] is params
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    optimizer.close()


def test_sharding_rewrites_the_parameters_of_groups_after_construction() -> None:
    """accelerate's FSDP2 path does: files are laid out, and named, at the first step."""
    model, optimizer = make(lr=0.01)
    expected = make_model(3, 11, 2, 5)
    for child, other in zip(model, expected, strict=True):
        child.weight = torch.nn.Parameter(other.weight.detach().clone())
        child.bias = torch.nn.Parameter(other.bias.detach().clone())
    optimizer.param_groups[0]["params"][:] = list(model.parameters())
    plain = Reference(torch.optim.AdamW, expected.parameters(), lr=0.01)
    for number in range(3):
        for one in (model, expected):
            give_gradients(one.parameters(), number)
        optimizer.step()
        plain.step()
        assert_same_parameters(model.named_parameters(), expected.named_parameters())
    stored = optimizer.checkpoint().result().tensors
    names = {tensor.name: tuple(tensor.shape) for tensor in stored}
    assert names == {name: tuple(p.shape) for name, p in model.named_parameters()}
    optimizer.close()


def test_the_ways_in_which_torch_refuses_groups() -> None:
    model, optimizer = make()
    new = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [model[0].weight]})
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group([new])
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        optimizer.add_param_group({"params": [new * 2]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": new, "lr": 0.5})  # one alone need not be in a list
    assert optimizer.param_groups[1]["params"] == [new]
    assert optimizer.param_groups[1]["weight_decay"] == optimizer.defaults["weight_decay"]
    with pytest.raises(ValueError, match="empty parameter list"):
        make_optimizer(model, MemoryBackend(), params=[])
    optimizer.close()


@pytest.mark.filterwarnings("ignore:the reference that state_dict")
def test_looking_for_the_state_takes_no_step() -> None:
    """`get_optimizer_state_dict` takes a step with gradients of zero if it finds no state."""
    model, optimizer = make()
    step(optimizer)
    optimizer.zero_grad()
    before = optimizer.full_state_dict()
    parameters = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises(KeyError, match="state"):  # and not a checkpoint without moments
            get_optimizer_state_dict(model, optimizer)
    assert optimizer.num_steps == 1
    assert_same_state(optimizer.full_state_dict()["state"], before["state"])
    for parameter, value in zip(model.parameters(), parameters, strict=True):
        assert_same_bits(parameter, value, "parameter")
    optimizer.close()


def test_it_is_set_before_the_first_step_and_in_the_middle_of_a_run() -> None:
    model, optimizer = make()
    for number in range(3):
        step(optimizer, number)
    optimizer.zero_grad()
    with optimizer.materialized():
        found = get_optimizer_state_dict(model, optimizer)
    expected = optimizer.full_state_dict()["state"]
    for num_steps in (0, 2):
        other, again = make(seed=5)
        for number in range(num_steps):
            step(again, 10 + number)
        again.zero_grad()
        set_optimizer_state_dict(other, again, found)
        assert_same_state(again.full_state_dict()["state"], expected)
        again.close()
    optimizer.close()


@pytest.mark.filterwarnings("ignore:the reference that state_dict")
def test_neither_torch_nor_an_import_takes_a_reference_for_an_empty_state(tmp_path: Path) -> None:
    """``optimizer.pt`` of a trainer that used this optimizer holds a reference."""
    model, optimizer = make()
    step(optimizer)
    with pytest.raises(KeyError, match="state"):
        torch.optim.AdamW(model.parameters()).load_state_dict(optimizer.state_dict())
    source = tmp_path / "saved.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    optimizer.close()
    with pytest.raises(CheckpointError, match=r"no optimizer's state dict in it"):
        offload.import_checkpoint(source, tmp_path / "run", options=options())


@pytest.mark.parametrize("overlap", [None, "forward", "backward"])
def test_a_profiler_shows_one_range_of_the_optimizer_for_each_step(overlap: str | None) -> None:
    """A wrapper that calls the step of an inner optimizer shows, and hooks, more of them."""
    model = make_model(40, 60)
    with make_optimizer(model, MemoryBackend(), settings={"overlap": overlap}) as optimizer:
        step(optimizer)
        optimizer.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for number in range(3):
                step(optimizer, number)
            optimizer.synchronize()
    ranges = [e.name for e in profiler.events() if e.name.startswith("Optimizer.step")]
    assert ranges == ["Optimizer.step#AdamW.step"] * 3
    assert any(e.name.startswith("offload.") for e in profiler.events())
