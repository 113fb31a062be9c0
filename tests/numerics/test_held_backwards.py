"""Backwards that nobody means as a step change no parameter, and give plain torch's gradients.

Each loop is run twice: with optimizers whose steps overlap backward, and with torch's own. What it
yields, and every parameter, must have the same bits.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

import offload
from offload.errors import BrokenOptimizerError, OverlapError
from tests.numerics.delays import Disordered
from tests.numerics.pairs import Cut
from tests.numerics.reference import assert_same_bits

Loop = Callable[[Sequence[Any], Sequence[Any]], Iterator[torch.Tensor]]
STEPS = 5


class Net(nn.Module):
    """Three layers."""

    def __init__(self, wide: int = 24, out: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(24, wide)
        self.middle = nn.Linear(wide, wide)
        self.last = nn.Linear(wide, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh()

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(x).tanh())


class Named(Net):
    """Takes its input by name, in something."""

    def forward(self, *, batch: dict[str, list[torch.Tensor]]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch["x"][0])


def batch(step: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(1000 * salt + step))


def optimizer_for(net: nn.Module, number: int = 0) -> offload.OffloadedOptimizer:
    options = Cut(4096, 2, settings={"overlap": "backward"}).options(Disordered(seed=number))
    return offload.AdamW(net.parameters(), lr=0.01, model=net, directory="/store", options=options)


def run(loop: Loop, make: Callable[[], Sequence[nn.Module]], *, plain: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    nets = make()
    optimizers: list[Any] = [
        torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
        if plain
        else optimizer_for(net, number)
        for number, net in enumerate(nets)
    ]
    found = [tensor.detach().clone() for tensor in loop(nets, optimizers)]
    for net in nets:
        found += [p.detach().clone() for p in net.parameters()]
    if not plain:
        for optimizer in optimizers:
            optimizer.checkpoint().result()
            optimizer.close()
    return found


def check(loop: Loop, make: Callable[[], Sequence[nn.Module]]) -> None:
    found, expected = run(loop, make, plain=False), run(loop, make, plain=True)
    for number, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(mine, other, f"tensor {number}")


def is_open(optimizer: Any) -> bool:
    """Return whether a step has begun in backward; torch's own never does."""
    engine = getattr(optimizer, "_engine", None)
    return engine is not None and engine.strategy._running is not None


def copies(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def gan(features: str) -> Loop:
    """The generator's loss reaches the discriminator, by its output or what is in it."""

    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        generator, critic = nets
        optimizer_g, optimizer_d = optimizers
        seen: list[torch.Tensor] = []
        critic.middle.register_forward_hook(lambda _m, _a, output: seen.append(output))
        for step in range(STEPS):
            fake = generator(batch(step))
            optimizer_d.zero_grad()  # of what the generator's loss has left
            loss = critic(batch(step, 1)).mean() - critic(fake.detach()).mean()
            loss.backward()
            assert isinstance(optimizer_d, torch.optim.AdamW) or is_open(optimizer_d)
            optimizer_d.step()
            optimizer_d.zero_grad()
            yield loss
            optimizer_g.zero_grad()
            before = copies(critic)
            seen.clear()
            loss = critic(fake).square().mean()
            if features == "only":
                loss = seen[0].square().mean()
            elif features == "too":
                loss = loss + seen[0].square().mean()
            loss.backward()
            assert not is_open(optimizer_d)
            yield from [p.grad for p in critic.parameters() if p.grad is not None]
            optimizer_g.step()
            assert all(map(torch.equal, before, critic.parameters()))
            yield loss

    return loop


@pytest.mark.parametrize("features", ["none", "too", "only"])
def test_a_generators_loss_leaves_the_discriminator_as_it_is(features):
    check(gan(features), lambda: [Net(), Net(40, 1)])


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


def test_a_backward_for_the_gradient_of_an_input():
    check(saliency, lambda: [Net()])


def by_name(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    for step in range(STEPS):
        x = batch(step).requires_grad_()
        nets[0](batch={"x": [x]}).square().mean().backward()
        assert not is_open(optimizers[0])
        optimizers[0].step()
        optimizers[0].zero_grad()
        yield x.grad


def test_inputs_that_are_in_something_and_given_by_name():
    check(by_name, lambda: [Named()])


def accumulate(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
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


def test_what_is_left_in_grad_is_applied_by_the_next_step():
    check(accumulate, lambda: [Net()])


def penalty(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    """A gradient of an input is part of the loss."""
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


def test_a_penalty_on_the_gradient_of_an_input():
    check(penalty, lambda: [Net()])


def pipeline(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    first, second = nets
    for step in range(STEPS):
        loss = second(first(batch(step))).square().mean()
        loss.backward()
        if not isinstance(optimizers[0], torch.optim.AdamW):
            assert is_open(optimizers[0])
        assert not is_open(optimizers[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


def test_two_optimizers_one_behind_the_other():
    check(pipeline, lambda: [Net(), Net()])


class Blocks(nn.Module):
    """Runs blocks by numbers, under reentrant checkpointing unless they are negative."""

    def __init__(self, *order: int, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 24)
        self.blocks = nn.ModuleList(Net() for _ in range(3))
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
        return x


def train(num_calls: int, *, is_hidden: bool) -> Loop:
    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        (net,), (optimizer,) = nets, optimizers
        for step in range(STEPS):
            loss = sum(net(batch(step, call)).square().mean() for call in range(num_calls))
            loss.backward()  # type: ignore[union-attr]
            if not isinstance(optimizer, torch.optim.AdamW):
                assert is_open(optimizer) == is_hidden
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    return loop


@pytest.mark.parametrize(
    ("order", "tied", "num_calls"),
    [
        ((0, 1, 0), False, 1),
        ((-1, 2, 1), False, 1),
        ((2, -2), False, 1),
        ((1, 2), True, 1),
        ((0, 1), False, 2),
    ],
    ids=["twice", "and-elsewhere", "elsewhere-later", "tied", "two-calls"],
)
def test_reentrant_checkpointing_of_what_is_used_twice(order, tied, num_calls):
    check(train(num_calls, is_hidden=False), lambda: [Blocks(*order, tied=tied)])


@pytest.mark.parametrize("twice", [(2, -2), (-2, 2), (2, 2)], ids=str)
def test_reentrant_checkpointing_of_what_is_used_twice_in_some_steps_only(twice):
    """Each use by itself has been seen before, and there was nothing to be said against it."""

    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        (net,), (optimizer,) = nets, optimizers
        for step, order in enumerate([(1, 2), (1, -2), (1, *twice), (1, -2), (1, *twice), (1, 2)]):
            net.order = order
            loss = net(batch(step)).square().mean()
            loss.backward()
            if not isinstance(optimizer, torch.optim.AdamW):
                assert is_open(optimizer) == (len(order) == 2)
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    check(loop, lambda: [Blocks()])


@pytest.mark.parametrize("order", [(0, 1, 2), (0, -1, 2), (-1, -1, 2)], ids=str)
def test_reentrant_checkpointing_of_what_is_used_once_still_overlaps(order):
    check(train(1, is_hidden=True), lambda: [Blocks(*order)])


def test_a_generators_loss_through_reentrant_checkpoints():
    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        generator, critic = nets
        for step in range(STEPS):
            fake = generator(batch(step))
            optimizers[1].zero_grad()
            critic(fake.detach()).mean().backward()
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            critic(fake).square().mean().backward()
            assert not is_open(optimizers[1])
            optimizers[0].step()
            yield from [p.grad for p in critic.parameters() if p.grad is not None]

    check(loop, lambda: [Net(), Blocks(0, 1, 2)])


class Distilled(nn.Module):
    """Compares itself with itself: the target is computed without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.net(x)
        return self.net(x * 0.5) - target


def parts(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Two modules of one model are called from outside, one after the other."""
    (net,), (optimizer,) = nets, optimizers
    for step in range(STEPS):
        hidden = net.first(batch(step)).tanh()
        loss = net.last(net.middle(hidden).tanh()).square().mean()
        loss.backward()
        assert isinstance(optimizer, torch.optim.AdamW) or is_open(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize(
    ("loop", "kind"),
    [(parts, Net), (train(1, is_hidden=True), Distilled), (train(2, is_hidden=True), Distilled)],
    ids=["parts", "distilled", "distilled-twice"],
)
def test_what_stays_hidden(loop, kind):
    check(loop, lambda: [kind()])


def test_it_is_said_once_and_why(caplog):
    net = Net()
    with caplog.at_level(logging.WARNING, "offload"), optimizer_for(net) as optimizer:
        for step in range(3):
            net(batch(step).requires_grad_()).sum().backward()
            optimizer.step()
        optimizer.checkpoint().result()
    (record,) = caplog.records
    assert "step(), which waits for it" in record.message
    assert "an input that requires a gradient" in record.message
    caplog.clear()
    net = Blocks(0, 0)
    with caplog.at_level(logging.WARNING, "offload"), optimizer_for(net) as optimizer:
        for step in range(3):
            net(batch(step)).sum().backward()
            optimizer.step()
        optimizer.checkpoint().result()
    (record,) = caplog.records
    assert "use_reentrant=False" in record.message


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_in_a_compiled_model_it_is_refused_and_not_trained_on():
    """No hook runs in it: what tells is that it reads parameters that have been stepped."""
    generator, critic = Net(), Net(40, 1)
    critic.compile(backend="aot_eager")
    optimizer = optimizer_for(critic)

    def step() -> None:
        fake = generator(batch(0))
        optimizer.zero_grad()
        critic(fake.detach()).mean().backward()
        optimizer.step()
        critic(fake).square().mean().backward()

    step()
    with pytest.raises(OverlapError, match=r"was used between backward\(\) and step\(\)"):
        step()
    with pytest.raises(OverlapError, match=r"was cleared or replaced"):
        optimizer.step()
    with pytest.raises(BrokenOptimizerError):
        optimizer.step()
    optimizer.close()


class BackwardStoppedError(RuntimeError):
    pass


def test_one_that_fails_does_not_hold_those_after_it():
    def stop(_: torch.Tensor) -> None:
        raise BackwardStoppedError

    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        (net,), (optimizer,) = nets, optimizers
        for step in range(STEPS):
            x = batch(step).requires_grad_()
            hidden = x * 2
            hidden.register_hook(stop)
            with pytest.raises(BackwardStoppedError):
                net(hidden).sum().backward()
            yield from [p.grad for p in net.parameters() if p.grad is not None]
            optimizer.zero_grad()
            net(batch(step)).square().mean().backward()
            assert isinstance(optimizer, torch.optim.AdamW) or is_open(optimizer)
            optimizer.step()
            optimizer.zero_grad()

    check(loop, lambda: [Net()])


class CallStoppedError(BaseException):
    """As an interrupt is, not an Exception."""


def test_a_call_that_was_interrupted_does_not_hold_those_after_it():
    def loop(nets: Sequence[Any], optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
        (net,), (optimizer,) = nets, optimizers
        stops = [True]

        def stop(*_: object) -> None:
            if stops[0]:
                raise CallStoppedError

        net.middle.register_forward_hook(stop)
        for step in range(STEPS):
            stops[0] = True
            with pytest.raises(CallStoppedError):
                net(batch(step).requires_grad_())
            stops[0] = False
            loss = net(batch(step)).square().mean()
            loss.backward()
            assert isinstance(optimizer, torch.optim.AdamW) or is_open(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    check(loop, lambda: [Net()])


def test_checkpoints_and_evaluation_after_a_held_backward():
    net = Net()
    with optimizer_for(net) as optimizer:
        net(batch(0)).sum().backward()
        optimizer.step()
        net(batch(0).requires_grad_()).sum().backward()
        gradients = [p.grad.clone() for p in net.parameters()]
        net.state_dict()
        with torch.no_grad():
            net(batch(1))
        assert optimizer.checkpoint().result().step == 1
        optimizer.synchronize()
        assert all(map(torch.equal, gradients, [p.grad for p in net.parameters()]))
        optimizer.step()
        optimizer.checkpoint().result()


def test_a_copy_of_the_model_and_one_whose_optimizer_is_closed_are_not_watched():
    net = Net()
    optimizer = optimizer_for(net)
    other = copy.deepcopy(net)
    for number, model in enumerate((other, net)):
        if number:
            optimizer.close()
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
        for salt in itertools.repeat(number, 2):
            model(batch(0, salt)).sum().backward()
        assert model.first.weight.grad is not None
    optimizer.close()


def test_after_a_failed_backward_both_optimizers_of_one_model_can_be_restored():
    """While the parameters of one are half stepped, the other may replace them all."""

    class StoppedError(Exception):
        pass

    def stop(_gradient: torch.Tensor) -> None:
        raise StoppedError

    torch.manual_seed(3)
    net = Net()
    plain = copy.deepcopy(net)
    halves = [[*net.middle.parameters(), *net.last.parameters()], [*net.first.parameters()]]
    optimizers = [
        offload.AdamW(
            half,
            lr=0.01,
            model=net,
            directory="/store",
            options=Cut(4096, 2, settings={"overlap": "backward"}).options(Disordered(seed=number)),
        )
        for number, half in enumerate(halves)
    ]
    expected = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)

    def step(number: int, model: nn.Module, stepped: Sequence[torch.optim.Optimizer]) -> None:
        model(batch(number)).square().mean().backward()
        for optimizer in stepped:
            optimizer.step()
            optimizer.zero_grad()

    for number in range(2):
        step(number, net, optimizers)
        step(number, plain, [expected])
    for optimizer in optimizers:
        optimizer.checkpoint().result()
    hook = net.first.weight.register_hook(stop)
    with pytest.raises(StoppedError):
        step(2, net, optimizers)
    hook.remove()
    assert any(map(is_open, optimizers))
    with pytest.raises(OverlapError, match="half stepped"):
        net.state_dict()
    for optimizer in optimizers:
        optimizer.restore()
        optimizer.zero_grad()
    for number in range(2, STEPS):
        step(number, net, optimizers)
        step(number, plain, [expected])
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert_same_bits(mine, other, "a parameter")
    for optimizer in optimizers:
        optimizer.checkpoint().result()
        optimizer.close()
