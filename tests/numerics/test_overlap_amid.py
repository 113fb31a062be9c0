"""What comes amid a step beside the forward: interrupts, signals, forks, other optimizers."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

import offload
from gds import MemoryBackend
from tests.eventually import TIMEOUT_S
from tests.numerics.delays import Held
from tests.numerics.reference import assert_same_bits, read_state
from tests.numerics.twins import LAST, Early, Layers, Twins, last, when_waiting

X = torch.randn(3, 32, generator=torch.Generator().manual_seed(7))


def forward(model: nn.Module) -> torch.Tensor:
    return model(X)


def evaluation(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(X)


def reader(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.flatten() for p in model.parameters()])


def first_layers(model: Layers) -> torch.Tensor:
    model.order = range(LAST)
    try:
        return model(X)
    finally:
        model.order = range(LAST + 1)


Call = Callable[[nn.Module], torch.Tensor]
INTERRUPTED: dict[str, tuple[type[nn.Module], int, Callable[[nn.Module], object], Call]] = {
    "entry of a forward": (Early, 1, forward, reader),
    "module": (Layers, LAST, forward, evaluation),
    "end of a forward": (Layers, LAST, first_layers, reader),
    "state_dict": (Early, 1, lambda model: model.state_dict(), evaluation),
    "edit": (Early, 1, lambda model: model.second.weight.data.mul_(2), reader),
}
"""A wait for a chunk that is interrupted, and what has to wait for it all the same then."""


@pytest.mark.parametrize(("kind", "chunk", "call", "then"), INTERRUPTED.values(), ids=INTERRUPTED)
def test_after_an_interrupted_wait_everything_still_waits(kind, chunk, call, then, ctrl_c):
    run = Twins(kind, backend=Held(), num_steps=2)
    run.optimizer.synchronize()
    if kind is Early:  # which reads this chunk ahead, and so for two steps
        run.backend.hold(chunk)
        run.step(2)
    run.step_held(3, chunk)
    when_waiting(run, ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        call(run.live)
    assert chunk not in run.backend.ended
    when_waiting(run, run.backend.release)
    assert_same_bits(then(run.live).detach(), then(run.expected).detach(), "then")
    for step in range(4, 6):
        run.step(step)
    run.assert_same()
    run.optimizer.close()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_that_reads_amid_a_step_is_told_so(run):
    run.step_held(2, LAST)
    pipe, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            message = "nothing was said"
            for read in (lambda: last(run.live).sum(), lambda: run.live(X)):
                try:
                    read()
                except offload.OffloadError as error:
                    message = str(error)
                else:
                    message = "nothing was said"
                    break
            os.write(writer, message.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(pipe, "rb") as file:
        message = file.read().decode()
    os.waitpid(child, 0)
    assert "call synchronize() before forking" in message
    run.backend.release()
    run.assert_same()


class Stated(Layers):
    """Its state dict has a value that is computed of parameters when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.add)
        self.register_load_state_dict_pre_hook(self.drop)

    @staticmethod
    def add(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        state[prefix + "total"] = last(module).detach().sum(0)

    @staticmethod
    def drop(_: nn.Module, state: dict[str, torch.Tensor], prefix: str, *__: object) -> None:
        del state[prefix + "total"]


def test_a_state_dict_that_computes_with_parameters_is_sealed_with_their_new_values():
    run = Twins(Stated, backend=Held(), num_steps=2)
    run.step_held(2, LAST)
    when_waiting(run, run.backend.release)
    found = run.optimizer.checkpoint().result(TIMEOUT_S)
    assert found.step == 3
    stored = read_state(found.path, run.backend)
    assert_same_bits(stored.model["total"], last(run.expected).detach().sum(0), "what is sealed")
    run.optimizer.close()


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_a_second_optimizer_for_the_same_parameters_waits(run, overlap):
    """Of whatever kind: torch's own reads them as anybody does."""
    options = offload.Options(
        backend=MemoryBackend(), chunk_bytes=1 << 16, allow_volatile=True, overlap=overlap
    )
    both = [run.live.layers[number].weight for number in (1, LAST)]
    expected = [run.expected.layers[number].weight for number in (1, LAST)]
    second = offload.SGD(both, lr=0.1, directory="/second", options=options, model=run.live)
    other = torch.optim.SGD(expected, lr=0.1)
    run.step_held(2, LAST)
    when_waiting(run, run.backend.release)
    for parameters, optimizer in ((both, second), (expected, other)):
        for parameter in parameters:
            parameter.grad = torch.ones(32, 32)
        optimizer.step()
        optimizer.zero_grad()
    second.synchronize()
    run.assert_same()
    second.close()
