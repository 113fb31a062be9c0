"""Streaming: which units are in buffers, and how their parameters come and go.

- A unit that is loaded has a buffer, of which each parameter's ``data`` is a view. A unit that is
  dropped has none: ``data`` is one NaN that is expanded to the shape, and the parameter is watched
  (see `offload.model.watch`). So any use of it through torch loads its unit first.
- A parameter is also watched while its unit is loaded, except within calls of its block. A use
  from outside marks it: the unit then stays loaded as long as something outside refers to its
  buffer, so that an alias stays an alias, and the value is brought home, so that edits count.
- A graph may have saved the parameter itself, which would see the NaN. Within calls of its block,
  hooks prevent that; after any other use, the unit stays loaded while a graph has the parameter.
- Loading is exact, whoever asks. Reading ahead is a guess (what followed the same use the last
  time), and can only cost time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import increment_version

from offload.ambient import neutral
from offload.blocks.buffers import Buffers
from offload.blocks.order import Use, UseOrder
from offload.blocks.places import Place
from offload.blocks.pool import num_references
from offload.blocks.sources import HostSource, Source
from offload.blocks.units import Member, Unit
from offload.device.boundary import HOST
from offload.device.filed import FiledTensor
from offload.errors import MismatchError, OffloadError, UnsupportedParameterError
from offload.model.homes import Keeper
from offload.model.watch import Watch
from offload.stream.meter import Meter

NUM_BUFFERS = 3
"""Buffers on each device: of the block that runs, of the one that is read ahead, and of the one
whose work a device has not finished."""

_num_owners: Any = torch.Tensor._use_count  # type: ignore[attr-defined]
"""Number of references to a tensor in C++: its own, and those of graphs."""


class StreamedBlocks(Keeper):
    """Units whose parameters are in few buffers, each only while it is used.

    Args:
        units: Units; see `find_units`.
        meter: Counters of the optimizer.
        source: Function that returns where the values are, given the place of each device.
        num_buffers: Number of buffers on each device, at least 2.
    """

    def __init__(
        self,
        units: list[Unit],
        meter: Meter,
        source: Callable[[Mapping[torch.device, Place]], Source] = HostSource,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        self.units = units
        self._buffers = Buffers(units, meter, source, num_buffers)
        self._source = self._buffers.source
        self._taken: list[Unit] = []
        """Units whose values are at home."""
        self._of = {id(m.parameter): (unit, m) for unit in units for m in unit.members}
        self._loaded: dict[Unit, None] = {}
        """Units with a buffer, the least recently used first."""
        self._owner: dict[int, Unit] = {}
        """Unit of each buffer in use, by the storage."""
        self._order = UseOrder(units)
        self._in_use: dict[int, set[Unit]] = {}
        """Units of the parameters that one function was given, by the thread that calls it."""
        self.watch = Watch(self._used, "streamed", self._was_used, knows_layout=False)
        self._alone: int = _num_owners(torch.empty(1, device=HOST))
        self.lock = threading.RLock()

    def begin(self) -> None:
        """Take the parameters' values, and release the parameters' own memory, unit by unit."""
        with neutral():
            self.register()
            for unit in self.units:
                self._source.take(unit)
                self._taken.append(unit)
                # A graph that was recorded before would see what comes now.
                increment_version([member.parameter for member in unit.members])
                self._empty(unit)

    def end(self) -> None:
        """Give all parameters their values back, whole, and stop watching them.

        In host memory, nothing is copied: a parameter's memory is its home from then on.

        Raises:
            DeviceMemoryError: The device has no memory for all parameters. They stay streamed, and
                so they can be used.
        """
        with self.lock, neutral():
            if self.is_ended:
                return
            for unit in self.units:
                self._buffers.abandon(unit)
            self.settle(force=True)
            memory = {
                unit: self._buffers.places[unit.device].empty(unit.nbytes)
                for unit in self._taken
                if unit.device.type != HOST.type and not self._is_filed(unit)
            }
            for unit in self._taken:
                if unit in memory:
                    self._buffers.read_again(unit, memory[unit])
                for member in unit.members:
                    value = self._source.home(member)
                    if isinstance(value, FiledTensor):
                        self._leave_filed(unit, member)
                        continue
                    if unit in memory:
                        value = member.view(memory[unit])
                    self.watch.release([member.parameter])
                    if value is not None and (
                        unit.buffer is None or member.is_view_of(unit.buffer)
                    ):
                        member.parameter.data = value
            self.unregister()
            self._loaded.clear()
            self._owner.clear()
            self._buffers.close()

    def _is_filed(self, unit: Unit) -> bool:
        return all(isinstance(self._source.home(m), FiledTensor) for m in unit.members)

    def _leave_filed(self, unit: Unit, member: Member) -> None:
        """Let every later use of a parameter say where its values are."""
        parameter: Any = member.parameter
        stub = self._buffers.places[unit.device].nan
        parameter.data = stub.view(member.dtype)[0].expand(member.shape)
        self.watch.add([parameter])
        parameter._offload_keeper = self  # which announces the uses

    # Uses.

    def enter(self, unit: Unit) -> None:
        """Load a unit for a call of its block, and read ahead. Its parameters are not watched."""
        with self.lock:
            self._was_used()  # if a function before has failed
            if not unit.num_calls:
                self.load(unit)
                is_backward = torch._C._current_graph_task_id() != -1
                self.read_ahead((unit, is_backward, torch.is_grad_enabled()))
                self.watch.release(m.parameter for m in unit.members)
            unit.num_calls += 1

    def leave(self, unit: Unit) -> None:
        """Record the end of a call."""
        with self.lock:
            unit.num_calls -= 1
            if not unit.num_calls and not self.is_ended:
                self.watch.add(m.parameter for m in unit.members)

    @property
    def is_ended(self) -> bool:
        """Whether parameters are whole again."""
        return not self._of

    def load(self, unit: Unit) -> None:
        """Give a unit a buffer with its values, and let the calling thread's next work wait."""
        with self.lock:
            if unit.buffer is None:
                with _below_transforms(), neutral():
                    self._fill(unit)
            else:  # now the most recently used one
                del self._loaded[unit]
                self._loaded[unit] = None
            self._buffers.places[unit.device].follow(unit.ready)

    def saved_in(self, storage: int) -> Unit | None:
        """Return the unit whose buffer has a storage; None if no unit's buffer has it."""
        return self._owner.get(storage)

    def saved_buffer(self, unit: Unit) -> torch.Tensor:
        """Load a unit for its backward, and return its buffer."""
        with self.lock:
            self.load(unit)
            self.read_ahead((unit, True, False))
            if unit.buffer is None:
                raise RuntimeError(f"{unit.name} was dropped while it was used")
            return unit.buffer

    def _used(self, parameter: torch.Tensor | None) -> bool:
        """Load a parameter that is used outside of its block: by a loss, state_dict(), an edit.

        What records a graph within a backward is a block that is run again, without its hooks.
        """
        if self.is_ended:
            raise OffloadError(
                "the values of this parameter are in the directory of an optimizer that is closed: "
                "make model and optimizer anew and call restore(), or use offload.load_parameters()"
            )
        found = [self._of[id(parameter)]] if parameter is not None else list(self._of.values())
        is_recorded = torch.is_grad_enabled()
        is_again = is_recorded and torch._C._current_graph_task_id() != -1
        with self.lock:
            for unit, member in found:
                self.load(unit)
                self._in_use.setdefault(threading.get_ident(), set()).add(unit)
                member.is_touched |= not is_again
                member.is_saved |= is_recorded
                if is_again:
                    self.read_ahead((unit, True, True))
        return True

    def _was_used(self, *_: object) -> None:
        """Record that the function has returned, after which its parameters are watched again."""
        self._in_use.pop(threading.get_ident(), None)

    def note_saved(self, unit: Unit) -> None:
        """Record that a graph may save the unit's parameters themselves."""
        for member in unit.members:
            member.is_saved = True

    # Reading ahead.

    def read_ahead(self, use: Use) -> None:
        """Record a use, and begin to read what is probably used next."""
        if self._order.note(use):
            self._begin_reading(self._order.guess())

    def _begin_reading(self, unit: Unit | None) -> None:
        if unit is not None and unit.buffer is None and unit.coming is None:
            with _below_transforms(), neutral():
                self._make_room(unit)
                self._buffers.begin(unit)

    # Coming and going.

    def _fill(self, unit: Unit) -> None:
        if unit.coming is None:
            self._make_room(unit)
        buffer, ready = self._buffers.read(unit)
        for member in unit.members:
            if member.present_version != member.version:
                self._buffers.put(unit, buffer)
                raise RuntimeError(
                    f"{member.name} was changed in place through a tensor that was taken from it "
                    "while its block ran; the block has been dropped since, so the change is lost. "
                    "Edit the parameter itself"
                )
        for member in unit.members:
            member.parameter.data = member.view(buffer)
        unit.buffer, unit.ready = buffer, ready
        self._owner[buffer.untyped_storage()._cdata] = unit
        unit.num_references = num_references(buffer)
        self._loaded[unit] = None

    def _make_room(self, wanted: Unit) -> None:
        """Drop the units used least recently, so that one more has a buffer on its device."""
        device = wanted.device
        coming = sum(u.coming is not None and u.device == device for u in self.units)
        loaded = [unit for unit in self._loaded if unit.device == device]
        in_use = {wanted}.union(*self._in_use.values())
        num_dropped = 0
        for unit in loaded:
            if self._buffers.have_room(device, len(loaded) - num_dropped + coming):
                break
            if unit.num_calls or unit in in_use or self._order.is_last(unit):
                continue
            if not self._is_held(unit):
                self._drop(unit)
                num_dropped += 1

    def _is_held(self, unit: Unit) -> bool:
        """Return whether an alias or a graph has a parameter, so that the unit must stay."""
        if unit.buffer is None:
            return False
        is_touched = any(member.is_touched for member in unit.members)
        num_replaced = sum(not member.is_view_of(unit.buffer) for member in unit.members)
        num_found = num_references(unit.buffer) + num_replaced
        return (is_touched and num_found > unit.num_references) or any(
            member.is_saved and _num_owners(member.parameter) > self._alone
            for member in unit.members
        )

    def _drop(self, unit: Unit) -> None:
        """Take a unit's buffer away. What the program may have edited is brought home."""
        self._settle(unit)
        self._release(unit)

    def _release(self, unit: Unit) -> None:
        buffer = unit.buffer
        del self._loaded[unit]
        if buffer is not None:
            self._owner.pop(buffer.untyped_storage()._cdata, None)
            unit.buffer = unit.ready = None
            self._empty(unit)
            self._buffers.put(unit, buffer)

    def _empty(self, unit: Unit) -> None:
        """Let a unit's parameters have no memory but one NaN, and watch them."""
        stub = self._buffers.places[unit.device].nan
        for member in unit.members:
            parameter = member.parameter
            member.is_touched = member.is_saved = False
            member.version = parameter._version
            parameter.data = stub.view(member.dtype)[0].expand(member.shape)
        stuck = self.watch.add(member.parameter for member in unit.members)
        if stuck:
            name = self._of[id(stuck[0])][1].name
            raise UnsupportedParameterError(
                f"parameter {name!r} cannot be streamed: the class of a "
                f"{type(stuck[0]).__name__} is fixed. Leave out parameters="
            )

    # Homes.

    def home_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the memory of a parameter that a step changes."""
        found = self._of.get(id(parameter))
        return None if found is None else self._source.home(found[1])

    def stays_filed(self, parameter: torch.Tensor) -> bool:
        """Return whether a restore leaves a parameter in the model file of the slot."""
        found = self._of.get(id(parameter))
        return found is not None and self._source.stays_filed(found[1])

    def unregister(self) -> None:
        """Make every parameter its own memory again."""
        super().unregister()
        self._of.clear()

    def settle(self, *, force: bool = False) -> None:
        """Bring the program's edits home, and wait until no home is read any more.

        Args:
            force: Whether parameters that were converted are left alone instead of refused.

        Raises:
            MismatchError: A parameter was converted or moved.
        """
        with self.lock, neutral():
            for unit in list(self._loaded):
                self._settle(unit, force=force)
            self._buffers.wait(self.units)

    def _settle(self, unit: Unit, *, force: bool = False) -> None:
        for member in unit.members:
            is_ours = member.is_view_of(unit.buffer)
            if not is_ours and not member.is_of_its_kind:
                if force:
                    continue
                now = member.parameter
                raise MismatchError(
                    f"parameter {member.name!r} is a {now.dtype} tensor of shape "
                    f"{list(now.shape)} on {now.device} now: a model whose parameters are "
                    "streamed cannot be converted or moved. Do it before the optimizer is made"
                )
            is_edited = member.present_version != member.version
            if not is_ours or member.is_touched or is_edited:
                member.version = member.present_version
                value = self._buffers.places[unit.device].to_host(member.parameter)
                if value.stride() != member.strides:
                    value = torch.empty_strided(
                        member.shape, member.strides, dtype=member.dtype, device=HOST
                    ).copy_(value)
                self._source.write(member, value)

    def refresh(self, changes: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        """Drop units whose homes have changed. Aliases get the new values.

        Args:
            changes: Function that returns whether the home of a parameter may have changed.
        """
        with self.lock, neutral():
            in_use = set[Unit]().union(*self._in_use.values())  # by other threads
            for unit in self.units:
                changed = [m for m in unit.members if changes(m.parameter)]
                if not changed:
                    continue
                self._buffers.abandon(unit)
                if unit.buffer is not None and (self._is_held(unit) or unit in in_use):
                    unit.ready = self._buffers.read_again(unit, unit.buffer)
                    for member in unit.members:
                        if not member.is_view_of(unit.buffer):  # ``p.data = other`` before
                            member.parameter.data = member.view(unit.buffer)
                elif unit.buffer is not None:
                    self._release(unit)
                increment_version([member.parameter for member in changed])
                for member in changed:
                    member.version += 1
            self._begin_reading(self._order.guess())

    def abandon(self) -> None:
        """Wait for what is read ahead, and forget it, because a step is about to write the file."""
        with self.lock, neutral():
            for unit in self.units:
                self._buffers.abandon(unit)

    def drop_all(self) -> None:
        """Drop all units, also those that the program has aliases of, after bringing edits home."""
        with self.lock, neutral():
            self.settle()
            for unit in self.units:
                self._buffers.abandon(unit)
            for unit in list(self._loaded):
                self._release(unit)


@contextmanager
def _below_transforms() -> Iterator[None]:
    """Run the block as outside of transforms of ``torch.func``, which wrap what is made in them."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield
