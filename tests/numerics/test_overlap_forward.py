"""A step that runs beside the next forward gives the same bits as one that is waited for.

The store is slow, and its transfers overtake each other, so that the forward is ahead of the step
wherever hooks let it be.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint as recompute

import offload
from gds import Backend, MemoryBackend
from tests.eventually import TIMEOUT_S
from tests.numerics.delays import Disordered
from tests.numerics.pairs import CASES, Cut, Pair
from tests.numerics.reference import (
    Reference,
    assert_same_bits,
    assert_same_parameters,
    assert_same_state,
    read_state,
)

FORWARD = {"overlap": "forward"}
CUTS = [
    Cut(4096, 2, settings=FORWARD),
    Cut(2 * 4096, 3, 777, settings=FORWARD),
    Cut(1 << 20, 2, settings=FORWARD),  # one chunk holds everything
]


class Batched(torch.nn.Module):
    """Linear layers, BatchNorm, a layer that is not used, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(11, 13)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(19, 67),
            torch.nn.BatchNorm1d(67),
            torch.nn.ReLU(),
            torch.nn.Linear(67, 67),
            torch.nn.Linear(67, 67).requires_grad_(False),
            torch.nn.Linear(67, 21),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(8, 19, generator=generator)


class Attention(torch.nn.Module):
    """`MultiheadAttention`, whose projection is used without being called, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(24, 41, bias=False)
        self.attention = torch.nn.MultiheadAttention(24, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(24)
        self.embedding = torch.nn.Embedding(41, 24)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.ones(24))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.norm(x + attended))

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, 41, (3, 7), generator=generator)


class Half(torch.nn.Module):
    """bf16 parameters, the last layer first, and every layer recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(48, 5)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(4))
        self.transposed = torch.nn.Parameter(torch.randn(48, 48).t())
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.transposed
        for block in self.blocks:
            x = recompute(lambda x, block=block: block(x).tanh(), x, use_reentrant=False)
        return self.out(x)

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(6, 48, generator=generator).bfloat16()


class Early(torch.nn.Module):
    """Uses a later layer's weight before that layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(40, 40)
        self.last = torch.nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + self.last.weight.sum(0))

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, 40, generator=generator)


MODELS = [Batched, Attention, Half, Early]


class Twins:
    """A model trained with overlap, and the same one with plain torch's update."""

    def __init__(
        self,
        model: type[torch.nn.Module] = Batched,
        cut: Cut = CUTS[0],
        backend: Backend | None = None,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **hyper,
    ) -> None:
        self.kind, self.cut = model, cut
        self.hyper = {"lr": 0.01, **hyper}
        self.optimizer_class = optimizer_class
        self.backend = backend or Disordered(seed=cut.ring_chunks)
        self.live, self.expected = self.make(), self.make()
        self.optimizer = self.offloaded(self.live)
        self.reference = Reference(optimizer_class, self.expected.parameters(), **self.hyper)

    def make(self, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        return self.kind()

    def offloaded(self, model: torch.nn.Module, **settings) -> offload.OffloadedOptimizer:
        return offload.OffloadedOptimizer(
            self.optimizer_class,
            model.parameters(),
            model=model,
            directory="/store",
            options=self.cut.options(self.backend),
            **settings,
            **self.hyper,
        )

    def sides(self) -> Iterator[tuple[torch.nn.Module, offload.OffloadedOptimizer | Reference]]:
        yield self.live, self.optimizer
        yield self.expected, self.reference

    def batch(self, step: int) -> torch.Tensor:
        return self.kind.batch(torch.Generator().manual_seed(step))

    def loss(self, model: torch.nn.Module, step: int) -> torch.Tensor:
        return (model(self.batch(step)).float() - 1).square().mean()

    def backward(self, step: int) -> None:
        """Compute gradients on both sides, which shows what their parameters were."""
        losses = [self.loss(model, step) for model in (self.live, self.expected)]
        assert_same_bits(losses[0], losses[1], f"loss of step {step}")
        for model, loss in zip((self.live, self.expected), losses, strict=True):
            model.zero_grad()
            loss.backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()
        self.reference.step()

    def assert_same(self) -> None:
        assert_same_parameters(self.live.state_dict().items(), self.expected.state_dict().items())

    def assert_same_state(self) -> None:
        path = self.optimizer.checkpoint().result(TIMEOUT_S).path
        names = {n: p for n, p in self.expected.named_parameters() if p.requires_grad}
        assert_same_state(read_state(path, self.backend), self.reference, names)

    def resume(self) -> offload.Checkpoint:
        """Close, and go on as another process would."""
        self.optimizer.close()
        self.live = self.make(seed=99)
        self.optimizer = self.offloaded(self.live)
        found = self.optimizer.restore()
        assert found is not None
        return found


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_forward_sees_the_updated_parameters(model, cut):
    twins = Twins(model, cut)
    for step in range(12):
        twins.step(step)
        assert all(p.grad is None for p in twins.live.parameters())
    twins.assert_same()
    twins.assert_same_state()
    stats = twins.optimizer.stats()
    assert stats.steps == 12
    trained = [p for p in twins.expected.parameters() if p.grad is not None]
    assert stats.moved_gradient_bytes == sum(p.grad.nbytes for p in trained)
    assert stats.copied_gradient_bytes == 0
    twins.optimizer.close()


@pytest.mark.parametrize("model", [Batched, Half])
@pytest.mark.parametrize("then", ["goes-on", "resumes"])
def test_a_checkpoint_after_every_step(model, then):
    """It is asked for while the step is running, and is of the moment at which it was."""
    twins = Twins(model)
    for step in range(8):
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
        assert_same_state(stored, twins.reference, names)
        if then == "resumes":
            assert twins.resume().step == step + 1
            twins.expected.load_state_dict(expected)
            twins.assert_same()
    twins.optimizer.close()


def test_checkpoints_that_are_not_waited_for():
    twins = Twins(Batched)
    handles = []
    for step in range(10):
        twins.step(step)
        handles.append(twins.optimizer.checkpoint({"step": step}))
        if step % 2:
            handles.append(twins.optimizer.checkpoint({"again": step}))
    twins.assert_same_state()
    assert [h.result(TIMEOUT_S).step for h in handles] == sorted([*range(1, 11), *range(2, 11, 2)])
    twins.optimizer.close()


def test_hyper_parameters_are_those_at_the_step():
    """A scheduler changes a tensor in place right after it."""
    twins = Twins(lr=torch.tensor(0.01))
    inner = twins.reference.inner
    inner.param_groups[0]["lr"] = torch.tensor(0.01)
    schedulers = [LambdaLR(o, lambda step: 0.5 ** (step % 4)) for o in (twins.optimizer, inner)]
    for step in range(10):
        twins.step(step)
        handle = twins.optimizer.checkpoint() if step % 3 == 1 else None
        rate = inner.param_groups[0]["lr"].clone()
        for scheduler in schedulers:
            scheduler.step()
        if handle is not None:
            (group,) = handle.result(TIMEOUT_S).hyperparameters
            assert torch.equal(torch.as_tensor(group["lr"]), rate)
    twins.optimizer.synchronize()
    twins.assert_same()
    twins.assert_same_state()


def test_accumulation_and_clipping():
    twins = Twins(Half)
    for step in range(8):
        for part in range(3):
            losses = [twins.loss(m, 10 * step + part) / 3 for m in (twins.live, twins.expected)]
            assert_same_bits(losses[0], losses[1], "loss")
            for loss in losses:
                loss.backward()
        norms = [
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            for m in (twins.live, twins.expected)
        ]
        assert_same_bits(norms[0], norms[1], "norm")
        twins.optimizer.step()
        twins.reference.step()
        twins.expected.zero_grad()
        if step % 2:
            twins.optimizer.zero_grad(set_to_none=step % 4 == 1)  # there is nothing to zero
    twins.assert_same_state()


def test_a_grad_scaler_that_skips_steps():
    twins = Twins(Batched)
    plain = torch.optim.AdamW(twins.expected.parameters(), lr=0.01)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4) for _ in "ab"]
    for step in range(14):
        for model, stepped, scaler in zip(
            (twins.live, twins.expected), (twins.optimizer, plain), scalers, strict=True
        ):
            stepped.zero_grad()
            loss = twins.loss(model, step) * (float("inf") if step % 5 == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(stepped)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(stepped)
            scaler.update()
        assert scalers[0].state_dict() == scalers[1].state_dict()
    twins.optimizer.synchronize()
    twins.assert_same()
    assert twins.optimizer.num_steps == 14 - 3


def test_closures_and_evaluation_between_steps():
    twins = Twins(Attention)
    plain = torch.optim.AdamW(twins.expected.parameters(), lr=0.01)

    def closure(model: torch.nn.Module, step: int) -> Callable[[], torch.Tensor]:
        def evaluate() -> torch.Tensor:
            model.zero_grad()
            loss = twins.loss(model, step)
            loss.backward()
            return loss

        return evaluate

    for step in range(10):
        losses = [
            twins.optimizer.step(closure(twins.live, step)),
            plain.step(closure(twins.expected, step)),
        ]
        assert_same_bits(losses[0], losses[1], "loss")
        if step % 2:
            with torch.no_grad():
                found = [twins.loss(m, 99) for m in (twins.live, twins.expected)]
            assert_same_bits(found[0], found[1], "evaluation")
    twins.optimizer.synchronize()
    twins.assert_same()


def test_parameters_that_are_edited_between_steps():
    twins = Twins(Half)
    for step in range(8):
        twins.step(step)
        if step % 2:
            twins.optimizer.synchronize()
            for model in (twins.live, twins.expected):
                with torch.no_grad():
                    model.blocks[1].weight.clamp_(-0.1, 0.1)
    twins.assert_same_state()


@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.SGD, torch.optim.NAdam, torch.optim.Adagrad]
)
def test_other_optimizers(optimizer_class):
    twins = Twins(Half, optimizer_class=optimizer_class)
    for step in range(6):
        twins.step(step)
    twins.assert_same_state()


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-in-some-groups"])
def test_every_kind_of_parameter_with_gradients_from_elsewhere(name):
    """Nobody calls the model, so that nobody could wait: the step itself does."""
    pair = Pair(CASES[name], Cut(4096, 2, 777, FORWARD), Disordered(seed=1))
    for step in range(13):
        pair.step(step)
        pair.assert_same_parameters()
        if step in (2, 3, 8):
            pair.optimizer.checkpoint({"step": step})
    pair.assert_same_state()
    pair.optimizer.close()


def test_groups_that_are_added_and_state_that_is_resident():
    cut = Cut(4096, 2, settings={**FORWARD, "host_memory": 100_000})
    twins = Twins(Batched, cut)
    for step in range(9):
        if step == 4:
            for model, owner in twins.sides():
                model.layers.append(torch.nn.Linear(21, 3, bias=False))
                torch.nn.init.constant_(model.layers[-1].weight, 0.1)
                owner.add_param_group({"params": [model.layers[-1].weight], "lr": 0.02})
        twins.step(step)
        if step % 3 == 2:
            twins.optimizer.checkpoint()
    twins.assert_same_state()


class Outside(torch.nn.Module):
    """What is called is not the model, but parts of it; parameters are used elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
        self.decoder = torch.nn.Linear(40, 40)
        self.scale = torch.nn.Parameter(torch.ones(40))

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, 40, generator=generator)


def test_parts_that_are_called_without_the_model():
    twins = Twins(Outside)

    def loss(model: Outside, step: int) -> torch.Tensor:
        shift = model.scale.square()  # read before anything is called
        return (model.decoder(model.encoder(twins.batch(step))) + shift).square().mean()

    twins.loss = loss
    for step in range(8):
        twins.step(step)
    twins.assert_same_state()


@pytest.mark.parametrize("model", [Batched, Early])
def test_parameters_that_are_read_before_the_forward(model):
    """As by those who hand upcast copies to the model."""
    twins = Twins(model)

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        upcast = {n: p.float() for n, p in model.named_parameters()}
        out = torch.func.functional_call(model, upcast, (twins.batch(step).float(),))
        return out.square().mean()

    twins.loss = loss
    for step in range(8):
        twins.step(step)
    twins.assert_same_state()


def test_a_model_that_is_not_called_any_more():
    """Nobody could wait, so that the step itself does."""
    twins = Twins(Early)
    for step in range(3):
        twins.step(step)
    twins.optimizer.synchronize()
    twins.loss = lambda model, step: (
        (twins.batch(step) @ model.first.weight @ model.last.weight).square().mean()
    )
    for step in range(3, 12):
        twins.step(step)
    twins.assert_same()


class Branching(torch.nn.Module):
    """Each branch is first used long after the first forward, and in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(33, 33) for _ in range(5))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        for number in range(2):
            x = self.branches[(self.turn * 3 + number * 2) % (2 if self.turn < 5 else 5)](x)
        return x

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, 33, generator=generator)


def test_a_forward_that_takes_another_way():
    twins = Twins(Branching)
    for step in range(16):
        twins.step(step)
    twins.assert_same_state()


# torch's tracer causes it: with one thread of filters it hides it, with warnings as errors not
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("given", ["compiled", "inner", "in-place", "layers", "layers-later"])
@pytest.mark.parametrize("called", ["before", "after"])
def test_compiled_models(given, called):
    torch.compiler.reset()
    twins = Twins(Batched)
    twins.optimizer.close()
    twins.live = inner = twins.make()
    if given == "compiled":
        twins.live = torch.compile(inner, backend="eager")
    if called == "before":
        with torch.no_grad():
            twins.live(twins.batch(0)), twins.expected(twins.batch(0))  # BatchNorm counts it
    if given == "in-place":
        twins.live.compile(backend="eager")
    if given == "layers":
        for block in inner.layers:
            block.compile(backend="eager")
    twins.optimizer = twins.offloaded(twins.live, fresh=True)
    if given == "inner":
        twins.live = torch.compile(inner, backend="eager")
    for step in range(8):
        if step == 3 and given == "layers-later":
            for block in inner.layers:
                block.compile(backend="eager")
        twins.step(step)
    twins.live = inner
    twins.optimizer.synchronize()
    twins.assert_same()
    twins.optimizer.close()
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_function_that_calls_a_part_of_the_model():
    torch.compiler.reset()
    twins = Twins(Batched)
    live, eager = twins.live, twins.loss
    part = torch.compile(lambda x: live.layers(x), backend="eager")

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        return eager(part if model is live else model, step)

    twins.loss = loss
    for step in range(6):
        twins.step(step)
    twins.optimizer.synchronize()
    twins.assert_same()
    torch.compiler.reset()


def test_something_is_compiled_while_a_step_runs():
    """torch's optimizers differ in the last bit meanwhile, on all threads."""
    torch.compiler.reset()
    twins = Twins(Early, backend=MemoryBackend())

    def compile_slowly(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        time.sleep(0.1)
        return graph.forward

    for step in range(4):
        twins.step(step)
        torch.compile(lambda x, step=step: x * step, backend=compile_slowly)(torch.ones(3))
    twins.assert_same_state()
    torch.compiler.reset()
