"""Training loops as people write them, with gradients on the drive: the bits of plain torch, or a
refusal that names what to do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from gds import PosixBackend, StorageError
from offload.errors import BrokenOptimizerError, UnsupportedParameterError
from tests.crash.fault_backend import FaultBackend
from tests.gradients.test_outside_gradients import Tied, loss, options
from tests.numerics.reference import assert_same_bits, assert_same_parameters

Loop = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


def made(model: Tied, path: Path, kind: str | None = "drive", **settings: Any) -> offload.AdamW:
    return offload.AdamW(
        model.parameters(), directory=path / "run", model=model, options=options(kind, **settings)
    )


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]


@loop
def a_factor_that_changes_later(model, optimizer):
    factor = torch.tensor(0.5)
    for grad in gradients(model):
        grad.mul_(factor)
    factor.fill_(0.1)


@loop
def norms_that_are_changed_in_place(model, optimizer):
    found = [g.norm().pow_(2) for g in gradients(model)] + [g.norm() for g in gradients(model)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)  # which changes the bits
    found += [g.norm() for g in gradients(model)]
    torch.set_num_threads(threads)
    return found


@loop
def zeros_times_infinity(model, optimizer):
    for number, grad in enumerate(gradients(model)):
        grad.zero_()
        grad.mul_(float("inf") if number else -1)


@loop
def a_factor_that_torch_refuses(model, optimizer):
    for factor in (1j, torch.tensor(1j)):
        with pytest.raises(RuntimeError, match="ComplexFloat"):
            model.head.weight.grad.mul_(factor)


@loop
def factors_while_denormal_numbers_are_flushed(model, optimizer):
    for number in range(3):
        torch.set_flush_denormal(number == 1)
        for grad in gradients(model):
            grad.mul_(1e-20)
    torch.set_flush_denormal(True)
    norms = [grad.norm() for grad in gradients(model)]
    optimizer.step()
    torch.set_flush_denormal(False)
    for grad in gradients(model):
        grad.mul_(1e38)
    return norms


@loop
def views(model, optimizer):
    grad = model.head.weight.grad
    grad[0].zero_()
    grad.t()[1:3].mul_(2)
    for part in grad.view(-1).chunk(2):
        part[:5].add_(1)
    found = [grad.flatten(), grad.T @ grad, *grad.unbind()[:2], grad.diagonal()]
    return [*found, torch.nn.utils.parameters_to_vector(gradients(model))]


@loop
def tensors_that_the_program_has_as_gradients(model, optimizer):
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    ends = [0]
    for p in model.parameters():
        ends.append(ends[-1] + p.numel())
        p.grad = flat[ends[-2] : ends[-1]].view_as(p)
    for seed in (1, 2):
        loss(model, seed).backward()
    flat.mul_(0.3)
    kept = model.body[0].weight.grad = torch.zeros_like(model.body[0].weight)
    loss(model, 3).backward()
    kept.mul_(3)


@loop
def sharpness_aware_minimization(model, optimizer):
    norm = torch.stack([g.norm(p=2) for g in gradients(model)]).norm(p=2)
    with torch.no_grad():
        moves = [g * (0.05 / (norm + 1e-12)) for g in gradients(model)]
        for p, move in zip(model.parameters(), moves, strict=True):
            p.add_(p.grad, alpha=0.01).add_(move)
        optimizer.zero_grad()
        with torch.enable_grad():
            loss(model, 0).backward()
        torch._foreach_sub_(list(model.parameters()), moves)


@loop
def noise_and_other_tensors_in_place_of_gradients(model, optimizer):
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.1)
        p.grad.data /= 3
        p.grad = p.grad * 0.5
    model.head.weight.grad.normal_()


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_has_the_bits_of_torch(name, tmp_path):
    found = []
    for kind in ("drive", None):
        model = Tied(torch.float32)
        with made(model, tmp_path / str(kind), kind) as optimizer:
            loss(model, 0).backward()
            torch.manual_seed(3)
            results = [r.clone() for r in LOOPS[name](model, optimizer) or []]
            results += [grad.clone() for grad in gradients(model)]
            optimizer.step()
            found.append(results + [p.detach() for p in model.parameters()])
    for number, (ours, torchs) in enumerate(zip(*found, strict=True)):
        assert_same_bits(ours, torchs, f"tensor {number}")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda p: p.grad.t_(), UnsupportedParameterError, "assign a new tensor"),
        (lambda p: p.grad.resize_(0), UnsupportedParameterError, "assign a new tensor"),
        (lambda p: p.grad.share_memory_(), UnsupportedParameterError, "cannot be shared"),
        (lambda p: p.grad.numpy().fill(0), ValueError, "read-only"),
        (lambda p: setattr(p.grad, "data", p.detach()), UnsupportedParameterError, "copy_"),
    ],
    ids=["transpose", "resize", "share", "numpy", "data"],
)
def test_what_cannot_reach_the_values_is_refused(change, error, message, tmp_path):
    model, plain = Tied(torch.float32), Tied(torch.float32)
    expected = torch.optim.AdamW(plain.parameters())
    with made(model, tmp_path) as optimizer:
        for each, one in ((model, optimizer), (plain, expected)):
            loss(each, 0).backward()
            if each is model:
                with pytest.raises(error, match=message):
                    change(model.body[0].weight)
            one.step()
        assert_same_parameters(model.named_parameters(), plain.named_parameters())


@pytest.mark.parametrize("kind", ["drive", None])
def test_gradients_of_an_optimizer_that_is_closed_are_refused_and_break_nothing(kind, tmp_path):
    model = Tied(torch.float32)
    with made(model, tmp_path / "a"):
        loss(model, 0).backward()
    with made(model, tmp_path / "b", kind) as optimizer:
        for call in (optimizer.step, loss(model, 1).backward):
            with pytest.raises(StorageError, match=r"is closed: call zero_grad\(\)"):
                call()
        optimizer.zero_grad()
        loss(model, 1).backward()
        optimizer.step()


def test_a_sum_that_was_not_written_is_refused_until_zero_grad(tmp_path):
    model = Tied(torch.float32)
    backend = FaultBackend(PosixBackend(), "at once")
    with made(model, tmp_path, backend=backend) as optimizer:
        loss(model, 0).backward()
        backend.fail("write", 1, forever=True)
        with pytest.raises(StorageError, match="injected"):
            loss(model, 1).backward()
        backend.repair()
        with pytest.raises(StorageError, match="repeat the backward"):
            optimizer.step()
        optimizer.zero_grad()
        loss(model, 1).backward()
        optimizer.step()


def step_to_the_end(optimizer: Any) -> None:
    """Step; beside the model, the step may fail before `step` returns, or after that."""
    optimizer.step()
    optimizer.synchronize()


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_a_gradient_that_a_step_cannot_read_breaks_it_and_restore_goes_on(overlap, tmp_path):
    model, plain = Tied(torch.float32), Tied(torch.float32)
    expected = torch.optim.AdamW(plain.parameters())
    backend = FaultBackend(PosixBackend(), "later")
    with made(model, tmp_path, backend=backend, overlap=overlap) as optimizer:
        for each, one in ((model, optimizer), (plain, expected)):
            loss(each, 0).backward()
            one.step()
            one.zero_grad()
        optimizer.checkpoint().result()
        optimizer.synchronize()
        loss(model, 1).backward()
        backend.fail("read", 1, forever=True)
        take_step = optimizer.step if overlap is None else lambda: step_to_the_end(optimizer)
        with pytest.raises(StorageError):
            take_step()
        backend.repair()
        with pytest.raises(BrokenOptimizerError):
            optimizer.step()
        optimizer.restore()
        optimizer.zero_grad()
        for each, one in ((model, optimizer), (plain, expected)):
            loss(each, 1).backward()
            one.step()
        optimizer.synchronize()
        assert_same_parameters(model.named_parameters(), plain.named_parameters())


def test_a_forked_process_can_drop_gradients_that_are_being_written(tmp_path):
    model = Tied(torch.float32)
    with made(model, tmp_path) as optimizer:
        loss(model, 0).backward()
        child = multiprocessing.get_context("fork").Process(target=model.zero_grad)
        child.start()
        child.join(60)
        assert child.exitcode == 0
        optimizer.step()
