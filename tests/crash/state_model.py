"""What a run must have at any point of its history: what the state machine compares with.

A run is a list of events, and everything that a checkpoint of it holds follows from them: it is
what the same events leave in a store of its own that nothing ever happens to. That such a store has
the bits of plain torch is what `tests/numerics` is about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

import offload
from gds import MemoryBackend
from offload import AdamW, Checkpoint
from tests.stores.training import (
    FEATURES,
    Model,
    Tensors,
    add_head,
    optimizer_for,
    options,
    read_tensors,
    same_bits,
)


@dataclass(frozen=True)
class Variant:
    """What a store is made with."""

    master: Literal["float32", "split"] = "float32"
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    chunk_bytes: int = 4096
    drives: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Settings that change results."""
        return {
            "master": self.master,
            "state_dtype": self.state_dtype,
            "chunk_bytes": self.chunk_bytes,
        }


@dataclass(frozen=True)
class Step:
    """An optimizer step on random gradients."""

    seed: int
    without: frozenset[int] = frozenset()
    """Positions of the parameters that have no gradient."""


@dataclass(frozen=True)
class Forward:
    """A forward, which changes the buffers."""

    seed: int


@dataclass(frozen=True)
class Edit:
    """One element of a parameter is set by hand."""

    parameter: int
    element: int
    value: float


@dataclass(frozen=True)
class AddHead:
    """A parameter group joins."""


@dataclass(frozen=True)
class SetRate:
    """A scheduler changes the learning rate of the first group."""

    lr: float


@dataclass(frozen=True)
class LayOut:
    """A checkpoint before the first step: the order of what is trained by then is fixed.

    Groups that join later come after it, whatever their dtypes; rounding at random sees the order.
    """


Event: TypeAlias = Step | Forward | Edit | AddHead | SetRate | LayOut


@dataclass(frozen=True)
class Expectation:
    """Everything that a checkpoint holds, but for the train state."""

    step: int
    model: Tensors
    state: dict[str, Tensors]
    """By parameter, as FP32, then by array; of those that have any."""

    rates: list[float]


def set_gradients(model: Model, event: Step, *, with_head: bool) -> set[str]:
    """Give parameters random gradients; returns the names of those that have one."""
    names = set()
    for position, (name, parameter) in enumerate(model.named_parameters()):
        parameter.grad = None
        if position not in event.without and (with_head or not name.startswith("head")):
            generator = torch.Generator().manual_seed(1000 * event.seed + position)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            names.add(name)
    return names


@torch.no_grad()
def forward(model: Model, event: Forward) -> None:
    """Change the buffers."""
    generator = torch.Generator().manual_seed(event.seed)
    model(torch.randn(6, FEATURES, generator=generator).to(torch.bfloat16))


@torch.no_grad()
def edit(model: Model, event: Edit, *, with_head: bool) -> None:
    """Set an element of a parameter that is trained."""
    parameters = [p for n, p in model.named_parameters() if with_head or not n.startswith("head")]
    flat = parameters[event.parameter % len(parameters)].view(-1)
    flat[event.element % len(flat)] = event.value


@dataclass
class Run:
    """A history, and what it has led to where nothing else has happened."""

    variant: Variant
    events: tuple[Event, ...] = ()
    with_head: bool = False
    started: set[str] = field(default_factory=set)
    """Parameters that have had a gradient."""

    def __post_init__(self) -> None:
        self.model = Model()
        settings = options(MemoryBackend(), **self.variant.options)
        self.optimizer: AdamW = optimizer_for(self.model, "/undisturbed", settings, keep=1)
        events, self.events = self.events, ()
        for event in events:
            self.apply(event)

    @property
    def num_steps(self) -> int:
        return self.optimizer.num_steps

    def apply(self, event: Event) -> None:
        """Let something happen."""
        self.events += (event,)
        match event:
            case Step():
                self.started |= set_gradients(self.model, event, with_head=self.with_head)
                self.optimizer.step()
            case Forward():
                forward(self.model, event)
            case Edit():
                edit(self.model, event, with_head=self.with_head)
            case AddHead():
                add_head(self.model, self.optimizer)
                self.with_head = True
            case SetRate():
                self.optimizer.param_groups[0]["lr"] = event.lr
            case LayOut():
                self._sealed()

    def expectation(self) -> Expectation:
        """Return what a checkpoint of this moment holds."""
        return content(self._sealed(), self.started)

    def _sealed(self) -> Checkpoint:
        return self.optimizer.checkpoint({"number": len(self.events)}).result()


def content(checkpoint: Checkpoint, names: set[str]) -> Expectation:
    """Read everything that a checkpoint holds, its state as FP32, whatever it is stored in."""
    model = read_tensors(checkpoint.backend, f"{checkpoint.path}/model.safetensors")
    state = {name: dict(offload.read_state(checkpoint, name)) for name in sorted(names)}
    rates = [group["lr"] for group in checkpoint.hyperparameters]
    return Expectation(checkpoint.step, model, state, rates)


def differences(checkpoint: Checkpoint, expected: Expectation) -> list[str]:
    """Say what of a checkpoint is not, to the bit, what is expected."""
    found = content(checkpoint, {*expected.state})
    wrong = [
        f"{what} {getattr(found, what)}, expected {getattr(expected, what)}"
        for what in ("step", "rates")
        if getattr(found, what) != getattr(expected, what)
    ]
    if not same_bits(found.model, expected.model):
        wrong.append("parameters or buffers")
    wrong += [n for n, arrays in expected.state.items() if not same_bits(found.state[n], arrays)]
    return [*wrong, *checkpoint.verify().problems]
