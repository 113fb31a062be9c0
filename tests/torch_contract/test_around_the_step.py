"""What loops put around `step()`, beside plain torch with FP32 masters: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from gds import Backend, MemoryBackend
from tests.numerics import twins
from tests.numerics.delays import Late
from tests.numerics.reference import (
    assert_same_bits,
    assert_same_parameters,
)

Step = Callable[[], object]


class Net(torch.nn.Module):
    """bfloat16 layers, and an FP32 norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(11, 40).bfloat16()
        self.norm = torch.nn.BatchNorm1d(40)
        self.second = torch.nn.Linear(40, 3).bfloat16()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs).float()).relu()
        return self.second(hidden.bfloat16()).float()


def inputs(step: int) -> torch.Tensor:
    return torch.randn(6, 11, generator=torch.Generator().manual_seed(step)).bfloat16()


def loss_of(model: Any, step: int) -> torch.Tensor:
    return (model(inputs(step)) - 1).square().mean()


class Twins(twins.Twins):
    """A model whose state is on storage, and the same one with its state in memory."""

    def __init__(self, backend: Backend | None = None, overlap: str | None = None) -> None:
        super().__init__(Net, overlap, backend or MemoryBackend())

    def steps(self) -> list[tuple[Net, Step]]:
        return [(model, owner.step) for model, owner in self.sides()]

    def train(self, step: int) -> None:
        for model, take_step in self.steps():
            model.zero_grad()
            loss_of(model, step).backward()
            take_step()

    def finish(self) -> None:
        """Compare masters and moments, too."""
        self.assert_same_state()
        self.optimizer.close()


ALL = pytest.mark.parametrize("overlap", [None, "forward", "backward"])
"""For what works in every mode."""


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_gradients_accumulated_over_micro_batches_and_clipped(overlap: str | None) -> None:
    """By norm, with torch's code for one and for many tensors, and by value."""
    pair = Twins(overlap=overlap)
    clip = torch.nn.utils
    for step in range(6):
        norms = []
        for model, take_step in pair.steps():
            model.zero_grad()
            for part in range(3):
                (loss_of(model, 10 * step + part) / 3).backward()
            given = model.parameters()
            if step % 3 < 2:
                norms.append(clip.clip_grad_norm_(given, 0.05, foreach=step % 3 == 1))
                assert norms[-1] > 0.05
            else:
                assert any((p.grad.abs() > 0.01).any() for p in model.parameters())
                clip.clip_grad_value_(given, 0.01)
            take_step()
        if norms:
            assert_same_bits(norms[0], norms[1], "norm")
        pair.assert_same()
    pair.finish()


@pytest.mark.parametrize("to_none", [True, False], ids=["to-none", "to-zero"])
def test_zero_grad(to_none: bool) -> None:
    """Gradients of zero are gradients: moments decay, weights too. None is no gradient."""
    pair = Twins()
    plain = torch.optim.SGD(pair.expected.parameters())
    for step in range(6):
        for (model, take_step), optimizer in zip(
            pair.steps(), (pair.optimizer, plain), strict=True
        ):
            optimizer.zero_grad(set_to_none=to_none)
            grads = [p.grad for p in model.parameters()]
            assert all((g is None) == (to_none or step == 0) for g in grads)
            if step % 3 != 2:
                loss_of(model, step).backward()
            take_step()
        pair.assert_same()
    assert pair.optimizer.num_steps == 6
    pair.finish()


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_torchs_scaler_with_bfloat16_parameters_skips_steps_without_touching_the_state(
    overlap: str | None,
) -> None:
    pair = Twins(overlap=overlap)
    plain = torch.optim.SGD(pair.expected.parameters())  # what the twin's scaler looks at
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in "ab"]
    for step in range(6):
        skipped = step in (0, 4)
        stats = pair.optimizer.stats()
        for (model, take_step), optimizer, scaler in zip(
            pair.steps(), (pair.optimizer, plain), scalers, strict=True
        ):
            model.zero_grad()
            scaler.scale(loss_of(model, step) * (float("inf") if skipped else 1.0)).backward()
            if model is pair.live:
                scaler.step(optimizer)
            else:
                scaler.unscale_(optimizer)
                if not skipped:
                    take_step()
            scaler.update()
        pair.assert_same()
        after = pair.optimizer.stats()
        assert (after.steps == stats.steps) == skipped
        if skipped:
            moved = (stats.bytes_read, stats.bytes_written)
            assert (after.bytes_read, after.bytes_written) == moved
        assert scalers[0].state_dict() == scalers[1].state_dict()
    assert pair.optimizer.num_steps == 4
    pair.finish()


@pytest.mark.parametrize(("compiler", "overlap"), [("eager", "backward"), ("aot_eager", None)])
def test_compiled_models(compiler: str, overlap: str | None) -> None:
    torch.compiler.reset()
    pair = Twins(overlap=overlap)
    for step in range(3):
        for model, take_step in pair.steps():
            model.zero_grad()
            loss_of(torch.compile(model, backend=compiler), step).backward()
            take_step()
    pair.finish()


@ALL
def test_a_compiled_step_is_not_compiled(overlap: str | None) -> None:
    """torch's optimizers differ in the last bit when traced, and files cannot be traced at all."""
    torch.compiler.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> Step:
        graphs.append(graph)
        return graph.forward

    pair = Twins(overlap=overlap)
    take_step = torch.compile(pair.optimizer.step, backend=count)
    model = torch.compile(pair.live, backend=count)

    def closure() -> torch.Tensor:
        pair.live.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    for number in range(3):
        if number == 2 and overlap is None:
            assert len(graphs) == 0
            take_step(closure)
            assert len(graphs) == 1  # of the model, which is still compiled
        else:
            pair.live.zero_grad()
            loss_of(pair.live, 0).backward()
            take_step()
        pair.expected.zero_grad()
        loss_of(pair.expected, 0).backward()
        pair.plain.step()
        pair.assert_same()
    pair.finish()


@pytest.mark.parametrize(
    ("kind", "overlap"),
    [("swa", None), ("swa", "forward"), ("ema", "forward"), ("ema", "backward")],
)
def test_averaged_models(kind: str, overlap: str | None) -> None:
    pair = Twins(overlap=overlap)
    averaging = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if kind == "ema" else {}
    averages = [AveragedModel(model, **averaging) for model, _ in pair.steps()]
    schedulers = [
        SWALR(optimizer, swa_lr=0.001, anneal_epochs=3)
        for optimizer in (pair.optimizer, pair.plain.inner)
    ]
    for step in range(5):
        pair.train(step)
        if step >= 2:
            for (model, _), average, scheduler in zip(
                pair.steps(), averages, schedulers, strict=True
            ):
                average.update_parameters(model)
                scheduler.step()
        pair.assert_same()
    for average in averages:
        update_bn([inputs(step) for step in range(3)], average)
    assert_same_parameters(averages[0].state_dict().items(), averages[1].state_dict().items())
    for model, average in zip((pair.live, pair.expected), averages, strict=True):
        model.load_state_dict(average.module.state_dict())  # and train on from the average
    pair.train(99)
    pair.finish()


@pytest.mark.filterwarnings("ignore:the reference that state_dict")
@ALL
def test_each_hook_fires_once(overlap: str | None) -> None:
    pair = Twins(overlap=overlap)
    optimizer, seen = pair.optimizer, []

    def note(name: str) -> Any:
        return lambda o, *_: seen.append((name, o is optimizer))

    registered = [
        optimizer.register_step_pre_hook(note("pre")),
        optimizer.register_step_post_hook(note("post")),
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    optimizer.register_state_dict_pre_hook(note("save"))
    optimizer.register_state_dict_post_hook(note("saved"))
    optimizer.register_load_state_dict_pre_hook(note("load"))
    optimizer.register_load_state_dict_post_hook(note("loaded"))

    def fired() -> list[str]:
        names, ours = [name for name, _ in seen], [one for _, one in seen]
        seen.clear()
        assert all(ours)
        return names

    try:
        for step in range(2):
            loss_of(pair.live, step).backward()
            assert fired() == []
            optimizer.step()
            optimizer.synchronize()
            assert fired() == ["global pre", "pre", "post", "global post"]
            optimizer.zero_grad()
        optimizer.checkpoint().result()
        optimizer.restore()
        assert fired() == []  # none of that is a step or a state dict
        reference, full = optimizer.state_dict(), optimizer.full_state_dict()
        assert fired() == ["save", "saved"] * 2
        optimizer.load_state_dict(reference)
        optimizer.load_state_dict(full)
        assert fired() == ["load", "loaded"] * 2
    finally:
        for handle in registered:
            handle.remove()
        optimizer.close()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("register", "compiled", "overlap"),
    [("one", False, "forward"), ("all", True, "forward"), ("one", True, "backward")],
)
def test_a_hook_of_steps_finds_the_parameters_updated(
    register: str, compiled: bool, overlap: str | None
) -> None:
    torch.compiler.reset()
    pair = Twins(Late(0.002), overlap=overlap)
    if compiled:
        pair.live.compile(backend="eager")
    found: list[torch.Tensor] = []

    def values(model: torch.nn.Module) -> torch.Tensor:
        return torch.cat([p.detach().float().flatten() for p in model.parameters()])

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is pair.optimizer:
            found.append(values(pair.live))

    of_one = pair.optimizer.register_step_post_hook
    registered = (of_one if register == "one" else register_optimizer_step_post_hook)(look)
    for step in range(4):
        pair.train(step)
        assert_same_bits(found[step], values(pair.expected), f"step {step}")
    registered.remove()
    pair.finish()
    torch.compiler.reset()
