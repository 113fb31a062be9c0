"""What a torch optimizer class keeps per parameter, and whether its update is element-wise.

The class itself is asked, by running it on a tiny tensor: whole, and cut in two. If both ways give
the same bits, the rule may be run chunk by chunk, and whatever tensors it kept are its state
arrays. Nothing is known about any particular optimizer except why some are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.ambient import in_neutral
from offload.errors import UnsupportedOptimizerError
from offload.formats import MASTER, MASTER_LOW, is_array_name

_REFUSED = {
    "Adafactor": "its second moment is factored over rows and columns of whole matrices",
    "Muon": "it orthogonalises whole matrices",
    "LBFGS": "its update needs inner products over all parameters and re-evaluates the loss",
    "SparseAdam": "it updates only the rows that a sparse gradient names",
}

FUSED_MULTIPLE = 16
"""Elements that torch's fused kernels, on any processor, take at once."""

_HAVE_FUSED = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}

_PROBE_SHAPE = (4, 33)
_PROBE_CUT = 37  # odd, and inside a row: cuts vectors and rows alike
_PROBE_STEPS = 3

ScalarValue = tuple[str, str, float | int]
"""Name, kind (``f32`` or ``f64`` for a 0-d tensor, ``float`` or ``int`` for a number) and value."""

Scalars = tuple[ScalarValue, ...]
"""The scalar state of one parameter, such as its ``step``: hashable, so that equal ones group."""

_TENSOR_KINDS = {torch.float32: "f32", torch.float64: "f64"}
_KIND_DTYPES = {kind: dtype for dtype, kind in _TENSOR_KINDS.items()}


@dataclass(frozen=True, slots=True)
class Rule:
    """What one parameter group's hyper-parameters make the optimizer keep."""

    arrays: tuple[str, ...]
    """State arrays, one FP32 value per element, by torch's names; masters are not among them."""

    scalars: tuple[str, ...]
    """Names of state with one value per parameter."""

    kinds: tuple[str, ...]
    """The kind of each of them, as in `ScalarValue`."""


class UpdateRule:
    """Runs the wrapped class's own step on flat tensors.

    Args:
        optimizer_class: A torch optimizer class.
        hyper: The keyword arguments its users give its constructor.
        allow_fused: Whether ``fused=True`` is honoured: by kernels of a device, whose results do
            not depend on where a tensor is cut.

    Raises:
        UnsupportedOptimizerError: The class needs more than one element at a time, says why.
        ValueError: torch's own complaint about a hyper-parameter.
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
        self._hyper = dict(hyper)
        self._allow_fused = allow_fused
        for cls in optimizer_class.__mro__:
            if cls.__module__.startswith("torch.optim") and cls.__name__ in _REFUSED:
                raise UnsupportedOptimizerError(
                    f"{optimizer_class.__name__} cannot be offloaded: {_REFUSED[cls.__name__]}, "
                    "so it cannot run on one chunk at a time. Use an element-wise optimizer "
                    "(AdamW, Adam, SGD, NAdam, RAdam, Adamax, RMSprop, Adagrad, Adadelta, "
                    "Rprop, ASGD), or keep this one in memory for the parameters that need it."
                )
        # An instance must exist before the step function is unwrapped: creating the first one is
        # what wraps it for hooks, and unwrapping earlier would strip its no_grad instead.
        placeholder = torch.zeros(1, dtype=torch.float32, device="cpu")
        instance = optimizer_class([placeholder], **self._hyper)
        self.defaults: dict[str, Any] = dict(instance.defaults)
        step = optimizer_class.step
        self._step: Callable[[torch.optim.Optimizer], Any] = (
            step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
        )
        self._rules: dict[tuple[tuple[str, bool], ...], Rule] = {}

    def rule(self, group: Mapping[str, Any]) -> Rule:
        """Return what a parameter group keeps, probing the class once per kind of group.

        Which arrays exist depends on whether hyper-parameters are zero (``momentum``) or set
        (``amsgrad``), never on their exact values, so that is the key.

        Raises:
            UnsupportedOptimizerError: Not element-wise, or a flag that cannot be honoured.
        """
        if self._allow_fused:
            group = {**group, "fused": None}  # keeps the same state
        _refuse_flags(group)
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        key = tuple((k, bool(_truth(v))) for k, v in sorted(options.items()))
        if key not in self._rules:
            self._rules[key] = self._probe(options)
        return self._rules[key]

    def fused(self, group: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a group's hyper-parameters for torch's fused kernel; None if it has none.

        That kernel is several times as fast, but not equal to the step that users get by default
        in the last bit; and what follows the last whole vector of `FUSED_MULTIPLE` elements is
        computed in another way than the rest. So it is for state that is rounded anyway, in
        multiples of that.
        """
        if self.optimizer_class not in _HAVE_FUSED or group.get("foreach"):
            return None
        return {**group, "fused": True} if self.rule(group).arrays else None

    def initial_state(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that the constructor alone makes of one FP32 element; most make none."""
        parameter = torch.zeros(1, dtype=torch.float32, device="cpu")
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        instance = self.optimizer_class([{**options, "params": [parameter]}], **self._hyper)
        return dict(instance.state[parameter]) if parameter in instance.state else {}

    def stepper(self) -> Stepper:
        """Return what runs the step; one for each thread."""
        return Stepper(self.optimizer_class, self._hyper, self._step)

    @in_neutral
    def _probe(self, group: Mapping[str, Any]) -> Rule:
        name = self.optimizer_class.__name__
        generator = torch.Generator("cpu").manual_seed(20260101)
        initial, *gradients = (
            torch.randn(_PROBE_SHAPE, generator=generator, dtype=torch.float32, device="cpu")
            for _ in range(1 + _PROBE_STEPS)
        )
        flat = initial.flatten()
        fired: list[int] = []
        hook = register_optimizer_step_pre_hook(lambda *_: fired.append(1))
        try:
            whole, whole_state = self._run(initial, gradients, group)
            parts = [
                self._run(flat[cut].clone(), [g.flatten()[cut] for g in gradients], group)
                for cut in (slice(None, _PROBE_CUT), slice(_PROBE_CUT, None))
            ]
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
        rule = _describe(name, whole, whole_state)
        pairs = [(whole, [p for p, _ in parts])]
        pairs += [(whole_state[array], [s[array] for _, s in parts]) for array in rule.arrays]
        same = all(
            torch.equal(
                one.flatten().view(torch.int32),
                torch.cat([part.flatten() for part in split]).view(torch.int32),
            )
            for one, split in pairs
        ) and all(
            read_scalars(whole_state, rule) == read_scalars(state, rule) for _, state in parts
        )
        if not same:
            raise UnsupportedOptimizerError(
                f"{name} cannot be offloaded: a tensor updated in two parts differs from the same "
                "tensor updated whole, so the rule is not element-wise (or its kernel depends on "
                "where a tensor is cut) and cannot run on one chunk at a time."
            )
        return rule

    def _run(
        self,
        initial: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        parameter = initial.clone()
        stepper = self.stepper()
        state = stepper.create(parameter, gradients[0].clone(), group)
        rule = _describe(self.optimizer_class.__name__, parameter, state)
        for gradient in gradients[1:]:
            # As a step does: only what the rule names survives from one to the next.
            kept = {name: state[name] for name in rule.arrays}
            state = {**kept, **write_scalars(read_scalars(state, rule))}
            stepper.apply(parameter, gradient.clone(), state, group)
        return parameter, state


class Stepper:
    """Runs an optimizer class's step on flat tensors; not for two threads at a time.

    Args:
        optimizer_class: The class.
        hyper: Arguments of its constructor.
        step: Its step function, without hooks.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        hyper: Mapping[str, Any],
        step: Callable[[torch.optim.Optimizer], Any],
    ) -> None:
        self._class = optimizer_class
        self._hyper = dict(hyper)
        self._step = step
        placeholder = torch.zeros(1, dtype=torch.float32, device="cpu")
        self._instance = optimizer_class([placeholder], **self._hyper)

    def create(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Run the first step of a flat parameter, letting torch create its state.

        Args:
            parameter: Flat FP32 values, updated in place.
            gradient: Flat FP32 gradient of the same length.
            group: Hyper-parameters as in ``param_groups``.

        Returns:
            The state that torch made: tensors like `parameter`, and scalars.
        """
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        instance = self._class([{**options, "params": [parameter]}], **self._hyper)
        parameter.grad = gradient
        self._step(instance)
        return dict(instance.state[parameter])

    def apply(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: Mapping[str, Any],
    ) -> None:
        """Run one step of a flat parameter that has state; updates `parameter` and `state`."""
        instance = self._instance
        parameter.grad = gradient
        instance.param_groups = [{**group, "params": [parameter]}]
        instance.state.clear()
        instance.state[parameter] = state
        try:
            self._step(instance)
        finally:
            instance.state.clear()
            instance.param_groups = []


def read_scalars(state: Mapping[str, Any], rule: Rule) -> Scalars:
    """Take a parameter's scalar state out of the dictionary that torch's step left."""
    values: list[ScalarValue] = []
    for name in rule.scalars:
        value = state[name]
        plain = value.item() if isinstance(value, torch.Tensor) else value
        values.append((name, _kind(value), plain))
    return tuple(values)


def write_scalars(scalars: Scalars) -> dict[str, Any]:
    """Return fresh objects for torch's step to read and change."""
    return {
        name: torch.tensor(value, dtype=_KIND_DTYPES[kind], device="cpu")
        if kind in _KIND_DTYPES
        else value
        for name, kind, value in scalars
    }


def kind_of_tensor(dtype: torch.dtype, default: str) -> str:
    """Return the kind of scalar that a tensor of a dtype is, if `default` is that of a tensor."""
    return _TENSOR_KINDS.get(dtype, default) if default in _KIND_DTYPES else default


def _describe(name: str, parameter: torch.Tensor, state: Mapping[str, Any]) -> Rule:
    arrays: list[str] = []
    scalars: dict[str, str] = {}
    for key, value in state.items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.shape == parameter.shape and value.dtype == torch.float32:
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
                f"of shape {tuple(parameter.shape)}; only FP32 tensors of the parameter's own "
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
    reasons = {
        "capturable": "a step that reads files cannot be captured in a CUDA graph",
        "differentiable": "autograd cannot follow a step whose state is on disk",
        "fused": (
            "torch's fused CPU kernels round differently depending on where a tensor is cut, so "
            "results would depend on the chunk size"
        ),
    }
    for flag, reason in reasons.items():
        if group.get(flag):
            raise UnsupportedOptimizerError(
                f"{flag}=True is not supported: {reason}. Leave {flag} unset."
            )


def _truth(value: object) -> bool:
    # A tensor hyper-parameter (a learning rate) is never structural, and asking a device tensor
    # for its truth would synchronise.
    return bool(value) if isinstance(value, bool | int | float | str | None) else True
