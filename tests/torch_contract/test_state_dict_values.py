"""Values of hyper-parameters and of users' own keys: by value in `state_dict()`, and NumPy's."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offload
from gds import MemoryBackend
from tests.numerics.reference import assert_same_bits
from tests.stores.small import give_gradients, make_model, make_optimizer, options, step

Pair = namedtuple("Pair", ["values", "name"])


@pytest.fixture
def optimizer() -> Iterator[offload.AdamW]:
    model = torch.nn.Linear(4, 4)
    with offload.AdamW(
        model.parameters(), directory="/run", options=options(MemoryBackend())
    ) as found:
        yield found


def test_a_tensor_in_a_container_and_an_array_are_copied(optimizer: offload.AdamW) -> None:
    values, array = torch.ones(3), np.ones(3)
    for kind in (list, tuple, Pair._make):
        optimizer.param_groups[0]["note"] = kind([values, "a"])
        found = optimizer.state_dict()["param_groups"][0]["note"]
        assert type(found) is type(optimizer.param_groups[0]["note"])
        assert found[0] is not values
        assert torch.equal(found[0], values)
        assert found[1] == "a"
    optimizer.param_groups[0]["note"] = array
    found = optimizer.state_dict()["param_groups"][0]["note"]
    array += 1
    assert found.tolist() == [1.0, 1.0, 1.0]


NUMBERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "float32 lr": (torch.optim.AdamW, {"lr": np.float32(1e-3)}),
    "float32 lr of NAdam": (torch.optim.NAdam, {"lr": np.float32(1e-3), "weight_decay": 0.1}),
    "array without a dimension": (torch.optim.AdamW, {"lr": np.array(1e-3)}),
    "betas": (torch.optim.NAdam, {"betas": tuple(np.array([0.8, 0.99], np.float32))}),
    "zero": (torch.optim.SGD, {"lr": 1e-3, "momentum": np.float32(0)}),
    "integer": (torch.optim.Adam, {"weight_decay": np.int8(2), "eps": np.int64(1)}),
}


def schedule(optimizer: torch.optim.Optimizer, number: int) -> None:
    if number == 2:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * np.float32(0.7)


HOW = ("restored", "by reference", "through a file of torch.save")


@pytest.mark.parametrize(
    ("case", "how"),
    [(case, HOW[n % 3]) for n, case in enumerate(NUMBERS)]
    + [("float32 lr", how) for how in HOW[1:]],
)
def test_numbers_of_numpy_train_as_in_torch_and_come_back(
    case: str, how: str, tmp_path: Path
) -> None:
    """NumPy computes ``1 - lr * weight_decay`` in FP32 for an FP32 `lr`, and torch takes that."""
    optimizer_class, hyper = NUMBERS[case]
    expected = make_model(dtype=torch.float32)
    plain = optimizer_class(expected.parameters(), **hyper)
    for number in range(6):
        schedule(plain, number)
        give_gradients(expected.parameters(), number)
        plain.step()

    def made(directory: Path) -> tuple[torch.nn.Module, offload.OffloadedOptimizer]:
        found = make_model(dtype=torch.float32)
        return found, offload.OffloadedOptimizer(
            optimizer_class, found.parameters(), directory=directory, options=options(), **hyper
        )

    store = tmp_path / "run"
    _, optimizer = made(store)
    with optimizer:
        for number in range(3):
            schedule(optimizer, number)
            step(optimizer, number)
        optimizer.checkpoint().result()
        reference = optimizer.state_dict()
    if how == "through a file of torch.save":
        with offload.open_checkpoint(store) as checkpoint:
            offload.export_checkpoint(checkpoint, tmp_path / "run.pt", to="pt")
        store = tmp_path / "imported"
        offload.import_checkpoint(tmp_path / "run.pt", store, optimizer_class, options=options())
    model, optimizer = made(store)
    with optimizer:
        optimizer.restore()
        if how == "by reference":
            optimizer.param_groups[0]["lr"] = 0.5
            optimizer.load_state_dict(reference)
        for number in range(3, 6):
            step(optimizer, number)
    for found, parameter in zip(model.parameters(), expected.parameters(), strict=True):
        assert_same_bits(found.detach(), parameter.detach(), case)


def test_users_numbers_of_numpy_come_back_as_numbers() -> None:
    backend = MemoryBackend()
    numbers = {"scale": np.float32(0.65), "layer": np.int64(3), "exact": np.float64(0.1)}
    for _ in range(2):
        model = make_model()
        groups = [{"params": list(model.parameters()), **numbers}]
        with make_optimizer(model, backend, params=groups) as optimizer:
            optimizer.restore()
            group = optimizer.param_groups[0]
            for name, kind in {"scale": np.float32, "layer": int, "exact": np.float64}.items():
                assert type(group[name]) is kind
                assert group[name] == numbers[name]
            step(optimizer)
            optimizer.checkpoint().result()


@pytest.mark.parametrize(
    "value",
    [np.longdouble(1), np.arange(3), 1j, {"a": 1}, Decimal(1), len],
    ids=lambda value: type(value).__name__,
)
def test_what_no_checkpoint_can_hold_is_refused_before_training(
    value: Any, optimizer: offload.AdamW
) -> None:
    says = rf"param_groups\[\d\]\['note'\] is a {type(value).__name__} and cannot be stored"
    model = torch.nn.Linear(4, 4)
    with pytest.raises(TypeError, match=says):
        make_optimizer(model, MemoryBackend(), params=[{"params": [model.weight], "note": value}])
    with pytest.raises(TypeError, match=says):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "note": value})
    assert len(optimizer.param_groups) == 1
