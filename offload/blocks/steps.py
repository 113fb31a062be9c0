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
from offload.errors import NotRestoredError
from offload.format.manifest import Manifest
from offload.model.outside import is_outside
from offload.model.parameters import is_stepped
from offload.store.slots.slot import Slot
from offload.store.state_store import StateSource
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

    def restored(self) -> None:
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
        self, state: TrainingState, model: torch.nn.Module, patterns: Sequence[str]
    ) -> None:
        super().__init__(state, model, patterns)
        state.memory.reads_model = True
        outside = {id(p) for p in model.parameters() if is_outside(p)}
        members = [member for unit in self._blocks.units for member in unit.members]
        for member in members:
            if id(member.parameter) in outside and is_stepped(member.parameter):
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
            self._source = SlotSource(places, backend, self._present)
            return self._source

        return StreamedBlocks(units, self._state.meter, make)

    def step(self, groups: Groups) -> None:
        """Update all parameters that have a gradient, and drop all blocks."""
        self._require_values()
        self._blocks.settle()
        self._blocks.abandon()
        if self._reader is not None:
            self._reader.check_all()
        try:
            StepStrategy.step(self, groups)
            self._source.file(self._trained())
        finally:
            self._blocks.refresh(is_stepped)

    def restored(self) -> None:
        """Let blocks be loaded again, from the restored slot."""
        sealed = self._state.slots.sealed
        self._close()
        self._restored = None if sealed is None else sealed.manifest
        self._source.file(self._trained())
        self._lacks_values = False
        super().restored()

    def settle(self, call: str) -> None:
        """Bring the program's edits home."""
        self._require_values()
        super().settle(call)

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

    def _trained(self) -> list[Member]:
        known = {id(t.parameter) for t in self._state.table.trainables}
        return [m for unit in self._blocks.units for m in unit.members if id(m.parameter) in known]

    def _present(self) -> tuple[ModelReader, Mapping[str, int]]:
        """Return the reader of the slot that holds the state now, and where parameters are."""
        self._require_values()
        slot = self._state.slots.present
        if self._reader is None or slot is not self._slot:
            restored = self._restored
            self._close()
            self._slot, present = slot, cast(Slot, slot)
            remedy = self._state.lifecycle.remedy
            self._reader = ModelReader(
                present, self._state.ring(), restored=restored, remedy=remedy
            )
        entries = cast(Slot, slot).layout.model_header.entries
        return self._reader, {name: entry.start for name, entry in entries.items()}

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._slot = self._restored = None
