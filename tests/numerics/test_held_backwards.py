"""Backwards that nobody means as a step change no parameter, and give plain torch's gradients."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from tests.numerics.loops import (
    STEPS,
    Loop,
    Net,
    assert_hidden,
    batch,
    check,
    copies,
    optimizer_for,
    training,
)


def gan(features: str) -> Loop:
    """The generator's loss reaches the discriminator, by its output or what is in it."""

    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        generator, critic = nets
        optimizer_g, optimizer_d = optimizers
        seen: list[torch.Tensor] = []
        if features == "only":
            critic.middle.register_forward_hook(lambda _m, _a, output: seen.append(output))
        for step in range(STEPS):
            fake = generator(batch(step))
            optimizer_d.zero_grad()  # of what the generator's loss has left
            loss = critic(batch(step, 1)).mean() - critic(fake.detach()).mean()
            loss.backward()
            # Reentrant checkpoints that are used twice are not hidden.
            assert_hidden(optimizer_d, features != "checkpoints")
            optimizer_d.step()
            optimizer_d.zero_grad()
            yield loss
            optimizer_g.zero_grad()
            before = copies(critic)
            seen.clear()
            loss = critic(fake).square().mean()
            if features == "only":
                loss = seen[0].square().mean()
            loss.backward()
            assert_hidden(optimizer_d, False)
            yield from [p.grad for p in critic.parameters() if p.grad is not None]
            optimizer_g.step()
            assert all(map(torch.equal, before, critic.parameters()))
            yield loss

    return loop


class Blocks(nn.Module):
    """Runs blocks by numbers, under reentrant checkpointing unless they are negative."""

    def __init__(self, *order: int, tied: bool = False, out: int = 24) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 24)
        self.blocks = nn.ModuleList(Net() for _ in range(3))
        self.head = nn.Linear(24, out)
        self.order = order
        if tied:
            self.blocks[2].middle.weight = self.blocks[1].middle.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for number in self.order:
            if number < 0:
                x = self.blocks[-number](x)
            else:
                x = recompute(self.blocks[number], x, use_reentrant=True)
        return self.head(x)


@pytest.mark.parametrize("features", ["", "only", "checkpoints"])
def test_a_generators_loss_leaves_the_discriminator_as_it_is(features):
    reentrant = features == "checkpoints"
    check(gan(features), lambda: [Net(), Blocks(0, 1, 2, out=1) if reentrant else Net(40, 1)])


def saliency(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Adversarial training: the sign of an input's gradient is added to it."""
    (net,), (optimizer,) = nets, optimizers
    for step in range(STEPS):
        x = batch(step).requires_grad_()
        net(x).square().mean().backward()
        assert x.grad is not None
        yield x.grad
        optimizer.zero_grad()
        loss = net(x.detach() + 0.1 * x.grad.sign()).square().mean()
        loss.backward()
        optimizer.step()
        yield loss


def accumulated(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Steps of held backwards: what is done to gradients counts, as nothing is applied before."""
    (net,), (optimizer,) = nets, optimizers
    for step in range(STEPS):
        for part in range(2):
            net(batch(step, part).requires_grad_()).square().mean().backward()
        yield nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        # One that is not held adds to what one that was has left.
        net(batch(step, 2).requires_grad_()).square().mean().backward()
        net(batch(step, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("loop", [saliency, accumulated])
def test_a_backward_for_the_gradient_of_an_input(loop):
    check(loop, lambda: [Net()])


def test_a_penalty_on_the_gradient_of_an_input():
    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        (net,), (optimizer,) = nets, optimizers
        for step in range(STEPS):
            x = batch(step).requires_grad_()
            output = net(x)
            (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            loss = output.mean() + (gradient.norm() - 1).square()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    check(loop, lambda: [Net()])


@pytest.mark.parametrize(
    ("order", "tied", "num_calls"),
    [
        ((0, 1, 0), False, 1),
        ((2, -2), False, 1),
        ((1, 2), True, 1),
        ((0, 1), False, 2),
    ],
    ids=["twice", "and-elsewhere", "tied", "two-calls"],
)
def test_reentrant_checkpointing_of_what_is_used_twice(order, tied, num_calls):
    check(training(num_calls, hidden=False), lambda: [Blocks(*order, tied=tied)])


def test_reentrant_checkpointing_of_what_is_used_twice_in_some_steps_only():
    """Each use by itself has been seen before, and there was nothing to be said against it."""

    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        (net,), (optimizer,) = nets, optimizers
        for step, order in enumerate([(1, 2), (1, -2), (1, 2, -2), (1, -2), (1, 2, 2), (1, 2)]):
            net.order = order
            loss = net(batch(step)).square().mean()
            loss.backward()
            assert_hidden(optimizer, len(order) == 2)
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    check(loop, lambda: [Blocks()])


@pytest.mark.parametrize("order", [(0, 1, 2), (-1, -1, 2)], ids=str)
def test_reentrant_checkpointing_of_what_is_used_once_still_overlaps(order):
    check(training(hidden=True), lambda: [Blocks(*order)])


@pytest.mark.parametrize(
    ("net", "with_gradient", "why"),
    [
        (Net(), True, "an input that requires a gradient"),
        (Blocks(0, 0), False, "use_reentrant=False"),
    ],
    ids=["an input", "reentrant"],
)
def test_it_is_said_once_and_why(net, with_gradient, why, caplog):
    with caplog.at_level(logging.WARNING, "offload"), optimizer_for(net) as optimizer:
        for step in range(3):
            net(batch(step).requires_grad_(with_gradient)).sum().backward()
            optimizer.step()
        optimizer.checkpoint().result()
    (record,) = caplog.records
    assert "step(), which waits for it" in record.message
    assert why in record.message


class StoppedError(BaseException):
    """As an interrupt is, not an Exception."""


def test_one_that_is_stopped_does_not_hold_those_after_it():
    def stop(*_: object) -> None:
        raise StoppedError

    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        (net,), (optimizer,) = nets, optimizers
        for step in range(STEPS):
            hidden = batch(step).requires_grad_() * 2
            hidden.register_hook(stop)
            with pytest.raises(StoppedError):
                net(hidden).sum().backward()
            yield from [p.grad for p in net.parameters() if p.grad is not None]
            optimizer.zero_grad()
            loss = net(batch(step)).square().mean()
            loss.backward()
            assert_hidden(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    check(loop, lambda: [Net()])
