"""What a training loop puts around `step()` works as it does with plain torch, to the bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import safetensors.torch
import torch
from torch.optim.lr_scheduler import LambdaLR

import offload
from gds import Backend, MemoryBackend
from tests.eventually import TIMEOUT_S
from tests.numerics.delays import Gate
from tests.numerics.models import give_gradients
from tests.numerics.pairs import CUTS, Case, changing_rate, memory_pair
from tests.numerics.reference import (
    assert_same_bits,
    assert_same_parameters,
)

NUM_STEPS = 12


class Full(torch.nn.Module):
    """FP32 all through, with BatchNorm: what plain torch trains without masters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(19, 67),
            torch.nn.BatchNorm1d(67),
            torch.nn.ReLU(),
            torch.nn.Linear(67, 21),
        )

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return (self.layers(torch.randn(8, 19, generator=generator)) - 1).square().mean()


def offloaded(
    model: torch.nn.Module, backend: Backend, overlap: str | None = None, **hyper
) -> offload.OffloadedOptimizer:
    options = replace(CUTS[0], settings={"overlap": overlap}).options(backend)
    return offload.AdamW(
        model.parameters(), model=model, directory="/store", options=options, **hyper
    )


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_a_closure_is_called_once_with_gradients_enabled(overlap):
    live, expected = Full(), Full()
    optimizer = offloaded(live, MemoryBackend(), overlap=overlap, lr=0.01)
    plain = torch.optim.AdamW(expected.parameters(), lr=0.01)
    calls = []

    def evaluate(model: Full, stepped: torch.optim.Optimizer, step: int) -> torch.Tensor:
        calls.append(step)
        stepped.zero_grad()
        loss = model.loss(step)
        loss.backward()
        return loss

    for step in range(NUM_STEPS):
        found = optimizer.step(partial(evaluate, live, optimizer, step))
        expected_loss = plain.step(partial(evaluate, expected, plain, step))
        assert_same_bits(found, expected_loss, "loss")
        assert_same_parameters(live.named_parameters(), expected.named_parameters())
    assert calls == [step for step in range(NUM_STEPS) for _ in range(2)]


@pytest.mark.parametrize(("tensor", "overlap"), [(False, None), (True, None), (True, "forward")])
def test_a_checkpoint_holds_what_was_there_when_it_was_asked_for(tensor, overlap):
    memory = MemoryBackend()
    gate = Gate(memory)
    gate.close_gate()
    live = Full()
    optimizer = offloaded(live, gate, overlap, lr=torch.tensor(0.01) if tensor else 0.01)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    live.loss(0).backward()
    optimizer.step()
    running_mean = live.layers[1].running_mean.clone()
    train_state = {"list": [1, 2], "tensor": torch.zeros(3)}
    handle = optimizer.checkpoint(train_state)
    assert gate.reached.wait(TIMEOUT_S)
    train_state["list"].append(3)
    train_state["tensor"].fill_(5)
    scheduler.step()  # changes a tensor in place
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    live.loss(1)  # changes the running statistics
    assert not torch.equal(live.layers[1].running_mean, running_mean)
    gate.opened.set()
    handle.result()
    optimizer.close()

    live = Full(seed=99)
    optimizer = offloaded(live, memory.reopened(), lr=0.5)
    checkpoint = optimizer.restore()
    assert_same_bits(live.layers[1].running_mean, running_mean, "running mean")
    assert checkpoint.train_state["list"] == [1, 2]
    assert torch.equal(checkpoint.train_state["tensor"], torch.zeros(3))
    (group,) = optimizer.param_groups
    assert group["betas"] == (0.9, 0.999)
    assert isinstance(group["lr"], torch.Tensor) == tensor
    assert float(group["lr"]) == float(torch.tensor(0.01) if tensor else 0.01)


def test_a_resumed_learning_rate_tensor_goes_on_as_if_there_had_been_no_resume():
    case = Case(torch.optim.AdamW, {}, ({"lr": torch.tensor(0.01)},))
    pair = memory_pair(case, CUTS[0])
    pair.reference.inner.param_groups[0]["lr"] = torch.tensor(0.01)
    scheduler = LambdaLR(pair.optimizer, changing_rate)
    expected = LambdaLR(pair.reference.inner, changing_rate)
    for step in range(NUM_STEPS):
        pair.steps(step, step + 1)
        scheduler.step()
        expected.step()
        if step in (5, 9):
            pair.optimizer.checkpoint({"scheduler": scheduler.state_dict()})
            pair.reopen()
            scheduler = LambdaLR(pair.optimizer, changing_rate)
            for _ in range(2):
                pair.optimizer.param_groups[0]["lr"].fill_(0.5)
                state = pair.optimizer.restore().train_state
            scheduler.load_state_dict(state["scheduler"])
    assert isinstance(pair.optimizer.param_groups[0]["lr"], torch.Tensor)
    pair.assert_same_state()


class Tied(torch.nn.Module):
    """An embedding and a head that share their weight, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(41, 24, dtype=torch.bfloat16)
        self.norm = torch.nn.BatchNorm1d(24)
        self.head = torch.nn.Linear(24, 41, bias=False)
        self.head.weight = self.embedding.weight


def test_a_backward_through_a_forward_before_a_restore_is_refused_by_torch():
    live = Full()
    optimizer = offloaded(live, MemoryBackend())
    live.loss(0).backward()
    optimizer.step()
    optimizer.checkpoint().result()
    loss = live.loss(1)
    optimizer.restore()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.close()


@pytest.mark.parametrize("by", ["checkpoint", "store"])
def test_load_parameters_needs_no_optimizer(by):
    """It loads buffers, too, and leaves the memory and the ties of parameters as they are."""
    live, backend = Tied(), MemoryBackend()
    optimizer = offloaded(live, backend)
    for step in range(3):
        give_gradients(step, live)
        live.norm(torch.randn(5, 24))
        optimizer.step()
    path = optimizer.checkpoint().result().path
    model = Tied(seed=99)
    pointers = [p.data_ptr() for p in model.parameters()]
    at = path if by == "checkpoint" else "/store"
    assert offload.load_parameters(model, at, backend=backend) == 3
    assert_same_parameters(model.state_dict().items(), live.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert model.head.weight is model.embedding.weight


def test_the_model_file_loads_with_safetensors_ties_included(tmp_path):
    live = Tied()
    optimizer = offload.AdamW(live.parameters(), model=live, directory=tmp_path)
    for step in range(3):
        give_gradients(step, live)
        optimizer.step()
    path = optimizer.checkpoint().result().path
    model = Tied(seed=99)
    missing, unexpected = safetensors.torch.load_model(model, f"{path}/model.safetensors")
    assert (list(missing), list(unexpected)) == ([], [])
    assert_same_parameters(model.state_dict().items(), live.state_dict().items())
    assert model.head.weight is model.embedding.weight
    optimizer.close()
