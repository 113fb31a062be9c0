"""``param_groups`` that a user or a library changes in the middle of a run, beside plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import MismatchError
from tests.stores.small import STORE, make_model, make_optimizer


def pair() -> tuple[
    torch.nn.Module, offload.OffloadedOptimizer, torch.nn.Module, torch.optim.AdamW
]:
    """An offloaded FP32 model of two groups, and its twin with plain torch."""
    ours, theirs = (make_model(5, 7, 3, dtype=torch.float32) for _ in range(2))
    optimizer = make_optimizer(ours, MemoryBackend(), params=groups(ours))
    return ours, optimizer, theirs, torch.optim.AdamW(groups(theirs))


def groups(model: torch.nn.Module) -> list[dict[str, object]]:
    return [
        {"params": list(model[0].parameters()), "lr": 1e-2},
        {"params": list(model[1].parameters()), "lr": 1e-4},
    ]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def test_a_parameter_taken_out_of_its_group_is_not_stepped() -> None:
    ours, optimizer, theirs, reference = pair()
    for number in range(4):
        if number == 2:
            optimizer.param_groups[0]["params"].pop(0)
            reference.param_groups[0]["params"].pop(0)
        step(ours, optimizer, number)
        step(theirs, reference, number)
    for ours_p, theirs_p in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours_p, theirs_p)
    optimizer.close()


def test_a_parameter_moved_to_another_group_is_refused() -> None:
    ours, optimizer, _, _ = pair()
    step(ours, optimizer, 0)
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))
    before = ours[0].weight.detach().clone()
    says = r"'0\.weight' has changed .*: it is in parameter group 1 and was in 0\. "
    with pytest.raises(MismatchError, match=says):
        step(ours, optimizer, 1)
    assert torch.equal(ours[0].weight, before)
    optimizer.close()


def test_a_removed_group_is_refused() -> None:
    ours, optimizer, _, _ = pair()
    step(ours, optimizer, 0)
    del optimizer.param_groups[1]
    with pytest.raises(MismatchError, match="a group cannot be removed"):
        step(ours, optimizer, 1)
    optimizer.close()


def test_a_parameter_replaced_by_another_object_is_refused() -> None:
    ours, optimizer, _, _ = pair()
    step(ours, optimizer, 0)
    replacement = torch.nn.Parameter(ours[0].weight.detach().clone())
    ours[0].weight = replacement
    optimizer.param_groups[0]["params"][0] = replacement
    with pytest.raises(MismatchError, match=r"'0\.weight' has been replaced by another object"):
        step(ours, optimizer, 1)
    optimizer.close()


def test_a_parameter_that_is_unfrozen_and_was_never_given_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    for layer in model[1:]:
        layer.requires_grad_(False)
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True, chunk_bytes=4096)
    optimizer = offload.AdamW(
        list(model[0].parameters()), directory=STORE, model=model, options=options
    )

    def said_of() -> list[str]:
        told = [m for m in caplog.messages if "was frozen when the optimizer was made" in m]
        caplog.clear()
        return told

    step(model, optimizer, 0)
    optimizer.checkpoint().result()
    assert not said_of(), "nothing is unfrozen yet"
    model[1].requires_grad_(True)
    for number in (1, 2):
        step(model, optimizer, number)
        optimizer.checkpoint().result()
    (said,) = said_of()
    assert said.startswith("'1.weight' (and 1 more): requires gradients now")
    assert "so it is not trained by this optimizer: pass it to add_param_group()" in said
    model[2].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    step(model, optimizer, 3)
    optimizer.checkpoint().result()
    assert not said_of(), "what was given is trained"
    optimizer.close()


def test_a_parameter_of_another_optimizer_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Two optimizers of one model, as of a GAN: each is made while everything is trainable."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True, chunk_bytes=4096)
    with offload.AdamW(
        list(model[0].parameters()), directory=STORE, model=model, options=options
    ) as optimizer:
        for trains in (True, False, True):
            model[1].requires_grad_(trains)
            step(model, optimizer, 0)
            optimizer.checkpoint().result()
    assert not [m for m in caplog.messages if "frozen" in m]


@pytest.mark.parametrize("is_passed", [False, True], ids=["no-model", "model"])
def test_what_checkpoints_lack_without_a_model_is_told_once(
    is_passed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="offload")
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True, chunk_bytes=4096)
    with offload.AdamW(
        model.parameters(), directory=STORE, model=model if is_passed else None, options=options
    ) as optimizer:
        for number in range(3):
            step(model, optimizer, number)
            stored = optimizer.checkpoint().result().tensors
    has_buffers = any("running_mean" in tensor.name for tensor in stored)
    assert has_buffers == is_passed
    told = [m for m in caplog.messages if "because model= was left out" in m]
    assert len(told) == (0 if is_passed else 1)


def replace_a_layer(model: torch.nn.Module) -> None:
    model[1] = torch.nn.Linear(7, 3)


def delete_the_first(model: torch.nn.Module) -> None:
    del model[0]


def reshape(model: torch.nn.Module) -> None:
    model[1].bias.data = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (torch.nn.Module.bfloat16, r"'0\.weight' .*: it is BF16 and was F32\. "),
        (replace_a_layer, r"'1\.weight' .*: it is not in model= any more: its layer was replaced"),
        (delete_the_first, r"'0\.weight' .*: it is not in model= any more: .* or removed"),
        (reshape, r"'1\.bias' .*: it has the shape \[2\] and had \[3\]\. "),
    ],
)
def test_a_model_that_is_changed_in_mid_run_is_refused_in_plain_words(
    change: Callable[[torch.nn.Module], object], says: str
) -> None:
    ours, optimizer, _, _ = pair()
    step(ours, optimizer, 0)
    optimizer.checkpoint().result()
    change(ours)
    with pytest.raises(MismatchError, match=says) as error:
        optimizer.checkpoint()
    assert "has changed since the optimizer was made" in str(error.value)
    assert "change the model first, and construct the optimizer after that" in str(error.value)
    assert "ParameterSpec" not in str(error.value)
    assert "group0" not in str(error.value)
    optimizer.close()


def test_settings_that_need_other_state_are_refused_in_plain_words() -> None:
    ours, optimizer, _, _ = pair()
    step(ours, optimizer, 0)
    optimizer.param_groups[1]["amsgrad"] = True
    with pytest.raises(MismatchError, match=r"'1\.weight' .* would keep .*'max_exp_avg_sq'.*kept"):
        step(ours, optimizer, 1)
    optimizer.close()


def test_parameters_that_were_all_replaced_are_told_from_a_copy_of_the_model() -> None:
    ours, optimizer, _, _ = pair()
    step(ours, optimizer, 0)
    optimizer.checkpoint().result()
    values = {name: value.clone() for name, value in ours.state_dict().items()}
    ours.load_state_dict(values, assign=True)
    for call in (optimizer.checkpoint, optimizer.restore):
        with pytest.raises(MismatchError, match=r"were replaced .*assign=True") as error:
            call()
        assert "copy of it" not in str(error.value)
    optimizer.close()


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
    ours, theirs = (make_model(5, 7, 3, dtype=torch.float32) for _ in range(2))
    twin = Counting(theirs.parameters())
    optimizer = make_optimizer(ours, MemoryBackend(), optimizer_class=of_class(Counting))
    first, before = optimizer.checkpoint().result(), twin.state_dict()
    weights = {name: value.clone() for name, value in theirs.state_dict().items()}
    for number in range(2):
        step(ours, optimizer, number)
        step(theirs, twin, number)
    assert optimizer.param_groups[0]["step"] == 2
    theirs.load_state_dict(weights)
    twin.load_state_dict(before)
    if back == "restore":
        assert optimizer.restore().step == first.step == 0
    else:
        ours.load_state_dict(weights)
        optimizer.load_state_dict(before)
    assert "step" not in optimizer.param_groups[0]
    step(ours, optimizer, 2)
    step(theirs, twin, 2)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    optimizer.close()


def test_a_step_that_calls_that_of_its_base_class_is_refused_whatever_was_made_before() -> None:
    class Calling(torch.optim.Adagrad):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            super().step()

    with pytest.raises(offload.UnsupportedOptimizerError, match=r"calls super\(\)\.step\(\)"):
        make_optimizer(make_model(3, 2), MemoryBackend(), optimizer_class=of_class(Calling))


def of_class(one: type[torch.optim.Optimizer]) -> Callable[..., offload.OffloadedOptimizer]:
    return partial(offload.OffloadedOptimizer, one)
