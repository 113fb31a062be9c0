"""Rules of torch optimizer classes: the state kept per parameter, and whether it is element-wise.

A probe runs the class on a small tensor, once whole and once in pieces (see `probe`). If both give
the same bits, the rule may run chunk by chunk, and the tensors that the class kept are its state
arrays. Nothing is known about any particular optimizer, except why some are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.ambient import in_neutral
from offload.errors import UnsupportedOptimizerError
from offload.format._manifest_fields import without_numpy
from offload.format.arrays import MASTER, MASTER_LOW, is_array_name
from offload.update.probe import QUICK, THOROUGH, same_arrays, same_values
from offload.update.stepper import Stepper

_REFUSED = {
    "Adafactor": "its second moment is factored over rows and columns of whole matrices",
    "Muon": "it orthogonalises whole matrices",
    "LBFGS": "its update needs inner products over all parameters and re-evaluates the loss",
    "SparseAdam": "it updates only the rows that a sparse gradient names",
}

_REFUSED_FLAGS = {
    "capturable": "a step that reads files cannot be captured in a CUDA graph",
    "differentiable": "autograd cannot follow a step whose state is on disk",
    "fused": (
        "torch's fused CPU kernels round differently depending on where a tensor is cut, so "
        "results would depend on the chunk size"
    ),
}

FUSED_MULTIPLE = 16
"""Elements that torch's fused kernels process at once, on any processor."""

_HAVE_FUSED = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}

_CHANGED_BY_SCHEDULES = {"lr", "momentum", "betas", "weight_decay"}
"""Hyper-parameters that may change at every step, and whose new values need no new probe."""

_MAX_RULES = 64

_PLACE = (
    "it uses a function of torch whose last bits depend on where an element lies in a tensor "
    "(pow, sigmoid, softplus, gelu, exp2, sinh, cosh and others, on most processors). exp, log, "
    "tanh, sqrt and erf do not: x.pow(a) can be written as (x.log() * a).exp(), and x.sigmoid() as "
    "1 / (1 + (-x).exp())."
)

ScalarValue = tuple[str, str, float | int]
"""Name, kind (``f32`` or ``f64`` for a 0-d tensor, ``float`` or ``int`` for a number) and value."""

Scalars = tuple[ScalarValue, ...]
"""Scalar state of one parameter, such as its ``step``; hashable, so that parameters with equal
state can be grouped."""

_TENSOR_KINDS = {torch.float32: "f32", torch.float64: "f64"}
_KIND_DTYPES = {kind: dtype for dtype, kind in _TENSOR_KINDS.items()}


@dataclass(frozen=True, slots=True)
class Rule:
    """State that the optimizer keeps with the hyper-parameters of one parameter group."""

    arrays: tuple[str, ...]
    """State arrays by torch's names, with one FP32 value per element; without masters."""

    scalars: tuple[str, ...]
    """Names of state with one value per parameter."""

    kinds: tuple[str, ...]
    """Kind of each of `scalars`, as in `ScalarValue`."""


class UpdateRule:
    """Runs the wrapped class's own step on flat tensors.

    Args:
        optimizer_class: A torch optimizer class.
        hyper: Keyword arguments that the user passed for its constructor.
        allow_fused: Whether ``fused=True`` is accepted, for a device whose kernels give results
            that do not depend on where a tensor is cut.

    Raises:
        TypeError: An instance was passed in place of the class.
        UnsupportedOptimizerError: The class needs more than one element at a time; says why.
        ValueError: torch refuses a hyper-parameter.
    """

    @in_neutral
    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        hyper: Mapping[str, Any],
        *,
        allow_fused: bool = False,
    ) -> None:
        if not isinstance(optimizer_class, type):
            raise TypeError(
                f"pass the class, such as torch.optim.{type(optimizer_class).__name__}, not "
                f"{optimizer_class!r:.60}"
            )
        self.optimizer_class = optimizer_class
        self.class_name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
        self._hyper = {key: without_numpy(value) for key, value in hyper.items()}
        self._allow_fused = allow_fused
        for cls in optimizer_class.__mro__:
            if cls.__module__.startswith("torch.optim") and cls.__name__ in _REFUSED:
                raise UnsupportedOptimizerError(
                    f"{optimizer_class.__name__} cannot be offloaded: {_REFUSED[cls.__name__]}, "
                    "so it cannot run on one chunk at a time. Use an element-wise optimizer "
                    "(AdamW, Adam, SGD, NAdam, RAdam, Adamax, RMSprop, Adagrad, Adadelta, "
                    "Rprop, ASGD), or keep this one in memory for the parameters that need it."
                )
        # An instance must exist before the step function is unwrapped. Constructing the first
        # instance wraps the function for hooks; unwrapping earlier would strip no_grad instead.
        placeholder = torch.zeros(1, dtype=torch.float32, device="cpu")
        instance = optimizer_class([placeholder], **self._hyper)
        self.defaults: dict[str, Any] = {
            key: without_numpy(value) for key, value in instance.defaults.items()
        }
        step = optimizer_class.step
        self._step: Callable[[torch.optim.Optimizer], Any] = (
            step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
        )
        self._is_torchs = getattr(torch.optim, optimizer_class.__name__, None) is optimizer_class
        self._rules: dict[tuple[tuple[str, object], ...], Rule] = {}

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """Return the rule of a parameter group, probing the class once per kind of group.

        The arrays depend on whether hyper-parameters are zero (``momentum``) or set (``amsgrad``),
        never on their exact values, so only these facts are in the key. For a class that is not
        torch's, the key also has the exact values: one may be an exponent, and torch computes
        squares differently from other powers. Values that schedules change are not in the key.

        Raises:
            UnsupportedOptimizerError: The rule is not element-wise, or a flag is not supported.
        """
        if self._allow_fused:
            group = {**group, "fused": None}  # the fused step keeps the same state
        _refuse_flags(group)
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        key = tuple((k, self._key(k, v)) for k, v in sorted(options.items()))
        if key not in self._rules:
            rule = self._probe(options)
            if len(self._rules) >= _MAX_RULES:
                self._rules.clear()
            self._rules[key] = rule
        return self._rules[key]

    def without_flags(
        self, groups: Sequence[Mapping[str, Any]], origin: str = ""
    ) -> list[dict[str, Any]]:
        """Return the groups of another run without the flags that this optimizer refuses.

        The flags say how that run computed its steps, on its device; the state is the same. The
        optimizer's own values take their place, and the log says so.

        Args:
            groups: Parameter groups of a state dict or checkpoint.
            origin: Origin of the groups, for the log; nothing is logged if it is empty.
        """
        usable = [dict(group) for group in groups]
        for flag, reason in _REFUSED_FLAGS.items():
            if flag == "fused" and self._allow_fused:
                continue
            found = [group for group in usable if group.get(flag)]
            for group in found:
                group[flag] = self.defaults.get(flag)
            if found and origin:
                logging.getLogger("offload").info(
                    "%s: %s=True is left out: %s", origin, flag, reason
                )
        return usable

    def fused(self, group: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a group's hyper-parameters for torch's fused kernel; None if it has no kernel.

        The kernel is several times as fast as torch's default step, but may differ from it in the
        last bit. It also computes the elements after the last whole vector of `FUSED_MULTIPLE`
        differently from the rest. It is therefore used only for state that is rounded anyway, and
        only in multiples of that length.
        """
        if self.optimizer_class not in _HAVE_FUSED or group.get("foreach"):
            return None
        return {**group, "fused": True} if self.rule(group).arrays else None

    def initial_state(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that the constructor creates for one FP32 element before any step.

        Most classes create no state then.
        """
        parameter = torch.zeros(1, dtype=torch.float32, device="cpu")
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        instance = self.optimizer_class([{**options, "params": [parameter]}], **self._hyper)
        return dict(instance.state[parameter]) if parameter in instance.state else {}

    def stepper(self) -> Stepper:
        """Return a new stepper. Each thread needs its own."""
        return Stepper(self.optimizer_class, self._hyper, self._step)

    def _key(self, name: str, value: object) -> object:
        exact = not self._is_torchs and name not in _CHANGED_BY_SCHEDULES
        return repr(value) if exact and _is_plain(value) else _truth(value)

    @in_neutral
    def _probe(self, group: Mapping[str, Any]) -> Rule:
        name = self.optimizer_class.__name__
        # torch's own classes add, multiply, divide and take square roots. Their results do not
        # depend on an element's place. A test puts all their configurations through the long probe.
        probe = QUICK if self._is_torchs else THOROUGH

        def run(
            parameters: Sequence[list[torch.Tensor]], gradients: Sequence[list[torch.Tensor]]
        ) -> list[dict[str, Any]]:
            """Run steps of this group, for the probe."""
            return self._run(parameters, gradients, group)

        fired: list[int] = []
        hook = register_optimizer_step_pre_hook(lambda *_: fired.append(1))
        try:
            stepped, state = probe.whole(run)
            in_pieces, states = probe.pieces(run)
            strided = probe.strided(run)
        except UnsupportedOptimizerError:
            raise
        except Exception as error:
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: its step failed on a plain FP32 tensor "
                f"({type(error).__name__}: {error})"
            ) from error
        finally:
            hook.remove()
        if fired:
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: its step() calls super().step(), which would fire "
                "optimizer step hooks once per chunk. Derive it from torch.optim.Optimizer and "
                "put the whole update into its own step()."
            )
        rule = _describe(name, probe.shape, state)
        scalars = read_scalars(state, rule)
        same = (
            same_values(stepped, in_pieces)
            and same_arrays(state, states, rule.arrays)
            and all(read_scalars(part, rule) == scalars for part in states)
        )
        if not same:
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: a tensor updated in parts differs from the same "
                "tensor updated whole, so it cannot run on one chunk at a time. Either the rule "
                f"is not element-wise, or {_PLACE}"
            )
        if not all(
            same_values(stepped, other) and same_arrays(state, [its], rule.arrays)
            for other, its in strided
        ):
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: a contiguous tensor is updated to other bits than "
                f"the same values in a tensor of other strides, and chunks are contiguous: {_PLACE}"
            )
        return rule

    def _run(
        self,
        parameters: Sequence[list[torch.Tensor]],
        gradients: Sequence[list[torch.Tensor]],
        group: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Run steps, each with new parameters and with the state that the last step left.

        Args:
            parameters: Parameters of each step; updated in place.
            gradients: Their gradients, for each step.
            group: Hyper-parameters.

        Returns:
            The final state of each parameter.
        """
        stepper = self.stepper()
        states = stepper.create_all(parameters[0], gradients[0], group)
        shape = parameters[0][0].shape
        rule = _describe(self.optimizer_class.__name__, shape, states[0])
        for tensors, given in zip(parameters[1:], gradients[1:], strict=True):
            # As in a real step, only state that the rule names survives from one step to the next.
            states = [
                {name: state[name] for name in rule.arrays}
                | write_scalars(read_scalars(state, rule))
                for state in states
            ]
            stepper.apply_all(tensors, given, states, group)
        return states


def read_scalars(state: Mapping[str, Any], rule: Rule) -> Scalars:
    """Return a parameter's scalar state, given the dictionary that torch's step left."""
    values: list[ScalarValue] = []
    for name in rule.scalars:
        value = state[name]
        plain = value.item() if isinstance(value, torch.Tensor) else value
        values.append((name, _kind(value), plain))
    return tuple(values)


def write_scalars(scalars: Scalars) -> dict[str, Any]:
    """Return scalar state as new objects, which torch's step may read and change."""
    return {
        name: torch.tensor(value, dtype=_KIND_DTYPES[kind], device="cpu")
        if kind in _KIND_DTYPES
        else value
        for name, kind, value in scalars
    }


def kind_of_tensor(dtype: torch.dtype, default: str) -> str:
    """Return the kind of a scalar tensor of this dtype; `default` if it is not a tensor's kind."""
    return _TENSOR_KINDS.get(dtype, default) if default in _KIND_DTYPES else default


def _describe(name: str, shape: torch.Size, state: Mapping[str, Any]) -> Rule:
    arrays: list[str] = []
    scalars: dict[str, str] = {}
    for key, value in state.items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.shape == shape and value.dtype == torch.float32:
            arrays.append(key)
        elif (is_tensor and value.dim() == 0 and value.dtype in _TENSOR_KINDS) or (
            isinstance(value, int | float) and not isinstance(value, bool)
        ):
            scalars[key] = _kind(value)
        elif value is not None:
            kind = (
                f"{value.dtype} tensor of shape {tuple(value.shape)}" if is_tensor else type(value)
            )
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: it keeps {key!r} as a {kind} for a float32 parameter "
                f"of shape {tuple(shape)}; only FP32 tensors of the parameter's own "
                "shape and single numbers can be streamed."
            )
    for array in arrays:
        if not is_array_name(array):
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: it keeps state called {array!r}, and a state array "
                "names a file: use at most 64 letters, digits and underscores, and neither 'model' "
                "nor 'train_state'"
            )
    for reserved in (MASTER, MASTER_LOW):
        if reserved in arrays:
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: it keeps state of its own called {reserved!r}, the "
                "name that this package gives to the FP32 copies of parameters."
            )
    return Rule(tuple(arrays), tuple(scalars), tuple(scalars.values()))


def _kind(value: torch.Tensor | float) -> str:
    if isinstance(value, torch.Tensor):
        return _TENSOR_KINDS[value.dtype]
    return "int" if isinstance(value, int) else "float"


def _refuse_flags(group: Mapping[str, Any]) -> None:
    for flag, reason in _REFUSED_FLAGS.items():
        if group.get(flag):
            raise UnsupportedOptimizerError(
                f"{flag}=True is not supported: {reason}. Leave {flag} unset."
            )


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | np.generic | None)


def _truth(value: object) -> bool:
    # A tensor hyper-parameter (a learning rate) never decides which state exists. Reading the
    # truth of a device tensor would synchronise.
    return bool(value) if isinstance(value, bool | int | float | str | np.generic | None) else True
