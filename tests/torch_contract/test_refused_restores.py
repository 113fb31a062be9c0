"""Restores that are refused: undecided, of a checkpoint that is not there, of another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gds import MemoryBackend
from offload import SGD, Adam, list_checkpoints, load_parameters
from offload.errors import CheckpointError, CheckpointNotFoundError, MismatchError, NotRestoredError
from tests.stores.files import flip
from tests.stores.small import STORE, make_model, make_optimizer, memory_store, step
from tests.threads import one_thread
from tests.torch_contract.refusing import nothing_changes

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


@pytest.mark.parametrize("call", ["step", "checkpoint", "synchronize"])
def test_using_a_store_before_deciding_about_it(call: str) -> None:
    backend, model = memory_store(2), make_model()
    with make_optimizer(model, backend) as optimizer:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(NotRestoredError, match="step-00000001, step-00000002") as error,
        ):
            getattr(optimizer, call)()
        assert "call restore() to continue" in str(error.value)
        assert "fresh=True to the optimizer to start over" in str(error.value)
        assert optimizer.restore() is not None
        getattr(optimizer, call)()


@pytest.mark.parametrize("which", [7, "step-00000007", "/elsewhere/step-00000001"])
def test_a_checkpoint_that_is_not_there(which: int | str) -> None:
    backend, model = memory_store(2), make_model()
    says = "no usable checkpoint.*it has: step-00000001, step-00000002"
    with (
        make_optimizer(model, backend) as optimizer,
        nothing_changes(backend, model, optimizer),
        pytest.raises(CheckpointNotFoundError, match=says),
    ):
        optimizer.restore(which)


def test_an_older_one_that_is_damaged_does_not_cost_the_newer_ones() -> None:
    backend = memory_store(3)
    flip(backend, f"{STORE}/step-00000001/model.safetensors", -100)
    with make_optimizer(make_model(), backend, keep=3) as optimizer:
        with pytest.raises(CheckpointError, match=r"step-00000001/model\.safetensors"):
            optimizer.restore(1, discard_newer=True)
        assert [c.step for c in list_checkpoints(STORE, backend=backend)] == [1, 2, 3]
        with pytest.warns(RuntimeWarning, match="not using .*step-00000001"):
            found = optimizer.restore()
        assert found is not None
        assert found.step == 3


def renamed(model: torch.nn.Sequential) -> torch.nn.Module:
    return torch.nn.ModuleDict({"first": model[0], "second": model[1]})


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: renamed(make_model()), ["'0.weight' is only in the checkpoint"]),
        (lambda: make_model(30, 41, 4), ["'0.weight' is BF16 [40, 30]", "BF16 [41, 30]"]),
        (lambda: make_model(dtype=torch.float32), ["BF16 [40, 30]", "F32 [40, 30]"]),
        (
            lambda: torch.nn.Sequential(*make_model(), torch.nn.Linear(4, 4)),
            ["'2.weight' is only in the model"],
        ),
        (
            lambda: torch.nn.Sequential(*make_model(), torch.nn.BatchNorm1d(4, affine=False)),
            ["'2.running_mean' is only in the model"],
        ),
    ],
    ids=["names", "shapes", "dtype", "more-parameters", "more-buffers"],
)
def test_another_model_is_refused_by_name(
    build: Callable[[], torch.nn.Module], says: list[str]
) -> None:
    backend, model = memory_store(2), build()
    is_dtype = any("F32" in part for part in says)
    with make_optimizer(model, backend) as optimizer:
        for call, another in (
            (optimizer.restore, "give it another directory=, or pass fresh=True"),
            (lambda: load_parameters(model, STORE, backend=backend), "or name a checkpoint of"),
        ):
            with (
                nothing_changes(backend, model, optimizer),
                pytest.raises(MismatchError, match="differs from the one that was saved") as error,
            ):
                call()
            for part in [*says, another, "Build the model as it was then, with the same config"]:
                assert part in str(error.value)
            assert ("convert it to another dtype after" in str(error.value)) == is_dtype
        with pytest.raises(NotRestoredError):
            optimizer.step()


def test_names_that_are_only_numbers() -> None:
    backend, model = memory_store(2, model=None), make_model()
    said = "It was made without model=, so it does not have the model's names"
    with pytest.raises(MismatchError, match=rf"'group0\.param0' is only in the ch.*{said}"):
        load_parameters(model, STORE, backend=backend)
    with (
        make_optimizer(model, backend) as named,
        pytest.raises(MismatchError, match=f"{said}: an optimizer that is made without model="),
    ):
        named.restore()
    with make_optimizer(model, backend, model=None) as numbered:
        assert numbered.restore() is not None


def two_groups(model: torch.nn.Sequential) -> list[dict[str, Any]]:
    first, second = ({"params": list(layer.parameters())} for layer in model)
    return [first, {**second, "momentum": 0.9}]


@pytest.mark.parametrize(
    ("cls", "params", "says"),
    [
        (Adam, lambda model: model.parameters(), "made with torch.optim.sgd.SGD, this optimizer"),
        (SGD, lambda model: model.parameters(), "has 2 parameter groups, .*with the same groups"),
        (SGD, lambda model: two_groups(model)[::-1], r"'\d\.\w+' was in group.*the same groups"),
    ],
    ids=["class", "number of groups", "order of groups"],
)
def test_another_optimizer_is_refused(cls: Any, params: Any, says: str) -> None:
    model, backend = make_model(), MemoryBackend()
    with make_optimizer(model, backend, SGD, params=two_groups(model), lr=0.1) as optimizer:
        step(optimizer)
        optimizer.checkpoint().result()
    model = make_model()
    with (
        make_optimizer(model, backend, cls, params=params(model), lr=0.1) as optimizer,
        nothing_changes(backend, model, optimizer),
        pytest.raises(MismatchError, match=says),
    ):
        optimizer.restore()


def test_a_restore_does_not_need_the_other_optimizers_of_the_model_at_rest() -> None:
    """One of them has applied its gradients in backward, and its step is still to come."""
    model, backend = make_model(), MemoryBackend()
    settings = {"overlap": "backward"}
    restored, other = (
        make_optimizer(
            model, backend, params=[*layer.parameters()], directory=f"/{n}", settings=settings
        )
        for n, layer in enumerate(model)
    )
    with restored, other:
        for number in (1, 2):
            model(torch.ones(5, 30, dtype=torch.bfloat16)).float().sum().backward()
            if number == 1:
                restored.step()
                other.step()
                restored.checkpoint().result()
                sealed = model.get_parameter("0.weight").detach().clone()
        assert restored.restore() is not None
        assert torch.equal(model.get_parameter("0.weight"), sealed)
        other.step()
        assert (restored.num_steps, other.num_steps) == (1, 2)
