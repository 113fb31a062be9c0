"""What happens between a torch optimizer and its store: the state's life from step to step.

`LOCK`, slots and checkpoints are the store's business, which slot is the state's that of
`StateSlots`, chunks in memory the streamer's, arithmetic the updater's, and sealing the seal's;
this module only orders them.
"""

from __future__ import annotations

import os
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from offload.ambient import in_neutral
from offload.checkpoint.checkpoint import Checkpoint
from offload.device.boundary import HOST
from offload.device.compute import Compute
from offload.engine.chunk_pass import ChunkWork, StatePass
from offload.engine.lifecycle import Usable
from offload.engine.reseal import is_unchanged, replace_train_state
from offload.engine.resume import (
    choose_checkpoint,
    give_up_damaged,
    load_checkpoint,
    match_checkpoint,
)
from offload.engine.seal import Captured, Seal, SealHandle, capture
from offload.engine.stats import Stats, collect_stats
from offload.engine.working_slot import StateSlots
from offload.errors import DamagedError, OffloadError
from offload.format.layout import Layout
from offload.format.train_state import encode
from offload.format.unreadable import stopping
from offload.model.model_file import BlockBuffers
from offload.model.table import ParameterTable
from offload.model.watch import settle_all
from offload.options import Options
from offload.placement.choose import StateDevice
from offload.retention.policy import Retention
from offload.store.frozen_space import FrozenSpace
from offload.store.giving_up import give_up
from offload.store.opening import StoredCheckpoint
from offload.store.places import NOTHING_CHANGED
from offload.store.slot import Slot
from offload.store.store import Store
from offload.stream.drives import Drives
from offload.stream.memory import WorkingMemory
from offload.stream.meter import Meter
from offload.stream.state_check import check_state
from offload.stream.streamer import Streamer
from offload.stream.trace import Trace
from offload.units import size
from offload.update.device_updater import DeviceUpdater
from offload.update.pool import UpdatePool
from offload.update.rules import Scalars, UpdateRule
from offload.update.step_inputs import StepInputs
from offload.update.updater import ChunkUpdater

Groups = Sequence[dict[str, Any]]
"""``param_groups`` of the optimizer, passed anew to each call: libraries replace the dicts."""

Metrics: TypeAlias = Mapping[str, float] | None
"""What was measured, checked; None where nobody said, which leaves those of a checkpoint alone."""


class Engine(Usable):
    """Owns the store, the ring and the threads of one optimizer.

    Args:
        rule: Runs the wrapped optimizer's step.
        directories: The store: one on each drive.
        model: Gives names, buffers and frozen parameters; None for parameters only.
        keep: Which checkpoints to keep.
        fresh: Whether to start over although the store has checkpoints.
        options: Settings of the machine.
        device: That the parameters are on now; None for host memory.
    """

    _updater_class = ChunkUpdater
    _device_updater_class = DeviceUpdater

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
        device: torch.device | None = None,
    ) -> None:
        self._rule = rule
        self._pool = UpdatePool(rule, slow=options.state_dtype != "float32")
        self._options = options
        self._table = ParameterTable(rule, model, options.chunk_elements, options.state_format)
        self._meter = Meter(trace=Trace(os.fspath(options.trace)) if options.trace else None)
        self._drives = Drives(directories, options, self._meter.trace, device)
        self._memory = WorkingMemory(self._drives, options, self._meter)
        self._state_device = StateDevice(options, rule, self._pool, self._drives)
        self._backend = self._drives.backends[0]
        try:
            store = Store(
                self._backend,
                directories[0],
                list(zip(self._drives.backends, directories, strict=True))[1:],
                keep=keep,
                fresh=fresh,
                train_state_bytes=options.train_state_bytes,
                reader_timeout_s=options.reader_timeout_s,
                allow_volatile=options.allow_volatile,
                allow_remote=options.allow_remote,
            )
            newest = store.newest
            self._table.shares = newest.manifest.layout.shares if newest else self._drives.shares()
        except BaseException:
            self._drives.close()
            raise
        super().__init__(store, decided=fresh or not (store.checkpoints or store.refused))
        self._run = uuid.uuid4().hex
        self.num_steps = 0
        self.gradient_factors: tuple[float, ...] = ()
        """What gradients are multiplied by, in turn, in steps that begin now."""
        self.frozen_space = FrozenSpace(store)
        self._slots = StateSlots(store)
        self._compute: Compute | None = None
        """Of the device that state is updated on; None for the CPU."""
        self._seal: Seal | None = None

    @in_neutral
    def require_space(self, groups: Groups) -> None:
        """Check names, parameters, rules and free space; touches nothing.

        Raises whatever would otherwise be raised by the first step. Warns about pins of nothing.
        """
        layout = self.lay_out(groups)
        with stopping(NOTHING_CHANGED):
            self.store.keeping.warn([path for path, _ in self.store.refused])
            self.store.require_space(layout, len(groups))

    def lay_out(self, groups: Groups) -> Layout:
        """Return how what the groups and the model hold now is laid out; changes nothing."""
        return self._table.describe(groups)[0]

    def attach(self, groups: Callable[[], Groups | None]) -> None:
        """Begin to follow the model, where a step runs beside it.

        Args:
            groups: Returns ``param_groups``, or None if the optimizer is gone.
        """

    def join(self) -> None:
        """Wait for a step that runs beside the model, where there is one."""

    def before_hooks(self) -> None:
        """Wait at the end of `step` for what hooks of it may read without being seen."""

    def step(self, groups: Groups) -> None:
        """Update every parameter that has a gradient.

        Raises:
            NotRestoredError: The store has checkpoints and nobody has decided about them.
            SealError: The seal before this step failed; the step has not been taken.
            BrokenOptimizerError: An earlier step failed half way.
        """
        self._require_usable()
        self._collect_seal()
        with self._meter.timed("step_s"):
            if not self._table.is_current(groups):
                self._relayout(groups)
            gradients = self._table.gradients(groups)
            if any(gradient is not None for gradient in gradients):
                self._stream(groups, gradients)
                self._meter.steps += 1
            self.num_steps += 1

    def add_parameters(self, groups: Groups) -> None:
        """Lay out parameters that were added to the groups, and reserve their space now.

        Raises:
            gds.StorageError: No space; nothing has changed.
        """
        if self._table.layout is None:
            self._table.describe(groups)  # what cannot be updated is refused now
        else:
            self._require_usable()
            self._relayout(groups)

    def checkpoint(
        self, groups: Groups, train_state: object, metrics: Metrics = None
    ) -> SealHandle:
        """Seal the present state; see `OffloadedOptimizer.checkpoint`."""
        self._require_usable()
        self._collect_seal(wait=True)
        encoded = encode(train_state)
        self.store.warn_of_lost()
        self._relayout(groups)
        stored = self._table.stored(groups)
        sealed = self._slots.sealed
        if (
            sealed is not None
            and sealed.manifest.step == self.num_steps
            # Else there may be one that failed, of a higher generation, which has been given up.
            and not self.store.poisoned
            and is_unchanged(sealed, groups, self._table, stored, self._block_buffers())
            # Last, as it is what others may change meanwhile.
            and self.store.is_usable(sealed)
        ):
            return replace_train_state(self.store, sealed, encoded, metrics)
        self.store.warn_of_lost()  # perhaps just now
        self.store.keeping.require_replaceable(self.store.path_of(self.num_steps))
        if self._slots.present is None:
            slot = self._slots.begin(self._layout(), len(groups))
        else:
            if not self._slots.is_working:
                # Nothing was stepped since the last seal, yet the checkpoint must differ from it.
                self._stream(groups, [None] * len(self._table.trainables))
            slot = self._slots.present
        captured = capture(
            groups, self._table, stored, slot, self.num_steps, encoded, metrics or {}
        )
        return self._begin_seal(slot, captured)

    def restore(
        self,
        groups: Groups,
        which: int | str | None,
        *,
        discard_newer: bool,
        verify: bool | None = None,
    ) -> Checkpoint | None:
        """Continue from a checkpoint; see `OffloadedOptimizer.restore`."""
        self._require_alive()
        self._collect_seal(wait=True, errors=False)
        self.store.look_again(warn_of_refused=False)
        found = choose_checkpoint(self.store, which, discard_newer=discard_newer)
        if found is None:
            if self._broken:
                self._require_usable()
            self._decided = True
            return None
        self.store.keeping.require_none_after(found)
        while True:
            try:
                return self._resume(found, groups, verify=verify)
            except DamagedError as error:
                older = give_up_damaged(self.store, found, error, which)
                if older is None:
                    raise DamagedError(f"{error}; {self._remedy()}") from error
                found = older

    def _resume(
        self,
        found: StoredCheckpoint,
        groups: Groups,
        *,
        parameters: bool = True,
        verify: bool | None = None,
    ) -> Checkpoint:
        """Make a checkpoint the present state.

        Args:
            found: One of the store's.
            groups: Of the optimizer.
            parameters: Whether parameters, buffers and hyper-parameters are loaded, too.
            verify: Whether the state is read and checked at once; None for what the options say.

        Raises:
            DamagedError: It is not what was written; the model may hold parts of it.
        """
        trainables, stored = match_checkpoint(
            found, groups, self._table.model, self._rule, self._table.state_format
        )
        compute = self._state_device.choose(groups, found.manifest.layout, trainables)
        started = time.perf_counter()
        checkpoint = Checkpoint(
            self._backend, found.path, found.manifest, self.store.directories[1:]
        )
        _ = checkpoint.train_state  # read and checked before anything is changed
        self._broken = f"restoring {found.path} failed half way"
        self._forget()
        self._compute = compute
        slot = self.store.slot_of(found)
        self._table.adopt(found.manifest.layout, trainables, found.manifest.scalars)
        self._meter.restore_bytes = 0
        if parameters:
            self._meter.restore_bytes = load_checkpoint(
                found, slot, stored, self._block_buffers(), groups
            )
        slot.unchecked = True  # also if this process wrote it: the first pass reads it again
        if self._options.verify == "at_restore" if verify is None else verify:
            self._meter.restore_bytes += check_state(self._ring(), slot, self._order(), self._meter)
        self.store.withdraw_newer(found)  # now that the older one has proved to be readable
        self.num_steps = found.manifest.step
        self._slots.resume(slot, found)
        self._decided, self._broken = True, ""
        self._steps_settled = self._meter.steps  # those after the checkpoint are given up
        self._meter.restore_s = time.perf_counter() - started
        return checkpoint

    def pin(self, name: str, which: int | str | None) -> None:
        """Pin a checkpoint; see `OffloadedOptimizer.pin`."""
        self._require_alive()
        self.join()
        self._collect_seal(wait=True)
        self.store.look_again()
        self.store.keeping.pin(name, which)

    def synchronize(self) -> None:
        """Wait until every transfer and seal that was started has ended; raises their errors."""
        self._require_usable()
        self._collect_seal(wait=True)
        self._memory.synchronize()

    def describe(self) -> str:
        """Say in one line where the state is, and how much of it; waits for nothing."""
        layout = self._table.layout
        state = f"{size(layout.state_bytes)} of state" if layout else "no state yet"
        closed = ", closed" if self._closed else ""
        return f"{self.store.directory}: step {self.num_steps}, {state}{closed}"

    def stats(self) -> Stats:
        """Return the totals so far."""
        return collect_stats(
            self._meter,
            self._drives,
            self._memory.streamer,
            self._table.layout,
        )

    def close(self) -> None:
        """Wait for what is in flight and let go of everything. Idempotent.

        Raises:
            SealError: The last seal failed.
        """
        if self._closed:
            return
        if os.getpid() != self._pid:
            return  # a forked child has neither the threads nor the lock
        if self._seal is not None:
            self._seal.handle.wait()  # interrupted here, it can be closed again
        self._closed = True
        try:
            self._collect_seal(wait=True)
        finally:
            self._memory.reset()
            self._slots.close()
            self._pool.close()
            self.store.close()
            self._drives.close()
            if self._meter.trace is not None:
                self._meter.trace.write()
        if self._meter.steps > self._steps_settled:
            self._say_what_is_lost(self._meter.steps - self._steps_settled)

    def _begin_seal(self, slot: Slot, captured: Captured) -> SealHandle:
        """Start to seal the state, which is in `slot`."""
        ring, buffers, seal = self._ring(), self._block_buffers(), None
        try:
            seal = Seal(self.store, slot, captured, buffers, ring.flush(), self._meter)
            self.store.begin_seal(captured.manifest)
            self._slots.froze()
            self._steps_in_seal = self._meter.steps
            self._seal = seal  # known before it begins: it may be interrupted here
            seal.start(self._meter.count_seal)
        except BaseException:
            if seal is None or seal.cancel():  # else it goes on
                self._seal = None
                ring.thaw()
                self.store.end_seal()
                self._slots.is_working = True
            raise
        return seal.handle

    def _stream(self, groups: Groups, gradients: Sequence[torch.Tensor | None]) -> None:
        """Read, update and write every chunk that needs it; all of them if the state moves."""
        self._run_pass(self._begin_pass(groups, gradients))

    def _run_pass(self, state_pass: StatePass) -> None:
        try:
            self._pass_ended(state_pass, state_pass.run())
        except BaseException as error:
            failure = self._pass_failed(state_pass, error)
            if failure is error:
                raise
            raise failure from error

    def _begin_pass(self, groups: Groups, gradients: Sequence[torch.Tensor | None]) -> StatePass:
        """Prepare a pass over every chunk that needs it; all of them if the state moves."""
        settle_all(t.tensor for t in self._table.trainables)  # another optimizer may step them, too
        make: Callable[..., ChunkUpdater] = self._updater_class
        if self._compute is not None:
            make = partial(self._device_updater_class, compute=self._compute)
        updater = make(
            self._rule,
            self._pool,
            StepInputs(
                layout=self._layout(),
                groups=groups,
                parameters=[t.tensor for t in self._table.trainables],
                gradients=gradients,
                scalars=self._table.scalars,
                step=self.num_steps + 1,
                seed=self._options.rounding_seed,
                factors=self.gradient_factors,
            ),
            traffic=self._meter.traffic,
        )
        chunks = self._order()
        if self._slots.is_working:
            chunks = [c for c in chunks if updater.touched(c)]
        return self._new_pass(groups, updater, chunks, source=self._slots.present)

    def _new_pass(
        self, groups: Groups, work: ChunkWork, chunks: Sequence[int], *, source: Slot | None
    ) -> StatePass:
        """Choose the slot that a pass writes: the working one, or a new one."""
        with self._meter.timed("wait_seal_s"):
            target = self._slots.target(self._layout(), len(groups))
        return StatePass(
            self._ring(),
            work,
            step=self.num_steps + 1,
            source=source,
            target=target,
            chunks=chunks,
            seal=self._seal,
            meter=self._meter,
            run=self._pool.map,
        )

    def _order(self) -> Sequence[int]:
        """Return all chunks in the order in which a step takes them."""
        return range(self._layout().num_chunks)

    def _pass_ended(self, state_pass: StatePass, scalars: list[Scalars | None]) -> None:
        """Take note of a pass that has gone well, and read ahead for the next one."""
        self._table.scalars = scalars
        self._moved(state_pass.target)
        self._ring().begin(self._slots.present, self._order())

    def _pass_failed(self, state_pass: StatePass, error: BaseException) -> BaseException:
        """Take note of a pass that has failed half way: only a restore helps.

        Returns:
            What to raise.
        """
        self._broken = f"step {state_pass.step} failed half way ({error!r})"
        self.num_steps = state_pass.step - 1
        self._slots.torn(state_pass.target)
        if not isinstance(error, DamagedError):
            return error
        refusal = ""
        for checkpoint in [c for c in self.store.checkpoints if c.slot is state_pass.source]:
            refusal = give_up(self.store, checkpoint, error)
        return DamagedError(f"{error}; {refusal or self._remedy()}")

    def _moved(self, target: Slot) -> None:
        """Note that the state is now in `target`; let go of a source that is no checkpoint."""
        left = self._slots.moved_to(target, self._seal.slot if self._seal is not None else None)
        if left is not None:
            self._ring().synchronize()
            self.store.release(left)

    def _relayout(self, groups: Groups) -> None:
        """Follow parameters, and tensors of the model, that are new since the last call."""
        layout, trainables = self._table.describe(groups)
        if layout == self._table.layout:
            return
        compute = self._state_device.choose(groups, layout, trainables)
        present = self._slots.present
        if self._table.layout is not None and present is not None:
            self._collect_seal(wait=True)
            self._slots.reserve(layout, len(groups))
        if self._memory.streamer is not None and present is not None:
            flush = self._memory.streamer.flush()  # what is only in memory belongs to the old slot
            flush.start(present)
            flush.wait()
        self._memory.drop()
        self._compute = compute
        self._table.adopt(layout, trainables)

    def _collect_seal(self, *, wait: bool = False, errors: bool = True) -> None:
        """Take note of a seal that has ended.

        Args:
            wait: Wait for it.
            errors: Raise its error, rather than warn. The working slot stays what it was if the
                state is still in it, so that training may go on after the error has been seen.
        """
        seal = self._seal
        if seal is None or not (wait or seal.handle.done()):
            return
        with self._meter.timed("wait_seal_s"):
            seal.handle.wait()  # an interrupt leaves the seal in flight, and known
        self._seal = None
        try:
            seal.handle.result()
        except OffloadError as error:
            if self._slots.present is not seal.slot:
                self.store.release(seal.slot)
            elif self.store.poisoned:
                self._broken = f"the state of step {self.num_steps} could not be made durable"
            else:  # of which nobody has replaced a file: else the state moves to another slot
                self._slots.is_working = self.store.is_in_place(seal.slot)
            if errors:
                raise
            warnings.warn(str(error), RuntimeWarning, stacklevel=4)
        else:
            self._steps_settled = self._steps_in_seal
            if self._slots.present is seal.slot:
                sealed = (c for c in self.store.checkpoints if c.slot is seal.slot)
                self._slots.sealed = next(sealed, None)

    def _forget(self) -> None:
        """Drop what was read ahead, and the working slot, for a restore."""
        self._memory.reset()
        self._memory.drop()
        self._slots.forget()
        self._table.clear()

    def _ring(self) -> Streamer:
        return self._memory.ring(self._layout(), self._compute)

    def _block_buffers(self) -> BlockBuffers:
        blocks = self._memory.blocks(self._layout())
        return blocks.serve({t.tensor.device for t in self._table.trainables} - {HOST})

    def _layout(self) -> Layout:
        if self._table.layout is None:
            raise RuntimeError("the store has not been laid out")
        return self._table.layout

    @property
    def _transfer_error(self) -> Exception | None:
        streamer = self._memory.streamer
        return streamer.error if streamer is not None else None
