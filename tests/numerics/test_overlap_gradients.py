"""A step beside the forward applies the gradients of the moment at which it was asked for.

The oracle is torch's own optimizer, which has applied them when its step returns. Here a step is
held back until somebody has written into the gradients that it was given.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.delays import Late
from tests.numerics.twins import LAST, Twins, last

Spoil = Callable[[], object]
NUM_BYTES = 32 * 32 * 4
"""Of one gradient."""


def gradient(model: nn.Module) -> torch.Tensor:
    found = last(model).grad
    assert found is not None
    return found


def in_a_list(model: nn.Module) -> Spoil:
    kept = [p.grad for p in model.parameters()]
    return lambda: torch._foreach_zero_(kept)


def by_a_weak_reference(model: nn.Module) -> Spoil:
    reference = weakref.ref(gradient(model))
    return lambda: (kept := reference()) is not None and kept.zero_()


def in_a_flat_buffer(model: nn.Module) -> Spoil:
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    give_views(model, flat)
    return flat.zero_


def give_views(model: nn.Module, flat: torch.Tensor) -> None:
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()


def in_numpys_memory(model: nn.Module) -> Spoil:
    array = gradient(model).numpy().copy()
    last(model).grad = torch.from_numpy(array)
    return lambda: array.fill(0)


def in_shared_memory(model: nn.Module) -> Spoil:
    """Another mapping of which is as another process has it."""
    shared = gradient(model).clone().share_memory_()
    handle = shared.untyped_storage()._share_filename_cpu_()
    last(model).grad = shared
    other = torch.UntypedStorage._new_shared_filename_cpu(*handle)
    return lambda: other.fill_(0)


def of_two_that_are_trained(model: Any) -> Spoil:
    model.layers[0].weight.grad = kept = gradient(model)
    return kept.zero_


HOLDERS: dict[str, Callable[[nn.Module], Spoil]] = {
    "the gradient": lambda model: gradient(model).zero_,
    "a list": in_a_list,
    "a row": lambda model: gradient(model)[3].zero_,
    "storage": lambda model: partial(gradient(model).untyped_storage().fill_, 0),
    "NumPy": lambda model: partial(gradient(model).detach().numpy().fill, 0),
    "weak reference": by_a_weak_reference,
    "flat buffer": in_a_flat_buffer,
    "made of NumPy": in_numpys_memory,
    "shared memory": in_shared_memory,
    "another trained parameter": of_two_that_are_trained,
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_who_writes_into_a_gradient_after_the_step_does_not_change_it(run, hold):
    for step in range(2, 5):
        run.backward(step)
        spoil, _ = hold(run.live), hold(run.expected)
        run.optimizer.synchronize()  # nothing is read ahead
        run.backend.hold(LAST)
        run.optimizer.step()
        run.plain.step()
        assert LAST not in run.backend.ended
        spoil()
        run.backend.release()
        run.assert_same()
    stats = run.optimizer.stats()
    assert NUM_BYTES <= stats.copied_gradient_bytes <= stats.moved_gradient_bytes


def test_a_buffer_for_the_gradients_of_every_step(run):
    """It is cleared for the next batch while the step may still be running."""
    buffers = [torch.zeros(sum(p.numel() for p in run.live.parameters())) for _ in range(2)]
    for step in range(2, 8):
        for flat, model in zip(buffers, run.both(), strict=True):
            flat.zero_()
            give_views(model, flat)
        run.backend.release()  # the step before, of which nothing has been waited for
        for model in run.both():
            run.loss(model, step).backward()
        run.backend.hold(LAST)
        run.optimizer.step()
        run.plain.step()
    run.backend.release()
    run.assert_same()


def test_a_buffer_for_the_gradients_of_every_step_beside_the_backward():
    """There the step has ended when it returns, so that gradients are copied by nobody."""
    twins = Twins(overlap="backward", backend=Late())
    for step in range(4):
        for model, owner in twins.sides():
            flat = torch.zeros(sum(p.numel() for p in model.parameters()))
            give_views(model, flat)
            twins.loss(model, step).backward()
            owner.step()
            flat.zero_()
    twins.assert_same()
    assert twins.optimizer.stats().copied_gradient_bytes == 0
    twins.optimizer.close()


Loss = Callable[[int], torch.Tensor]


def accumulated(_: nn.Module, loss: Loss) -> None:
    for batch in range(3):
        loss(batch).backward()


def clipped_and_logged(model: nn.Module, loss: Loss) -> None:
    loss(0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert all(p.grad is not None and p.grad.norm().item() >= 0 for p in model.parameters())


def hooked(model: nn.Module, loss: Loss) -> None:
    handles = [p.register_hook(lambda g: g * 2) for p in model.parameters()]
    handles += [p.register_post_accumulate_grad_hook(lambda _: None) for p in model.parameters()]
    loss(0).backward()
    for handle in handles:
        handle.remove()


def graph_retained(_: nn.Module, loss: Loss) -> None:
    value = loss(0)
    value.backward(retain_graph=True)
    value.backward()


def joined(model: nn.Module, _: Loss) -> None:
    """The gradients are views of one memory, and nobody else has a part of it."""
    torch.cat(list(model.parameters())).square().mean().backward()


@pytest.mark.parametrize(
    ("usual", "to_none"),
    [
        (accumulated, True),
        (clipped_and_logged, False),
        (hooked, True),
        (graph_retained, False),
        (joined, True),
    ],
)
def test_gradients_that_nobody_else_has_are_not_copied(run, usual, to_none):
    for step in range(3):
        run.optimizer.zero_grad(set_to_none=to_none)
        for model in run.both():
            model.zero_grad(set_to_none=to_none)
            usual(model, lambda batch, model=model, step=step: run.loss(model, 10 * step + batch))
        run.optimizer.step()
        run.plain.step()
    run.assert_same()
    assert run.optimizer.stats().copied_gradient_bytes == 0
