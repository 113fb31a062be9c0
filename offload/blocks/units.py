"""Units: the blocks of a model, and the place of each parameter in a buffer of a block.

A unit is loaded and dropped as a whole. A parameter that several units use, or anything outside of
them (tied weights), belongs to none, and stays where it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from offload.device.boundary import Event, is_reachable
from offload.errors import UnsupportedParameterError

ALIGNMENT = 64
"""Alignment in bytes of each parameter in a buffer: torch's own. Matrix products may round
differently at another one."""

_PLAIN = (torch.nn.Parameter, torch.Tensor)


@dataclass(eq=False, slots=True)
class Member:
    """A parameter of a unit."""

    name: str
    parameter: torch.nn.Parameter
    place: int
    """First byte in the unit's buffer."""

    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device
    version: int = 0
    """Version of the parameter when the unit was dropped, or its value was brought home."""

    is_touched: bool = False
    """Whether the program has used the parameter outside of its block since the unit was loaded, so
    that it may have edited it, or have an alias."""

    is_saved: bool = False
    """Whether a graph may have saved the parameter itself since the unit was loaded."""

    @property
    def present_version(self) -> int:
        """How often the parameter has been changed in place; reading it is no use."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter._version

    @property
    def is_of_its_kind(self) -> bool:
        """Whether the parameter has the dtype, shape and device of its home still."""
        now = self.parameter
        return (now.dtype, tuple(now.shape), now.device) == (self.dtype, self.shape, self.device)

    def is_view_of(self, buffer: torch.Tensor | None) -> bool:
        """Return whether the parameter is the view of a buffer that `view` returns."""
        return (
            buffer is not None
            and self.parameter.data_ptr() == buffer.data_ptr() + self.place
            and self.is_of_its_kind
            and self.parameter.stride() == self.strides
        )

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the parameter's values in a buffer of the unit."""
        flat = buffer[self.place : self.place + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides, flat.storage_offset())


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A buffer that is being filled."""

    buffer: torch.Tensor
    filled: Future[Event | None]
    """The event after which a device may use the buffer; None if it may be used at once."""


@dataclass(eq=False, slots=True)
class Unit:
    """A block, and where its parameters are now."""

    name: str
    number: int
    """Place among the units, in the order of the model."""

    module: torch.nn.Module
    members: list[Member]
    nbytes: int
    device: torch.device
    buffer: torch.Tensor | None = None
    """Buffer that the parameters are views of; None while the unit is dropped."""

    ready: Event | None = None
    """Point after which a device may use the buffer."""

    num_calls: int = 0
    """Number of calls of the block, or of parts of it, that are running."""

    coming: Arrival | None = None
    num_references: int = 0
    """Number of references to the buffer's memory when it was loaded."""

    _places: list[int] = field(default_factory=list)

    def member_at(self, place: int) -> Member:
        """Return the parameter that has a byte of the buffer."""
        self._places = self._places or [member.place for member in self.members]
        return self.members[bisect_right(self._places, place) - 1]


def find_units(model: torch.nn.Module, patterns: Sequence[str]) -> list[Unit]:
    """Return the blocks of a model that have parameters.

    Args:
        model: Model that is trained.
        patterns: Patterns of names of modules, as of `fnmatch`, that are blocks. If there are none,
            blocks are the members of each ``ModuleList`` of several modules of one class. What is
            within a block belongs to the block.

    Raises:
        ValueError: There is no block, or a pattern matches no module.
        UnsupportedParameterError: A parameter in a block cannot be moved; names it and says why.
    """
    blocks = _named(model, patterns) if patterns else _listed(model)
    unit_of = {id(part): n for n, (_, block) in enumerate(blocks) for part in block.modules()}
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), set()).add(unit_of.get(id(module), -1))
    units: list[Unit] = []
    for number, (name, block) in enumerate(blocks):
        parameters = {
            f"{name}.{inner}": parameter
            for inner, parameter in block.named_parameters()
            if users[id(parameter)] == {number} and not _is_empty(parameter)
        }
        if parameters:
            units.append(_unit(name, len(units), block, parameters))
    if not units:
        found = "the blocks have no parameters of their own" if blocks else "there is no block"
        raise ValueError(
            f"parameters= streams the blocks of a model, but in this {type(model).__name__} "
            f"{found}: name them, as in Options(blocks=['encoder.layer.*']). Without blocks=, they "
            "are the members of a torch.nn.ModuleList whose modules have one class"
        )
    return units


def _listed(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the members of lists of modules of one class that are in no other such list."""
    found: list[tuple[str, torch.nn.Module]] = []
    inner: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and id(module) not in inner:
            children = list(module.named_children())
            if len(children) > 1 and len({type(child) for _, child in children}) == 1:
                found += [(f"{name}.{key}".lstrip("."), child) for key, child in children]
                inner.update(id(part) for part in module.modules())
    return found


def _named(model: torch.nn.Module, patterns: Sequence[str]) -> list[tuple[str, torch.nn.Module]]:
    """Return the outermost modules that a pattern matches."""
    found: list[tuple[str, torch.nn.Module]] = []
    inner: set[int] = set()
    matching: set[str] = set()
    for name, module in model.named_modules():
        hits = [pattern for pattern in patterns if name and fnmatchcase(name, pattern)]
        matching.update(hits)
        if hits and id(module) not in inner:
            found.append((name, module))
            inner.update(id(part) for part in module.modules())
    for pattern in patterns:
        if pattern not in matching:
            names = [name for name, _ in model.named_modules() if name.count(".") <= 2][1:4]
            raise ValueError(
                f"blocks= has {pattern!r}, which matches no module of this "
                f"{type(model).__name__}: its modules are called {', '.join(names)}, ..."
            )
    return found


def _unit(
    name: str, number: int, block: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]
) -> Unit:
    members: list[Member] = []
    place = 0
    for path, parameter in parameters.items():
        _require_plain(path, parameter)
        # Dense memory keeps its order of dimensions; strides of anything else become contiguous.
        like = torch.empty_strided(parameter.shape, parameter.stride(), device="meta")
        strides = torch.empty_like(like).stride()
        nbytes, shape = parameter.nbytes, tuple(parameter.shape)
        member = Member(
            path, parameter, place, nbytes, parameter.dtype, shape, strides, parameter.device
        )
        members.append(member)
        place += -(-nbytes // ALIGNMENT) * ALIGNMENT
    devices = {member.device for member in members}
    if len(devices) > 1:
        raise UnsupportedParameterError(
            f"the block {name!r} has parameters on {' and '.join(sorted(map(str, devices)))}; "
            "the parameters of a block are moved together: put them on one device"
        )
    return Unit(name, number, block, members, place, devices.pop())


def _is_empty(parameter: Any) -> bool:
    return not is_lazy(parameter) and not parameter.numel()


def _require_plain(name: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter whose values are not simply its memory."""
    kind: Any = type(parameter)
    why = ""
    if is_lazy(parameter):
        why = "has no shape yet: run one forward, model(example), first"
    elif parameter.is_quantized or parameter.layout != torch.strided:
        why = f"is a {parameter.layout} tensor of {parameter.dtype}"
    elif hasattr(parameter, "_offload_keeper"):
        raise UnsupportedParameterError(
            f"the values of {name!r} are in the directory of an optimizer that is closed: build "
            "the model anew, and call restore() after making the optimizer"
        )
    elif hasattr(kind, "__tensor_flatten__") or (
        issubclass(kind, torch.nn.Parameter) and kind not in _PLAIN
    ):
        why = f"is a {kind.__name__}, expected a plain Parameter"
    elif not is_reachable(parameter.device):
        why = f"is on {parameter.device}"
    elif parameter.is_inference():
        why = "was made in inference mode"
    if why:
        raise UnsupportedParameterError(
            f"parameter {name!r} is in a block that is to be streamed, and {why}: leave out "
            "parameters=, or name other blocks with blocks="
        )
