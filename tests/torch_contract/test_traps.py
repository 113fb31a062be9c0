"""What is known to go wrong when something stands in for a torch optimizer, and does not here.

Others of these have a place where they belong: precision of loaded state in `tests/exchange`, data
types and edits of parameters in `tests/numerics`, scalers in `test_scaling.py`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import ExponentialLR

import offload
from gds import MemoryBackend, StorageError
from offload.errors import CheckpointError
from offload.exchange.foreign import open_foreign
from tests.crash.fault_backend import FaultBackend
from tests.eventually import is_freed
from tests.numerics.reference import Reference, assert_same_bits, assert_same_parameters
from tests.stores.small import (
    give_gradients,
    make_model,
    make_optimizer,
    memory_store,
    options,
)
from tests.stores.small import step as take_step

CLASSES = {"AdamW": offload.AdamW, "Adam": offload.Adam, "SGD": offload.SGD}


def make(
    seed: int = 0, cls: Callable[..., Any] = offload.AdamW, **hyper: Any
) -> tuple[torch.nn.Module, offload.OffloadedOptimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 30).bfloat16(), torch.nn.Linear(30, 5))
    optimizer = cls(
        model.parameters(),
        directory="/store",
        model=model,
        options=options(MemoryBackend()),
        **hyper,
    )
    return model, optimizer


def first_line(optimizer: offload.OffloadedOptimizer) -> str:
    return repr(optimizer).partition("\n")[0]


def assert_same_state(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    assert expected
    for number, state in expected.items():
        assert found[number].keys() == state.keys()
        for key, value in state.items():
            assert_same_bits(found[number][key], value, f"{key} of {number}")


class TestAnOptimizerIsOne:
    @pytest.mark.parametrize("name", CLASSES)
    def test_schedulers_and_trainers_check_isinstance(self, name: str) -> None:
        _, optimizer = make(cls=CLASSES[name])
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.close()

    def test_a_scheduler_patches_step_so_it_must_be_a_method(self) -> None:
        """``self.step = ...`` in a constructor makes every scheduler fail: it has no __func__."""
        _, optimizer = make()
        assert "step" not in vars(optimizer)
        assert callable(optimizer.step.__func__)
        ExponentialLR(optimizer, 0.5)
        assert "step" in vars(optimizer)  # torch's doing
        optimizer.close()

    @pytest.mark.parametrize(
        ("name", "hyper"),
        [
            ("AdamW", {"lr": 0.25, "betas": (0.5, 0.75), "amsgrad": True}),
            ("Adam", {"weight_decay": 0.5}),
            ("SGD", {"lr": 0.5, "momentum": 0.9, "nesterov": True}),
        ],
    )
    def test_hugging_face_reads_defaults(self, name: str, hyper: dict[str, Any]) -> None:
        model, optimizer = make(cls=CLASSES[name], **hyper)
        plain = getattr(torch.optim, name)(model.parameters(), **hyper)
        assert optimizer.defaults == plain.defaults
        assert list(optimizer.defaults) == list(plain.defaults)
        for ours, theirs in zip(optimizer.param_groups, plain.param_groups, strict=True):
            assert list(ours) == list(theirs)
        optimizer.close()

    def test_it_prints_as_torchs_do_below_a_line_of_its_own(self) -> None:
        model, optimizer = make(lr=0.5)
        first, rest = repr(optimizer).split("\n", 1)
        assert first == "AdamW in /store: step 0, no state yet"
        assert rest == repr(torch.optim.AdamW(model.parameters(), lr=0.5))
        give_gradients(model.parameters(), 0)
        optimizer.step()
        optimizer.checkpoint()
        num_bytes = optimizer.stats().state_bytes
        line = f"AdamW in /store: step 1, {num_bytes / 1024:.1f} KiB of state"
        assert repr(optimizer).startswith(f"{line}\n")
        optimizer.close()
        assert repr(optimizer).startswith(f"{line}, closed\n")

    def test_it_prints_what_is_to_be_done_about_its_checkpoints(self) -> None:
        backend = memory_store(2)
        with make_optimizer(make_model(), backend, keep=2) as optimizer:
            assert first_line(optimizer) == (
                "AdamW in /run: not restored, the newest checkpoint is of step 2"
            )
            optimizer.restore()
            num_bytes = optimizer.stats().state_bytes
            line = f"AdamW in /run: step 2, {num_bytes / 1024:.1f} KiB of state"
            assert first_line(optimizer) == line
        assert first_line(optimizer) == f"{line}, closed"

    def test_it_prints_why_it_is_broken(self) -> None:
        backend = FaultBackend(memory_store(2))
        optimizer = make_optimizer(make_model(), backend, keep=2)
        optimizer.restore()
        backend.fail("write", 2, forever=False)
        with pytest.raises(StorageError):
            take_step(optimizer)
        line = first_line(optimizer)
        assert line.startswith("AdamW in /run: step ")
        assert ", broken: " in line
        optimizer.close()
        assert first_line(optimizer).endswith(", closed")

    def test_it_prints_before_and_after_everything(self) -> None:
        optimizer = make_optimizer(make_model(), MemoryBackend())
        assert repr(object.__new__(offload.AdamW)) == "<AdamW without a store>"
        child = os.fork()
        if child == 0:
            os._exit(0 if first_line(optimizer).startswith("AdamW in /run: step 0") else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        optimizer.param_groups.clear()
        assert first_line(optimizer) == "AdamW in /run: step 0, no state yet"
        optimizer.close()

    def test_names_that_came_with_parameters_are_kept(self) -> None:
        model, named = make()
        named.close()
        with offload.AdamW(
            model.named_parameters(), directory="/store", options=options(MemoryBackend())
        ) as optimizer:
            names = [name for name, _ in model.named_parameters()]
            assert optimizer.param_groups[0]["param_names"] == names

    def test_it_is_freed_when_it_is_dropped(self) -> None:
        model, optimizer = make()
        give_gradients(model.parameters(), 0)
        optimizer.step()
        gone = weakref.ref(optimizer)
        del optimizer
        assert is_freed(gone)


class TestGroups:
    def test_libraries_replace_the_dicts_of_groups(self) -> None:
        """torch's own load_state_dict does, so nothing may hold on to one."""
        model, optimizer = make(lr=0.01)
        expected, unused = make(lr=0.01)
        unused.close()
        plain = Reference(torch.optim.AdamW, expected.parameters(), lr=0.01)
        for step in range(4):
            if step == 2:
                optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
                optimizer.param_groups[0]["lr"] = 0.1
                plain.inner.param_groups[0]["lr"] = 0.1
            for one in (model, expected):
                give_gradients(one.parameters(), step)
            optimizer.step()
            plain.step()
            assert_same_parameters(model.named_parameters(), expected.named_parameters())
        optimizer.close()

    def test_groups_and_parameters_are_the_objects_that_were_passed(self) -> None:
        model, optimizer = make()
        (group,) = optimizer.param_groups
        params = group["params"]
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        give_gradients(model.parameters(), 0)
        optimizer.step()
        optimizer.checkpoint().result()
        optimizer.restore()
        assert optimizer.param_groups[0] is group
        assert group["params"] is params
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        optimizer.close()

    def test_sharding_rewrites_the_parameters_of_groups_after_construction(self) -> None:
        """accelerate's FSDP2 path does: files are laid out, and named, at the first step."""
        model, optimizer = make(lr=0.01)
        expected = torch.nn.Sequential(torch.nn.Linear(3, 11), torch.nn.Linear(11, 2)).bfloat16()
        for child, other in zip(model, expected, strict=True):
            child.weight = torch.nn.Parameter(other.weight.detach().clone())
            child.bias = torch.nn.Parameter(other.bias.detach().clone())
        optimizer.param_groups[0]["params"][:] = list(model.parameters())
        plain = Reference(torch.optim.AdamW, expected.parameters(), lr=0.01)
        for step in range(3):
            for one in (model, expected):
                give_gradients(one.parameters(), step)
            optimizer.step()
            plain.step()
            assert_same_parameters(model.named_parameters(), expected.named_parameters())
        stored = optimizer.checkpoint().result().manifest.layout.parameters
        names = {spec.name: spec.shape for spec in stored}
        assert names == {name: tuple(p.shape) for name, p in model.named_parameters()}
        optimizer.close()

    def test_the_ways_in_which_torch_refuses_groups(self) -> None:
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
            offload.AdamW([], directory="/elsewhere", options=options(MemoryBackend()))
        optimizer.close()


class TestDistributedCheckpoint:
    """`get_optimizer_state_dict` takes a step with gradients of zero if it finds no state."""

    @pytest.mark.filterwarnings("ignore:the reference that state_dict")
    def test_looking_for_the_state_takes_no_step(self) -> None:
        model, optimizer = make()
        give_gradients(model.parameters(), 0)
        optimizer.step()
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

    def test_it_is_set_before_the_first_step_and_in_the_middle_of_a_run(self) -> None:
        model, optimizer = make()
        for step in range(3):
            give_gradients(model.parameters(), step)
            optimizer.step()
        optimizer.zero_grad()
        with optimizer.materialized():
            found = get_optimizer_state_dict(model, optimizer)
        expected = optimizer.full_state_dict()["state"]
        for num_steps in (0, 2):
            other, again = make(seed=5)
            for step in range(num_steps):
                give_gradients(other.parameters(), 10 + step)
                again.step()
            again.zero_grad()
            set_optimizer_state_dict(other, again, found)
            assert_same_state(again.full_state_dict()["state"], expected)
            again.close()
        optimizer.close()


@pytest.mark.filterwarnings("ignore:the reference that state_dict")
def test_plain_torch_does_not_take_a_reference_for_an_empty_state() -> None:
    model, optimizer = make()
    give_gradients(model.parameters(), 0)
    optimizer.step()
    with pytest.raises(KeyError, match="state"):
        torch.optim.AdamW(model.parameters()).load_state_dict(optimizer.state_dict())
    optimizer.close()


@pytest.mark.filterwarnings("ignore:the reference that state_dict")
def test_an_import_does_not_take_a_reference_for_an_empty_state(tmp_path: Path) -> None:
    """``optimizer.pt`` of a trainer that used this optimizer holds a reference."""
    model, optimizer = make()
    give_gradients(model.parameters(), 0)
    optimizer.step()
    source = tmp_path / "saved.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    optimizer.close()
    with pytest.raises(CheckpointError, match=r"no optimizer's state dict in it"):
        open_foreign(str(source))


class Counting(torch.optim.Optimizer):
    """Counts the calls of its step; a decay of parameters by their gradients."""

    calls = 0

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        type(self).calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


def test_many_tiny_parameters_take_one_call_of_torchs_step() -> None:
    parameters = [torch.nn.Parameter(torch.full((n % 3 + 1,), float(n))) for n in range(400)]
    with offload.OffloadedOptimizer(
        Counting, parameters, directory="/store", options=options(MemoryBackend())
    ) as optimizer:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.step()
        before = Counting.calls
        optimizer.step()
        num_chunks = -(-sum(p.numel() for p in parameters) // 1024)
        assert Counting.calls - before == num_chunks
        for n, parameter in enumerate(parameters):
            assert torch.equal(parameter.detach(), torch.full_like(parameter, n - 2.0))


@pytest.mark.parametrize("overlap", [None, "forward", "backward"])
def test_a_profiler_shows_one_range_of_the_optimizer_for_each_step(overlap: str | None) -> None:
    """A wrapper that calls the step of an inner optimizer shows, and hooks, more of them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 60)
    with offload.AdamW(
        model.parameters(),
        directory="/store",
        model=model,
        options=options(MemoryBackend(), overlap=overlap),
    ) as optimizer:
        give_gradients(model.parameters(), 0)
        optimizer.step()
        optimizer.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for step in range(3):
                give_gradients(model.parameters(), step)
                optimizer.step()
            optimizer.synchronize()
    ranges = [e.name for e in profiler.events() if e.name.startswith("Optimizer.step")]
    assert ranges == ["Optimizer.step#AdamW.step"] * 3
    assert any(e.name.startswith("offload.") for e in profiler.events())
