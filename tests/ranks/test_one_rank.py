"""What a rank refuses, clears and names, and what its manifest says of its boxes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from offload.errors import OverlapError, UnsupportedParameterError
from offload.format.boxes import Box, Cut
from offload.format.shares.dealing import deal_rows
from offload.model.names import unwrapped_names
from offload.model.shards import own_shards, rows, uncounted, whole
from offload.model.stored import describe_model
from offload.overlap.backward import DuringBackward
from tests.numerics.reference import Reference, assert_same_parameters
from tests.ranks.rank import Rank


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    sizes = (8, 33, 17, 4)
    linear = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return torch.nn.Sequential(*linear).bfloat16()


def backward(model: torch.nn.Module, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(5, 8).bfloat16()).float().square().mean().backward()


@pytest.mark.parametrize("sealed", [False, True], ids=["steps", "sealed"])
def test_a_step_beside_forward_clears_the_gradients_of_all_ranks(
    sealed: bool, tmp_path: Path
) -> None:
    models, expected = [network() for _ in range(3)], network()
    shapes = {name: tuple(p.shape) for name, p in expected.named_parameters()}
    dealt = [dict(view) for view in deal_rows(shapes, 2)] + [{}]  # the last rank steps nothing
    reference = Reference(torch.optim.AdamW, expected.parameters(), lr=0.01)
    ranks = [
        Rank(
            torch.optim.AdamW,
            model.parameters(),
            tmp_path / str(number),
            own_shards(dealt[number], shapes, keeps_others=number == 0),
            model=model,
            forward=True,
            lr=0.01,
        )
        for number, model in enumerate(models)
    ]
    for step in range(1, 5):
        backward(expected, step)
        reference.step()
        expected.zero_grad()
        for model, rank in zip(models, ranks, strict=True):
            backward(model, step)
            kept = [parameter.grad for parameter in model.parameters()]
            rank.step()
            assert all(parameter.grad is None for parameter in model.parameters())
            for gradient in kept:  # the step has its own values by now
                gradient.zero_()
            if sealed:
                rank.checkpoint({"step": step})
            rank.engine.join()
        for number, own in enumerate(dealt):
            for name, cut in own.items():
                part = models[number].get_parameter(name).detach()[cut.box.slices]
                for model in models:
                    if model is not models[number]:
                        uncounted(model.get_parameter(name))[cut.box.slices].copy_(part)
        for model in models:
            assert_same_parameters(model.named_parameters(), expected.named_parameters())
    for rank in ranks:
        assert rank.engine.num_steps == 4
        rank.close()


def test_steps_during_backward_are_refused(tmp_path: Path) -> None:
    model = network()
    rank = Rank(torch.optim.AdamW, model.parameters(), tmp_path, lambda _, p: whole(p))
    with rank, pytest.raises(OverlapError, match="gradient of this rank alone"):
        DuringBackward(rank.training, model)


def test_a_parameter_without_elements_here_is_not_stored(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    shards = {"weight": lambda p: rows(p, 2, 2), "bias": lambda p: rows(p, 0, 2)}
    with Rank(
        torch.optim.AdamW,
        model.named_parameters(),
        tmp_path,
        lambda name, parameter: shards[name](parameter),
        model=model,
    ) as rank:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        rank.step()
        layout = rank.training.layout
        assert [spec.stored_name for spec in layout.parameters] == ["bias[0:2,]"]
        whole = [(tensor.name, tensor.shape) for tensor in layout.model]
        assert whole == [("weight", (3, 2)), ("bias", (3,))]


def test_rows_are_views_of_a_parameter_and_of_its_gradient() -> None:
    parameter = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3))
    shard = rows(parameter, 1, 3)
    assert shard.cut == Cut((4, 3), Box((1, 0), (2, 3)))
    assert shard.gradient() is None
    parameter.grad = torch.ones(4, 3)
    gradient = shard.gradient()
    assert gradient is not None
    gradient.fill_(2)
    assert parameter.grad.sum(1).tolist() == [3, 6, 6, 3]
    shard.tensor().fill_(-1)
    assert parameter.sum(1).tolist() == [3, -3, -3, 30]
    assert not shard.tensor().requires_grad
    parameter.data = torch.zeros(4, 3)  # replaced memory is seen at the next use
    assert shard.tensor().data_ptr() == parameter[1:].data_ptr()
    assert rows(parameter, 0, 4).tensor() is parameter
    assert rows(parameter, 2, 2).is_empty
    for start, stop in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="has no rows"):
            rows(parameter, start, stop)
    with pytest.raises(ValueError, match="has no rows"):
        rows(torch.nn.Parameter(torch.ones(())), 0, 0)


def test_a_box_that_the_tensor_lacks_is_refused_by_name() -> None:
    shards = own_shards({"w": Cut((6, 2), Box((0, 0), (3, 2)))}, {"w"})
    with pytest.raises(UnsupportedParameterError, match=r"'w'.*\[0:3, 0:2\] of the shape \[6, 2\]"):
        shards("w", torch.nn.Parameter(torch.ones(4, 2)))
    columns = own_shards({"w": Cut((4, 2), Box((0, 0), (4, 1)))}, {"w"})
    with pytest.raises(UnsupportedParameterError, match=r"'w'.*\[0:4, 0:1\]"):
        columns("w", torch.nn.Parameter(torch.ones(4, 2)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "wrap",
    [lambda m: m, torch.compile, lambda m: torch.compile(torch.nn.Sequential(m))],
    ids=["plain", "compiled", "inside"],
)
def test_names_are_those_of_torchs_distributed_checkpoints(
    wrap: Callable[[Any], torch.nn.Module], tmp_path: Path
) -> None:
    inner = torch.nn.Sequential(network(), checkpoint_wrapper(torch.nn.Linear(4, 4)))
    inner[0][1] = torch.compile(inner[0][1])
    model = wrap(inner)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        for wrapped in (model, DistributedDataParallel(model)):
            expected = {id(p): n for n, p in get_model_state_dict(wrapped).items()}
            named = unwrapped_names(wrapped)
            found = {named(name) for name, _ in wrapped.named_parameters()}
            assert found == {*expected.values()}
            stored = describe_model(wrapped, [], [], lambda _, tensor: whole(tensor))
            assert {item.spec.name for item in stored} == found
    finally:
        torch.distributed.destroy_process_group()
