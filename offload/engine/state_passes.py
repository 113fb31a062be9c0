"""Passes over the state: their preparation, and the record of their success or failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Protocol

import torch

from offload.checkpoint.recut.source import RecutSource
from offload.engine.seal_handle import SealInFlight
from offload.engine.training_state import Groups, TrainingState
from offload.errors import DamagedError
from offload.format.digests import Digests, Run
from offload.model.new_values import NoValues, Step, Values
from offload.model.parameters import memories
from offload.model.watch import announce_uses
from offload.store.state_store import StateSlot, StateSource, try_to_quarantine
from offload.stream.frame import Frame
from offload.stream.meter import Meter
from offload.stream.passes import RingPass
from offload.stream.streamer import Streamer
from offload.update.kept_state import Scalars
from offload.update.step_keys import StepInputs
from offload.update.updater import ChunkUpdater, DeviceUpdater, HostUpdater

STEP_THREAD = "offload-step"
"""Name of the threads that run a pass beside the model."""


class ChunkWork(Protocol):
    """Work on the chunks of a pass: a step, or filling the chunks with other state."""

    @property
    def device(self) -> torch.device:
        """Device on which the work needs a chunk: that of the frames, or the CPU."""
        ...

    def touched(self, chunk: int) -> bool:
        """Return whether the work changes a chunk, even if the state stays in its slot."""
        ...

    def update(
        self, chunk: int, arrays: Mapping[str, torch.Tensor], digests: Digests | None = None
    ) -> None:
        """Change a chunk in place."""
        ...

    def prepare(self, chunk: int) -> bool:
        """Begin the work for a chunk that is possible before its update. Idempotent."""
        ...

    def arrive(self, chunk: int) -> None:
        """Wait for the work that `prepare` has begun for a chunk."""
        ...

    def fence(self) -> None:
        """Make the calling thread's work on devices wait for the parameters changed so far."""
        ...

    def finish(self) -> list[Scalars | None]:
        """Return the scalar state of each parameter after the pass."""
        ...


class StatePass:
    """Reads, updates and writes a sequence of chunks.

    Args:
        streamer: Ring that moves the chunks.
        updater: Work that updates the chunks.
        step: Number of the step, from 1.
        source: Slot that holds the state; None if there is no state yet.
        target: Slot to write. It is the source itself if that is the working slot.
        chunks: Chunks in the order of their update.
        seal: Seal in flight that still copies parameters which the update changes, or None.
        meter: Meter that counts seconds.
        run: Runner that computes the remaining digests of a chunk on several threads.
        lock: Lock that is held while the updater computes; None if the updater needs no lock.
    """

    def __init__(
        self,
        streamer: Streamer,
        updater: ChunkWork,
        *,
        step: int,
        source: StateSource | None,
        target: StateSlot,
        chunks: Sequence[int],
        seal: SealInFlight | None,
        meter: Meter,
        run: Run,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.step = step
        self.source = source
        self.target = target
        self.chunks = chunks
        self.schedule: Iterable[int] = chunks
        """Iterable that yields the chunks in their order, each as soon as it may be updated. It may
        leave out last chunks if `announce` has been called without them."""
        self._ring = RingPass(streamer, source=source, target=target, run=run)
        self._stops = seal.stops(streamer.layout) if seal is not None else ()
        self.streamer = streamer
        self.updater = updater
        self._seal = seal
        self._meter = meter
        self._lock = nullcontext() if lock is None else lock

    def is_needed(self, chunk: int) -> bool:
        """Return whether the pass must step a chunk, or move it to another slot."""
        return self.source is not self.target or self.updater.touched(chunk)

    def announce(self, chunks: Sequence[int]) -> None:
        """Tell the ring which chunks are still to come."""
        self._ring.announce(chunks)

    def run(self, updated: Callable[[int], object] | None = None) -> list[Scalars | None]:
        """Update all chunks; the last writes may still be in progress on return.

        Args:
            updated: Called with each chunk after its parameters have received their new values.

        Returns:
            The scalar state of each parameter after the step.

        Raises:
            gds.StorageError: A transfer failed.
            DamagedError: The state that was read is not the state that was written.
        """
        seal = self._seal
        self.announce(self.chunks)
        following = dict(pairwise(self.chunks)) if self.schedule is self.chunks else {}
        for chunk in self.schedule:
            is_staged = self.updater.prepare(chunk)
            with self._ring.taken(chunk) as frame:
                if seal is not None:
                    seal.wait_copied(self._stops[chunk])
                if is_staged:
                    if chunk in following:
                        self.updater.prepare(following[chunk])
                    with self._meter.timed("wait_device_s", chunk=chunk):
                        self.updater.arrive(chunk)
                with self._meter.timed("compute_s", chunk=chunk):
                    self._update(chunk, frame)
                if updated is not None:
                    updated(chunk)
        with self._lock:
            scalars = self.updater.finish()
        self.updater.fence()
        if seal is not None:
            # After the pass, the user may also change frozen parameters, which no step changes.
            seal.wait_all_copied()
        return scalars

    def _update(self, chunk: int, frame: Frame) -> None:
        work, digests = self.updater, frame.digests
        with frame.tensors_on(work.device, changes=True) as arrays, self._lock:
            # If `arrays` are copies, no byte is final before they are sent back to the frame.
            work.update(chunk, arrays, digests if frame.device == work.device else None)


def step_chunks(
    state: TrainingState, groups: Groups, gradients: Sequence[torch.Tensor | None]
) -> None:
    """Read, update and write every chunk that needs it, or all chunks if the state moves.

    Raises the errors of `StatePass.run`. The state is broken after an error.
    """
    state_pass = begin_pass(state, groups, gradients)
    values = begin_values(state, groups, state_pass)
    run_pass(state, state_pass, values)


def advanced(state: TrainingState, groups: Groups) -> list[dict[str, Any]]:
    """Return the hyper-parameters that the optimizer's class itself changes in a step.

    It is called while parameters have their gradients. `advance` writes the result into
    ``param_groups`` once the pass has taken the hyper-parameters before the step.
    """
    return [
        state.rule.advance(g, has_gradient=any(p.grad is not None for p in g["params"]))
        for g in groups
    ]


def advance(groups: Groups, changes: Sequence[dict[str, Any]]) -> None:
    """Write what the optimizer's class itself changes in a step into ``param_groups``."""
    for group, changed in zip(groups, changes, strict=True):
        group.update(changed)


def move_state(state: TrainingState, groups: Groups) -> None:
    """Copy the state from a checkpoint's slot to a working slot, without a step.

    Raises the errors of `StatePass.run`. The state is broken after an error.
    """
    nothing = [None] * len(state.table.trainables)
    run_pass(state, begin_pass(state, groups, nothing, is_step=False))


def begin_values(state: TrainingState, groups: Groups, state_pass: StatePass) -> Values:
    """Agree with the other ranks on a step, before anything is changed.

    Returns:
        The exchange of new values with the other ranks during the pass.

    Raises:
        RanksError: The ranks differ. Nothing has been changed.
    """
    try:
        if not state.ranks.gathers:
            state.ranks.require_same_calls()
            return NoValues()
        seal, named = state.seal, state.table.live(groups)
        return state.ranks.begin_step(
            Step(
                number=state_pass.step,
                layout=state.layout,
                stepped=state.table.with_gradient(groups),
                chunks=state_pass.chunks,
                memory=named.__getitem__,
                before_write=seal.wait_copied_of if seal is not None else _no_wait,
            )
        )
    except BaseException:
        state.slots.torn(state_pass.target)  # the slot is kept for the next pass
        raise


def _no_wait(name: str) -> None:
    """Return at once: no seal copies the tensor."""
    del name


def run_pass(state: TrainingState, state_pass: StatePass, values: Values | None = None) -> None:
    """Run a pass on the calling thread, and record its success or failure."""
    values = NoValues() if values is None else values
    try:
        try:
            scalars = state_pass.run(values.updated)
        except BaseException as error:
            failure = values.fail(error)
            if failure is error:
                raise
            raise failure from error
        values.finish()
        pass_ended(state, state_pass, scalars)
    except BaseException as error:
        state.ranks.failed(error)
        failure = pass_failed(state, state_pass, error)
        if failure is error:
            raise
        raise failure from error


def begin_pass(
    state: TrainingState,
    groups: Groups,
    gradients: Sequence[torch.Tensor | None],
    *,
    is_step: bool = True,
) -> StatePass:
    """Prepare a step over every chunk that needs it, or over all chunks if the state moves."""
    with state.refusing_step() if is_step else nullcontext():
        updater = _updater(state, groups, gradients)
        state.ring()  # an error in allocating it comes before the ranks agree on the step
    chunks = state.chunks()
    if state.slots.is_working:
        chunks = [c for c in chunks if updater.touched(c)]
    return new_pass(
        state, groups, updater, chunks, source=state.slots.present, lock=state.update_lock
    )


def _updater(
    state: TrainingState, groups: Groups, gradients: Sequence[torch.Tensor | None]
) -> ChunkUpdater:
    """Return what updates the chunks of a step, on the device that was chosen for it."""
    table, traffic = state.table, state.meter.traffic
    announce_uses(t.parameter for t in table.trainables)
    inputs = StepInputs(
        layout=state.layout,
        groups=groups,
        parameters=memories(table.trainables),
        gradients=gradients,
        scalars=table.scalars,
        step=state.num_steps + 1,
        seed=state.options.rounding_seed,
        factors=state.gradient_factors,
    )
    if state.compute is None:
        kernel = state.kernel.kernel
        host = HostUpdater(state.rule, state.pool, inputs, kernel=kernel, traffic=traffic)
        state.update_code = host.code(state.kernel.code)
        return host
    updater = DeviceUpdater(state.rule, state.pool, inputs, compute=state.compute)
    state.update_code = updater.code(f"kernels ({state.compute.device})")
    return updater


def new_pass(
    state: TrainingState,
    groups: Groups,
    work: ChunkWork,
    chunks: Sequence[int],
    *,
    source: StateSource | None,
    lock: AbstractContextManager[object] | None = None,
) -> StatePass:
    """Return a pass that writes the working slot, or a new slot if there is no working slot."""
    ring = state.ring()
    with state.meter.timed("wait_seal_s"):
        target = state.slots.target(ring.layout, len(groups))
    return StatePass(
        ring,
        work,
        step=state.num_steps + 1,
        source=source,
        target=target,
        chunks=chunks,
        seal=state.seal,
        meter=state.meter,
        run=state.pool.map,
        lock=lock,
    )


def pass_ended(state: TrainingState, state_pass: StatePass, scalars: list[Scalars | None]) -> None:
    """Record that a pass has succeeded, and read ahead for the next one."""
    state.table.scalars = scalars
    sealing = state.seal.slot if state.seal is not None else None
    ring, previous = state_pass.streamer, state.slots.moved_to(state_pass.target, sealing)
    if previous is not None:
        ring.synchronize()
        state.store.release(previous)
    ring.begin(state.slots.present, state.chunks())


def pass_failed(state: TrainingState, state_pass: StatePass, error: BaseException) -> BaseException:
    """Record that a pass has failed half way, after which only a restore can continue.

    Returns:
        The exception to raise.
    """
    state.lifecycle.broken = f"step {state_pass.step} failed half way ({error!r})"
    state.num_steps = state_pass.step - 1
    state.slots.torn(state_pass.target)
    # With several ranks, the error that all of them raise has the damage as its cause.
    damage = error if isinstance(error, DamagedError) else error.__cause__
    if not isinstance(damage, DamagedError):
        return error
    refusal = ""
    source = state_pass.source
    checkpoint = None if source is None else state.store.checkpoint_of(source)
    if isinstance(source, RecutSource):
        checkpoint = state.slots.sealed
    if checkpoint is not None:
        refusal = try_to_quarantine(state.store, checkpoint, damage)
    if damage is not error:
        return error
    return DamagedError(f"{error}; {refusal or state.lifecycle.remedy()}")
