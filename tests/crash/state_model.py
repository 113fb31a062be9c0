"""What a run must have at any point of its history: what the state machine compares with.

A run is a list of `Event`s, and everything that a checkpoint of it holds follows from them. For
FP32 state that is computed by `torch.optim.AdamW` on FP32 masters in memory. For smaller formats,
whose arithmetic `tests/numerics` compares with oracles of their own, it is what the same events
leave in a store of its own that nothing ever happens to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

import offload
from gds import Backend, MemoryBackend
from offload import AdamW, Checkpoint
from tests.stores.training import (
    FEATURES,
    HEAD_HYPER,
    HYPER,
    Model,
    Tensors,
    add_head,
    optimizer_for,
    options,
    read_array,
    read_tensors,
    same_bits,
)

_MOMENTS = ("exp_avg", "exp_avg_sq")


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
    """By array, then by parameter; of those that have any."""

    rates: tuple[float, ...]

    edited: frozenset[str]
    """Parameters whose stored master is older than an edit: their FP32 value is in `state`."""


def trained(model: Model, *, with_head: bool) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained, by name, in a fixed order."""
    return {n: p for n, p in model.named_parameters() if with_head or not n.startswith("head")}


def set_gradients(model: Model, event: Step, *, with_head: bool) -> set[str]:
    """Give parameters random gradients; returns the names of those that have one."""
    names = set()
    for position, (name, parameter) in enumerate(trained(model, with_head=with_head).items()):
        parameter.grad = None
        if position not in event.without:
            generator = torch.Generator().manual_seed(1000 * event.seed + position)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            names.add(name)
    return names


def forward(model: Model, event: Forward) -> None:
    """Change the buffers."""
    generator = torch.Generator().manual_seed(event.seed)
    with torch.no_grad():
        model(torch.randn(6, FEATURES, generator=generator).to(torch.bfloat16))


def edit(model: Model, event: Edit, *, with_head: bool) -> str:
    """Set an element; returns the parameter's name."""
    parameters = list(trained(model, with_head=with_head).items())
    name, parameter = parameters[event.parameter % len(parameters)]
    with torch.no_grad():
        flat = parameter.view(-1)
        flat[event.element % len(flat)] = event.value
    return name


@dataclass
class Run:
    """A history, and what it has led to."""

    variant: Variant
    events: tuple[Event, ...] = ()
    num_steps: int = 0
    with_head: bool = False
    started: set[str] = field(default_factory=set)
    """Parameters that have had a gradient."""

    edited: set[str] = field(default_factory=set)
    """Parameters that have been edited since: what is stored of their masters follows at their next
    gradient."""

    def __post_init__(self) -> None:
        self.model = Model()
        self._prepare()
        events, self.events = self.events, ()
        for event in events:
            self.apply(event)

    def apply(self, event: Event) -> None:
        """Let something happen."""
        self.events += (event,)
        match event:
            case Step():
                names = set_gradients(self.model, event, with_head=self.with_head)
                self._step(names)
                self.num_steps += 1
                self.started |= names
                self.edited -= names
            case Forward():
                forward(self.model, event)
            case Edit():
                self.edited.add(edit(self.model, event, with_head=self.with_head))
            case AddHead():
                self._add_head()
                self.with_head = True
            case SetRate():
                self._set_rate(event.lr)
            case LayOut():
                self._lay_out()

    def expectation(self) -> Expectation:
        """Return what a checkpoint of this moment holds."""
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        edited = frozenset(self.edited)
        return Expectation(self.num_steps, model, self._state(), self._rates(), edited)

    def _prepare(self) -> None:
        raise NotImplementedError

    def _step(self, names: set[str]) -> None:
        raise NotImplementedError

    def _add_head(self) -> None:
        raise NotImplementedError

    def _lay_out(self) -> None:
        """Fix the order of the parameters, where that makes a difference."""

    def _set_rate(self, lr: float) -> None:
        raise NotImplementedError

    def _rates(self) -> tuple[float, ...]:
        raise NotImplementedError

    def _state(self) -> dict[str, Tensors]:
        raise NotImplementedError


class TorchRun(Run):
    """FP32 moments: torch's own optimizer on FP32 masters in memory."""

    def _prepare(self) -> None:
        self._masters: Tensors = {}
        self._low: Tensors = {}
        """With split masters: what of the master is not in the live parameter."""
        body = self._new(trained(self.model, with_head=False))
        self._optimizer = torch.optim.AdamW(body, **HYPER)

    def _new(self, parameters: dict[str, torch.nn.Parameter]) -> list[torch.Tensor]:
        for name, parameter in parameters.items():
            self._masters[name] = parameter.detach().float().clone().requires_grad_()
            if self.variant.master == "split" and parameter.dtype == torch.bfloat16:
                self._low[name] = torch.zeros(parameter.shape, dtype=torch.int32)
        return [self._masters[name] for name in parameters]

    def _add_head(self) -> None:
        head = {n: p for n, p in self.model.named_parameters() if n.startswith("head")}
        self._optimizer.add_param_group({"params": self._new(head), **HEAD_HYPER})

    def _set_rate(self, lr: float) -> None:
        self._optimizer.param_groups[0]["lr"] = lr

    def _rates(self) -> tuple[float, ...]:
        return tuple(group["lr"] for group in self._optimizer.param_groups)

    @torch.no_grad()
    def _step(self, names: set[str]) -> None:
        live = dict(self.model.named_parameters())
        for name, master in self._masters.items():
            master.grad = live[name].grad.float() if name in names else None
            if name not in names:
                continue
            master.copy_(self._present(name, live[name]))
        self._optimizer.step()
        for name in names:
            master = self._masters[name]
            if name in self._low:
                bits = master.detach().view(torch.int32)
                upper = (bits + 0x8000) >> 16  # half away from zero
                self._low[name] = bits - (upper << 16)
                live[name].copy_(upper.to(torch.int16).view(torch.bfloat16))
            else:
                live[name].copy_(master)

    def _present(self, name: str, live: torch.Tensor) -> torch.Tensor:
        """Return the FP32 value of a parameter that has state: edits count."""
        master = self._masters[name].detach()
        if name in self._low:
            return _joined(live, self._low[name])
        edited = _bits(live) != _bits(master.to(live.dtype))
        return torch.where(edited, live.detach().float(), master)

    def _state(self) -> dict[str, Tensors]:
        live = dict(self.model.named_parameters())
        state: dict[str, Tensors] = {
            array: {
                name: self._optimizer.state[self._masters[name]][array].clone()
                for name in self.started
            }
            for array in _MOMENTS
        }
        state["master"] = {
            name: self._present(name, live[name]).clone()
            for name in self.started
            if live[name].dtype == torch.bfloat16
        }
        return state


class UndisturbedRun(Run):
    """Moments in fewer bits: the same optimizer in a store that nothing happens to."""

    def _prepare(self) -> None:
        self._backend = MemoryBackend()
        settings = options(self._backend, **self.variant.options)
        self._optimizer: AdamW = optimizer_for(self.model, "/undisturbed", settings, keep=1)

    def _step(self, names: set[str]) -> None:
        self._optimizer.step()

    def _add_head(self) -> None:
        add_head(self.model, self._optimizer)

    def _lay_out(self) -> None:
        self._optimizer.checkpoint({"number": len(self.events)}).result()

    def _set_rate(self, lr: float) -> None:
        self._optimizer.param_groups[0]["lr"] = lr

    def _rates(self) -> tuple[float, ...]:
        return tuple(group["lr"] for group in self._optimizer.param_groups)

    def _state(self) -> dict[str, Tensors]:
        checkpoint = self._optimizer.checkpoint({"number": len(self.events)}).result()
        return decoded_state(checkpoint, self.model, self.started)


def new_run(variant: Variant, events: Sequence[Event] = ()) -> Run:
    """Return what these events lead to."""
    exact = variant.state_dtype == "float32"
    return (TorchRun if exact else UndisturbedRun)(variant, tuple(events))


def decoded_state(checkpoint: Checkpoint, model: Model, names: set[str]) -> dict[str, Tensors]:
    """Read state as FP32, through the library, whatever it is stored in."""
    state: dict[str, Tensors] = {}
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    for name in names:
        for array, values in offload.read_state(checkpoint, name).items():
            if array != "master" or dtypes[name] == torch.bfloat16:
                state.setdefault(array, {})[name] = values
    return state


def differences(
    checkpoint: Checkpoint, backend: Backend, variant: Variant, expected: Expectation
) -> list[str]:
    """Say what of a checkpoint is not, to the bit, what is expected."""
    found = []
    if checkpoint.step != expected.step:
        found.append(f"step {checkpoint.step}, expected {expected.step}")
    rates = tuple(group["lr"] for group in checkpoint.hyperparameters)
    if rates != expected.rates:
        found.append(f"learning rates {rates}, expected {expected.rates}")
    if not same_bits(read_tensors(backend, f"{checkpoint.path}/model.safetensors"), expected.model):
        found.append("parameters or buffers")
    names = set(expected.state.get(_MOMENTS[0], {}))
    plain = variant.master == "float32" and variant.state_dtype == "float32"
    state = decoded_state(checkpoint, Model(), names)
    for array, tensors in expected.state.items():
        if not tensors:
            continue
        if not same_bits({n: state[array][n] for n in tensors}, tensors):
            found.append(array)
        if not plain:
            continue
        stored = read_array(backend, checkpoint, array, tensors)
        waiting = expected.edited if array == "master" else frozenset()
        if any(not same_bits({n: stored[n]}, {n: tensors[n]}) for n in tensors.keys() - waiting):
            found.append(f"{array}, as it is stored")
    found.extend(checkpoint.verify().problems)
    return found


def _joined(live: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    upper = live.detach().view(torch.int16).to(torch.int32) << 16
    return (upper + low).view(torch.float32)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.detach().view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)
