"""What only a step beside the forward allows: complete gradients, and any call of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.eventually import TIMEOUT_S
from tests.numerics.reference import assert_same_bits, assert_same_state, read_state
from tests.numerics.twins import Attention, Batched, Early, Half, Twins


@pytest.mark.parametrize("model", [Batched, Half])
@pytest.mark.parametrize("then", ["goes-on", "resumes"])
def test_a_checkpoint_after_every_step(model, then):
    """It is asked for while the step is running, and is of the moment at which it was."""
    twins = Twins(model)
    for step in range(6):
        twins.step(step)
        train_state = {"step": [step]}
        handle = twins.optimizer.checkpoint(train_state)
        train_state["step"].append(-1)
        expected = copy.deepcopy(twins.expected.state_dict())
        if step % 3 != 2:
            with torch.no_grad():  # the next forward: it changes BatchNorm's buffers
                twins.loss(twins.live, 100), twins.loss(twins.expected, 100)
        found = handle.result(TIMEOUT_S)
        assert found.step == handle.step == step + 1
        assert found.train_state == {"step": [step]}
        assert found.verify().ok
        stored = read_state(found.path, twins.backend)
        for name, tensor in stored.model.items():
            assert_same_bits(tensor, expected[name], name)
        names = {n: p for n, p in twins.expected.named_parameters() if p.requires_grad}
        assert_same_state(stored, twins.plain, names)
        if then == "resumes":
            assert twins.resume().step == step + 1
            twins.expected.load_state_dict(expected)
            twins.assert_same()
    twins.optimizer.close()


def test_accumulation_and_clipping():
    twins = Twins(Half)
    for step in range(8):
        for part in range(3):
            losses = [twins.loss(m, 10 * step + part) / 3 for m in twins.both()]
            assert_same_bits(losses[0], losses[1], "loss")
            for loss in losses:
                loss.backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in twins.both()]
        assert_same_bits(norms[0], norms[1], "norm")
        twins.optimizer.step()
        twins.plain.step()
        twins.expected.zero_grad()
        if step % 2:
            twins.optimizer.zero_grad(set_to_none=step % 4 == 1)  # there is nothing to zero
    twins.assert_same_state()


def test_a_grad_scaler_that_skips_steps():
    twins = Twins(Batched)
    plain = torch.optim.AdamW(twins.expected.parameters(), lr=0.01)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4) for _ in "ab"]
    for step in range(12):
        for model, stepped, scaler in zip(
            twins.both(), (twins.optimizer, plain), scalers, strict=True
        ):
            stepped.zero_grad()
            loss = twins.loss(model, step) * (float("inf") if step % 5 == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(stepped)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(stepped)
            scaler.update()
        assert scalers[0].state_dict() == scalers[1].state_dict()
    twins.assert_same()
    assert twins.optimizer.num_steps == 12 - 2


def test_closures_and_evaluation_between_steps():
    twins = Twins(Attention)
    plain = torch.optim.AdamW(twins.expected.parameters(), lr=0.01)

    def closure(model: nn.Module, step: int) -> Callable[[], torch.Tensor]:
        def evaluate() -> torch.Tensor:
            model.zero_grad()
            loss = twins.loss(model, step)
            loss.backward()
            return loss

        return evaluate

    for step in range(8):
        losses = [
            twins.optimizer.step(closure(twins.live, step)),
            plain.step(closure(twins.expected, step)),
        ]
        assert_same_bits(losses[0], losses[1], "loss")
        if step % 2:
            with torch.no_grad():
                found = [twins.loss(m, 99) for m in twins.both()]
            assert_same_bits(found[0], found[1], "evaluation")
    twins.assert_same()


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


def parameters_only(model: Early, x: torch.Tensor) -> torch.Tensor:
    """Nobody could wait, so that the step itself does."""
    return x @ model.first.weight @ model.second.weight


CALLS = {
    "only parts of the model": (Outside, only_parts),
    "copies made before the forward": (Batched, upcast_first),
    "copies of what is used early": (Early, upcast_first),
    "parameters without the model": (Early, parameters_only),
}


@pytest.mark.parametrize(("model", "call"), CALLS.values(), ids=CALLS)
def test_other_ways_to_use_a_model(model, call):
    twins = Twins(model, num_steps=3 if call is parameters_only else 0)
    twins.loss = lambda model, step: call(model, twins.batch(step)).square().mean()
    for step in range(3, 11):
        twins.step(step)
    twins.assert_same_state()
