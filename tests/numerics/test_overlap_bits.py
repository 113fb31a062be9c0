"""A step that runs beside the forward or the backward gives the bits of one that is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.eventually import TIMEOUT_S
from tests.numerics.delays import Disordered
from tests.numerics.pairs import CASES, Cut, Pair
from tests.numerics.reference import assert_same_bits
from tests.numerics.twins import Attention, Batched, Branching, Early, Half, Twins

OVERLAPS = ("forward", "backward")
ONE_CHUNK = (1 << 20, 2, None)

MODELS_AND_CUTS = {
    "odd-sizes": (Batched, (4096, 2, None)),
    "odd-sizes-in-small-blocks": (Batched, (8192, 3, 777)),
    "attention": (Attention, (8192, 3, 777)),
    "attention-in-one-chunk": (Attention, ONE_CHUNK),
    "recomputed-half-precision": (Half, (4096, 2, None)),
    "used-early-in-one-chunk": (Early, ONE_CHUNK),
}


@pytest.mark.parametrize(
    ("name", "overlap", "parameters"),
    [(name, OVERLAPS[n % 2], None) for n, name in enumerate(MODELS_AND_CUTS)]
    + [("odd-sizes", "backward", None), ("attention", "backward", None)]
    + [("odd-sizes", overlap, "drive") for overlap in OVERLAPS],
)
def test_every_step_gives_the_same_bits(name, overlap, parameters):
    model, cut = MODELS_AND_CUTS[name]
    twins = Twins(model, overlap, cut=cut, settings={"parameters": parameters})
    for step in range(8):
        twins.step(step)
        assert all(p.grad is None for p in twins.live.parameters())
    twins.assert_same_state()
    stats = twins.optimizer.stats()
    assert stats.steps == 8
    assert stats.copied_gradient_bytes == 0
    assert stats.moved_gradient_bytes > 0
    if overlap == "forward":
        trained = [p.grad for p in twins.expected.parameters() if p.grad is not None]
        assert stats.moved_gradient_bytes == sum(g.nbytes for g in trained)
    twins.optimizer.close()


After = Callable[[int], object]


def growing(twins: Twins) -> After:
    """A group joins, and layers are frozen and unfrozen."""

    def after(step: int) -> None:
        for model, owner in twins.sides():
            if step == 2:
                model.layers.append(nn.Linear(21, 3, bias=False))
                nn.init.constant_(model.layers[-1].weight, 0.1)
                owner.add_param_group({"params": [model.layers[-1].weight], "lr": 0.02})
            if step in (4, 6):
                model.layers[3].requires_grad_(step == 6)
                model.layers[4].requires_grad_(True)  # for the first time

    return after


def edited(twins: Twins) -> After:
    def after(_: int) -> None:
        with torch.no_grad():
            for model in twins.both():
                model.attention.out_proj.weight.clamp_(-0.1, 0.1)

    return after


def evaluated(twins: Twins) -> After:
    def after(_: int) -> None:
        with torch.no_grad():
            found = [twins.loss(model, 99) for model in twins.both()]
        assert_same_bits(found[0], found[1], "evaluation")

    return after


def scheduled(twins: Twins) -> After:
    """A scheduler changes a tensor in place right after the step."""
    inner = twins.plain.inner
    for optimizer in (twins.optimizer, inner):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    schedulers = [LambdaLR(o, lambda step: 0.5 ** (step % 4)) for o in (twins.optimizer, inner)]

    def after(step: int) -> None:
        handle = twins.optimizer.checkpoint() if step % 3 == 1 else None
        rate = inner.param_groups[0]["lr"].clone()
        for scheduler in schedulers:
            scheduler.step()
        if handle is not None:
            (group,) = handle.result(TIMEOUT_S).hyperparameters
            assert torch.equal(torch.as_tensor(group["lr"]), rate)

    return after


def sealed(twins: Twins) -> After:
    """Nobody waits for checkpoints, of which some are of one step."""
    handles = []

    def after(step: int) -> None:
        handles.append(twins.optimizer.checkpoint({"step": step}))
        if step % 2:
            handles.append(twins.optimizer.checkpoint({"again": step}))
        if step == 7:
            found = [handle.result(TIMEOUT_S).step for handle in handles]
            assert found == sorted([*range(1, 9), *range(2, 9, 2)])

    return after


def resumed(twins: Twins) -> After:
    def after(step: int) -> None:
        if step % 3 == 1:
            assert twins.optimizer.checkpoint({"step": step}).result(TIMEOUT_S).verify().ok
            assert twins.resume().train_state == {"step": step}

    return after


def nothing(_: Twins) -> After:
    return lambda _: None


SITUATIONS: dict[str, tuple[type[nn.Module], dict[str, Any], Callable[[Twins], After]]] = {
    "a group joins and layers are frozen and unfrozen": (Batched, {}, growing),
    "the same with resident state": (Batched, {"settings": {"host_memory": 100_000}}, growing),
    "parameters are edited": (Attention, {}, edited),
    "the model is evaluated": (Batched, {}, evaluated),
    "a scheduler changes the learning rate": (Half, {"lr": torch.tensor(0.01)}, scheduled),
    "checkpoints are asked for": (Batched, {}, sealed),
    "the run is closed and resumed": (Half, {}, resumed),
    "the forward takes other ways": (Branching, {}, nothing),
    "other ways with resident state": (Branching, {"settings": {"host_memory": 30_000}}, nothing),
}


@pytest.mark.parametrize(
    ("name", "overlap"),
    [(name, overlap) for name in SITUATIONS for overlap in OVERLAPS if "resident" not in name]
    + [("the same with resident state", "forward"), ("other ways with resident state", "backward")],
)
def test_what_happens_between_steps(name, overlap):
    model, more, make = SITUATIONS[name]
    twins = Twins(model, overlap, **more)
    after = make(twins)
    for step in range(8 if model is not Branching else 15):
        twins.step(step)
        after(step)
    twins.assert_same_state()
    twins.optimizer.close()


@pytest.mark.parametrize(
    ("overlap", "optimizer_class"),
    [
        ("forward", torch.optim.NAdam),
        ("forward", torch.optim.Adagrad),
        ("backward", torch.optim.SGD),
        ("backward", torch.optim.Rprop),
    ],
)
def test_other_optimizers(overlap, optimizer_class):
    twins = Twins(Half, overlap, optimizer_class=optimizer_class, num_steps=6)
    twins.assert_same_state()


@pytest.mark.parametrize(
    ("overlap", "name"), [("forward", "adamw"), ("backward", "sgd-momentum-in-some-groups")]
)
def test_every_kind_of_parameter_with_gradients_from_elsewhere(overlap, name):
    """Nobody calls the model, so that nobody could wait: the step itself does."""
    pair = Pair(CASES[name], Cut(4096, 2, 777, {"overlap": overlap}), Disordered(seed=1))
    for step in range(13):
        pair.step(step)
        pair.assert_same_parameters()
        if step in (2, 3, 8):
            pair.optimizer.checkpoint({"step": step})
    pair.assert_same_state()
    pair.optimizer.close()


class Outside(nn.Module):
    """What is called is not the model, but parts of it; parameters are used elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        self.decoder = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(32))


def only_parts(model: Outside, x: torch.Tensor) -> torch.Tensor:
    shift = model.scale.square()  # read before anything is called
    return model.decoder(model.encoder(x)) + shift


def upcast_first(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As by those who hand upcast copies to the model."""
    upcast = {name: p.float() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, upcast, (x,))


@pytest.mark.parametrize(("model", "call"), [(Outside, only_parts), (Batched, upcast_first)])
def test_a_model_that_is_not_called_itself(model, call):
    twins = Twins(model)
    twins.loss = lambda model, step: call(model, twins.batch(step)).square().mean()
    for step in range(6):
        twins.step(step)
    twins.assert_same_state()


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_some_gradients_from_elsewhere(overlap):
    twins = Twins(Batched, overlap)
    for step in range(6):
        twins.backward(step)
        for model in twins.both():
            model.unused.weight.grad = torch.full_like(model.unused.weight, 0.1 * step)
        twins.optimizer.step()
        twins.plain.step()
    twins.assert_same_state()
