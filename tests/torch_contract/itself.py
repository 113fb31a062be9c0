"""An optimizer class by itself, in memory, as its author uses it, against the same class offloaded.

The oracle knows nothing about the library: it constructs the class with FP32 parameters, calls its
`step()`, and keeps what the parameters were after each step, what `state_dict()` says at the end,
and torch's random state. Either the offloaded class has all of this to the bit, with a checkpoint
and a new process in the middle, or its constructor refuses it.
"""

from __future__ import annotations

import inspect
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import offload
from gds import MemoryBackend
from offload.errors import UnsupportedOptimizerError
from tests.numerics.reference import bits, one_nan

ITS_BITS = "its bits"
REFUSED = "refused"
OTHER = "other bits"
FAILS = "fails in memory"

GIVEN = {"num_data": 1, "num_iterations": 200, "base_optimizer": torch.optim.SGD}
"""Arguments that classes need besides the parameters."""


@dataclass(frozen=True)
class Outcome:
    """What came of a class."""

    kind: str
    reason: str = ""
    """Message of the refusal, or the first difference."""


@dataclass(frozen=True)
class Case:
    """A training program: a small network in two groups, some of whose steps are unusual."""

    steps: int = 48
    width: int = 37
    """Features of the first layer, which is cut into several chunks."""

    missing: bool = True
    """Whether gradients are edited: some steps have none for some or all parameters."""

    graph: bool = False
    """Whether `backward()` is asked for a graph, as second-order classes need it."""

    clears: bool = True
    """Whether the program clears the gradients, and the class does not."""

    closure: bool = False
    """Whether `step()` is given the function that computes the loss."""

    spoiled: int = -1
    """Step in which one element of a gradient is infinite."""

    joins: int = 0
    """Step in which the last parameter joins in a group of its own; 0 for the second group."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Options of both groups."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the second group."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of `offload.Options`."""

    prepare: Callable[[torch.nn.Module], None] = lambda _: None
    """Does something to the network before the optimizer is made."""

    def network(self) -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = torch.nn.Sequential(
                torch.nn.Linear(self.width, 41),
                torch.nn.Tanh(),
                torch.nn.Unflatten(1, (1, 41)),
                torch.nn.Conv1d(1, 3, 5, stride=4),
                torch.nn.Flatten(),
                torch.nn.LayerNorm(30),
                torch.nn.Linear(30, 5),
                torch.nn.PReLU(),
            )
        self.prepare(net)
        return net

    def groups(self, net: torch.nn.Module, cls: type[torch.optim.Optimizer]) -> list[Any]:
        """Return two groups; the second has another learning rate, if the class has any."""
        parameters = list(net.parameters())
        lr = self.arguments.get("lr", getattr(_signature(cls).get("lr"), "default", None))
        other = {"lr": lr * 0.3} if isinstance(lr, int | float) else {}
        second = parameters[3:-1] if self.joins else parameters[3:]
        return [
            {"params": parameters[:3], **self.shared},
            {"params": second, **self.shared, **other, **self.options},
        ]

    def step(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Take a step as a training program does, with torch's own random numbers."""
        given, wanted = torch.randn(8, self.width), torch.randint(5, (8,))
        parameters = list(net.parameters())

        def closure() -> torch.Tensor:
            loss = torch.nn.functional.cross_entropy(net(given), wanted) * _SCALES.get(number, 1.0)
            loss.backward(create_graph=self.graph)
            if number == 9 and self.missing:  # zeros for all of a chunk, and not of a tensor
                net[0].weight.grad[:30] = 0
            if number == self.spoiled:
                net[0].weight.grad[0, 0] = torch.inf
            for index in _MISSING.get(number, ()) if self.missing else ():
                parameters[index].grad = None
            if number < self.joins:
                parameters[-1].grad = None
            return loss

        if number == 27:  # as a scheduler does
            for group in optimizer.param_groups:
                if isinstance(group.get("lr"), float):
                    group["lr"] *= 0.5
        if number == self.joins > 0:
            optimizer.add_param_group({"params": parameters[-1:]})
        if self.closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if self.clears:
            optimizer.zero_grad()


_SCALES = {6: 0.0, 7: 0.0, 10: 1e-20, 11: 1e-20, 12: 1e-6, 14: 1e3, 42: 1e5, 45: 1e9}
"""Factors of the gradients of some steps. Huge ones come last, because some classes do not train on
after them."""

_MISSING = {0: [7], 1: [7], 17: [0], 18: [0], 20: range(9), 21: [0, 1, 2], 22: [0, 1, 2]}
"""Parameters without a gradient, by step. One gets its first one late; a group has none."""


USUAL = Case()


def outcome(cls: type[torch.optim.Optimizer], case: Case) -> Outcome:
    """Train a class by itself and offloaded, and compare."""
    with _alone():
        backend = MemoryBackend()
        arguments = {**_needed(cls), **case.arguments}
        net = case.network()
        try:
            optimizer = _offloaded(cls, net, backend, case, arguments)
        except UnsupportedOptimizerError as error:
            return _refused(str(error), net, case, backend)
        except Exception as error:  # noqa: BLE001  (whatever the class itself raises)
            return _refused_by_itself(cls, case, arguments, error)
        try:
            return _compare(cls, case, arguments, net, optimizer, backend)
        finally:
            optimizer.close()


def _compare(
    cls: type[torch.optim.Optimizer],
    case: Case,
    arguments: Mapping[str, Any],
    net: torch.nn.Module,
    optimizer: offload.OffloadedOptimizer,
    backend: MemoryBackend,
) -> Outcome:
    if torch.initial_seed() != 1 or not torch.equal(torch.get_rng_state(), _fresh_random_state()):
        return Outcome(OTHER, "the constructor uses torch's random numbers")
    expected = case.network()
    try:
        plain = cls(case.groups(expected, cls), **arguments)
        trace: list[torch.Tensor] = []
        for number in range(case.steps):
            case.step(expected, plain, number)
            trace.append(_values(expected))
    except Exception as error:  # noqa: BLE001  (the class is others')
        return Outcome(FAILS, f"step {len(trace) + 1}: {type(error).__name__}: {error}")
    _seed()
    try:
        for number in range(case.steps):
            if number == case.steps // 2:
                optimizer.checkpoint().result()
                state = torch.get_rng_state(), random.getstate()
                optimizer.close()
                net = case.network()
                backend = backend.reopened()
                optimizer = _offloaded(cls, net, backend, case, arguments)
                optimizer.restore()
                torch.set_rng_state(state[0])
                random.setstate(state[1])
            case.step(net, optimizer, number)
            found = _values(net)
            if not torch.equal(bits(found), bits(trace[number])):
                largest = (found - trace[number]).abs().max().item()
                return Outcome(OTHER, f"parameters after step {number + 1}, by {largest:.1e}")
        full, whole = optimizer.full_state_dict(), plain.state_dict()
        for part in ("state", "param_groups"):
            if difference := _difference(full[part], whole[part], part):
                return Outcome(OTHER, difference)
    except Exception as error:  # noqa: BLE001
        return Outcome(OTHER, f"step {number + 1}: {type(error).__name__}: {error}")
    finally:
        optimizer.close()
    return Outcome(ITS_BITS)


def _offloaded(
    cls: type[torch.optim.Optimizer],
    net: torch.nn.Module,
    backend: MemoryBackend,
    case: Case,
    arguments: Mapping[str, Any],
) -> offload.OffloadedOptimizer:
    usual = {"chunk_bytes": 4096, "allow_volatile": True, "train_state_bytes": 8192}
    options = offload.Options(backend=backend, **{**usual, **case.settings})
    return offload.OffloadedOptimizer(
        cls, case.groups(net, cls), directory="/run", model=net, options=options, **arguments
    )


def _refused(text: str, net: torch.nn.Module, case: Case, backend: MemoryBackend) -> Outcome:
    if not torch.equal(bits(_values(net)), bits(_values(case.network()))):
        return Outcome(OTHER, f"refused after parameters were changed: {text}")
    return Outcome(REFUSED, text)


def _refused_by_itself(
    cls: type[torch.optim.Optimizer], case: Case, arguments: Mapping[str, Any], error: Exception
) -> Outcome:
    try:
        cls(case.groups(case.network(), cls), **arguments)
    except Exception as its:  # noqa: BLE001  (whatever the class itself raises)
        if type(its) is type(error):
            return Outcome(REFUSED, f"{type(its).__name__}: {its}")
    return Outcome(OTHER, f"the constructor raises {type(error).__name__}: {error}")


def _difference(found: Any, expected: Any, path: str) -> str:
    """Return where two values differ; empty if nowhere. None and {} are as nothing at all."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        left, right = map(_without_nothing, (found, expected))
        if left.keys() != right.keys():
            return f"{path} has {sorted(map(str, left))}, expected {sorted(map(str, right))}"
        pairs = ((left[key], right[key], f"{path}[{key!r}]") for key in right)
        return next(filter(None, itertools.starmap(_difference, pairs)), "")
    if isinstance(expected, list | tuple) and type(found) is type(expected):
        if len(found) != len(expected):
            return f"{path} has another length"
        names = [f"{path}[{number}]" for number in range(len(expected))]
        return next(filter(None, map(_difference, found, expected, names)), "")
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        same = (found.dtype, found.shape) == (expected.dtype, expected.shape)
        if same and expected.is_floating_point():
            found, expected = one_nan(found), one_nan(expected)
        if same and torch.equal(bits(found), bits(expected)):
            return ""
        found, expected = found.flatten()[:3], expected.flatten()[:3]
        return f"{path} begins with {found}, expected {expected}"
    same = type(found) is type(expected) and (found == expected or found != found)
    return "" if same else f"{path} is {found!r:.60}, expected {expected!r:.60}"


def _without_nothing(values: Mapping[Any, Any]) -> dict[Any, Any]:
    nothing = {k for k, v in values.items() if v is None or (isinstance(v, dict) and not v)}
    return {key: value for key, value in values.items() if key not in nothing}


def _values(net: torch.nn.Module) -> torch.Tensor:
    return one_nan(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))


def _signature(cls: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls).parameters


def _needed(cls: type) -> dict[str, Any]:
    return {
        name: GIVEN[name]
        for name, parameter in _signature(cls).items()
        if parameter.default is parameter.empty and name in GIVEN
    }


def _seed() -> None:
    torch.manual_seed(1)
    random.seed(1)


def _fresh_random_state() -> torch.Tensor:
    return torch.Generator().manual_seed(1).get_state()


@contextmanager
def _alone() -> Iterator[None]:
    """Keep warnings of the classes, and random numbers, to this block."""
    state = random.getstate()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _seed()
        try:
            yield
        finally:
            random.setstate(state)
