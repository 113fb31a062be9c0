"""Rules of torch optimizer classes: the state kept per parameter, and whether it is element-wise.

A probe runs the class on a small tensor, once whole and once in pieces (see `probe`). If both give
the same bits, the rule may run chunk by chunk, and the tensors that the class kept are its state
arrays. A class that is not torch's own is then tried beside itself, used as its author uses it (see
`trial`). Nothing is known about any particular optimizer, except why some are refused.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.ambient import in_neutral
from offload.errors import UnsupportedOptimizerError
from offload.format._manifest_fields import encode_group, without_numpy
from offload.update.kept_state import Rule, describe, read_scalars, write_scalars
from offload.update.probe import QUICK, THOROUGH, same_arrays, same_values
from offload.update.stepper import NOT_OPTIONS, Stepper, first_options
from offload.update.trial import TrialError, try_class
from offload.update.trial_inputs import NUM_STEPS, randomness_kept

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

_WARNED_OF: set[str] = set()
"""Classes that this process has warned of."""

_PLACE = (
    "it uses a function of torch whose last bits depend on where an element lies in a tensor "
    "(pow, sigmoid, softplus, gelu, exp2, sinh, cosh and others, on most processors). exp, log, "
    "tanh, sqrt and erf do not: x.pow(a) can be written as (x.log() * a).exp(), and x.sigmoid() as "
    "1 / (1 + (-x).exp())."
)


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
            is_instance = isinstance(optimizer_class, torch.optim.Optimizer)
            name = type(optimizer_class).__name__ if is_instance else "AdamW"
            raise TypeError(
                f"pass the class, such as torch.optim.{name}, not {optimizer_class!r:.60}"
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
        if optimizer_class.zero_grad is not torch.optim.Optimizer.zero_grad:
            raise UnsupportedOptimizerError(
                f"{optimizer_class.__name__} cannot be offloaded: it has a zero_grad() of its own, "
                "which is not called here"
            )
        for name in ("train", "eval"):
            if callable(getattr(optimizer_class, name, None)):
                raise UnsupportedOptimizerError(
                    f"{optimizer_class.__name__} cannot be offloaded: its {name}() changes all "
                    "parameters with their state, which is on storage. Use a class without it"
                )
        _watch_steps(optimizer_class)
        # An instance must exist before the step function is unwrapped. Constructing the first
        # instance wraps the function for hooks; unwrapping earlier would strip no_grad instead.
        placeholder = torch.zeros(1, dtype=torch.float32, device="cpu")
        try:
            instance = optimizer_class([placeholder], **self._hyper)
        except (TypeError, ValueError):
            raise  # in the words of the class
        except Exception as error:
            raise UnsupportedOptimizerError(
                f"{optimizer_class.__name__} cannot be offloaded: its constructor failed on a "
                f"plain list of one parameter ({type(error).__name__}: {error})"
            ) from error
        self.defaults: dict[str, Any] = {
            key: without_numpy(value) for key, value in instance.defaults.items()
        }
        for name, value in self.defaults.items():
            if name not in hyper and (why := _unstorable(name, value)):
                raise UnsupportedOptimizerError(
                    f"{optimizer_class.__name__} cannot be offloaded: its option {name!r} {why}, "
                    "which no checkpoint can hold"
                )
        step = optimizer_class.step
        self._step: Callable[[torch.optim.Optimizer], Any] = (
            step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
        )
        self.is_torchs = getattr(torch.optim, optimizer_class.__name__, None) is optimizer_class
        """Whether the class is one of torch's own, with all of whose settings tests compare it."""
        self._rules: dict[tuple[tuple[str, object], ...], Rule] = {}
        self._changed: set[str] = set()
        """Hyper-parameters that the class itself changes, of all rules found so far."""
        self._advancing: Stepper | None = None

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
        if not (self.is_torchs or self._rules):
            # A group of a run that goes on has a count of steps: what the class changes is not an
            # option of the run, and is known from groups that have taken no step.
            self._find(self.defaults)
        return self._find(group)

    def _find(self, group: Mapping[str, Any]) -> Rule:
        options = self.pristine(group)
        found = self._rules.get(self._key_of(options))
        if found is None:
            found = self._probe(options)
            self._changed |= found.changes
            if len(self._rules) >= _MAX_RULES:
                self._rules.clear()
            self._rules[self._key_of(self.pristine(options))] = found
        return found

    def pristine(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's hyper-parameters as before its first step."""
        options = {k: v for k, v in group.items() if k not in NOT_OPTIONS}
        return first_options(options, self.defaults, self._changed) if self._changed else options

    def rewind(self, groups: Iterable[dict[str, Any]]) -> None:
        """Take from groups what the class itself has put there, before others are loaded."""
        for group in groups:
            first = self.pristine(group)
            for name in self._changed & group.keys():
                if name in first:
                    group[name] = first[name]
                else:
                    del group[name]

    def advance(self, group: Mapping[str, Any], *, has_gradient: bool = True) -> dict[str, Any]:
        """Return the hyper-parameters that the class itself changes in a step, after the step.

        `StepKeys` checks that each block changes its group in the same way.
        """
        if self.is_torchs or not self.rule(group).changes:
            return {}
        if self._advancing is None:
            self._advancing = self.stepper()
        options = {k: v for k, v in group.items() if k not in NOT_OPTIONS}
        return self._advancing.advance(options, self.pristine(group), has_gradient=has_gradient)

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
        options = {k: v for k, v in group.items() if k not in NOT_OPTIONS}
        instance = self.optimizer_class([{**options, "params": [parameter]}], **self._hyper)
        return dict(instance.state[parameter]) if parameter in instance.state else {}

    def stepper(self) -> Stepper:
        """Return a new stepper. Each thread needs its own."""
        return Stepper(self.optimizer_class, self._hyper, self._step, keeps_groups=self.is_torchs)

    def _key_of(self, options: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
        return tuple((k, self._key(k, v)) for k, v in sorted(options.items()))

    def _key(self, name: str, value: object) -> object:
        exact = not self.is_torchs and name not in _CHANGED_BY_SCHEDULES
        return repr(value) if exact and _is_plain(value) else _truth(value)

    @in_neutral
    def _probe(self, group: Mapping[str, Any]) -> Rule:
        if self.is_torchs:
            return self._probe_alone(group)
        with randomness_kept():
            rule = self._probe_alone(group)
            try:
                rule = try_class(self.stepper, group, rule)
            except TrialError as error:
                name = self.optimizer_class.__name__
                raise UnsupportedOptimizerError(f"{name} cannot be offloaded: {error}") from error
        self._warn_untested()
        return rule

    def _warn_untested(self) -> None:
        if self.class_name in _WARNED_OF:
            return
        _WARNED_OF.add(self.class_name)
        warnings.warn(
            f"{self.class_name} is not torch's own. A trial of {NUM_STEPS} steps gave its bits; "
            "later steps, other shapes and sizes are untested: compare a run with it in memory, or "
            "see docs/works-with.md for classes that are tested.",
            UserWarning,
            stacklevel=7,  # the constructor of the optimizer
        )

    def _probe_alone(self, group: Mapping[str, Any]) -> Rule:
        name = self.optimizer_class.__name__
        # torch's own classes add, multiply, divide and take square roots. Their results do not
        # depend on an element's place. A test puts all their configurations through the long probe.
        probe = QUICK if self.is_torchs else THOROUGH

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
        except KeyError as error:
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: its step looked for {error}, which is neither in the "
                "state nor in the group that it left at the step before"
            ) from error
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
        rule = describe(name, probe.shape, state)
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
        """Run steps, each with new parameters and with the state that the last step left."""
        stepper = self.stepper()
        states = stepper.create_all(parameters[0], gradients[0], group)
        shape = parameters[0][0].shape
        rule = describe(self.optimizer_class.__name__, shape, states[0])
        for tensors, given in zip(parameters[1:], gradients[1:], strict=True):
            # As in a real step, only state that the rule names survives from one step to the next.
            states = [
                {name: state[name] for name in rule.arrays}
                | write_scalars(read_scalars(state, rule))
                for state in states
            ]
            states = stepper.apply_all(tensors, given, states, {**group, **stepper.options})
        return states


def _unstorable(name: str, value: object) -> str:
    """Return how a hyper-parameter is none that a checkpoint can hold; empty if it can."""
    try:
        encode_group(0, {name: value})
    except TypeError:
        return f"is a {type(value).__name__}"
    return ""


def _watch_steps(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Let the steps of base classes fire hooks, as they do once a base class has had an instance.

    Whether a step calls that of a base class is found by its hooks, so it must not depend on what
    the program has constructed before.
    """
    for base in optimizer_class.__mro__[1:]:
        if base is torch.optim.Optimizer or "step" not in vars(base):
            continue
        step = vars(base)["step"]
        if not getattr(step, "hooked", False):
            hooked = torch.optim.Optimizer.profile_hook_step(step)
            hooked.hooked = True  # type: ignore[attr-defined]
            base.step = hooked  # type: ignore[attr-defined]


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
