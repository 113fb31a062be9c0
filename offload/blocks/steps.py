"""Strategy of steps that update the homes of streamed parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch.utils.hooks import RemovableHandle

from gds.errors import DeviceMemoryError
from offload.blocks.hooks import put_hooks
from offload.blocks.places import Place
from offload.blocks.sources import HostSource, SlotSource
from offload.blocks.streaming import StreamedBlocks
from offload.blocks.units import Member, Unit, find_units
from offload.engine.stepping import StepStrategy
from offload.engine.training_state import Groups, TrainingState
from offload.errors import DamagedError, NotRestoredError
from offload.format.manifest import Manifest
from offload.model.outside import is_outside
from offload.model.parameters import is_stepped
from offload.store.slots.slot import Slot
from offload.store.state_store import StateSource, try_to_quarantine
from offload.stream.model_reader import ModelReader


class StreamedSteps(StepStrategy):
    """The strategy of steps of a model whose blocks are streamed.

    Whatever the engine does with the state, it finds the values of all parameters in their homes.

    Args:
        state: State that is trained.
        model: Model with the blocks.
        patterns: Names of the blocks; see `find_units`.
    """

    def __init__(
        self, state: TrainingState, model: torch.nn.Module, patterns: Sequence[str]
    ) -> None:
        super().__init__(state)
        self._blocks = self._streamed(find_units(model, patterns))
        self._handles: list[RemovableHandle] = []

    def _streamed(self, units: list[Unit]) -> StreamedBlocks:
        return StreamedBlocks(units, self._state.meter)

    def attach(self, groups: Callable[[], Groups | None]) -> None:  # noqa: ARG002
        """Move the parameters of the blocks to their homes, and put hooks on the blocks."""
        try:
            self._blocks.begin()
            self._handles = put_hooks(self._blocks)
        except BaseException:
            self._blocks.end()
            raise

    def step(self, groups: Groups) -> None:
        """Update the homes of all parameters that have a gradient, and drop all blocks."""
        self._blocks.settle()
        try:
            super().step(groups)
        finally:
            self._blocks.refresh(is_stepped)

    def settle(self, call: str) -> None:  # noqa: ARG002
        """Bring the program's edits home."""
        self._blocks.settle()

    def give_up(self) -> None:
        """Drop all blocks, because a restore replaces their values."""
        self._blocks.drop_all()

    def restored(self, *, found: bool = True) -> None:  # noqa: ARG002
        """Let blocks be loaded again."""
        self._blocks.refresh()

    def end(self) -> None:
        """Give the model its parameters back, whole."""
        try:
            self._blocks.end()
        except DeviceMemoryError as error:
            warnings.warn(
                f"the parameters of blocks stay in host memory, and are streamed still: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class FiledSteps(StreamedSteps):
    """The strategy of steps that write the parameters of blocks into the slot.

    Blocks are read from the slot that holds the state. A step reads that slot, and writes another
    one, or the same one if it is no checkpoint; so nothing may be read ahead while it runs. The
    blocks of a restored slot are compared with their digests when they are first read.
    """

    _source: SlotSource
    _slot: StateSource | None = None
    _reader: ModelReader | None = None
    _restored: Manifest | None = None
    _lacks_values = False
    """Whether there are parameters that have no values before a restore."""

    def __init__(
        self,
        state: TrainingState,
        model: torch.nn.Module,
        patterns: Sequence[str],
        groups: Groups,
    ) -> None:
        self._known: tuple[object, set[int]] = (None, set())
        self._note_given(groups)
        super().__init__(state, model, patterns)
        state.memory.reads_model = True
        outside = {id(p) for p in model.parameters() if is_outside(p)}
        members = self._members()
        for member in members:
            if id(member.parameter) in outside and self._is_written(member):
                self._source.file([member])
            elif id(member.parameter) in outside:
                self._source.hold(member)  # steps do not write what is frozen
        in_blocks = {id(member.parameter) for member in members}
        for parameter in model.parameters():
            if id(parameter) in outside - in_blocks:  # these are always in memory
                parameter.data = torch.full_like(parameter, torch.nan)
        self._lacks_values = bool(outside)
        self._blocks.register()

    def _streamed(self, units: list[Unit]) -> StreamedBlocks:
        backend = self._state.drives.backends[0]

        def make(places: Mapping[torch.device, Place]) -> HostSource:
            """Make the source of the blocks' values."""
            self._source = SlotSource(places, backend, self._present, self._is_written)
            return self._source

        return StreamedBlocks(units, self._state.meter, make)

    def step(self, groups: Groups) -> None:
        """Update all parameters that have a gradient, and drop all blocks."""
        self._require_values()
        self._blocks.settle()
        self._blocks.abandon()
        self._check_restored()
        num_passes = self._state.meter.steps
        try:
            StepStrategy.step(self, groups)
            if self._state.meter.steps > num_passes:  # without gradients, nothing is written
                self._source.file(filter(self._is_known, self._members()))
        finally:
            self._blocks.refresh(is_stepped)

    def attach(self, groups: Callable[[], Groups | None]) -> None:
        """Move the parameters of the blocks to their homes, and put hooks on the blocks."""
        super().attach(groups)
        self._groups = groups

    def added(self, groups: Groups) -> None:
        """Note parameters that steps write from now on."""
        self._note_given(groups)

    def give_up(self) -> None:
        """Drop all blocks. What steps may write no more gets memory, for a restore to fill."""
        super().give_up()
        self._note_given(self._groups() or ())
        for member in self._members():
            if not self._is_to_be_stepped(member):
                self._source.keep(member)

    def restored(self, *, found: bool = True) -> None:
        """Let blocks be loaded again, from the restored slot if there is one."""
        if found:
            sealed = self._state.slots.sealed
            self._close()
            self._restored = None if sealed is None else sealed.manifest
            self._source.file(filter(self._is_written, self._members()))
            self._lacks_values = False
        if not self._lacks_values:
            super().restored(found=found)

    def settle(self, call: str) -> None:
        """Bring the program's edits home, and check what is about to be copied or given away."""
        self._require_values()
        super().settle(call)
        if call in ("checkpoint()", "materialized()"):
            self._check_restored()

    def _check_restored(self) -> None:
        """Compare blocks of a restored slot with their digests that nothing has read so far."""
        self._state.lifecycle.require_usable()
        if self._restored is not None:
            self._present()
        if self._reader is not None:
            self._reader.check_all()

    def _require_values(self) -> None:
        if self._lacks_values:
            raise NotRestoredError(
                "this model was made in outside_memory(), so its parameters have no values yet: "
                "call restore() first; offload import fills a store with weights"
            )

    def end(self) -> None:
        """Give the model those parameters back that are in memory."""
        super().end()
        self._close()

    def _members(self) -> list[Member]:
        return [member for unit in self._blocks.units for member in unit.members]

    def _note_given(self, groups: Groups) -> None:
        self._given = {id(p) for group in groups for p in group["params"]}

    def _is_known(self, member: Member) -> bool:
        """Return whether the layout of the state has a parameter, so that every pass writes it."""
        trainables = self._state.table.trainables
        if self._known[0] is not trainables:
            self._known = trainables, {id(t.parameter) for t in trainables}
        return id(member.parameter) in self._known[1]

    def _is_to_be_stepped(self, member: Member) -> bool:
        return id(member.parameter) in self._given and is_stepped(member.parameter)

    def _is_written(self, member: Member) -> bool:
        """Return whether steps write a parameter, from the next one on."""
        return self._is_known(member) or self._is_to_be_stepped(member)

    def _present(self) -> tuple[ModelReader, Mapping[str, int]]:
        """Return the reader of the slot that holds the state now, and where parameters are."""
        self._require_values()
        slot = self._state.slots.present
        if slot is None:  # a restore has failed half way
            self._state.lifecycle.require_usable()
        if self._reader is None or slot is not self._slot:
            restored = self._restored
            self._close()
            self._slot, present = slot, cast(Slot, slot)
            self._reader = ModelReader(
                present, self._state.ring(), restored=restored, damaged=self._damaged
            )
        entries = cast(Slot, slot).layout.model_header.entries
        return self._reader, {name: entry.start for name, entry in entries.items()}

    def _damaged(self, error: DamagedError) -> str:
        """Quarantine the restored checkpoint, as a step does; return what the user can do."""
        state, sealed, refusal = self._state, self._state.slots.sealed, ""
        if sealed is not None and not state.lifecycle.broken:
            state.lifecycle.broken = f"{sealed.path} is damaged"
            refusal = try_to_quarantine(state.store, sealed, error)
        return refusal or state.lifecycle.remedy()

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._slot = self._restored = None
