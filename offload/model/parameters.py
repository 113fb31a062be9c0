"""Live tensors of a training: their names in files, and checks of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from offload.device.boundary import is_reachable
from offload.errors import (
    MismatchError,
    UnsupportedOptimizerError,
    UnsupportedParameterError,
)
from offload.format.arrays import StateFormat
from offload.format.layout import ParameterSpec
from offload.model.homes import home_of
from offload.model.process_groups import require_whole
from offload.model.shards import Shard, Shards, at_home, cut_of
from offload.update.dtypes import DTYPE_CODES
from offload.update.kept_state import Rule
from offload.update.rules import UpdateRule

_TRAINABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_COPY = (
    "model= has none of the optimizer's parameters: pass the module whose parameters() you gave, "
    "not a copy of it"
)

_REPLACED = (
    "model= has none of the optimizer's parameters any more: all of them were replaced after the "
    "optimizer was constructed, as fully_shard(), to_empty() and load_state_dict(..., assign=True) "
    "do, so that steps train tensors that the model does not use. Shard the model and give it "
    "memory before constructing the optimizer, and load without assign=True, which copies the "
    "values into the parameters. A library that shards later must put the new parameters into "
    "param_groups before the first step"
)


@dataclass(frozen=True, slots=True, eq=False)
class Trainable:
    """A parameter that the optimizer updates, with its description in files."""

    spec: ParameterSpec

    parameter: torch.Tensor
    """Parameter of the model. It gives the name, the group and the identity."""

    shard: Shard | None = None
    """Part of the parameter that is stepped; None if the memory is the parameter itself."""

    @property
    def memory(self) -> torch.Tensor:
        """Live memory that is stepped, of the shape in `spec`."""
        return self.parameter if self.shard is None else self.shard.tensor()

    @property
    def gradient(self) -> torch.Tensor | None:
        """Gradient of the memory; None if there is none."""
        return self.parameter.grad if self.shard is None else self.shard.gradient()


def is_stepped(parameter: torch.Tensor) -> bool:
    """Return whether a step updates a parameter, if it has a gradient by then.

    torch only looks at the gradient. So a frozen parameter with a gradient is stepped as well.
    """
    return parameter.requires_grad or parameter.grad is not None


def are_stepped(trainables: Iterable[Trainable]) -> list[bool]:
    """Return `is_stepped` of each parameter."""
    return [is_stepped(t.parameter) for t in trainables]


def memories(trainables: Iterable[Trainable]) -> list[torch.Tensor]:
    """Return the live memory of each parameter, in their order; see `Trainable.memory`."""
    return [t.parameter if t.shard is None else t.shard.tensor() for t in trainables]


def describe_parameters(
    param_groups: Sequence[Mapping[str, Any]],
    model: torch.nn.Module | None,
    rule: UpdateRule,
    state_format: StateFormat,
    *,
    also: Container[str] = (),
    constructed: bool = False,
    shards: Shards | None = None,
) -> list[Trainable]:
    """Name and check every parameter of the groups that `is_stepped`, in the groups' order.

    Parameters that only other ranks step are checked, but are not in the result.

    Args:
        param_groups: Parameter groups of the optimizer.
        model: Module that names the parameters; None for the groups' own names.
        rule: Rule that determines a parameter's state arrays.
        state_format: Stored form of the arrays.
        also: Names of parameters that are described even if they are frozen.
        constructed: Whether the optimizer exists already. The model then had its parameters once,
            and the error for a model without them says that they were replaced.
        shards: Function that returns this rank's part of a parameter; None if this process steps
            all parameters as a whole.

    Raises:
        UnsupportedParameterError: A parameter cannot be updated; names it and says why.
        MismatchError: Two parameters have the same name, a parameter is given twice, or the model
            has none of the parameters.
    """
    names: dict[torch.Tensor, str] = {}
    if model is not None:
        named = names_of(model, shards)
        names.update({parameter: named(name) for name, parameter in model.named_parameters()})
        given = [p for group in param_groups for p in group["params"]]
        if given and not any(parameter in names for parameter in given):
            raise MismatchError(_REPLACED if constructed else _COPY)
    check_given_once(param_groups, names)
    found: list[Trainable] = []
    owners: dict[str, int] = {}
    for index, group in enumerate(param_groups):
        kept = rule.rule(group)
        for position, (name, parameter) in enumerate(_named(index, group, names)):
            if not (is_stepped(parameter) or name in also):
                continue
            check_parameter(name, parameter, sharded=shards is not None)
            check_attributes(name, parameter, rule, kept)
            if name in owners:
                raise MismatchError(
                    f"two parameters are called {name!r} (in parameter groups {owners[name]} and "
                    f"{index}, position {position}); give them different names"
                )
            owners[name] = index
            arrays = state_format.stored_arrays(DTYPE_CODES[parameter.dtype], kept.arrays)
            trainable = make_trainable(name, parameter, index, arrays, shards)
            if trainable is not None:
                found.append(trainable)
    return found


def check_attributes(name: str, parameter: torch.Tensor, rule: UpdateRule, kept: Rule) -> None:
    """Check that a parameter has no attribute that the optimizer's class looks for."""
    for attribute in sorted(kept.reads):
        if hasattr(parameter, attribute):
            raise UnsupportedOptimizerError(
                f"{rule.optimizer_class.__name__} cannot be offloaded with the parameter {name!r}, "
                f"whose attribute {attribute!r} it reads: chunks have no attributes. Give the "
                "parameter a group of its own instead"
            )


def make_trainable(
    name: str,
    parameter: torch.Tensor,
    group: int,
    arrays: tuple[str, ...],
    shards: Shards | None = None,
) -> Trainable | None:
    """Return a parameter with its description in files; None if only other ranks step it.

    Args:
        name: Name of the parameter.
        parameter: Parameter that `check_parameter` has accepted.
        group: Index of its group.
        arrays: State arrays of the parameter on storage.
        shards: As for `describe_parameters`.

    Raises:
        UnsupportedParameterError: This rank's part of the parameter is no box of it.
    """
    dtype = DTYPE_CODES[parameter.dtype]
    if shards is None:
        home = home_of(parameter)
        return Trainable(
            ParameterSpec(name, dtype, tuple(parameter.shape), group, arrays),
            parameter,
            None if home is None else at_home(parameter, home),
        )
    shard = shards(name, parameter)
    if shard is None or shard.is_empty:
        return None
    shape = cut_of(shard).box.sizes
    spec = ParameterSpec(name, dtype, shape, group, arrays, shard.cut)
    return Trainable(spec, parameter, None if shard.tensor() is parameter else shard)


def names_of(model: torch.nn.Module, shards: Shards | None) -> Callable[[str], str]:
    """Return the function that makes names in files from the names of a model's tensors.

    The names are the same. If the model is trained by several ranks, they lack the prefixes of
    wrappers.
    """
    return str if shards is None else unwrapped_names(model)


def check_iterable(params: object) -> None:
    """Refuse a module or a callable as the iterable of parameters; torch refuses other mistakes.

    Raises:
        TypeError: The value is a module, or a callable such as ``model.parameters`` itself.
    """
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"the first argument is a module ({type(params).__name__}), expected its parameters: "
            "pass model.parameters(), and the module itself as model="
        )
    if callable(params):
        name = getattr(params, "__name__", type(params).__name__)
        raise TypeError(
            f"the first argument is {name} itself, expected what it returns: call it, as in "
            "model.parameters()"
        )


def check_given_once(
    param_groups: Sequence[Mapping[str, Any]], names: Mapping[torch.Tensor, str]
) -> None:
    """Refuse a parameter that is given twice.

    torch steps such a parameter twice, and warns that it will refuse this in future.

    Args:
        param_groups: Parameter groups of the optimizer.
        names: Names of the model's parameters; other parameters have the names of their group.

    Raises:
        MismatchError: A parameter is given twice; names it and both places.
    """
    places: dict[torch.Tensor, str] = {}
    for index, group in enumerate(param_groups):
        for position, (name, parameter) in enumerate(_named(index, group, names)):
            place = f"position {position} of parameter group {index}"
            first = places.setdefault(parameter, place)
            if first != place:
                raise MismatchError(
                    f"parameter {name!r} is given twice, at {first} and at {place}: give it once, "
                    "also if modules share it (model.parameters() does)"
                )


def check_parameter(name: str, parameter: torch.Tensor, *, sharded: bool = False) -> None:
    """Refuse a parameter that cannot be updated on flat FP32 views.

    Args:
        name: Name of the parameter, for messages.
        parameter: Parameter.
        sharded: Whether DTensors are accepted, of which this rank steps its part.

    Raises:
        UnsupportedParameterError: The parameter has an unsupported kind, dtype, layout or device;
            names it, and says what it is and what to do.
    """
    require_shape(name, parameter)
    if not sharded:
        require_whole(name, parameter)
    if parameter.dtype not in _TRAINABLE_DTYPES or parameter.layout != torch.strided:
        raise UnsupportedParameterError(
            f"parameter {name!r} is a {parameter.layout} tensor of {parameter.dtype}; only dense "
            "bfloat16, float16 and float32 parameters can be offloaded. "
            + (
                "Store its real and imaginary parts as two real parameters (torch.view_as_real)."
                if parameter.is_complex()
                else "Convert it, or give it to another optimizer."
            )
        )
    if not is_reachable(parameter.device):
        raise UnsupportedParameterError(
            f"parameter {name!r} is on {parameter.device}; parameters can be in host memory or on "
            f"a CUDA device. {how_to_move(parameter)} before constructing the optimizer."
        )
    if parameter.is_inference():
        raise UnsupportedParameterError(
            f"parameter {name!r} was made in inference mode, so torch cannot train it outside of "
            "that mode: construct the model outside of torch.inference_mode()"
        )


def check_gradients(
    trainables: Sequence[Trainable], gradients: Sequence[torch.Tensor | None]
) -> None:
    """Refuse sparse and complex gradients.

    Args:
        trainables: Parameters that are about to be stepped.
        gradients: Gradient of each of them; None if it has none.

    Raises:
        UnsupportedParameterError: A gradient is sparse or complex; names its parameter.
    """
    for trainable, gradient in zip(trainables, gradients, strict=True):
        if gradient is None:
            continue
        if gradient.layout != torch.strided or gradient.is_complex():
            raise UnsupportedParameterError(
                f"the gradient of {trainable.spec.name!r} is a {gradient.layout} tensor of "
                f"{gradient.dtype}; only dense real gradients can be applied chunk by chunk. For "
                "an embedding, pass sparse=False."
            )


def group_names(
    param_groups: Sequence[Mapping[str, Any]], model: torch.nn.Module | None, shards: Shards | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of all groups, with their names in files."""
    names: dict[torch.Tensor, str] = {}
    if model is not None:
        named = names_of(model, shards)
        names = {parameter: named(name) for name, parameter in model.named_parameters()}
    return [pair for i, group in enumerate(param_groups) for pair in _named(i, group, names)]


def all_parameters(
    param_groups: Sequence[Mapping[str, Any]], model: torch.nn.Module | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of an optimizer and of its model, with their names in files.

    Args:
        param_groups: Parameter groups of the optimizer.
        model: Model that is trained; None if it was not given.
    """
    named = dict(group_names(param_groups, model, _no_shards))
    if model is not None:
        models = [{"params": list(model.parameters())}]
        named |= dict(group_names(models, model, _no_shards))
    return list(named.items())


def _no_shards(name: str, tensor: torch.Tensor) -> None:
    """Stand for shards that are not known yet, so that names lack the prefixes of wrappers."""
    del name, tensor


def require_shape(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor of a lazy module, which has neither a shape nor memory."""
    if is_lazy(tensor):
        raise UnsupportedParameterError(
            f"{name!r} has no shape yet, because its module is lazy and was never called: run one "
            "forward, model(example), first"
        )


def how_to_move(tensor: torch.Tensor) -> str:
    """Return what to do with a tensor on a device that is not supported."""
    if tensor.device.type == "meta":  # Module.to() refuses it
        return "Give the model memory (model.to_empty(device='cpu')) and load its values"
    return "Move the model there"


def _named(
    index: int, group: Mapping[str, Any], names: Mapping[torch.Tensor, str]
) -> list[tuple[str, torch.Tensor]]:
    """Return a group's parameters with names: the model's, the user's, or by position."""
    given = group.get("param_names") or [
        f"group{index}.param{position}" for position in range(len(group["params"]))
    ]
    return [
        (names.get(parameter, name), parameter)
        for name, parameter in zip(given, group["params"], strict=True)
    ]


_WRAPPED_AS = {
    ("torch.nn.parallel", "DistributedDataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
}
"""Attribute that holds the wrapped module, by the module that defines the wrapper and its class. If
a defining module is not imported, its class has no instances."""

_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."
"""Prefix of modules whose activations are recomputed. Some methods of the wrapper remove it."""


def unwrapped_names(model: torch.nn.Module) -> Callable[[str], str]:
    """Return the function that removes wrappers from the names of a model's tensors."""
    wrappers = [
        (getattr(sys.modules[module], name), attribute)
        for (module, name), attribute in _WRAPPED_AS.items()
        if hasattr(sys.modules.get(module), name)
    ]
    prefixes = {
        f"{prefix}.{attribute}" if prefix else attribute
        for prefix, module in model.named_modules(remove_duplicate=False)
        for kind, attribute in wrappers
        if isinstance(module, kind)
    }

    def unwrapped(name: str) -> str:
        """Return a name without the parts that wrappers have put into it."""
        if prefixes:
            parts = name.split(".")
            kept = [
                part
                for number, part in enumerate(parts)
                if ".".join(parts[: number + 1]) not in prefixes
            ]
            name = ".".join(kept)
        return name.replace(_CHECKPOINT_WRAPPER, "")

    return unwrapped
