"""Strategy of steps that update the homes of streamed parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch.utils.hooks import RemovableHandle

from gds import File
from gds.errors import DeviceMemoryError
from offload.blocks.hooks import put_hooks
from offload.blocks.places import Place
from offload.blocks.sources import HostSource, SlotSource
from offload.blocks.streaming import StreamedBlocks
from offload.blocks.units import Member, Unit, find_units
from offload.engine.seal import Seal
from offload.engine.stepping import StepStrategy
from offload.engine.training_state import Groups, TrainingState
from offload.errors import DamagedError, NotRestoredError, UnsupportedParameterError
from offload.format.manifest import Manifest
from offload.model.outside import is_outside
from offload.model.parameters import is_stepped
from offload.store.slots.slot import Slot
from offload.store.state_store import try_to_quarantine
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

    Trained parameters are read from the slot that holds the state. A step reads that slot, and
    writes another one, or the same one if it is no checkpoint; so nothing may be read ahead while
    it runs. Frozen parameters are read from the newest checkpoint, which no step writes: the next
    seal copies them. The blocks of a restored slot are compared with their digests when they are
    first read.
    """

    _source: SlotSource
    _restored: tuple[Slot, Manifest] | None = None
    """The slot that was restored last, until the state has moved on."""
    _newest: Slot | None = None
    """The slot of the newest checkpoint; None if parameters are in no checkpoint yet."""
    _seal: Seal | None = None
    """The newest seal, until it is known to have ended well."""
    _lacks_values = False
    """Whether there are parameters that have no values before a restore."""

    def __init__(
        self,
        state: TrainingState,
        model: torch.nn.Module,
        patterns: Sequence[str],
        groups: Groups,
    ) -> None:
        self._readers: dict[Slot, ModelReader] = {}
        self._known: tuple[object, set[int]] = (None, set())
        self._groups: Callable[[], Groups | None] = lambda: groups
        super().__init__(state, model, patterns)
        state.memory.reads_model = True
        outside = {id(p) for p in model.parameters() if is_outside(p)}
        self._source.file(m for m in self._members() if id(m.parameter) in outside)
        in_blocks = {id(member.parameter) for member in self._members()}
        for parameter in model.parameters():
            if id(parameter) in outside - in_blocks:  # these are always in memory
                parameter.data = torch.full_like(parameter, torch.nan)
        self._lacks_values = bool(outside)
        self._blocks.register()

    def _streamed(self, units: list[Unit]) -> StreamedBlocks:
        backend = self._state.drives.backends[0]

        def make(places: Mapping[torch.device, Place]) -> HostSource:
            """Make the source of the blocks' values."""
            self._source = SlotSource(places, backend, self._opened, self._place_of, self._is_known)
            return self._source

        return StreamedBlocks(units, self._state.meter, make)

    def step(self, groups: Groups) -> None:
        """Update all parameters that have a gradient, and drop all blocks."""
        self._require_values()
        self._blocks.settle()
        self._blocks.abandon()
        self._check_restored()
        self._note_seal()
        self._bring_joining()
        present, num_passes = self._state.slots.present, self._state.meter.steps
        try:
            StepStrategy.step(self, groups)
            if self._state.meter.steps > num_passes:  # without gradients, nothing is written
                self._source.file(filter(self._is_known, self._members()))
        finally:
            if self._state.slots.present is not present:
                self._close()
            self._blocks.refresh(is_stepped)

    def attach(self, groups: Callable[[], Groups | None]) -> None:
        """Move the parameters of the blocks to their homes, and put hooks on the blocks."""
        super().attach(groups)
        self._groups = groups

    def keep_parameters(self) -> None:
        """Bring all parameters to memory, because the slot with their values is left."""
        self._require_values()
        self._source.bring(self._members())

    def kept_parameters(self) -> None:
        """Free the memory of parameters that are the same in the checkpoint."""
        self._begin_with_present()
        self._source.file(self._source.in_file(self._members()))

    def _begin_with_present(self) -> None:
        slots = self._state.slots
        self._close()
        self._newest, self._seal = cast(Slot, slots.present), None
        if slots.sealed is not None:
            self._restored = self._newest, slots.sealed.manifest

    def restored(self, *, found: bool = True) -> None:
        """Let blocks be loaded again, from the restored slot if there is one."""
        if found:
            self._begin_with_present()
            self._source.file(self._members())
            self._lacks_values = False
        if not self._lacks_values:
            super().restored(found=found)

    def settle(self, call: str) -> None:
        """Bring the program's edits home, and check what is about to be copied or given away."""
        self._require_values()
        super().settle(call)
        self._note_seal()
        self._bring_joining()
        if call in ("checkpoint()", "materialized()"):
            self._check_restored()

    def _check_restored(self) -> None:
        """Compare blocks of a restored slot with their digests that nothing has read so far."""
        self._state.lifecycle.require_usable()
        if self._restored is not None:
            self._reader(self._restored[0]).check_all()

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

    def _is_known(self, member: Member) -> bool:
        """Return whether the layout of the state has a parameter, so that every pass writes it."""
        trainables = self._state.table.trainables
        if self._known[0] is not trainables:
            self._known = trainables, {id(t.parameter) for t in trainables}
        return id(member.parameter) in self._known[1]

    def _bring_joining(self) -> None:
        """Bring parameters to memory that the layout is about to get, unless its slot has them."""
        if self._state.slots.present is not self._newest_slot():
            given = {id(p) for group in self._groups() or () for p in group["params"]}
            self._source.bring(
                member
                for member in self._members()
                if id(member.parameter) in given
                and is_stepped(member.parameter)
                and not self._is_known(member)
            )

    def _note_seal(self) -> None:
        """Free frozen parameters that a seal has written, and have not been edited since."""
        seal, self._seal = self._seal, None
        for each in (seal, self._state.seal):
            if isinstance(each, Seal) and each.handle.done():
                self._note_sealed(each)
            elif isinstance(each, Seal):
                self._seal = each

    def _note_sealed(self, seal: Seal) -> None:
        """Free what a seal that has ended has written, if it has made a checkpoint."""
        slot = cast(Slot, seal.slot)
        if self._state.store.checkpoint_of(slot) is not None:
            self._newest = slot
            versions = {tensor.data_ptr(): version for tensor, version in seal.copied}
            own = [member for member in self._members() if not self._is_known(member)]
            homes = [(member, self._source.home(member)) for member in own]
            self._source.file(
                member
                for member, home in homes
                if home is not None and versions.get(home.data_ptr(), -1) == home._version
            )

    def _newest_slot(self) -> Slot | None:
        """Return the slot of the newest checkpoint, which has all frozen parameters."""
        newest, store = self._state.store.newest, self._state.store
        known = self._newest
        if known is None or newest is None:
            return known
        if newest.manifest.generation > known.context.generation:
            self._newest = cast(Slot, store.slot_of(newest))
        return self._newest

    def _opened(self, is_written: bool) -> tuple[ModelReader, Mapping[str, int]]:
        """Return a reader of the file with parameters, and where they are; see `SlotSource`."""
        self._require_values()
        slot = self._state.slots.present if is_written else self._newest_slot()
        if slot is None:  # a restore has failed half way
            self._state.lifecycle.require_usable()
        found = cast(Slot, slot)
        entries = found.layout.model_header.entries
        return self._reader(found), {name: entry.start for name, entry in entries.items()}

    def _place_of(self, member: Member) -> tuple[File, int]:
        """Return the file that has a frozen parameter, and the position of its first byte."""
        self._require_values()
        slot = self._newest_slot()
        if slot is None or self._is_known(member):  # only another optimizer asks for these
            raise UnsupportedParameterError(
                f"parameter {member.name!r} is in {self._state.store.directory}, so no other "
                "optimizer can make checkpoints of it: construct that one without model="
            )
        header = slot.layout.model_header
        return slot.model, header.data_start + header.entries[member.name].start

    def _reader(self, slot: Slot) -> ModelReader:
        reader = self._readers.get(slot)
        if reader is None:
            restored = self._restored
            reader = self._readers[slot] = ModelReader(
                slot,
                self._state.ring(),
                restored=restored[1] if restored is not None and restored[0] is slot else None,
                damaged=self._damaged,
            )
        return reader

    def _damaged(self, error: DamagedError) -> str:
        """Quarantine the restored checkpoint, as a step does; return what the user can do."""
        state, sealed, refusal = self._state, self._state.slots.sealed, ""
        if sealed is not None and not state.lifecycle.broken:
            state.lifecycle.broken = f"{sealed.path} is damaged"
            refusal = try_to_quarantine(state.store, sealed, error)
        return refusal or state.lifecycle.remedy()

    def _close(self) -> None:
        """Forget what is known of files, because the state has moved to another slot."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._restored = None
