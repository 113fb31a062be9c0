"""Models whose parameters have shapes but no memory, for training with all of them on the drive."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from offload.device.filed import FiledTensor
from offload.errors import UnsupportedParameterError
from offload.model.homes import home_of, stays_filed

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

_here = threading.local()


@contextmanager
def outside_memory(device: torch.device | str = "cpu") -> Iterator[None]:
    """Build models in the block whose parameters take no memory; buffers are real.

    A parameter has its shape, dtype and device, and no values: each element is NaN, and all are the
    same one in memory. Initialisation of parameters does nothing. Building takes the memory of the
    largest parameter, and of the buffers::

        with offload.outside_memory():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    To train the model, pass ``Options(parameters="drive")`` to the optimizer and call `restore`,
    for example after ``offload import``. A checkpoint then has the values.

    Parameters that modules share stay shared, and attributes of parameters are kept. The block
    affects the modules that the calling thread builds in it; modules from before keep what they
    have. Within the block, parameters are on the device ``meta``: the final ones take their places
    at the end, so keep no references to those of the block. Random numbers are drawn for buffers
    only. A block within another one does nothing. If the block raises, so does this, and what was
    built is not usable.

    Args:
        device: Device of the parameters.

    Raises:
        UnsupportedParameterError: A module is lazy, a parameter is no dense floating-point
            `torch.nn.Parameter` or has hooks, or a buffer was computed from parameters. Names it.
        ValueError: The block is within one for another device.
    """
    where = torch.empty(0, device=device).device  # with its index, and only if there is one
    outer: torch.device | None = getattr(_here, "device", None)
    if outer is not None:
        if outer != where:
            raise ValueError(
                f"outside_memory({str(device)!r}) is within a block for {outer}: build all parts "
                "of a model in one block"
            )
        yield
        return
    building = _Building()
    _here.device = where
    try:
        with building.following():
            yield
        building.finish(where)
    finally:
        _here.device = None


@cache
def _follow_modules() -> None:
    """Let torch tell of every module that gets a parameter or a child, for ever.

    Other threads may build modules at any time, and torch fails there if a hook comes or goes.
    """
    # The hints of torch know only hooks that return nothing.
    take: Callable[..., Any] = _taken
    register_module_parameter_registration_hook(take)
    register_module_module_registration_hook(_noted)


def _taken(
    module: torch.nn.Module, name: str, parameter: torch.nn.Parameter
) -> torch.nn.Parameter | None:
    building: _Building | None = getattr(_here, "building", None)
    return None if building is None else building.take_memory(module, name, parameter)


def _noted(module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    del name, child
    building: _Building | None = getattr(_here, "building", None)
    if building is not None:
        building.note(module)


class _Building:
    """Modules that one thread builds, whose parameters are on the device ``meta`` meanwhile."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._on_meta = WeakIdKeyDictionary()
        """Parameters as they were made, which a module may share with another one, each with the
        one that modules have."""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Take the memory of every parameter that gets into a module in the block."""
        _follow_modules()
        _here.building = self
        try:
            yield
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise UnsupportedParameterError(
                "outside_memory(): a module reads values of its parameters while it is built, and "
                f"they have none: build it outside of the block ({error})"
            ) from error
        finally:
            _here.building = None

    def note(self, module: torch.nn.Module) -> None:
        """Note a module that gets a child, which may be a copy that no parameter was put into."""
        self._modules.append(weakref.ref(module))

    def take_memory(
        self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter
    ) -> torch.nn.Parameter | None:
        """Return what a module gets in place of a parameter; None for the parameter itself."""
        _require_plain(f"{name!r} of {type(module).__name__}", parameter)
        self._modules.append(weakref.ref(module))
        if parameter.is_meta:
            return None
        if parameter not in self._on_meta:
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            self._on_meta[parameter] = _like(parameter, values)
        found: torch.nn.Parameter = self._on_meta[parameter]
        return found

    def finish(self, device: torch.device) -> None:
        """Give every module its final parameters."""
        final: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        noted = (reference() for reference in self._modules)
        for module in _with_children(module for module in noted if module is not None):
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    raise UnsupportedParameterError(
                        f"the buffer {name!r} of {type(module).__name__} is on meta: it was "
                        "computed from parameters, which have no values in outside_memory(), or "
                        "made there. Build this module outside of the block"
                    )
            for name, parameter in list(module._parameters.items()):
                if parameter is None or not parameter.is_meta:
                    continue
                _require_plain(f"{name!r} of {type(module).__name__}", parameter)
                if id(parameter) not in final:
                    nan = torch.full((), math.nan, dtype=parameter.dtype, device=device)
                    made: Any = _like(parameter, nan.expand(parameter.shape))
                    made._offload_outside = True
                    final[id(parameter)] = parameter, made  # the id stays that of `parameter`
                # Modules that list their parameters elsewhere, as LSTM does, follow assignments.
                setattr(module, name, final[id(parameter)][1])


def _with_children(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield modules and all that are below them, each once."""
    seen: set[torch.nn.Module] = set()
    for top in modules:
        for _, module in top.named_modules(memo=seen):
            yield module


def _like(parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter with other values, and with the attributes of this one."""
    made = torch.nn.Parameter(values, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def _require_plain(what: str, parameter: torch.nn.Parameter) -> None:
    """Refuse a parameter that is more than a shape and values."""
    why = ""
    if is_lazy(parameter):
        why = "has no shape yet, because its module is lazy: use the module that is told its sizes"
    elif type(parameter) is not torch.nn.Parameter:
        why = f"is a {type(parameter).__name__}, and not a plain torch.nn.Parameter"
    elif parameter.layout != torch.strided or not parameter.is_floating_point():
        why = f"is a {parameter.layout} tensor of {parameter.dtype}, and not a dense float"
    elif any(getattr(parameter, name, None) for name in _HOOKS):
        why = "has hooks, which would be lost: register them after the block"
    if why:
        raise UnsupportedParameterError(f"outside_memory(): the parameter {what} {why}")


def is_outside(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has no values because it was made in `outside_memory`.

    Parameters of one element, which have no strides that tell, bear a mark.
    """
    if is_lazy(parameter) or parameter.layout != torch.strided:
        return False
    if parameter.is_meta or not parameter.numel():
        return False
    if parameter.numel() == 1 and not hasattr(parameter, "_offload_outside"):
        return False
    strides = zip(parameter.shape, parameter.stride(), strict=True)
    if any(stride for size, stride in strides if size > 1):
        return False
    return bool(parameter.detach()[(0,) * parameter.dim()].isnan())


def _is_in_memory(parameter: torch.Tensor) -> bool:
    """Return whether a parameter that may look as if it had no values has them in its home."""
    home = home_of(parameter)
    return home is not None and not isinstance(home, FiledTensor)


def require_unfiled(model: torch.nn.Module | None) -> None:
    """Refuse a model that has parameters on the drive, in the directory of another optimizer.

    Raises:
        UnsupportedParameterError: There is one; names it.
    """
    for name, parameter in model.named_parameters() if model is not None else ():
        if stays_filed(parameter):
            raise UnsupportedParameterError(
                f"parameter {name!r} is in the directory of another optimizer with "
                'parameters="drive": leave out model=, close that optimizer, or give all '
                "parameters to one optimizer"
            )


def require_values(named: Iterable[tuple[str, torch.Tensor]], *, instead: str) -> None:
    """Refuse parameters that were made in `outside_memory`, where they need values.

    Args:
        named: Parameters with their names.
        instead: What to do about it, as a clause.

    Raises:
        UnsupportedParameterError: Some have no values; names the first.
    """
    if names := [name for name, p in named if not _is_in_memory(p) and is_outside(p)]:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise UnsupportedParameterError(
            f"parameter {names[0]!r}{more}: no values, as made in outside_memory(): {instead}"
        )
