"""Stepping each chunk as soon as its gradients are final gives the bits of stepping all at once."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.hooks import RemovableHandle

import offload
from gds import MemoryBackend, StorageError
from offload.errors import BrokenOptimizerError
from offload.overlap import backward
from tests.eventually import TIMEOUT_S, eventually, is_freed
from tests.numerics.delays import Disordered, Held
from tests.numerics.pairs import CASES, Cut, Pair
from tests.numerics.reference import assert_same_bits
from tests.numerics.test_overlap_forward import MODELS, Attention, Batched, Half, Twins
from tests.numerics.test_overlap_forward_waits import is_stepping

BACKWARD = {"overlap": "backward"}
CUTS = [
    Cut(4096, 2, settings=BACKWARD),
    Cut(2 * 4096, 3, 777, settings=BACKWARD),
    Cut(1 << 20, 2, settings=BACKWARD),  # one chunk holds everything
]


def twins_of(model: type[torch.nn.Module] = Batched, cut: Cut = CUTS[0], **hyper) -> Twins:
    return Twins(model, cut, **hyper)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_step_gives_the_same_bits(model, cut):
    twins = twins_of(model, cut)
    for step in range(10):
        twins.step(step)
        assert all(p.grad is None for p in twins.live.parameters())
        twins.assert_same()
    twins.assert_same_state()
    assert twins.optimizer.stats().steps == 10
    assert twins.optimizer.stats().moved_gradient_bytes > 0
    twins.optimizer.close()


@pytest.mark.parametrize("model", [Batched, Half])
def test_checkpoints_and_resumes(model):
    twins = twins_of(model)
    for step in range(9):
        twins.step(step)
        if step % 3 == 0:
            twins.optimizer.checkpoint({"step": step})
        if step % 3 == 1:
            found = twins.optimizer.checkpoint({"step": step}).result(TIMEOUT_S)
            assert found.verify().ok
            assert twins.resume().train_state == {"step": step}
            twins.live.load_state_dict(twins.expected.state_dict())
        twins.assert_same()
    twins.assert_same_state()
    twins.optimizer.close()


def test_schedulers_are_read_when_backward_begins():
    twins = twins_of(Half, lr=torch.tensor(0.01))
    inner = twins.reference.inner
    inner.param_groups[0]["lr"] = torch.tensor(0.01)
    schedulers = [LambdaLR(o, lambda step: 0.5 ** (step % 4)) for o in (twins.optimizer, inner)]
    for step in range(8):
        twins.step(step)
        twins.assert_same()
        for scheduler in schedulers:
            scheduler.step()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.NAdam, torch.optim.Rprop])
def test_other_optimizers(optimizer_class):
    twins = twins_of(Half, optimizer_class=optimizer_class)
    for step in range(6):
        twins.step(step)
        twins.assert_same()
    twins.assert_same_state()


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-in-some-groups"])
def test_every_kind_of_parameter_with_gradients_from_elsewhere(name):
    pair = Pair(CASES[name], Cut(4096, 2, 777, BACKWARD), Disordered(seed=1))
    for step in range(13):
        pair.step(step)
        pair.assert_same_parameters()
        if step in (2, 3, 8):
            pair.optimizer.checkpoint({"step": step})
    pair.assert_same_state()
    pair.optimizer.close()


def test_some_gradients_from_elsewhere():
    twins = twins_of(Batched)
    for step in range(6):
        twins.backward(step)
        for model in (twins.live, twins.expected):
            model.unused.weight.grad = torch.full_like(model.unused.weight, 0.1 * step)
        twins.optimizer.step()
        twins.reference.step()
        twins.assert_same()
    twins.assert_same_state()


class Branching(torch.nn.Module):
    """Every step leaves some parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(33, 33) for _ in range(5))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return self.branches[self.turn % 5](self.branches[(self.turn // 2) % 3](x))

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, 33, generator=generator)


@pytest.mark.parametrize("settings", [{}, {"host_memory": 60_000}], ids=["", "resident"])
def test_parameters_without_gradients(settings):
    twins = twins_of(Branching, Cut(4096, 2, settings={**BACKWARD, **settings}))
    for step in range(15):
        twins.step(step)
        twins.assert_same()
        if step % 4 == 1:
            twins.optimizer.checkpoint()
    twins.assert_same_state()


def test_groups_that_are_added_and_layers_that_are_unfrozen():
    twins = twins_of(Batched)
    for step in range(9):
        if step == 3:
            for model, owner in twins.sides():
                model.layers.append(torch.nn.Linear(21, 3, bias=False))
                torch.nn.init.constant_(model.layers[-1].weight, 0.1)
                owner.add_param_group({"params": [model.layers[-1].weight], "lr": 0.02})
        if step == 6:
            for model in (twins.live, twins.expected):
                model.layers[3].requires_grad_(step > 9)
        twins.step(step)
        twins.assert_same()


def test_edits_and_evaluation_between_steps():
    twins = twins_of(Attention)
    for step in range(8):
        twins.step(step)
        with torch.no_grad():
            for model in (twins.live, twins.expected):
                model.attention.out_proj.weight.clamp_(-0.1, 0.1)
            losses = [twins.loss(m, 99) for m in (twins.live, twins.expected)]
        assert_same_bits(losses[0], losses[1], "evaluation")
    twins.assert_same_state()


NUM_LAYERS = 6


class Layers(torch.nn.Module):
    """Layers of one chunk each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(32, 32, bias=False) for _ in range(NUM_LAYERS))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, 32, generator=generator)


@pytest.fixture
def layers():
    twins = twins_of(Layers, backend=Held())
    for step in range(2):
        twins.step(step)
    yield twins
    twins.backend.release()
    twins.optimizer.close()


def test_a_chunk_is_stepped_while_backward_goes_on(layers):
    before = layers.live.layers[-1].weight.detach().clone()
    gradient = []

    def observe(_module: object, inputs: tuple[torch.Tensor, ...], _output: object) -> None:
        inputs[0].register_hook(lambda _: stepped())

    def stepped() -> None:
        """Between the gradients of the first and the second layer, the last is stepped."""
        layers.optimizer._engine.strategy._running.wait_for([NUM_LAYERS - 1])
        with torch._C.DisableTorchFunctionSubclass():  # others are refused to look
            assert not torch.equal(layers.live.layers[-1].weight, before)
        gradient.append(layers.live.layers[-1].weight.grad)

    layers.live.layers[1].register_forward_hook(observe)
    layers.step(2)
    assert len(gradient) == 1
    assert gradient[0].shape == (32, 32)
    layers.assert_same()


def on_gradients_of_inputs(
    model: Layers, call: Callable[[torch.Tensor], None]
) -> list[RemovableHandle]:
    """Have something called when a layer's own gradient has been taken, but for the first layer."""

    def hook(_module: object, inputs: tuple[torch.Tensor, ...], _output: object) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(call)

    return [layer.register_forward_hook(hook) for layer in model.layers]


def test_gradients_are_freed_at_once(layers):
    layers.live.zero_grad()
    alive = []
    gradients = []

    def watch(parameter: torch.Tensor) -> None:
        gradients.append(weakref.ref(parameter.grad))

    def count(_gradient: torch.Tensor) -> None:
        done = [NUM_LAYERS - n for n in range(1, len(gradients))]
        layers.optimizer._engine.strategy._running.wait_for(done)
        alive.append(sum(g() is not None for g in gradients))

    live = layers.live
    layers.live = layers.make()
    layers.optimizer.close()
    del live
    for layer in layers.live.layers:
        layer.weight.register_post_accumulate_grad_hook(watch)
    layers.optimizer = layers.offloaded(layers.live, fresh=True)
    on_gradients_of_inputs(layers.live, count)
    for step in range(3):
        gradients.clear()
        layers.loss(layers.live, step).backward()
        layers.optimizer.step()
    assert max(alive) <= 2
    assert layers.optimizer.stats().moved_gradient_bytes <= 3 * 4096


def test_chunks_follow_the_order_of_the_backward_before(layers):
    layers.optimizer.synchronize()
    num_ahead = 2 * 2  # two chunks of two arrays have been read ahead
    layers.backend.reads = layers.backend.reads[-num_ahead:]
    layers.step(2)
    found = list(dict.fromkeys(layers.backend.reads))
    assert found[:NUM_LAYERS] == list(range(NUM_LAYERS - 1, -1, -1))


@pytest.mark.parametrize("at", ["backward", "step"])
def test_an_error_is_raised_at_the_next_point(layers, at):
    layers.optimizer.checkpoint().result()
    saved = copy.deepcopy(layers.expected.state_dict())
    plain = copy.deepcopy(layers.reference.inner.state_dict())
    layers.step(2)
    chunk = NUM_LAYERS - 3 if at == "backward" else 0
    layers.backend.hold(chunk)
    error = StorageError(5, "the drive is gone", "/store/x")
    layers.backend.release(error)
    layers.live.zero_grad()
    handles = []
    if at == "backward":
        running = []

        def wait(_: torch.Tensor) -> None:
            running.append(layers.optimizer._engine.strategy._running)
            if len(running) == 4:
                running[0].wait_ended()

        handles = on_gradients_of_inputs(layers.live, wait)
    loss = layers.loss(layers.live, 3)
    if at == "step":
        loss.backward()
    with pytest.raises(StorageError, match="the drive is gone") as found:
        loss.backward() if at == "backward" else layers.optimizer.step()
    assert found.value is error
    layers.backend.hold()
    with pytest.raises(BrokenOptimizerError, match=r"step 4 failed.*call restore\(\)"):
        layers.optimizer.step()
    layers.live.zero_grad()
    with pytest.raises(BrokenOptimizerError, match=r"call restore\(\)"):
        layers.loss(layers.live, 3).backward()
    assert layers.optimizer.restore().step == 2
    layers.expected.load_state_dict(saved)
    layers.reference.inner.load_state_dict(plain)
    for handle in handles:
        handle.remove()
    for step in range(2, 5):
        layers.step(step)
        layers.assert_same()


def test_gradients_that_come_on_two_threads_open_one_pass(monkeypatch):
    # torch computes the gradients of each device on a thread of its own, and calls hooks there
    torch.manual_seed(5)
    live, expected = (torch.nn.ParameterList([torch.ones(9000), torch.ones(9000)]) for _ in "ab")
    options = CUTS[0].options(MemoryBackend())
    optimizer = offload.AdamW(live.parameters(), model=live, directory="/store", options=options)
    reference = torch.optim.AdamW(expected.parameters(), foreach=False)
    begin, num_begun, second = backward.begin_pass, 0, threading.Event()

    def slow(*arguments):
        nonlocal num_begun
        num_begun += 1
        if num_begun == 1:
            first.set()
            second.wait(0.3)  # in which the other gradient opens one as well, if it may
        else:
            second.set()
        return begin(*arguments)

    monkeypatch.setattr(backward, "begin_pass", slow)
    for step in range(2):
        num_begun, first = 0, threading.Event()
        for parameter in expected:
            parameter.grad = torch.randn(9000)
        threads = [
            threading.Thread(target=(mine * other.grad).sum().backward)
            for mine, other in zip(live, expected, strict=True)
        ]
        threads[0].start()
        assert first.wait(TIMEOUT_S)
        threads[1].start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert num_begun == 1
        optimizer.step()
        reference.step()
        for number, (mine, other) in enumerate(zip(live, expected, strict=True)):
            assert_same_bits(mine.detach(), other.detach(), f"parameter {number}, step {step}")
    optimizer.close()


def test_a_dropped_optimizer_with_half_a_step_ends():
    others = set(threading.enumerate())
    twins = twins_of(Layers, backend=Held())
    twins.step(0)
    twins.loss(twins.live, 1).backward()
    optimizer = weakref.ref(twins.optimizer)
    del twins.optimizer
    assert is_freed(optimizer)
    assert eventually(lambda: not is_stepping(set(threading.enumerate()) - others))
    parameters = list(twins.live.parameters())
    assert eventually(lambda: not any(p._post_accumulate_grad_hooks for p in parameters))
    assert eventually(lambda: not any(m._forward_pre_hooks for m in twins.live.modules()))
    twins.offloaded(twins.live).close()


def test_a_store_that_has_to_be_decided_about_is_found_out_in_backward():
    twins = twins_of(Layers)
    twins.step(0)
    twins.optimizer.checkpoint().result()
    twins.optimizer.close()
    twins.live = twins.make()
    twins.optimizer = twins.offloaded(twins.live)
    with pytest.raises(offload.OffloadError, match=r"call restore\(\)"):
        twins.loss(twins.live, 1).backward()
    twins.live.zero_grad()
    assert twins.optimizer.restore().step == 1
    twins.step(1)
    twins.assert_same()
