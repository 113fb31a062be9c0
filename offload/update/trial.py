"""Trial of a class that is not torch's: its step in chunks beside the class itself, as it is used.

The class runs on several parameters in two groups, for as many steps as warm-ups and late rules
usually take, with gradients that are zero, tiny, huge and missing. Beside it, the same steps are
taken in pieces, with the state that is stored; every parameter must have the same bits after every
step. A second optimizer is told other numbers of elements and given a closure, and parameters
record which attributes are read.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, Final

import torch

from offload.format._manifest_fields import encode_group
from offload.update.kept_state import Rule, read_scalars, unknown_state, write_scalars
from offload.update.probe import flat, same_values
from offload.update.stepper import NOT_OPTIONS, Stepper, changes, differing, first_options
from offload.update.trial_inputs import (
    NUM_STEPS,
    AskedParameter,
    Odd,
    OtherNumbers,
    first_parameters,
    gradients_of,
    random_states,
)

_PIECES: Final = (2500, 1, 997, 64, 3333, 7)
"""Numbers of elements of successive pieces."""

_LR_OF_SECOND_GROUP: Final = 0.3


class TrialError(Exception):
    """The class cannot be trained in chunks; the message says why, as the end of a sentence."""


def try_class(stepper: Callable[[], Stepper], options: Mapping[str, Any], rule: Rule) -> Rule:
    """Return the rule of a class, with what its step changes and reads, if chunks give its bits.

    The class is that of the steppers, with the hyper-parameters of a group.
    """
    left_out = set[Odd]()
    while True:
        try:
            return _try(stepper(), options, rule, left_out)
        except _StepFailedError as error:
            # Some classes cannot take such gradients, whoever calls them.
            odd: Odd = "infinite" if error.number == NUM_STEPS - 1 else "missing"
            if odd in left_out:
                raise
            left_out.add(odd)


class _StepFailedError(TrialError):
    """The class itself failed."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__(
            f"its own step number {number + 1} failed in a trial in memory "
            f"({type(error).__name__}: {error})"
        )
        self.number = number


def _two_groups(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the hyper-parameters of two groups that differ in their learning rates."""
    lr = options.get("lr")
    other = {"lr": lr * _LR_OF_SECOND_GROUP} if isinstance(lr, float) else {}
    return [dict(options), {**options, **other}]


def _try(stepper: Stepper, options: Mapping[str, Any], rule: Rule, left_out: Set[Odd]) -> Rule:
    AskedParameter.asked.clear()
    own = [[AskedParameter(p) for p in group] for group in first_parameters()]
    told = [[AskedParameter(p) for p in group] for group in first_parameters()]
    itself = stepper.instance(_two_groups(options), own)
    misled: torch.optim.Optimizer | None = stepper.instance(_two_groups(options), told)
    if itself._optimizer_step_pre_hooks or itself._optimizer_step_post_hooks:
        raise TrialError("it registers step hooks on itself, which would run once for each chunk")
    misleading: Callable[..., Any] = stepper.step
    if "closure" in inspect.signature(stepper.step).parameters:
        loss = torch.tensor(7.0, dtype=torch.float32, device="cpu")
        misleading = partial(misleading, closure=lambda: loss.clone())
    before, drawn = _attributes(itself), random_states()
    chunks = _InChunks(stepper, rule, _two_groups(options))
    generator = torch.Generator("cpu").manual_seed(20260102)
    try:
        for number in range(NUM_STEPS):
            gradients = gradients_of(number, own, generator, left_out)
            _run(stepper.step, itself, own, gradients, number)
            _require_gradients(own, gradients)
            if misled is not None:
                try:
                    with torch._C._EnableTorchFunction(), OtherNumbers():
                        _run(misleading, misled, told, gradients, number)
                except _StepFailedError:
                    misled = None  # it does need the number, for example for a shape
            chunks.step(number, gradients)
            _compare(number, own, chunks)
        if misled is not None and not same_values([_flat(own)], [_flat(told)]):
            raise TrialError(
                "its update depends on the number of elements of a parameter, or on the loss that "
                "a closure returns"
            )
        _compare_rest(itself, own, chunks, rule)
    except _StepFailedError:
        raise
    except TrialError as error:
        raise TrialError(_outside(itself, own, before, drawn) or str(error)) from error
    if why := _outside(itself, own, before, drawn):
        raise TrialError(why)
    return replace(rule, changes=frozenset(chunks.changed), reads=frozenset(AskedParameter.asked))


def _outside(
    itself: torch.optim.Optimizer,
    own: Sequence[Sequence[torch.Tensor]],
    before: Mapping[str, bytes],
    drawn: tuple[Any, ...],
) -> str:
    """Return what the class keeps or takes outside of parameters and groups; empty if nothing."""
    if pickle.dumps(random_states()) != pickle.dumps(drawn):
        return (
            "its step draws random numbers, of which chunks would draw others than whole parameters"
        )
    for key in itself.state:
        if not any(key is parameter for group in own for parameter in group):
            return f"it keeps state of no parameter, as self.state[{key!r:.40}]"
    after = _attributes(itself)
    for name in [*before, *after]:
        if after.get(name) != before.get(name):
            return (
                f"its step changes the attribute {name!r} of the optimizer, which is not stored; "
                f"keep it in the parameter group, as group[{name!r}]"
            )
    return ""


class _InChunks:
    """Parameters and state that are stepped as this package steps them."""

    def __init__(self, stepper: Stepper, rule: Rule, groups: list[dict[str, Any]]) -> None:
        self._stepper = stepper
        self._rule = rule
        self.groups = groups
        self._first = [dict(options) for options in groups]
        self.changed: set[str] = set()
        """Hyper-parameters that the class has changed."""
        self.parameters = [[p.reshape(-1) for p in group] for group in first_parameters()]
        self.states = [[_cut(p) for p in group] for group in self.parameters]

    def step(self, number: int, gradients: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """Step every piece of every parameter that has a gradient."""
        for index, (options, given) in enumerate(zip(self.groups, gradients, strict=True)):
            stepped = [
                self._step_piece(number, piece, parameter, gradient.reshape(-1), options)
                for parameter, pieces, gradient in zip(
                    self.parameters[index], self.states[index], given, strict=True
                )
                if gradient is not None
                for piece in pieces
            ]
            expected: dict[str, Any] = {}
            if self.changed or any(stepped):
                expected = self._advance(number, index, has_gradient=bool(stepped))
            for changed in stepped:
                if why := differing(changed, expected):
                    raise TrialError(why)
            options.update(expected)
            self.changed |= expected.keys()

    def _advance(self, number: int, index: int, *, has_gradient: bool) -> dict[str, Any]:
        options = self.groups[index]
        first = first_options(options, self._first[index], self.changed)
        try:
            return self._stepper.advance(options, first, has_gradient=has_gradient)
        except Exception as error:
            raise TrialError(
                "it changes its parameter groups, and so has to step an empty tensor, on which "
                f"step {number + 1} failed ({type(error).__name__}: {error})"
            ) from error

    def _step_piece(
        self,
        number: int,
        piece: _Piece,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Step a piece, and return what the class changes in the group."""
        values, given = parameter[piece.range], gradient[piece.range].clone()
        stepped = values.view(-1)
        try:
            if piece.state is None:
                state = self._stepper.create(stepped, given, options)
            else:
                arrays = {name: piece.state[0][name].clone() for name in self._rule.arrays}
                state = {**arrays, **write_scalars(piece.state[1])}
                state = self._stepper.apply(stepped, given, state, options)
            if stepped.data_ptr() != values.data_ptr():
                values.copy_(stepped)
        except Exception as error:
            raise TrialError(
                f"its step number {number + 1} failed on a piece of a parameter "
                f"({type(error).__name__}: {error})"
            ) from error
        if why := unknown_state(state, self._rule):
            raise TrialError(f"{why}, after step {number + 1}")
        arrays = {}
        for name in self._rule.arrays:
            array = state.get(name)
            arrays[name] = torch.zeros_like(values) if array is None else array
        piece.state = (arrays, read_scalars(state, self._rule))
        return changes(options, self._stepper.options)


class _Piece:
    """A range of a parameter, and its state: arrays and scalars, once it has been stepped."""

    def __init__(self, start: int, stop: int) -> None:
        self.range = slice(start, stop)
        self.state: tuple[dict[str, torch.Tensor], Any] | None = None


def _run(
    step: Callable[[torch.optim.Optimizer], Any],
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Sequence[torch.Tensor]],
    gradients: Sequence[Sequence[torch.Tensor | None]],
    number: int,
) -> None:
    for group, given in zip(parameters, gradients, strict=True):
        for parameter, gradient in zip(group, given, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
    try:
        step(optimizer)
    except Exception as error:
        raise _StepFailedError(number, error) from error


def _require_gradients(
    own: Sequence[Sequence[torch.Tensor]], gradients: Sequence[Sequence[torch.Tensor | None]]
) -> None:
    """Check that the class leaves gradients to the program, which they stay with here."""
    for group, given in zip(own, gradients, strict=True):
        for parameter, gradient in zip(group, given, strict=True):
            if gradient is None or not gradient.any():
                continue
            if parameter.grad is None or not parameter.grad.any():
                raise TrialError(
                    "its step clears the gradients of parameters, which steps leave to the "
                    "program here: clear them by zero_grad() instead"
                )


def _compare(number: int, own: Sequence[Sequence[torch.Tensor]], chunks: _InChunks) -> None:
    for index, (group, others) in enumerate(zip(own, chunks.parameters, strict=True)):
        for parameter, other in zip(group, others, strict=True):
            if not same_values([parameter.detach().reshape(-1)], [other]):
                raise TrialError(
                    f"from step {number + 1} of a trial on, chunks give other bits than the class "
                    f"itself (shape {tuple(parameter.shape)}, group {index}). Its step may look at "
                    "whole parameters, their shapes or order, at other parameters, or at chance"
                )


def _compare_rest(
    itself: torch.optim.Optimizer,
    own: Sequence[Sequence[torch.Tensor]],
    chunks: _InChunks,
    rule: Rule,
) -> None:
    for group, states in zip(own, chunks.states, strict=True):
        for parameter, pieces in zip(group, states, strict=True):
            state = itself.state.get(parameter, {})
            for name in rule.arrays:
                parts = [p.state[0][name] for p in pieces if p.state is not None]
                value = state.get(name)
                if value is not None and not same_values([value.reshape(-1)], [flat(parts)]):
                    raise TrialError(f"chunks leave other bits in its state {name!r}")
            for piece in pieces:
                if piece.state is not None and piece.state[1] != read_scalars(state, rule):
                    raise TrialError("chunks leave another count in its state")
    for index, options in enumerate(chunks.groups):
        try:
            encode_group(index, {name: options[name] for name in chunks.changed & options.keys()})
        except TypeError as error:
            raise TrialError(f"its step changes its group to what is not stored: {error}") from None
    for group_itself, options in zip(itself.param_groups, chunks.groups, strict=True):
        left = {k: v for k, v in group_itself.items() if k not in NOT_OPTIONS}
        if why := differing(left, options):
            raise TrialError(why)


def _cut(parameter: torch.Tensor) -> list[_Piece]:
    sizes, start, pieces = cycle(_PIECES), 0, []
    while start < len(parameter):
        stop = min(start + next(sizes), len(parameter))
        pieces.append(_Piece(start, stop))
        start = stop
    return pieces


def _flat(parameters: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    return flat([p.detach() for group in parameters for p in group])


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """Return a snapshot of what the class keeps on itself and could compute with."""
    torchs = {*vars(torch.optim.SGD([torch.zeros(1, dtype=torch.float32, device="cpu")]))}
    kept = {k: _snapshot(v) for k, v in vars(optimizer).items() if k not in torchs}
    return {name: snapshot for name, snapshot in kept.items() if snapshot}


def _snapshot(value: object) -> bytes:
    """Return bytes that tell a value from another one; none for what only switches or names."""
    if callable(value) or isinstance(value, bool | str | None):
        return b""
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001  (whatever the class keeps)
        return b""
