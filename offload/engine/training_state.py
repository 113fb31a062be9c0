"""The state that is trained, and the store, ring and threads that it needs.

The parts of an engine share one `TrainingState`, which knows none of them. The store manages
`LOCK`, slots and checkpoints. `StateSlots` says which slot holds the state, the streamer moves
chunks through memory, the updater does the arithmetic, and the seal makes checkpoints.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from offload.ambient import in_neutral
from offload.checkpoint.recut.source import RecutSource
from offload.device.boundary import HOST
from offload.device.compute import Compute
from offload.distributed.ranks import Ranks
from offload.engine.lifecycle import Lifecycle
from offload.engine.matching import whole_copy
from offload.engine.seal import Captured, Seal, capture
from offload.engine.seal_handle import Arrival, FailedSeal, SealHandle
from offload.engine.working_slot import StateSlots
from offload.errors import InDoubtError, OffloadError, RanksError, SealError, reason_of
from offload.format.layout import Layout
from offload.format.train_state import EncodedState
from offload.gradients import GradientMover
from offload.model.model_file import BlockBuffers
from offload.model.parameters import Trainable, all_parameters
from offload.model.stored import Stored
from offload.model.table import ParameterTable
from offload.options import Options
from offload.placement.choose import PlacementChooser
from offload.retention.policy import Retention
from offload.store.slots.slot import Slot
from offload.store.state_store import StateSlot
from offload.stream.drives import Drives
from offload.stream.memory import WorkingMemory
from offload.stream.meter import Meter, Trace
from offload.stream.streamer import Streamer
from offload.update.kernel_check import choose_kernel
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule

if TYPE_CHECKING:
    from offload.tiers.arriving import ArrivingState

Groups: TypeAlias = Sequence[dict[str, Any]]
"""``param_groups`` of the optimizer, passed anew to each call because libraries replace the
dicts."""


class TrainingState:
    """The state of one optimizer: its store, its ring, its threads and the seal in flight.

    Args:
        rule: Update rule that runs the wrapped optimizer's step.
        directories: Directories of the store, one on each drive.
        model: Model that gives names, buffers and frozen parameters; None for parameters only.
        keep: Retention policy of the store.
        fresh: Whether to start over although the store has checkpoints.
        options: Settings of the machine.
        device: Device that the parameters are on now; None for host memory.
        ranks: Ranks that train together.

    Raises:
        StoreError: The directories cannot be used; says why.
    """

    @in_neutral
    def __init__(
        self,
        rule: UpdateRule,
        directories: Sequence[str],
        *,
        model: torch.nn.Module | None,
        keep: Retention,
        fresh: bool,
        options: Options,
        device: torch.device | None,
        ranks: Ranks,
    ) -> None:
        self.rule = rule
        self.ranks = ranks
        self.pool = UpdatePool(rule)
        self.kernel = choose_kernel(rule.optimizer_class, options.state_dtype)
        """Code that updates the state on a CPU."""
        self.update_code = self.kernel.code
        """Code of the newest step, in words."""
        self.options = options
        self.table = ParameterTable(
            rule,
            model,
            options.chunk_elements,
            options.state_format,
            shards=ranks.shards,
        )
        self.meter = Meter(trace=Trace(os.fsdecode(options.trace)) if options.trace else None)
        own = directories if self.ranks.size == 1 else directories[:1]
        self.drives = Drives(own, options, self.meter.trace, device)
        self.memory = WorkingMemory(self.drives, options, self.meter)
        self.placement = PlacementChooser(options, rule, self.pool, self.drives)
        try:
            backends = self.drives.backends
            if self.ranks.size > 1:
                backends = backends * len(directories)
            drives = list(zip(backends, directories, strict=True))
            self.store = store = self.ranks.open_store(drives, keep, options, fresh=fresh)
            self.drives.move(store.state_directories)
            newest = store.newest
            # State that ranks have stored is spread anew over the directories of one process.
            is_spread = newest is not None and not newest.manifest.owners and self.ranks.size == 1
            self.table.shares = (
                newest.manifest.layout.shares if newest and is_spread else self.drives.shares()
            )
        except BaseException:
            self.drives.close()
            raise
        tier = "" if fresh or options.tier is None else options.tier
        tier_url = tier if isinstance(tier, str) else tier.url
        decided = fresh or not (store.checkpoints or store.refused)
        self.lifecycle = Lifecycle(store, self.memory, decided=decided, tier_url=tier_url)
        self.slots = StateSlots(store, self.meter)
        self.compute: Compute | None = None
        """Runs work on the device that state is updated on; None for the CPU."""
        self.seal: Seal | FailedSeal | Arrival | None = None
        """The seal that has begun, until `collect_seal` has recorded its end."""
        self.arriving: ArrivingState | None = None
        """State of this rank that arrives from the tier, if there are several ranks."""
        self.arriving_groups: Groups = ()
        """The ``param_groups`` that were restored with it; others may be added meanwhile."""
        self.arriving_trainables: Sequence[Trainable] = ()
        """The parameters that were matched with it; the model may grow meanwhile."""
        self.run_id = uuid.uuid4().hex
        """Identity of this object among all optimizers that have used the store."""
        self.num_steps = 0
        """Optimizer steps taken."""
        self.call = "the constructor"
        """Call of the user that is running, or was the last one, for messages."""
        self.gradient_factors: tuple[float, ...] = ()
        """Factors by which steps that begin now multiply gradients, one after the other."""
        self.learned_order: Sequence[int] = ()
        """All chunks in the order of the last steps; not used if the layout has other chunks."""
        self.is_backwards = False
        """Whether steps take the last chunk first until an order has been learned."""
        self.mover: GradientMover | None = None
        """Moves gradients out of their device; None if they stay."""
        self.update_lock: AbstractContextManager[object] | None = None
        """Lock that is held while torch's own step runs on a chunk; None if no lock is needed."""

    @property
    def layout(self) -> Layout:
        """The layout of the present state."""
        if self.table.layout is None:
            raise RuntimeError("the store has not been laid out")
        return self.table.layout

    def chunks(self) -> Sequence[int]:
        """Return all chunks in the order in which a step takes them."""
        num_chunks = self.layout.num_chunks
        if len(self.learned_order) == num_chunks:
            return self.learned_order
        return range(num_chunks)[::-1] if self.is_backwards else range(num_chunks)

    def ring(self) -> Streamer:
        """Return the streamer; its ring is allocated at the first call."""
        return self.memory.streamer or self.memory.ring(self.layout, self.compute)

    def block_buffers(self) -> BlockBuffers:
        """Return the buffers of ``model.safetensors``, ready for the parameters' devices."""
        blocks = self.memory.blocks(self.layout)
        return blocks.page_lock_for({t.parameter.device for t in self.table.trainables} - {HOST})

    def know_parameters(self, groups: Groups) -> None:
        """Let the ranks decide who steps parameters that are new. Collective if there are any.

        Until state has been laid out, other objects may take the place of all parameters, as
        libraries do that shard a model when its optimizer exists.
        """
        if self.ranks.size > 1:
            named = all_parameters(groups, self.table.model)
            self.ranks.know(named, replaces=self.table.layout is None)

    def relayout(self, groups: Groups) -> bool:
        """Update the layout for parameters and model tensors that are new since the last call.

        Returns whether an earlier layout has been replaced. If there is no space, nothing changes.
        """
        self.know_parameters(groups)
        before, present = self.table.layout, self.slots.present
        if self.ranks.size > 1 and (before is None or not self.table.is_agreed(groups)):
            # What is new may concern this rank's part of the model, or only that of other ranks.
            describe = partial(self.table.describe, groups)
            layout, trainables = self.ranks.together(self.call, describe)
            is_same = before is not None and self.ranks.all(self.call, lambda: layout == before)
        else:
            layout, trainables = self.table.describe(groups)
            is_same = layout == before
        if is_same:
            self.table.note_agreed(groups)
            return False
        compute = self.placement.choose(groups, layout, trainables)
        if before is not None and present is not None:
            self.collect_seal(wait=True)
            self.slots.reserve(layout, len(groups))
        if self.memory.streamer is not None and present is not None:
            flush = self.memory.streamer.flush()  # state only in memory belongs to the old slot
            flush.start(present)
            flush.wait()
        self.memory.drop()
        self.compute = compute
        self.table.adopt(layout, trainables)
        self.table.note_agreed(groups)
        if before is None and self.ranks.size > 1:
            # Ranks that measure a drive at the same time measure each other.
            directory, measure = self.drives.directories[0], self.drives.calibrate
            self.ranks.measure(self.call, directory, layout.state_bytes, measure)
        return before is not None

    def begin_call(self, what: str) -> None:
        """Record which call of the user begins, for messages: ``step()``."""
        self.call = what
        self.ranks.begin_call(what, self.num_steps)

    def capture(
        self,
        groups: Groups,
        stored: Sequence[Stored],
        slot: StateSlot,
        train_state: EncodedState,
        metrics: Mapping[str, float] | None,
    ) -> Captured:
        """Capture a checkpoint of the state in `slot`; see `offload.engine.seal.capture`."""
        return capture(
            self.store.sealing,
            groups,
            self.table,
            stored,
            slot,
            self.num_steps,
            train_state,
            metrics or {},
            self.update_code,
        )

    def begin_seal(self, slot: StateSlot, captured: Captured) -> SealHandle:
        """Begin to seal the state, which is in `slot`."""
        seal = None
        with self.failing_seal():
            ring = self.ring()
            model = self.ranks.model_copy(slot, captured.stored, captured.marks)
            if model is None:
                own, buffers, reads_back = cast(Slot, slot), self.block_buffers(), ring.writes_model
                model = whole_copy(self.store, own, captured, buffers, reads_back=reads_back)
            flush = ring.flush()
        try:
            seal = Seal(self.store, slot, captured, model, flush, self.meter)
            self.store.sealing.begin(captured.manifest)
            self.slots.sealed_now()
            self.lifecycle.steps_in_seal = self.meter.steps
            self.seal = seal  # set before the seal begins, as the start may be interrupted
            seal.start()
        except BaseException:
            if seal is None or seal.claim():  # otherwise the seal goes on
                self.seal = None
                ring.thaw()
                self.store.sealing.end()
                self.slots.is_working = True
            raise
        return seal.handle

    def fail_seal(self, error: Exception) -> None:
        """Take part, with an error, in a seal that the other ranks begin now. Never waits.

        All ranks learn of the error, and training goes on in the slots that they have. Nothing
        happens if there is no other rank.
        """
        slot = self.slots.present if not self.lifecycle.why_broken() else None
        if isinstance(slot, RecutSource):
            slot = None  # state in another cut is no part of a checkpoint of these ranks
        tell = self.ranks.fail_seal(slot, self.num_steps, error)
        if tell is None:
            return
        failure = SealError(
            f"sealing step {self.num_steps} failed, so it is not a checkpoint on any rank; earlier "
            f"checkpoints are untouched: rank {self.ranks.rank}: {reason_of(error)}"
        )
        failure.__cause__ = error
        self.meter.note_failed_seal(self.num_steps, failure)
        self.slots.sealed_now()
        self.seal = FailedSeal(slot, self.num_steps, tell, failure)
        self.seal.start()
        if slot is not None:
            raise failure

    @contextmanager
    def failing_seal(self) -> Iterator[None]:
        """Take part, with an error that the block raises, in the seal that all ranks begin.

        An error that the ranks have agreed on is raised on all of them, so no seal begins then.
        """
        try:
            yield
        except (RanksError, SealError):
            raise
        except Exception as error:
            self.fail_seal(error)
            raise

    def require_step(self) -> None:
        """Check that a step may be taken, and record the end of a seal that has ended."""
        try:
            self.lifecycle.require_usable()
        except Exception as error:
            self.refuse_step(error)
            raise
        self.collect_seal()

    def lay_out_step(self, groups: Groups) -> bool:
        """Do what `relayout` does, if any parameter or model tensor is new since the last step."""
        return not self.table.is_current(groups) and self.relayout(groups)

    def begin_step(self, groups: Groups) -> tuple[list[torch.Tensor | None], bool]:
        """Lay out what is new, and return the gradients in element-space order; None for no one.

        The second result is that of `relayout`.
        """
        is_new = self.lay_out_step(groups)
        try:
            gradients = self.table.gradients(groups)
            if self.mover is not None:
                self.mover.attach(groups)  # parameters that require gradients only from now on
                self.mover.settle()
            return gradients, is_new
        except Exception as error:
            self.refuse_step(error)
            raise

    def refuse_step(self, error: Exception) -> None:
        """Take part, with an error of this rank, in the step that all ranks begin."""
        if self.table.layout is not None:
            needs_slot = self.slots.needs_target
            self.ranks.refuse_step(self.num_steps + 1, error, needs_slot=needs_slot)

    def collect_seal(self, *, wait: bool = False, errors: bool = True, alone: bool = False) -> None:
        """Record the end of a seal, if one has ended.

        Args:
            wait: Whether to wait for a seal in flight.
            errors: Whether to raise the seal's error, rather than warn. If the state is still in
                the working slot, the slot stays the working slot, so that training may go on after
                the error has been seen.
            alone: Whether other ranks may not make this call, so that nothing is exchanged.

        Raises:
            SealError: The seal failed, and `errors` is set. With several ranks, not if the user has
                seen the error on all of them.
        """
        seal = self.seal
        if seal is None or not (wait or seal.handle.done()):
            return
        if not wait and self.ranks.size > 1:
            return  # ranks would learn of it at different steps
        with self.meter.timed("wait_seal_s"):
            seal.handle.wait()  # an interrupt leaves `seal` set, with the seal in flight
        self.seal = None
        lifecycle, slots = self.lifecycle, self.slots
        try:
            seal.handle.outcome()
        except OffloadError as error:
            if seal.slot is None:
                pass  # the state is torn
            elif isinstance(seal, Arrival) and slots.present is seal.slot:
                if not lifecycle.why_broken():
                    lifecycle.broken = f"the state of {seal.url} did not arrive"
            elif slots.present is not seal.slot:
                self.store.release(seal.slot)
            elif self.store.poisoned:
                lifecycle.broken = f"the state of step {self.num_steps} could not be made durable"
                slots.is_working = self.ranks.size > 1  # as on the other ranks
            else:  # if files of the slot were replaced, the state moves to another slot
                slots.is_working = seal.slot.is_surely_in_place()
            if errors and self._was_raised(seal, error, alone=alone):
                return
            if errors:
                raise
            warnings.warn(str(error), RuntimeWarning, stacklevel=4)
        else:
            lifecycle.steps_settled = lifecycle.steps_in_seal
            if slots.present is seal.slot and seal.slot is not None:
                slots.sealed = self.store.checkpoint_of(seal.slot)

    def _was_raised(
        self, seal: Seal | FailedSeal | Arrival, error: OffloadError, *, alone: bool
    ) -> bool:
        """Return whether the user has seen the error of a failed seal on all of several ranks.

        Collective, unless `alone` is set: ranks that go on after the error must all do so.
        """
        is_ordinary = isinstance(error, SealError) and not isinstance(error, InDoubtError)
        if self.ranks.size == 1 or isinstance(seal, Arrival) or not is_ordinary:
            return False
        own = seal.handle.was_raised
        return own if alone else self.ranks.all(self.call, lambda: own)

    def forget(self) -> None:
        """Drop data that was read ahead, and the working slot, before a restore."""
        self.memory.reset()
        self.memory.drop()
        self.slots.forget()
        self.table.clear()

    def close(self) -> None:
        """Wait for the seal in flight and free everything.

        After an interrupt this can be called again. If it came during a wait, nothing is freed.

        Raises:
            SealError: The last seal failed, and nobody has seen its error.
        """
        if isinstance(self.seal, Arrival):
            self.seal.stop()
        if self.arriving is not None:
            self.arriving.close()
        if self.seal is not None:
            self.seal.handle.wait()  # after an interrupt here, `close` can be called again
        self.lifecycle.closed = True
        seal = self.seal
        is_seen = isinstance(seal, Seal | FailedSeal) and seal.handle.was_raised
        try:
            if not (isinstance(self.seal, Arrival) and self.seal.is_cut_short):
                self.collect_seal(wait=True, alone=True)
        except SealError:
            if not is_seen or self.store.poisoned or self.lifecycle.why_broken():
                raise
        finally:
            self.memory.reset()  # files must not be closed while transfers use them
            self.memory.release()
            with ExitStack() as releases:  # an error in one callback does not skip the others
                if self.meter.trace is not None:
                    releases.callback(self.meter.trace.write)
                releases.callback(self.drives.close)
                if self.mover is not None:
                    releases.callback(self.mover.close)  # before the drives
                releases.callback(self.store.close)
                releases.callback(self.ranks.close)
                releases.callback(self.pool.close)
                releases.callback(self.slots.close)
            self.lifecycle.released = True
        self.store.journal.tell()
        if self.meter.steps > self.lifecycle.steps_settled:
            self.lifecycle.log_lost_steps(self.meter.steps - self.lifecycle.steps_settled)
