"""Whoever reads or edits a parameter while a step runs beside the forward gets the step's result.

The oracle is the same model with torch's own optimizer. A step cannot end before somebody waits for
it: it is released at that moment, so that who does not wait computes with old values.
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from offload.model.watch import is_watched
from tests.eventually import TIMEOUT_S
from tests.numerics.delays import Held
from tests.numerics.reference import assert_same_bits
from tests.numerics.twins import LAST, Layers, Twins, last, when_waiting

X = torch.randn(3, 32, generator=torch.Generator().manual_seed(7))


def average(model: Layers) -> list[torch.Tensor]:
    averaged = AveragedModel(Layers(), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)  # the first takes a copy
    averaged.update_parameters(model)
    return list(averaged.parameters())


def forward_without_the_module(model: Layers) -> torch.Tensor:
    for layer in model.layers[:LAST]:
        layer(X)
    return nn.functional.linear(X, last(model))


def save_and_load(p: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


def edit(change: Callable[[torch.Tensor], object]) -> Callable[[Layers], torch.Tensor]:
    def edited(model: Layers) -> torch.Tensor:
        with torch.no_grad():
            change(last(model))
        return last(model).detach().clone()

    return edited


READERS: dict[str, Callable[[Layers], object]] = {
    "function": lambda model: nn.functional.linear(X, last(model)),
    "function beside modules that are called": forward_without_the_module,
    "operator": lambda model: X @ last(model),
    "data": lambda model: last(model).data.clone(),
    "numpy": lambda model: torch.from_numpy(last(model).numpy(force=True).copy()),
    "item": lambda model: last(model)[0, 0].item(),
    "sums": lambda model: [p.sum() for p in model.parameters()],
    "foreach": lambda model: torch._foreach_norm(list(model.parameters())),
    "state_dict": lambda model: [t.clone() for t in model.state_dict().values()],
    "torch.save": lambda model: save_and_load(last(model)),
    "deepcopy of the model": lambda model: list(copy.deepcopy(model).parameters()),
    "functional_call": lambda model: torch.func.functional_call(
        model, dict(model.named_parameters()), (X,)
    ),
    "averaged model": average,
    "gradient": lambda model: torch.autograd.grad((X @ last(model)).sum(), last(model)),
    "text": lambda model: repr(last(model)),
    "iteration": lambda model: list(last(model)),
    "vmap": lambda model: torch.vmap(torch.sum)(last(model)),
    "result of another": edit(lambda p: torch.add(torch.ones(32, 32), 1, out=p)),
    "edit": edit(lambda p: p.mul_(0.5)),
    "edit of the data": edit(lambda p: p.data.clamp_(-0.1, 0.1)),
    "edit of a row": edit(lambda p: p[3].zero_()),
    "other memory": edit(lambda p: p.set_(torch.full((32, 32), 0.25))),
    "new real part": edit(lambda p: setattr(p, "real", torch.ones(32, 32))),
    "weight decay by hand": edit(lambda p: torch._foreach_mul_([p], 0.9)),
}


def assert_same(found: object, expected: object) -> None:
    if isinstance(found, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(found, torch.Tensor):
        assert_same_bits(found, expected, "what was read")
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("read", "thread"),
    [(name, "same") for name in READERS]
    + [(name, "another") for name in ("operator", "state_dict", "edit", "averaged model")],
)
def test_a_reader_waits(run, read, thread):
    run.step_held(2, LAST)
    when_waiting(run, run.backend.release)
    found = []
    reader = threading.Thread(target=lambda: found.append(READERS[read](run.live)))
    if thread == "another":
        reader.start()
        reader.join(TIMEOUT_S)
    else:
        reader.run()
    assert_same(found[0], READERS[read](run.expected))
    assert type(last(run.live)) is nn.Parameter
    for step in range(3, 6):  # edits count, and the step's masters follow them
        run.step(step)
    run.assert_same()
    assert all(type(p) is nn.Parameter for p in run.live.parameters())


def test_a_reader_waits_for_its_own_parameter_and_who_only_looks_does_not(run):
    run.step_held(2, LAST)
    first, p = run.live.layers[0].weight, last(run.live)
    assert_same_bits(X @ first, X @ run.expected.layers[0].weight, "read")
    assert (type(first), is_watched(p)) == (nn.Parameter, True)
    assert (p.shape, p.dtype, p.device.type) == ((32, 32), torch.float32, "cpu")
    assert p.requires_grad
    assert p.grad is None
    p.grad = torch.ones_like(run.expected.layers[LAST].weight)
    run.optimizer.zero_grad()
    run.live.zero_grad()
    nn.utils.clip_grad_norm_(run.live.parameters(), 1.0)
    assert sum(p.numel() for p in run.live.parameters()) == 32 * 32 * len(run.live.layers)
    assert p.__class__ is nn.Parameter
    run.live.train()
    assert LAST not in run.backend.ended
    assert is_watched(p)
    run.backend.release()
    run.assert_same()
    run.optimizer.close()
    assert all(type(p) is nn.Parameter for p in run.live.parameters())


class Calls(nn.Module):
    """Is used in other ways than by a call, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32, bias=False)
        self.position = nn.Parameter(torch.ones(40, 32))
        self.head = nn.Linear(32, 64, bias=False)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x + self.position.sum(0))

    def forward(self, x: torch.Tensor, *, fused: bool = False) -> torch.Tensor:
        hidden = self.encode(x)
        return nn.functional.linear(hidden[-1:], self.head.weight) if fused else self.head(hidden)


def on_threads(model: nn.Module, num: int) -> torch.Tensor:
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(model(X))) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return torch.stack(found)


PATHS: dict[str, tuple[Callable[[Calls], torch.Tensor], Callable[[], object]]] = {
    "three threads": (lambda model: on_threads(model, 3), torch.enable_grad),
    "forward in inference_mode": (lambda model: model(X), torch.inference_mode),
    "fused loss in training": (lambda model: model(X, fused=True), torch.enable_grad),
    "a method in training": (lambda model: model.encode(X), torch.enable_grad),
    "a method in inference_mode": (lambda model: model.encode(X), torch.inference_mode),
    "parameters in no_grad": (
        lambda model: X @ model.first.weight @ model.head.weight.T,
        torch.no_grad,
    ),
}


@pytest.mark.parametrize(("call", "mode"), PATHS.values(), ids=PATHS)
def test_a_path_that_was_not_recorded(call, mode):
    run = Twins(Calls, backend=Held(), num_steps=2)
    for step in range(2, 5):
        run.step_held(step, *range(6))
        when_waiting(run, run.backend.release)
        found = []
        for model in run.both():
            model.train(mode is torch.enable_grad)
            with mode():
                found.append(call(model).detach().clone())
            model.train()
        assert_same_bits(found[0], found[1], "output")
        run.backend.release()
    run.assert_same()
    run.optimizer.close()


def evaluate(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(X)


class Encoder(nn.Module):
    """torch's own layers, which take a fast path, with other bits, where no gradient is needed.

    `within` says whether it is asked for within a call that trains, too.
    """

    within = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        return x + self.attention(x, x, x, need_weights=False)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)[None].expand(2, -1, -1)
        out = self.encode(x)
        if self.within:
            self.encoder.eval(), self.attention.eval()
            with torch.no_grad():
                out = out + self.encode(x)
            self.train()
        return out


def evaluated(model: Encoder) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(X)


def evaluated_within(model: Encoder) -> torch.Tensor:
    model.within = True
    out = model(X)
    model.within = False
    return out


@pytest.mark.parametrize(
    ("call", "recorded"),
    [
        (evaluated, True),
        (evaluated, False),
        (evaluated_within, True),
    ],
)
def test_evaluation_takes_the_fast_paths_that_it_takes_without_overlap(call, recorded):
    """Beside a step that is running, and before the first step has looked at a forward."""
    run = Twins(Encoder, backend=Held(), num_steps=3 if recorded else 0)
    if recorded:
        run.step_held(3, *range(8))
        when_waiting(run, run.backend.release)

    def called(model: Encoder, *, fast: bool) -> torch.Tensor:
        torch.backends.mha.set_fastpath_enabled(fast)
        found = call(model).detach().clone()
        model.train()
        torch.backends.mha.set_fastpath_enabled(True)
        return found

    found = called(run.live, fast=True)
    fast, slow = (called(run.expected, fast=fast) for fast in (True, False))
    assert not torch.equal(fast, slow), "the paths do not differ: this shows nothing"
    assert_same_bits(found, fast, "evaluation")
    run.backend.release()
    run.assert_same()
    run.optimizer.close()


def test_a_checkpoint_on_one_thread_does_not_let_another_one_pass(run):
    """The optimizer looks at the model's state dict meanwhile, without waiting."""
    run.step_held(2, LAST)
    found: list[torch.Tensor] = []
    evaluating = threading.Thread(target=lambda: found.append(evaluate(run.live)))

    def looked_at(*_: object) -> None:
        if not evaluating.ident:
            evaluating.start()
            evaluating.join(0.2)  # in which it would pass

    run.live.register_state_dict_post_hook(looked_at)
    handle = run.optimizer.checkpoint()
    assert found == []
    run.backend.release()
    evaluating.join(TIMEOUT_S)
    assert_same_bits(found[0], evaluate(run.expected), "evaluation")
    assert handle.result(TIMEOUT_S).step == 3
