"""Engine of an optimizer: steps, checkpoints, restores and closing, in the right order.

An engine has a `TrainingState`, which moves the state, and a `StepStrategy`, which decides when
steps are taken. This module only coordinates the two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

from offload.ambient import in_neutral
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.listing import CheckpointInfo, info_of
from offload.checkpoint.reading import directories_of_parts
from offload.engine.matching import has_same_model
from offload.engine.reference import Position, find_sealed
from offload.engine.resume import restore, resume
from offload.engine.seal_handle import SealHandle
from offload.engine.state_dict import load_reference, load_tensors, materialize
from offload.engine.stats import Stats, collect_stats
from offload.engine.stepping import Metrics, StepStrategy, move_state
from offload.engine.training_state import Groups, TrainingState
from offload.errors import BrokenOptimizerError
from offload.exchange.torch_dicts import MaterializedState
from offload.format.layout import Layout
from offload.format.manifest import encode_group
from offload.format.train_state import EncodedState, encode
from offload.format.unreadable import as_unreadable
from offload.gradients import GradientMover
from offload.model.homes import written
from offload.retention.pins import FoundPins
from offload.store.opening import StoredCheckpoint
from offload.store.state_store import FrozenSpace, StateSlot, StateStore
from offload.store.store_errors import NOTHING_CHANGED
from offload.units import size

T = TypeVar("T")


class Engine:
    """Carries out an optimizer's calls on its training state."""

    has_warned = False
    """Whether the warning about a reference to unsealed state has been given."""

    def __init__(self, state: TrainingState, strategy: StepStrategy) -> None:
        self.state = state
        self.strategy = strategy
        self.store: StateStore = state.store
        self.frozen_space = FrozenSpace(state.store)

    @property
    def num_steps(self) -> int:
        """Optimizer steps that the present state has seen; one that still runs counts."""
        return self.state.num_steps

    @property
    def position(self) -> Position:
        """Position of the present state."""
        state, slot = self.state, self.state.slots.present
        if state.arriving is not None:
            generation = state.arriving.share.manifest.generation
            return Position(
                self.store.store_id, state.num_steps, generation, state.run_id, sealed=True
            )
        sealing = state.seal is not None and state.seal.slot is slot and not state.slots.is_working
        return Position(
            self.store.store_id,
            state.num_steps,
            slot.context.generation if slot is not None else 0,
            state.run_id,
            sealed=slot is not None and (sealing or state.slots.sealed is not None),
        )

    def open_store(self) -> StateStore:
        """Return the store, which this process has open."""
        self.state.lifecycle.require_alive()
        return self.store

    @in_neutral
    def require_space(self, groups: Groups) -> None:
        """Check names, parameters, rules and free space; changes no file.

        Raises errors that the first step would otherwise raise. Warns about pins of checkpoints
        that do not exist.
        """
        failed: list[Exception] = []
        with as_unreadable(NOTHING_CHANGED):
            try:
                layout = self.lay_out(groups)
                self.store.keeping.warn([path for path, _ in self.store.refused])
            except Exception as error:
                if self.state.ranks.size == 1:
                    raise
                failed.append(error)

            def require() -> None:
                """Check the space, unless this rank has an error to tell."""
                if failed:
                    raise failed[0]
                self.store.require_space(layout, len(groups))

            self.state.ranks.together("the constructor", require)

    def move_gradients(self, groups: Groups) -> None:
        """Begin to move gradients out of their device, if the options say so."""
        kind, drives = self.state.options.gradients, self.state.drives
        if kind is not None:
            pairs = list(zip(drives.backends, drives.directories, strict=True))
            self.state.mover = GradientMover(kind, pairs, groups)

    def lay_out(self, groups: Groups) -> Layout:
        """Return the layout of the present parameters and model tensors; changes nothing."""
        return self.state.table.describe(groups)[0]

    def relayout(self, groups: Groups) -> None:
        """Update the layout for parameters and model tensors that are new since the last call."""
        if self.state.relayout(groups):
            self.strategy.laid_out()

    def join(self) -> None:
        """Wait for a step that runs beside the model, or raise if the state is half stepped."""
        self.strategy.settle("state_dict()")

    def finish_arrival(self) -> None:
        """Wait until state of all ranks that arrives from a tier is here, and go on from it.

        Collective. Nothing happens if none is arriving. Parameters, buffers and hyper-parameters
        stay as they are.
        """
        if self.state.arriving is not None:
            from offload.engine.tier_restore import take_arrived  # with the code of tiers

            state, meter = self.state, self.state.meter
            found = take_arrived(state, state.call)
            restored = meter.restore_s, meter.restore_bytes
            matched = state.arriving_trainables
            resume(state, state.arriving_groups, found, parameters=False, matched=matched)
            meter.restore_s, meter.restore_bytes = restored
            self.strategy.restored()

    def join_all(self, call: str) -> None:
        """Wait for a step that runs beside the model; all ranks raise its error. Collective.

        State that arrives from a tier is waited for as well.
        """
        self.finish_arrival()
        failed: list[Exception] = []
        try:
            self.join()
        except Exception as error:
            if self.state.ranks.size == 1:
                raise
            failed.append(error)

        def tell() -> None:
            """Raise the error of this rank."""
            if failed:
                raise failed[0]

        self.state.ranks.together(call, tell)

    def step(self, groups: Groups) -> None:
        """Take a step, or begin it; see `OffloadedOptimizer.step`."""
        self.finish_arrival()
        self.strategy.step(groups)

    def add_parameters(self, groups: Groups) -> None:
        """Lay out parameters that were added to the groups, and reserve their space now.

        Raises:
            gds.StorageError: There is no space. Nothing has changed.
        """
        self.state.begin_call("add_param_group()")
        self.finish_arrival()
        self.strategy.settle("add_param_group()")
        if self.state.table.layout is None:
            self.state.know_parameters(groups)
            self.state.table.describe(groups)  # refuses parameters that cannot be updated
        else:
            self.state.lifecycle.require_usable()
            self.relayout(groups)
        if self.state.mover is not None:
            self.state.mover.attach(groups)
        self.strategy.added(groups)

    def checkpoint(
        self, groups: Groups, train_state: object, metrics: Metrics = None
    ) -> SealHandle:
        """Seal the present state; see `OffloadedOptimizer.checkpoint`."""
        self.finish_arrival()
        with self._failing_torn():
            later = self.strategy.seal_at_end(groups, train_state, metrics)
        if later is not None:
            return later
        state, store = self.state, self.store
        encoded = self._begin_checkpoint(lambda: encode(train_state))
        self.relayout(groups)
        sealed = state.slots.sealed
        is_sealed = (
            sealed is not None
            and sealed.manifest.step == state.num_steps
            and state.ranks.all("checkpoint()", lambda: self._is_unchanged(sealed, groups))
        )
        store.warn_of_lost()  # also of a loss that was found just now
        if sealed is not None and is_sealed:
            return self._replace_train_state(sealed, encoded, metrics)
        store.keeping.require_replaceable(store.sealing.path_of(state.num_steps))
        moves = False
        if state.slots.present is None:
            state.slots.begin(state.layout, len(groups))
        elif not state.slots.is_working:
            # No step was taken since the last seal, yet the new checkpoint differs from it.
            state.slots.ensure_target(state.layout, len(groups))
            moves = True
        with state.failing_seal():
            if moves:
                move_state(state, groups)
            # Moving state makes a slot of what `restore` has found in another cut.
            written = cast(StateSlot, state.slots.present)
            stored = state.table.stored(groups)
            captured = state.capture(groups, stored, written, encoded, metrics)
        return state.begin_seal(written, captured)

    def fail_checkpoint(self, error: Exception) -> None:
        """Let a checkpoint fail on all ranks because its content cannot be stored on this one.

        Returns if there is no other rank; otherwise it raises an error.
        """

        def fail() -> None:
            """Raise the error of this rank."""
            raise error

        if self.state.ranks.size > 1:
            self.finish_arrival()
            with self._failing_torn():
                self.strategy.settle("checkpoint()")
            self._begin_checkpoint(fail)

    @contextmanager
    def _failing_torn(self) -> Iterator[None]:
        """Take part in the seal of the other ranks if the step before it has failed here.

        Ranks that send nothing to each other in a step do not know of its failure.
        """
        state = self.state
        try:
            yield
        except Exception as error:
            if state.ranks.size > 1 and state.lifecycle.why_broken():
                state.collect_seal(wait=True)  # its error is raised on all ranks: then no seal
                state.fail_seal(error)
            raise

    def _begin_checkpoint(self, prepare: Callable[[], T]) -> T:
        """Check that the state can be sealed, and return the result of `prepare`.

        An error of this rank alone is raised on all ranks: by the seal that the others begin, or,
        if ranks exchange something before that, at once.
        """
        state = self.state
        try:
            state.lifecycle.require_usable()
        except BrokenOptimizerError as error:
            if state.ranks.size > 1:
                state.collect_seal(wait=True)
                state.fail_seal(error)
            raise
        state.collect_seal(wait=True)
        if not state.slots.is_working:
            return state.ranks.together("checkpoint()", prepare)
        with state.failing_seal():
            return prepare()

    def _is_unchanged(self, sealed: StoredCheckpoint, groups: Groups) -> bool:
        """Return whether a checkpoint of the present state holds all of the present content."""
        state, store = self.state, self.store
        # In a poisoned store, a failed seal may have left a newer checkpoint, now abandoned.
        if store.poisoned or sealed.manifest.layout != state.layout:
            return False
        saved = [encode_group(i, group) for i, group in enumerate(sealed.manifest.groups)]
        if saved != [encode_group(i, group) for i, group in enumerate(groups)]:
            return False
        stored = state.table.stored(groups)
        is_same = state.ranks.has_same_model(sealed, stored)
        if is_same is None:
            is_same = has_same_model(sealed, stored, state.block_buffers())
        # Checked last, because other programs may change the checkpoint meanwhile.
        return is_same and store.is_usable(sealed)

    def _replace_train_state(
        self, sealed: StoredCheckpoint, encoded: EncodedState, metrics: Metrics
    ) -> SealHandle:
        """Replace train state and metrics of a checkpoint if they differ; durable on return.

        Each of the two is replaced atomically, the train state first. With several ranks only the
        store knows the train states of all.
        """
        store, reader = self.store, self.store.reader_of(sealed)
        if self.state.ranks.size > 1 or reader.read_train_state() != encoded:
            store.replace_train_state(sealed, encoded)
        if metrics is not None and metrics != sealed.manifest.metrics:
            store.replace_manifest(sealed, replace(sealed.manifest, metrics=metrics))
        return SealHandle.finished(store.reader_of(sealed))

    def restore(
        self,
        groups: Groups,
        which: int | str | None,
        *,
        discard_newer: bool,
        verify: bool | None = None,
        reencode: bool | None = None,
        require: Callable[[], None],
    ) -> Checkpoint | None:
        """Continue from a checkpoint; see `OffloadedOptimizer.restore`.

        `require` raises an error if the checkpoint that the user means has been replaced.
        """
        self.state.lifecycle.require_alive()
        try:
            self.finish_arrival()
        except Exception as error:  # noqa: BLE001  (of all ranks: what has arrived is kept)
            warnings.warn(str(error), RuntimeWarning, stacklevel=4)
        self.strategy.give_up()
        checkpoint = restore(
            self.state,
            groups,
            which,
            discard_newer=discard_newer,
            verify=verify,
            reencode=reencode,
            require=require,
        )
        self.strategy.restored(found=checkpoint is not None)
        return checkpoint

    def pin(self, name: str, which: int | str | None, *, require: Callable[[], None]) -> None:
        """Pin a checkpoint; see `OffloadedOptimizer.pin`.

        `require` raises an error if the checkpoint that the user means has been replaced.
        """
        state = self.state
        state.lifecycle.require_alive()
        if state.ranks.size == 1:
            require()
        self.join_all("pin()")
        state.collect_seal(wait=True)
        self.store.refresh()

        def find() -> tuple[None, str]:
            """Return in words what this rank is to pin."""
            require()
            found = self.store.newest if which is None else self.store.find(which)
            path = "no checkpoint" if found is None else found.path
            return None, f"the pin {name!r} of {path}"

        if state.ranks.size > 1:
            state.ranks.choose("pin()", find)
        self.store.keeping.pin(name, which)

    def unpin(self, name: str) -> None:
        """Remove a pin; see `OffloadedOptimizer.unpin`."""
        if self.state.ranks.size > 1:
            self.join_all("unpin()")  # at the end of a step the ranks may agree on a seal
        self.state.ranks.require_same("unpin()", f"the pin {name!r}")
        self.store.keeping.unpin(name)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the usable checkpoints of the store; see `OffloadedOptimizer.checkpoints`."""
        store = self.open_store()
        pins = store.keeping.pins()
        return [_info(store, checkpoint, pins) for checkpoint in store.keeping.current]

    def pins(self) -> dict[str, str]:
        """Return the path of the checkpoint of each pin, by name; see `OffloadedOptimizer.pins`."""
        store = self.open_store()
        return {
            pin.name: f"{store.directory}/{pin.checkpoint}" for pin in store.keeping.pins().pins
        }

    def find(self, wanted: Position) -> CheckpointInfo:
        """Return the checkpoint that a reference names; see `OffloadedOptimizer.find`."""
        present = self.position
        store = self.open_store()
        return _info(store, find_sealed(store, wanted, present), store.keeping.pins())

    def load_reference(self, groups: Groups, reference: Mapping[str, Any]) -> None:
        """Load a reference; see `OffloadedOptimizer.load_state_dict`."""
        load_reference(self, groups, reference)

    def load_tensors(self, groups: Groups, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of torch; see `OffloadedOptimizer.load_state_dict`. Collective."""
        with written():
            load_tensors(self, groups, state_dict)

    def materialize(self, groups: Groups) -> MaterializedState:
        """Read the present state into memory; see `OffloadedOptimizer.materialized`."""
        self.strategy.settle("materialized()")
        return materialize(self, groups)

    def synchronize(self) -> None:
        """Wait until every transfer and seal in flight has ended; raise their errors."""
        state = self.state
        self.strategy.settle("synchronize()")
        state.lifecycle.require_usable()
        if state.arriving is not None:
            state.arriving.require()
        state.collect_seal(wait=True, alone=True)
        state.memory.synchronize()

    def describe(self) -> str:
        """Say in one line where the state is, how large it is, and whether it can be used.

        Waits for nothing, looks at no drive, and never raises, whatever has become of the state.
        """
        lifecycle, layout, newest = self.state.lifecycle, self.state.table.layout, self.store.newest
        if lifecycle.decided:
            state = f"{size(layout.state_bytes)} of state" if layout else "no state yet"
            parts = [f"step {self.num_steps}", state]
        elif newest is not None:
            parts = ["not restored", f"the newest checkpoint is of step {newest.manifest.step}"]
        else:
            parts = ["not restored", "none of the checkpoints can be used"]
        if lifecycle.closed:
            parts.append("closed")
        elif broken := lifecycle.why_broken():
            parts.append(f"broken: {broken}")
        return f"{self.store.directory}: {', '.join(parts)}"

    def stats(self) -> Stats:
        """Return the totals since construction."""
        state = self.state
        found = collect_stats(
            state.meter,
            state.drives,
            state.memory.streamer,
            state.table.layout,
            state.update_code,
        )
        mover = state.mover
        if mover is None or mover.spill is None:
            return found
        return replace(found, spilled_gradient_bytes=mover.spill.peak_bytes)

    def close(self) -> None:
        """Wait for transfers and seals in flight, and release everything. Idempotent.

        Raises:
            SealError: The last seal failed, and nobody has seen its error.
        """
        if self.state.lifecycle.is_over:
            return
        self.strategy.end()  # after an interrupt here, `close` can be called again
        try:
            self.strategy.raise_pending()
        finally:
            self.state.close()


def _info(store: StateStore, checkpoint: StoredCheckpoint, pins: FoundPins) -> CheckpointInfo:
    manifest, parts = checkpoint.manifest, store.directories[1:]
    if manifest.parts:  # of one process; ranks may have been given the directories in another order
        parts = tuple(directories_of_parts(store.backend, manifest, parts))
    return info_of(store.backend, checkpoint.path, manifest, parts, pins)
