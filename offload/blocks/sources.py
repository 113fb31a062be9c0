"""Sources: where the values of units are while they are not in a buffer.

Everything that streams units knows a source by `Source` alone. So the values may be in host memory,
or in a file that a step writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from offload.blocks.places import Place, pages
from offload.blocks.units import Member, Unit
from offload.device.boundary import HOST, Event, boundary_of


class Source(Protocol):
    """Values of units. All methods may be called on any thread, by one thread at a time."""

    def read(self, unit: Unit, buffer: torch.Tensor, after: Event) -> Event:
        """Read a unit's parameters into a buffer.

        Args:
            unit: Unit whose parameters are read, each to its place in the buffer.
            buffer: Buffer of at least the unit's size.
            after: Point after which the buffer may be overwritten.

        Returns:
            The point after which the buffer may be used.
        """
        ...

    def write(self, member: Member, value: torch.Tensor) -> None:
        """Take a value of a parameter that the program may have edited.

        Nothing changes if the parameter has this value already, bit for bit.
        """
        ...

    def home(self, member: Member) -> torch.Tensor | None:
        """Return the memory that a step changes, of the parameter's shape, always the same tensor.

        None if a step does not change memory, but writes elsewhere.
        """
        ...


class HostSource:
    """Values in host memory, which is page-locked for the device of the unit.

    Args:
        places: Place of each device.
    """

    def __init__(self, places: Mapping[torch.device, Place]) -> None:
        self._places = places
        self._memory: dict[Unit, torch.Tensor] = {}
        self._homes: dict[Member, torch.Tensor] = {}
        self._locks: list[object] = []

    def take(self, unit: Unit) -> None:
        """Copy the present values of a unit's parameters, which may then be dropped."""
        memory = pages(unit.nbytes)
        if unit.device.type != HOST.type:
            self._locks.append(boundary_of(unit.device).lock_pages(memory))
        place = self._places[unit.device]
        for member in unit.members:
            home = member.view(memory)
            home.copy_(place.to_host(member.parameter))
            self._homes[member] = home
        self._memory[unit] = memory

    def read(self, unit: Unit, buffer: torch.Tensor, after: Event) -> Event:
        """Copy a unit's parameters into a buffer, all at once."""
        return self._places[unit.device].fill(self._memory[unit], buffer[: unit.nbytes], [after])

    def write(self, member: Member, value: torch.Tensor) -> None:
        """Copy a value home, unless it is there."""
        home = self._homes[member]
        if not same_bits(value, home):
            home.copy_(value)

    def home(self, member: Member) -> torch.Tensor | None:
        """Return the memory of a parameter; None if its value has not been taken."""
        return self._homes.get(member)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype, shape and device have the same bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.itemsize)
    return (
        torch.equal(one, other) if bits is None else torch.equal(one.view(bits), other.view(bits))
    )
