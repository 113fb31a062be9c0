"""Layers that are frozen and set free: in a run, between runs, and with gradients all the same.

The oracle is torch's own optimizer on the same FP32 model, which steps whatever has a gradient, and
whose state dict keeps the state of what is frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload.errors import MismatchError
from tests.numerics.pairs import CASES, CUTS, Pair, memory_pair
from tests.numerics.reference import assert_same_bits, assert_same_parameters
from tests.numerics.twins import Twins

HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
Model = torch.nn.Sequential
Prepare = Callable[[Model], object]


def make_model() -> Model:
    return Model(
        torch.nn.Linear(32, 70), torch.nn.Tanh(), torch.nn.Linear(70, 50), torch.nn.Linear(50, 3)
    )


def frozen(*numbers: int) -> Prepare:
    """Return what freezes these layers and sets all others free."""

    def prepare(model: Model) -> None:
        for number in (0, 2, 3):
            model[number].requires_grad_(number not in numbers)

    return prepare


ALL_FREE = frozen()


class Run(Twins):
    """The plain side is never resumed; its layers are frozen as those of the other are."""

    def __init__(self, overlap: str | None = None, prepare: Prepare = ALL_FREE) -> None:
        self.prepare = prepare
        super().__init__(lambda: self.prepared(), overlap, MemoryBackend(), **HYPER)

    def prepared(self) -> Model:
        model = make_model()
        self.prepare(model)
        return model

    def each(self, prepare: Prepare) -> None:
        for model in self.both():
            prepare(model)

    def take(self, step: int, gives: str = "", *, backwards: bool = True) -> None:
        """Take a step; layer 2 is given gradients ``before`` or ``after`` the backward."""
        for model, owner in self.sides():
            model.zero_grad()
            if gives == "before":
                give_gradients(model, step)
            if backwards:
                self.loss(model, step).backward()
            if gives == "after":
                give_gradients(model, step)
            owner.step()
        self.assert_same()

    def resume(self, prepare: Prepare) -> None:
        """Go on as another process would, with a model that is prepared anew."""
        self.optimizer.checkpoint().result()
        prepare(self.expected)
        self.prepare = prepare
        super().resume()
        self.assert_same()

    def assert_same_state(self) -> offload.Checkpoint:
        """Also of what is frozen."""
        checkpoint = self.optimizer.checkpoint({"compared": True}).result()
        assert checkpoint.verify().ok
        for name, parameter in self.expected.named_parameters():
            state = self.plain.state(parameter)
            if not state:
                continue
            found = offload.read_state(checkpoint, name)
            for array in ("exp_avg", "exp_avg_sq"):
                assert_same_bits(found[array], state[array], f"{array} of {name}")
            layout = checkpoint.manifest.layout
            index = [p.name for p in layout.parameters].index(name)
            assert checkpoint.manifest.scalars[index] == (("step", "f32", state["step"].item()),)
        return checkpoint


def give_gradients(model: Model, step: int) -> None:
    for parameter in model[2].parameters():
        generator = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@dataclass(frozen=True)
class Story:
    """What happens to the layers of a run."""

    num_steps: int
    prepare: Prepare = ALL_FREE
    edits: Mapping[int, Prepare] = field(default_factory=dict)
    """Before these steps layers are frozen or set free."""
    resumes: Mapping[int, Prepare] = field(default_factory=dict)
    """Before these steps the run is resumed, with a model that is prepared so."""
    gives: Iterable[int] = ()
    """Steps at which layer 2 is given gradients."""
    when: str = "after"


STORIES = {
    "frozen, with gradients": Story(6, frozen(2), gives=(0, 1, 4, 5)),
    "frozen, with gradients before backward": Story(6, frozen(2), gives=(0, 1, 4), when="before"),
    "frozen later, with gradients": Story(7, edits={2: frozen(2)}, gives=(4, 6)),
    "first gradient in the middle": Story(8, frozen(2), gives=range(4, 8)),
    "with gradients, resumed": Story(
        8, frozen(2), resumes={4: frozen(2)}, gives=(0, 1, 2, 3, 6, 7)
    ),
    "frozen in a run, and in the next": Story(7, edits={2: frozen(0)}, resumes={4: frozen(0)}),
    "frozen between runs, set free later": Story(8, edits={5: ALL_FREE}, resumes={3: frozen(2)}),
    "set free between runs": Story(8, frozen(2), resumes={3: ALL_FREE, 6: ALL_FREE}),
    "layers take turns": Story(
        12,
        frozen(0),
        resumes={3: frozen(2), 6: frozen(0, 2), 8: ALL_FREE, 10: frozen(3, 0)},
    ),
}
BESIDE = [
    "frozen, with gradients",
    "frozen, with gradients before backward",
    "frozen later, with gradients",
    "first gradient in the middle",
    "frozen between runs, set free later",
    "set free between runs",
]


@pytest.mark.parametrize(
    ("name", "overlap"),
    [(name, None) for name in STORIES]
    + [(name, ("forward", "backward")[n % 2]) for n, name in enumerate(BESIDE)]
    + [("frozen, with gradients", "backward"), ("set free between runs", "forward")],
)
def test_layers_that_are_frozen_and_set_free(name, overlap):
    story = STORIES[name]
    twins = Run(overlap, story.prepare)
    for step in range(story.num_steps):
        if step in story.resumes:
            twins.resume(story.resumes[step])
        if step in story.edits:
            twins.each(story.edits[step])
        twins.take(step, story.when if step in story.gives else "")
        if step % 4 == 3:
            twins.optimizer.checkpoint().result()
    twins.assert_same_state()


@pytest.mark.parametrize("overlap", [None, "forward", "backward"])
def test_nothing_but_what_is_frozen_has_a_gradient(overlap):
    twins = Run(overlap, frozen(2))
    twins.take(0)
    twins.take(1, "after", backwards=False)
    twins.take(2)
    twins.assert_same_state()


@pytest.mark.parametrize(
    ("before", "after"), [(ALL_FREE, frozen(0)), (frozen(0), ALL_FREE)], ids=["frozen", "set free"]
)
def test_checkpoints_before_the_next_step_keep_the_state_of_what_is_frozen(before, after):
    twins = Run(None, before)
    for step in range(3):
        twins.take(step)
    for _ in range(3):
        twins.resume(after)
    twins.assert_same_state()
    twins.resume(ALL_FREE)
    twins.take(3)
    twins.assert_same_state()


def test_what_is_frozen_is_not_given_any_more():
    """The common ``AdamW(p for p in model.parameters() if p.requires_grad)``."""
    twins = Run()
    twins.given = lambda model: [p for p in model.parameters() if p.requires_grad]
    for step in range(3):
        twins.take(step)
    sealed = twins.optimizer.checkpoint().result()
    names = ("0.weight", "0.bias")
    kept = {name: offload.read_state(sealed, name)["exp_avg"] for name in names}
    twins.resume(frozen(0))
    for step in range(3, 6):
        twins.take(step)
    last = twins.assert_same_state()
    for name in names:
        found = offload.read_state(last, name)
        assert_same_bits(found["exp_avg"], kept[name], name)
        assert_same_bits(found["master"], twins.live.get_parameter(name).detach(), name)


@pytest.mark.parametrize(
    ("first", "then"), [(ALL_FREE, frozen(0)), (frozen(0), ALL_FREE)], ids=["frozen", "set free"]
)
def test_going_back_in_the_same_process_to_before_a_layer_was(first, then):
    twins = Run(None, first)
    for step in range(3):
        twins.take(step)
    twins.optimizer.checkpoint().result()
    saved = copy.deepcopy([twins.plain.inner.state_dict(), twins.expected.state_dict()])
    twins.each(then)
    twins.take(3)
    twins.optimizer.checkpoint().result()
    assert twins.optimizer.restore(3, discard_newer=True).step == 3
    twins.plain.inner.load_state_dict(saved[0])
    twins.expected.load_state_dict(saved[1])
    twins.assert_same()
    for step in range(3, 6):
        twins.take(step)
    twins.each(ALL_FREE)
    twins.take(6)
    twins.assert_same_state()


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-in-some-groups", "adagrad"])
def test_16_bit_parameters_and_other_classes(name):
    pair: Pair = memory_pair(CASES[name], CUTS[0])
    for step in range(12):
        if step in (3, 8):
            for model in pair.both():
                model.matrix.requires_grad_(step == 8)
                model.strided_full.requires_grad_(step == 8)
                model.sometimes.requires_grad_(step == 3)
        if step in (5, 9):
            pair.optimizer.checkpoint().result()
            frozen = [n for n, p in pair.expected.named_parameters() if not p.requires_grad]
            live = type(pair.expected)(seed=99)
            for n, p in live.named_parameters():
                p.requires_grad_(n not in frozen)
            pair.reopen(live)
            pair.optimizer.restore()
        pair.step(step)
        pair.assert_same_parameters()
    checkpoint = pair.optimizer.checkpoint().result()
    for parameter in ("matrix", "strided_full", "sometimes"):
        found = offload.read_state(checkpoint, parameter)
        state = pair.reference.state(pair.expected.get_parameter(parameter))
        for array in found.keys() & state.keys():
            assert_same_bits(found[array], state[array], f"{array} of {parameter}")


def one_not_given() -> tuple[Model, list[Any]]:
    model = make_model()
    return model, [p for n, p in model.named_parameters() if n != "2.weight"]


def another_group() -> tuple[Model, list[Any]]:
    model = make_model()
    model[2].requires_grad_(False)
    rest = [*model[0].parameters(), *model[2].parameters(), *model[3].parameters()]
    return model, [{"params": rest}, {"params": []}]


CONTRADICTIONS = {
    "requires gradients and is not given": (
        one_not_given,
        (
            r"'2.weight' has optimizer state in the checkpoint and requires gradients now"
            r".*was not given.*requires_grad_\(False\)"
        ),
    ),
    "frozen, in another group": (another_group, r"'2\.weight' was in group 1"),
}


@pytest.mark.parametrize(("make", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions_are_refused_and_change_nothing(make, message):
    backend = MemoryBackend()
    model = make_model()
    given: list[Any] = list(model.parameters())
    if make is another_group:
        rest = [*model[0].parameters(), *model[3].parameters()]
        given = [{"params": rest}, {"params": list(model[2].parameters())}]
    options = offload.Options(backend=backend, allow_volatile=True)
    with offload.AdamW(given, directory="/run", model=model, options=options) as optimizer:
        model(torch.ones(5, 32)).square().mean().backward()
        optimizer.step()
        optimizer.checkpoint().result()
    other, params = make()
    before = {name: p.detach().clone() for name, p in other.named_parameters()}
    options = offload.Options(backend=backend.reopened(), allow_volatile=True)
    with (
        offload.AdamW(params, directory="/run", model=other, options=options) as optimizer,
        pytest.raises(MismatchError, match=message),
    ):
        optimizer.restore()
    assert_same_parameters(other.named_parameters(), before.items())
