"""Sources: where the values of units are while they are not in a buffer.

Everything that streams units knows a source by `Source` alone. So the values may be in host memory,
or in a file that a step writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch

from gds import ALIGNMENT, Backend, Buffer, File
from offload.blocks.places import Place, pages
from offload.blocks.units import Member, Unit
from offload.device.boundary import HOST, Event, boundary_of
from offload.device.filed import FiledTensor
from offload.errors import DamagedError
from offload.model.tensor_image import bytes_of
from offload.stream.model_reader import ModelReader


class Source(Protocol):
    """Values of units. All methods may be called on any thread, by one thread at a time."""

    def take(self, unit: Unit) -> None:
        """Take the present values of a unit's parameters, which may then be dropped."""
        ...

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

        A `FiledTensor` if a step writes the parameter into the model file.
        """
        ...

    def stays_filed(self, member: Member) -> bool:
        """Return whether a restore leaves a parameter in the model file."""
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
        """Copy the present values of a unit's parameters."""
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

    def stays_filed(self, member: Member) -> bool:  # noqa: ARG002
        """Return whether a restore leaves a parameter in the model file: never."""
        return False


Reader: TypeAlias = Callable[[bool], tuple[ModelReader, Mapping[str, int]]]
"""Function that returns the reader of a model file, and the first byte of each parameter in the
file's data, by name: of the slot that holds the state, or, if the argument is False, of the newest
checkpoint."""


class SlotSource(HostSource):
    """Values in model files: of the slot that holds the state, and of the newest checkpoint.

    Steps write trained parameters into the slot that holds the state. Frozen ones are in the newest
    checkpoint. What no file has yet is in host memory: the values of a model that was never stepped
    or sealed, and edits, until a step or a seal has written them.

    Args:
        places: Place of each device.
        backend: Backend that allocates memory for reads.
        reader: Function that returns the reader of a model file.
        place: Function that returns the model file of the newest checkpoint, and the position of
            the first byte of a parameter.
        is_written: Function that returns whether steps write a parameter into the slot.
    """

    def __init__(
        self,
        places: Mapping[torch.device, Place],
        backend: Backend,
        reader: Reader,
        place: Callable[[Member], tuple[File, int]],
        is_written: Callable[[Member], bool],
    ) -> None:
        super().__init__(places)
        self._is_written = is_written
        self._backend = backend
        self._reader = reader
        self._place = place
        self._filed: dict[Member, FiledTensor] = {}
        self._lock = threading.Lock()
        self._stage: Buffer | None = None

    def take(self, unit: Unit) -> None:
        """Copy the present values of a unit's parameters, which may then be dropped."""
        for member in unit.members:
            if self.home(member) is not None:
                continue  # it was made outside of memory
            home = torch.empty(member.shape, dtype=member.dtype, device=HOST)
            home.copy_(self._places[unit.device].to_host(member.parameter))
            self._homes[member] = home

    def bring(self, members: Iterable[Member]) -> None:
        """Give parameters memory with their values, because another file will have them next."""
        for member in members:
            if member in self._filed and member not in self._homes:
                self._homes[member] = self._value(member)

    def in_file(self, members: Iterable[Member]) -> list[Member]:
        """Return the parameters in memory whose values the file surely has as well."""
        homes = [(m, self._homes[m]) for m in members if m in self._homes]
        return [member for member, home in homes if self._has(member, home)]

    def file(self, members: Iterable[Member]) -> None:
        """Record that a file has the values of some parameters, and free their memory."""
        for member in members:
            if member not in self._filed:
                self._filed[member] = FiledTensor(
                    member.name, member.shape, member.dtype, partial(self._place, member)
                )
            self._homes.pop(member, None)

    def home(self, member: Member) -> torch.Tensor | None:
        """Return the memory of a parameter, or what stands for it in the file."""
        return self._homes.get(member) if member in self._homes else self._filed.get(member)

    def stays_filed(self, member: Member) -> bool:  # noqa: ARG002
        """Return whether a restore leaves a parameter in the model file: always."""
        return True

    def write(self, member: Member, value: torch.Tensor) -> None:
        """Take a value that the program has edited; it stays in memory until a file has it."""
        if member in self._homes:
            super().write(member, value)
        elif not self._has(member, value.cpu()):
            self._homes[member] = value.detach().clone().contiguous()

    def read(self, unit: Unit, buffer: torch.Tensor, after: Event) -> Event:
        """Read a unit's parameters from files, and copy those that are in memory.

        Raises:
            DamagedError: A file is not as it was written.
            gds.StorageError: A file cannot be read.
        """
        with self._lock:
            place, last = self._places[unit.device], after
            # A step on another thread may free memory meanwhile.
            homes = {member: self._homes.get(member) for member in unit.members}
            values = self._from_file([m for m in unit.members if homes[m] is None])
            for member, home in homes.items():
                value = values[member] if home is None else bytes_of(home)
                into = buffer[member.place : member.place + member.nbytes]
                last = place.fill(value, into, [after])
            return last

    def _has(self, member: Member, value: torch.Tensor) -> bool:
        """Return whether the file surely has a value; if it cannot be read, memory keeps it."""
        try:
            return same_bits(value, self._value(member))
        except (OSError, DamagedError):
            return False

    def _value(self, member: Member) -> torch.Tensor:
        with self._lock:
            found = self._from_file([member])[member]
            return found.view(member.dtype).view(member.shape).clone()

    def _from_file(self, members: Sequence[Member]) -> dict[Member, torch.Tensor]:
        """Return the bytes of parameters in files; they stay until the next call."""
        if not members:
            return {}
        for place in self._places.values():
            place.wait_filled()  # what was read before may not have been copied yet
        # Each run takes less than two pages more than its members.
        most = sum(member.nbytes for member in members) + 2 * len(members) * ALIGNMENT
        stage = self._staged(most)
        memory = torch.frombuffer(stage.memoryview(), dtype=torch.uint8)
        found: dict[Member, torch.Tensor] = {}
        at = 0
        for is_written in (True, False):
            own = [member for member in members if self._is_written(member) is is_written]
            if not own:
                continue
            reader, starts = self._reader(is_written)
            parts = []
            for run in _runs(own, starts):
                start, nbytes = starts[run[0].name], sum(member.nbytes for member in run)
                at = -(-at // ALIGNMENT) * ALIGNMENT + reader.position(start) % ALIGNMENT
                parts.append((start, stage.slice(at, nbytes)))
                for member in run:
                    found[member] = memory[at : at + member.nbytes]
                    at += member.nbytes
            for transfer in reader.start(parts):
                transfer.result()
        return found

    def _staged(self, nbytes: int) -> Buffer:
        if self._stage is None or self._stage.nbytes < nbytes:
            self._locks = []  # before the memory is freed
            self._stage = self._backend.allocate(-(-nbytes // ALIGNMENT) * ALIGNMENT)
            memory = torch.frombuffer(self._stage.memoryview(), dtype=torch.uint8)
            devices = [device for device in self._places if device.type != HOST.type]
            self._locks = [boundary_of(device).lock_pages(memory) for device in devices]
        return self._stage


def _runs(members: Sequence[Member], starts: Mapping[str, int]) -> list[list[Member]]:
    """Return members in the order of a file, those together that lie end to end."""
    runs: list[list[Member]] = []
    for member in sorted(members, key=lambda member: starts[member.name]):
        last = runs[-1][-1] if runs else None
        if last is not None and starts[last.name] + last.nbytes == starts[member.name]:
            runs[-1].append(member)
        else:
            runs.append([member])
    return runs


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype, shape and device have the same bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.itemsize)
    return (
        torch.equal(one, other) if bits is None else torch.equal(one.view(bits), other.view(bits))
    )
