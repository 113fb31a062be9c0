"""Ranks that step rows of a model: the bits are those of one process, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload import AdamW
from offload.errors import MismatchError
from offload.model.shards import rows
from tests.numerics.reference import Reference, assert_same_bits, assert_same_parameters
from tests.ranks.rank import Rank, settings
from tests.ranks.replicas import SHAPES, Model, Replicas, arrays_of, elements

FORMS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "plain-sgd": (torch.optim.SGD, {"lr": 0.05}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_stepped_as_torch_steps_the_whole(
    form: str, dtype: torch.dtype, num_ranks: int, tmp_path: Path
) -> None:
    optimizer_class, hyper = FORMS[form]
    expected = Model(dtype)
    reference = Reference(optimizer_class, expected.groups(), **hyper)
    replicas = Replicas(num_ranks, dtype, tmp_path, optimizer_class, **hyper)
    steps = [1, 2, 3, 4]
    for step in steps:
        expected.give_gradients(step)
        reference.step()
        replicas.step(step)
        for rank in replicas.ranks:
            rank.checkpoint({"step": step})  # sealed while the next step and gather go on
        for model in replicas.models:
            assert_same_parameters(model.named_parameters(), expected.named_parameters())
    replicas.close()

    # Each rank restores its own rows and state into a model of other values, and trains on.
    again = Replicas(num_ranks, dtype, tmp_path, optimizer_class, **hyper)
    for model, rank in zip(again.models, again.ranks, strict=True):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        restored = rank.restore()
        assert restored is not None
        assert (restored.step, restored.train_state) == (4, {"step": 4})
    again.gather()
    for number, model in enumerate(again.models):
        found = {n: p for n, p in model.named_parameters() if n in SHAPES}
        assert_same_parameters(
            found.items(), [(n, p) for n, p in expected.named_parameters() if n in found]
        )
        assert bool((model.frozen == (1 if number == 0 else 7)).all())  # the first rank stores it
    for step in (5, 6):
        expected.give_gradients(step)
        reference.step()
        again.step(step)
    for model in again.models:
        assert_same_parameters(
            [(n, p) for n, p in model.named_parameters() if n in SHAPES],
            [(n, p) for n, p in expected.named_parameters() if n in SHAPES],
        )
    again.close()


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_the_state_is_that_of_one_process(state_dtype: str, num_ranks: int, tmp_path: Path) -> None:
    hyper = {"lr": 0.01, "weight_decay": 0.1}
    options = settings(state_dtype=state_dtype, rounding_seed=5)
    alone = Model(torch.bfloat16)
    optimizer = AdamW(
        alone.groups(), directory=tmp_path / "alone", model=alone, options=options, **hyper
    )
    replicas = Replicas(
        num_ranks,
        torch.bfloat16,
        tmp_path / "ranks",
        torch.optim.AdamW,
        multiple=32 if state_dtype == "int8" else 1,
        options=options,
        **hyper,
    )
    for step in (1, 2, 3):
        alone.give_gradients(step)
        optimizer.step()
        replicas.step(step)
        for model in replicas.models:
            assert_same_parameters(model.named_parameters(), alone.named_parameters())
    whole = arrays_of(optimizer.checkpoint({}).result().path)
    found = [arrays_of(rank.checkpoint({}).result().path) for rank in replicas.ranks]
    optimizer.close()
    replicas.close()
    assert whole
    for array, tensors in whole.items():
        for name in tensors:
            held = [
                entry
                for arrays in found
                for key, entry in arrays.get(array, {}).items()
                if key.partition("[")[0] == name
            ]
            joined = torch.cat([tensor.flatten() for tensor in held])
            assert_same_bits(joined, tensors[name].flatten(), f"{array} of {name}")


def test_ranks_without_elements_count_their_steps(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    with Rank(torch.optim.AdamW, model.parameters(), tmp_path, lambda *_: None) as rank:
        for _ in range(2):
            model.weight.grad = torch.ones(1, 2)
            before = model.weight.detach().clone()
            rank.step()
            assert rank.engine.num_steps > 0
            assert torch.equal(model.weight, before)
            assert rank.training.table.is_current(rank.param_groups)
        assert rank.checkpoint({"mine": 1}).result().step == 2


def test_no_step_lays_out_anew(tmp_path: Path) -> None:
    replicas = Replicas(2, torch.bfloat16, tmp_path, torch.optim.AdamW)
    replicas.step(1)
    for rank in replicas.ranks:
        assert rank.training.table.is_current(rank.param_groups)
        layout = rank.training.layout
        replicas.step(2)
        assert rank.training.layout is layout
    replicas.close()


def test_other_cuts_are_refused_by_name(tmp_path: Path) -> None:
    replicas = Replicas(2, torch.bfloat16, tmp_path, torch.optim.AdamW)
    replicas.step(1)
    for rank in replicas.ranks:
        rank.checkpoint({}).result()
    replicas.close()
    others = Replicas(3, torch.bfloat16, tmp_path, torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"this rank steps .* as many ranks"):
        others.ranks[0].restore()
    others.close()


@pytest.mark.parametrize(("start", "stop"), [(1, 7), (0, 4), (0, 12)])
def test_other_rows_of_a_parameter_are_refused_by_name(
    start: int, stop: int, tmp_path: Path
) -> None:
    parameter = torch.nn.Parameter(torch.ones(12, 4))
    parameter.grad = torch.ones(12, 4)
    with Rank(torch.optim.AdamW, [parameter], tmp_path, lambda _, p: rows(p, 0, 6)) as rank:
        rank.step()
        rank.checkpoint({}).result()
    refused = pytest.raises(MismatchError, match=r"param0\[0:6, 0:4\]', this rank steps 'group0")
    with (
        Rank(torch.optim.AdamW, [parameter], tmp_path, lambda _, p: rows(p, start, stop)) as rank,
        refused,
    ):
        rank.restore()


def test_an_edit_of_rows_during_a_seal_is_found(tmp_path: Path) -> None:
    """Writes of other ranks' rows are not counted, but those of the user are."""
    replicas = Replicas(2, torch.bfloat16, tmp_path, torch.optim.AdamW)
    replicas.step(1)
    name, cut = [*replicas.dealt[0].items()][-1]
    assert cut.box.sizes != cut.shape
    parameter = replicas.models[0].get_parameter(name)
    shard = replicas.shards(0)(name, parameter)
    assert shard is not None
    version = shard.tensor()._version
    replicas.gather()
    assert shard.tensor()._version == version
    with torch.no_grad():
        parameter.mul_(1)
    assert shard.tensor()._version > version
    replicas.close()


def test_all_elements_are_stored_once(tmp_path: Path) -> None:
    replicas = Replicas(3, torch.float32, tmp_path, torch.optim.AdamW)
    replicas.step(1)
    found = [arrays_of(rank.checkpoint({}).result().path) for rank in replicas.ranks]
    replicas.close()
    counts = [elements(f["exp_avg"], [*f["exp_avg"]]).numel() for f in found]
    total = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 96
