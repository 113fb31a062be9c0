"""Each chunk is stepped as soon as its gradients are final, and errors come at the next point."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

import offload
from gds import MemoryBackend, StorageError
from offload.errors import BrokenOptimizerError
from offload.overlap import backward
from tests.eventually import TIMEOUT_S, eventually
from tests.numerics.delays import Held
from tests.numerics.pairs import Cut
from tests.numerics.reference import assert_same_bits
from tests.numerics.twins import NUM_LAYERS, Layers, Twins


@pytest.fixture
def layers() -> Iterator[Twins]:
    twins = Twins(Layers, "backward", Held(), num_steps=2)
    yield twins
    twins.backend.release()
    twins.optimizer.close()


def on_gradients_of_inputs(
    model: Layers, call: Callable[[torch.Tensor], object], numbers: range = range(1, NUM_LAYERS)
) -> list[RemovableHandle]:
    """Have something called when a layer's own gradient has been taken."""

    def hook(_module: object, inputs: tuple[torch.Tensor, ...], _output: object) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: call(gradient) and None)

    return [model.layers[number].register_forward_hook(hook) for number in numbers]


def test_a_chunk_is_stepped_while_backward_goes_on(layers):
    weight = layers.live.layers[-1].weight
    before = weight.detach().clone()
    seen = []

    def is_stepped() -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # others are refused to look
            return not torch.equal(weight, before)

    def between(_: torch.Tensor) -> None:
        """Between the gradients of the first and the second layer, the last is stepped."""
        assert eventually(is_stepped)
        seen.append(weight.grad)

    on_gradients_of_inputs(layers.live, between, range(1, 2))
    layers.step(2)
    assert [gradient.shape for gradient in seen] == [(32, 32)]
    layers.assert_same()


def test_gradients_are_freed_at_once():
    layers = Twins(Layers, "backward", Held())
    layers.optimizer.close()
    layers.live = layers.make()
    gradients: list[StorageWeakRef] = []
    freed: list[bool] = []

    def watch(parameter: torch.Tensor) -> None:
        gradients.append(StorageWeakRef(parameter.grad.untyped_storage()))

    def count(_: torch.Tensor) -> None:
        freed.append(eventually(lambda: sum(not g.expired() for g in gradients) <= 2))

    for layer in layers.live.layers:
        layer.weight.register_post_accumulate_grad_hook(watch)
    layers.optimizer = layers.offloaded(layers.live, fresh=True)  # after the hooks: none is new
    on_gradients_of_inputs(layers.live, count)
    for step in range(3):
        gradients.clear()
        layers.loss(layers.live, step).backward()
        layers.optimizer.step()
    assert len(freed) == 3 * (NUM_LAYERS - 1)
    assert all(freed)
    assert layers.optimizer.stats().moved_gradient_bytes < NUM_LAYERS * 4096
    layers.optimizer.close()


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
    saved = copy.deepcopy((layers.expected.state_dict(), layers.plain.inner.state_dict()))
    layers.step(2)
    layers.backend.hold(NUM_LAYERS - 3 if at == "backward" else 0)
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
    layers.expected.load_state_dict(saved[0])
    layers.plain.inner.load_state_dict(saved[1])
    for handle in handles:
        handle.remove()
    for step in range(2, 5):
        layers.step(step)
        layers.assert_same()


def test_gradients_that_come_on_two_threads_open_one_pass(monkeypatch):
    # torch computes the gradients of each device on a thread of its own, and calls hooks there
    live, expected = (torch.nn.ParameterList([torch.ones(9000), torch.ones(9000)]) for _ in "ab")
    options = Cut(4096, 2, settings={"overlap": "backward"}).options(MemoryBackend())
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
        for number, parameter in enumerate(expected):
            generator = torch.Generator().manual_seed(10 * step + number)
            parameter.grad = torch.randn(9000, generator=generator)
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


def test_a_store_that_has_to_be_decided_about_is_found_out_in_backward():
    twins = Twins(Layers, "backward", num_steps=1)
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
