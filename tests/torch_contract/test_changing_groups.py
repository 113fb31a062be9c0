"""``param_groups`` and models that are changed in the middle of a run, beside plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import MismatchError
from tests.stores.small import make_model, make_optimizer, step


def make() -> torch.nn.Sequential:
    return make_model(5, 7, 3, dtype=torch.float32)


def groups(model: torch.nn.Sequential) -> list[dict[str, object]]:
    first, second = (list(layer.parameters()) for layer in model)
    return [{"params": first, "lr": 1e-2}, {"params": second, "lr": 1e-4}]


def give_and_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def test_a_parameter_taken_out_of_its_group_is_not_stepped() -> None:
    ours, theirs = make(), make()
    reference = torch.optim.AdamW(groups(theirs))
    with make_optimizer(ours, MemoryBackend(), params=groups(ours)) as optimizer:
        for number in range(4):
            if number == 2:
                for one in (optimizer, reference):
                    one.param_groups[0]["params"].pop(0)
            give_and_step(ours, optimizer, number)
            give_and_step(theirs, reference, number)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


Change = Callable[[torch.nn.Sequential, offload.OffloadedOptimizer], object]


def move(_: torch.nn.Module, optimizer: offload.OffloadedOptimizer) -> None:
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))


def replace(model: torch.nn.Sequential, optimizer: offload.OffloadedOptimizer) -> None:
    model[0].weight = torch.nn.Parameter(model[0].weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = model[0].weight


def remove(_: torch.nn.Module, optimizer: offload.OffloadedOptimizer) -> None:
    del optimizer.param_groups[1]


def ask_for_other_state(_: torch.nn.Module, optimizer: offload.OffloadedOptimizer) -> None:
    optimizer.param_groups[1]["amsgrad"] = True


def replace_a_layer(model: torch.nn.Sequential, _: object) -> None:
    model[1] = torch.nn.Linear(7, 3)


def delete_the_first(model: torch.nn.Sequential, _: object) -> None:
    del model[0]


def reshape(model: torch.nn.Sequential, _: object) -> None:
    model[1].bias.data = torch.zeros(2)


def assign(model: torch.nn.Sequential, _: object) -> None:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


@pytest.mark.parametrize(
    ("call", "change", "says"),
    [
        ("step", move, r"'0\.weight' has changed .*: it is in parameter group 1 and was in 0\. "),
        ("step", replace, r"'0\.weight' has been replaced by another object"),
        ("step", remove, "a group cannot be removed"),
        ("step", ask_for_other_state, r"'1\.weight' .* would keep .*'max_exp_avg_sq'.*kept"),
        ("checkpoint", lambda m, _: m.bfloat16(), r"'0\.weight' .*: it is BF16 and was F32\. "),
        ("checkpoint", replace_a_layer, r"'1\.weight' .*any more: its layer was replaced"),
        (
            "checkpoint",
            delete_the_first,
            r"'0\.weight' .*: it is not in model= any more: .* or rem",
        ),
        ("checkpoint", reshape, r"'1\.bias' .*: it has the shape \[2\] and had \[3\]\. .*change t"),
        ("checkpoint", assign, r"were replaced .*assign=True"),
        ("restore", assign, r"were replaced .*assign=True"),
    ],
)
def test_a_change_that_cannot_be_followed_is_refused_in_plain_words(
    call: str, change: Change, says: str
) -> None:
    model = make()
    with make_optimizer(model, MemoryBackend(), params=groups(model)) as optimizer:
        step(optimizer)
        optimizer.checkpoint().result()
        change(model, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(MismatchError, match=says) as error:
            getattr(optimizer, call)()
        assert all(map(torch.equal, before, model.parameters()))
        assert not any(inner in str(error.value) for inner in ("ParameterSpec", "group0"))


def test_a_parameter_that_is_unfrozen_and_was_never_given_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model(3, 3, 3, 3)
    model[1:].requires_grad_(False)
    params = list(model[0].parameters())

    def told() -> list[str]:
        step(optimizer)
        optimizer.checkpoint().result()
        found = [m for m in caplog.messages if "was frozen when the optimizer was made" in m]
        caplog.clear()
        return found

    with make_optimizer(model, MemoryBackend(), params=params) as optimizer:
        assert not told(), "nothing is unfrozen yet"
        model[1].requires_grad_(True)
        (said,) = [*told(), *told()]
        assert said.startswith("'1.weight' (and 1 more): requires gradients now")
        assert "so it is not trained by this optimizer: pass it to add_param_group()" in said
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        assert not told(), "what was given is trained"


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups."""

    def __init__(self, params: object, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["step"])


@pytest.mark.parametrize("back", ["restore", "load_state_dict"])
def test_what_a_class_has_counted_goes_back_with_its_group(back: str) -> None:
    """A state dict of before the first step has no count, and torch replaces the whole group."""
    ours, theirs = make(), make()
    twin, made = Counting(theirs.parameters()), partial(offload.OffloadedOptimizer, Counting)
    with make_optimizer(ours, MemoryBackend(), made) as optimizer:
        optimizer.checkpoint().result()
        before = twin.state_dict()
        weights = {name: value.clone() for name, value in theirs.state_dict().items()}
        for number in range(2):
            give_and_step(ours, optimizer, number)
            give_and_step(theirs, twin, number)
        assert optimizer.param_groups[0]["step"] == 2
        theirs.load_state_dict(weights)
        twin.load_state_dict(before)
        if back == "restore":
            optimizer.restore()
        else:
            ours.load_state_dict(weights)
            optimizer.load_state_dict(before)
        assert "step" not in optimizer.param_groups[0]
        give_and_step(ours, optimizer, 2)
        give_and_step(theirs, twin, 2)
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


class Calling(torch.optim.Adagrad):
    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        super().step()


def test_a_step_that_calls_that_of_its_base_class_is_refused_whatever_was_made_before() -> None:
    made = partial(offload.OffloadedOptimizer, Calling)
    with pytest.raises(offload.UnsupportedOptimizerError, match=r"calls super\(\)\.step\(\)"):
        make_optimizer(make(), MemoryBackend(), made)
