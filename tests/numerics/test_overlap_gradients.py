"""A step beside the forward applies the gradients of the moment at which it was asked for.

The oracle is torch's own optimizer, which has applied them when its step returns. Here a step is
held back until somebody has written into the gradients that it was given.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import offload
from offload.overlap import forward
from tests.numerics.delays import Late
from tests.numerics.reference import assert_same_parameters
from tests.numerics.test_overlap_forward_waits import LAST, Layers, run

__all__ = ["run"]  # a fixture

Spoil = Callable[[], object]
NUM_BYTES = 32 * 32 * 4
"""Of one gradient."""


def last(model: nn.Module) -> nn.Parameter:
    assert isinstance(model, Layers)
    return model.layers[LAST].weight


def gradient(model: nn.Module) -> torch.Tensor:
    found = last(model).grad
    assert found is not None
    return found


def itself(model: nn.Module) -> Spoil:
    kept = gradient(model)
    return lambda: kept.zero_()


def in_a_list(model: nn.Module) -> Spoil:
    kept = [p.grad for p in model.parameters()]
    return lambda: torch._foreach_zero_(kept)


def kept_by_a_hook(model: nn.Module) -> Spoil:
    """Which is called by a second backward that adds to the gradients."""
    kept: list[torch.Tensor] = []
    p = last(model)
    handle = p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    (p * 0).sum().backward()
    handle.remove()
    return lambda: kept[0].zero_()


def as_data(model: nn.Module) -> Spoil:
    kept = gradient(model).data
    return lambda: kept.zero_()


def a_row(model: nn.Module) -> Spoil:
    kept = gradient(model)[3]
    return lambda: kept.zero_()


def its_storage(model: nn.Module) -> Spoil:
    kept = gradient(model).untyped_storage()
    return lambda: kept.fill_(0)


def as_numpy(model: nn.Module) -> Spoil:
    kept = gradient(model).detach().numpy()
    return lambda: kept.fill(0)


def as_dlpack(model: nn.Module) -> Spoil:
    kept = torch.from_dlpack(gradient(model))
    return lambda: kept.zero_()


def by_a_weak_reference(model: nn.Module) -> Spoil:
    reference = weakref.ref(gradient(model))

    def spoil() -> None:
        kept = reference()
        if kept is not None:
            kept.zero_()

    return spoil


def in_a_flat_buffer(model: nn.Module) -> Spoil:
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    return lambda: flat.zero_()


def in_numpys_memory(model: nn.Module) -> Spoil:
    array = gradient(model).numpy().copy()
    last(model).grad = torch.from_numpy(array)
    return lambda: array.fill(0)


def in_memory_of_pythons(model: nn.Module) -> Spoil:
    array = (ctypes.c_float * (32 * 32))(*gradient(model).flatten().tolist())
    last(model).grad = torch.frombuffer(array, dtype=torch.float32).view(32, 32)
    return lambda: ctypes.memset(array, 0, NUM_BYTES)


def in_shared_memory(model: nn.Module) -> Spoil:
    """Another mapping of which is as another process has it."""
    shared = gradient(model).clone().share_memory_()
    storage = shared.untyped_storage()
    handle = storage._share_filename_cpu_()
    last(model).grad = shared
    del shared, storage
    other = torch.UntypedStorage._new_shared_filename_cpu(*handle)
    return lambda: other.fill_(0)


def of_another_parameter(model: nn.Module) -> Spoil:
    """One tensor is the gradient of two, and stays that of one which is not trained any more."""
    assert isinstance(model, Layers)
    other = nn.Parameter(torch.zeros(32, 32))
    other.grad = last(model).grad
    return lambda: other.grad.zero_()


def expanded(model: nn.Module) -> Spoil:
    row = gradient(model)[0].clone()
    last(model).grad = row.expand(32, 32)
    return lambda: row.zero_()


HOLDERS: dict[str, Callable[[nn.Module], Spoil]] = {
    "the gradient": itself,
    "a list": in_a_list,
    "a hook": kept_by_a_hook,
    "data": as_data,
    "a row": a_row,
    "storage": its_storage,
    "NumPy": as_numpy,
    "DLPack": as_dlpack,
    "weak reference": by_a_weak_reference,
    "flat buffer": in_a_flat_buffer,
    "made of NumPy": in_numpys_memory,
    "made of a buffer": in_memory_of_pythons,
    "shared memory": in_shared_memory,
    "another parameter": of_another_parameter,
    "expanded": expanded,
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


def test_one_gradient_of_two_parameters(run):
    run.backward(2)
    for model in (run.live, run.expected):
        model.layers[0].weight.grad = last(model).grad
    kept = gradient(run.live)
    run.backend.hold(LAST)
    run.optimizer.step()
    run.plain.step()
    kept.zero_()
    run.backend.release()
    run.assert_same()


def test_a_buffer_for_the_gradients_of_every_step(run):
    """It is cleared for the next batch while the step may still be running."""
    buffers = [torch.zeros(sum(p.numel() for p in run.live.parameters())) for _ in range(2)]
    for step in range(2, 8):
        for flat, model in zip(buffers, (run.live, run.expected), strict=True):
            flat.zero_()
            at = 0
            for p in model.parameters():
                p.grad = flat[at : at + p.numel()].view(p.shape)
                at += p.numel()
        run.backend.release()  # the step before, of which nothing has been waited for
        for model in (run.live, run.expected):
            run.loss(model, step).backward()
        run.backend.hold(LAST)
        run.optimizer.step()
        run.plain.step()
    run.backend.release()
    run.assert_same()


def test_a_buffer_for_the_gradients_of_every_step_beside_the_backward():
    """There the step has ended when it returns, so that gradients are copied by nobody."""
    models = [Layers(), Layers()]
    options = offload.Options(
        backend=Late(),
        overlap="backward",
        chunk_bytes=4096,
        ring_chunks=2,
        allow_volatile=True,
    )
    optimizer = offload.AdamW(
        models[0].parameters(), lr=0.01, model=models[0], directory="/store", options=options
    )
    plain = torch.optim.AdamW(models[1].parameters(), lr=0.01)
    for step in range(4):
        for model, steps in zip(models, (optimizer, plain), strict=True):
            flat, at = torch.zeros(sum(p.numel() for p in model.parameters())), 0
            for p in model.parameters():
                p.grad = flat[at : at + p.numel()].view(p.shape)
                at += p.numel()
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            steps.step()
            flat.zero_()
    assert_same_parameters(models[0].named_parameters(), models[1].named_parameters())
    assert optimizer.stats().copied_gradient_bytes == 0
    optimizer.close()


def backward(model: nn.Module, loss: Callable[[int], torch.Tensor]) -> None:
    loss(0).backward()


def accumulated(model: nn.Module, loss: Callable[[int], torch.Tensor]) -> None:
    for batch in range(3):
        loss(batch).backward()


def clipped(model: nn.Module, loss: Callable[[int], torch.Tensor]) -> None:
    loss(0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def logged(model: nn.Module, loss: Callable[[int], torch.Tensor]) -> None:
    loss(0).backward()
    assert all(p.grad is not None and p.grad.norm().item() >= 0 for p in model.parameters())


def hooked(model: nn.Module, loss: Callable[[int], torch.Tensor]) -> None:
    handles = [p.register_hook(lambda g: g * 2) for p in model.parameters()]
    handles += [p.register_post_accumulate_grad_hook(lambda _: None) for p in model.parameters()]
    loss(0).backward()
    for handle in handles:
        handle.remove()


def graph_retained(model: nn.Module, loss: Callable[[int], torch.Tensor]) -> None:
    value = loss(0)
    value.backward(retain_graph=True)
    value.backward()


def joined(model: nn.Module, loss: Callable[[int], torch.Tensor]) -> None:
    """The gradients are views of one memory, and nobody else has a part of it."""
    everything = torch.cat(list(model.parameters()))
    everything.square().mean().backward()


USUAL = [backward, accumulated, clipped, logged, hooked, graph_retained, joined]


@pytest.mark.parametrize("usual", USUAL)
def test_gradients_that_nobody_else_has_are_not_copied(run, usual):
    for step in range(3):
        for model in (run.live, run.expected):
            model.zero_grad()
            usual(model, lambda batch, model=model, step=step: run.loss(model, 10 * step + batch))
        run.optimizer.step()
        run.plain.step()
    run.assert_same()
    assert run.optimizer.stats().copied_gradient_bytes == 0


def test_gradients_that_are_kept_to_be_cleared_are_not_copied(run):
    """After ``zero_grad(set_to_none=False)``: the step has left none."""
    for step in range(2, 5):
        run.optimizer.zero_grad(set_to_none=False)
        run.plain.zero_grad(set_to_none=False)
        for model in (run.live, run.expected):
            run.loss(model, step).backward()
        run.optimizer.step()
        run.plain.step()
    run.assert_same()
    assert run.optimizer.stats().copied_gradient_bytes == 0


def test_only_what_somebody_else_has_is_copied(run):
    run.backward(2)
    kept = gradient(run.live)
    run.optimizer.step()
    run.plain.step()
    kept.zero_()
    run.assert_same()
    assert run.optimizer.stats().copied_gradient_bytes == NUM_BYTES


def test_a_step_that_is_refused_leaves_the_gradients_with_their_parameters(run, monkeypatch):
    """Also those that had been copied for it."""
    run.backward(2)
    kept = gradient(run.live)

    def refuse(*_: object) -> None:
        raise RuntimeError("refused")

    with monkeypatch.context() as patched:
        patched.setattr(forward, "begin_pass", refuse)
        with pytest.raises(RuntimeError, match="refused"):
            run.optimizer.step()
    assert gradient(run.live) is kept
    run.optimizer.step()
    run.plain.step()
    run.assert_same()
