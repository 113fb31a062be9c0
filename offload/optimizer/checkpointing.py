"""The part of an optimizer that makes, keeps, lists and restores checkpoints."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, SupportsFloat, TypeAlias

from offload.ambient import neutral
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.listing import CheckpointInfo
from offload.engine.engine import Engine
from offload.engine.reference import Position
from offload.engine.seal_handle import SealHandle
from offload.engine.stats import Stats
from offload.errors import CheckpointNotFoundError
from offload.format.metrics import take_metrics
from offload.format.train_state import require_state
from offload.journal import say
from offload.near.place import is_remote
from offload.optimizer.store_owner import StoreOwner
from offload.record.recorder import Recorder

CheckpointName: TypeAlias = int | str | os.PathLike[str] | Checkpoint | CheckpointInfo
"""Designation of a checkpoint by the user: its step number, its path, or an object for it."""


class CheckpointingOptimizer(StoreOwner):
    """A torch optimizer whose state becomes checkpoints of its store."""

    upload_sealed: bool

    def checkpoint(
        self, train_state: Any = None, *, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> SealHandle:
        """Make the present state a checkpoint, in the background.

        No optimizer state is read, copied or moved. The parameters are written beside it, and the
        directory is renamed. The call returns at once. Parameters must not be edited before the
        next `step` unless ``.result()`` of the handle has returned. If the present step has a
        checkpoint already and nothing has changed, that checkpoint is kept. Then only its train
        state is replaced, and its metrics if new ones are given.

        Args:
            train_state: Other values needed to continue (schedulers, random states, position in the
                data), captured by value during the call: JSON-like values, numpy arrays, tensors.
                A bare text, path or number is refused, since it may be meant as a file name or a
                step number.
            metrics: Measured values, such as ``{"val_loss": 1.2}``: at most 16 Python numbers or
                tensors of one element. `BestBy` ranks by them, and ``offload ls`` shows them. A
                value that is not finite is left out, with a `RuntimeWarning`.

        Returns:
            A handle; its ``result()`` returns when the checkpoint is durable.

        Raises:
            SealError: The checkpoint before this one could not be sealed; or, with several ranks,
                this rank cannot store its content, so that there is no checkpoint on any rank.
            MetricError: A metric is not a number. The message names it. Nothing has been done.
            PinError: Another checkpoint of this step is pinned, and would be replaced.
            SlotFullError: The disk is full, because of pins or checkpoints that are kept for good.
                Make room as the message says, and call this again.
            TrainStateTypeError: `train_state` cannot be stored losslessly, or is a bare text, path
                or number. The class is that of `offload.format`.
            TrainStateTooLargeError: `train_state` is larger than the space reserved for it. The
                class is that of `offload.format`.
            OverlapError: With ``overlap="backward"``, a backward has begun since the last step.
        """
        try:
            checked = None if metrics is None else take_metrics(metrics)
            require_state(train_state)
        except Exception as error:  # also of a user's object, or of a warning that is an error
            with self._exclusive("checkpoint") as engine:
                engine.fail_checkpoint(error)
            raise
        began = time.perf_counter()
        with self._exclusive("checkpoint") as engine:
            try:
                engine.store.keeping.warn_unranked(engine.num_steps, metrics or {})
                if engine.frozen_space.is_due:
                    engine.frozen_space.warn(engine.lay_out(self.param_groups))
            except Exception as error:
                engine.fail_checkpoint(error)
                raise
            handle = engine.checkpoint(self.param_groups, train_state, checked)
        if self._uploads is not None and self.upload_sealed:
            handle.when_sealed(self._uploads.offer)
        if self._recorder is not None:
            self._recorder.called(time.perf_counter() - began)
            handle.when_sealed(partial(_record, self._recorder, handle))
        return handle

    def restore(
        self,
        checkpoint: CheckpointName | None = None,
        *,
        discard_newer: bool = False,
        verify: bool | None = None,
        reencode: bool | None = None,
    ) -> Checkpoint | None:
        """Continue from a checkpoint of this store, by default the newest usable one with state.

        This reads only the parameters and buffers, into the live tensors, and compares them with
        their digests. The optimizer state is read and compared in the first step, or in this call
        with `verify`. Hyper-parameters become those of the checkpoint. Parameters are matched by
        name. A parameter that is frozen now keeps its state; a parameter that was frozen in the
        checkpoint joins with the next step. Another number of ranks than now, or another sharding,
        may have made the checkpoint; the next step then writes the state as it is divided now.

        Data with a wrong digest is read a second time. A checkpoint that is found damaged is
        quarantined: marked on the drive as unusable. If `checkpoint` is None, the previous one is
        then taken, with a warning. If that one is damaged as well, it is not marked, and this
        raises, since bad memory would condemn one checkpoint after another.

        If the store has no checkpoint, `checkpoint` is None, and the options name a tier, this
        takes the newest complete checkpoint of the tier. The call returns when the parameters have
        arrived. The state follows, the first step waits for each chunk of it, and the checkpoint
        appears in the store when all of it is there. With several ranks, each fetches the part that
        it serves, and the first call that needs the state waits for that of all ranks. If another
        number of ranks made the checkpoint, or in another sharding, the call returns when
        everything has arrived.

        Args:
            checkpoint: Step number or path of a checkpoint, a `Checkpoint`, or one of
                `checkpoints`; None for the newest.
            discard_newer: Withdraw checkpoints that are newer than the chosen one. Without it,
                choosing a checkpoint that is not the newest is refused.
            verify: True reads all optimizer state in this call, before any training with it: 12
                bytes per parameter with Adam, which takes as long as the drive needs. Damage of the
                state is then treated like damage of parameters. False leaves the check to the first
                step, which fails at damage. None follows `Options.verify`.
            reencode: With ``state_dtype="int8"``, whether to go on if the state is divided in
                another way now, and some blocks of 32 elements with one scale would be cut. Their
                values are then encoded anew, with one more rounding, and a `RuntimeWarning` says
                so. False refuses it. It must be the same on all ranks. None follows
                `Options.reencode`.

        A line on standard error says what was resumed, such as ``offload: resumed step 30 from
        run/step-00000030``; of several ranks, rank 0 says it. ``OFFLOAD_VERBOSITY=warning`` in the
        environment, or the level of the logger ``offload``, silences it.

        Returns:
            The checkpoint, with ``.step``, ``.train_state`` and ``.path``. None if the store has
            no checkpoint, nor its tier; training then starts from the beginning.

        Raises:
            MismatchError: Model or optimizer differ from those of the checkpoint, or it has
                parameters only (`ParametersOnly`), or there are newer checkpoints, or 8-bit state
                would have to be encoded anew. Nothing has been changed.
            PinError: A newer checkpoint is pinned. Nothing has been changed.
            StoreFullError: Another number of ranks made the checkpoint, and there is no room for
                the state as it is divided now. Nothing has been changed.
            RanksError: The ranks ask for different checkpoints, or one of them failed or was lost;
                or the state was divided in another way, the ranks are on several hosts, and the
                host of one of them does not see all the state that it needs.
            CheckpointNotFoundError: The checkpoint does not exist.
            DamagedError: The damaged checkpoint was asked for, or is the last one left, or is the
                second damaged one in a row.
            CheckpointError: No checkpoint in the store is usable.
            TierError: The store has no checkpoint, and its tier cannot be used.
        """
        which = _which(checkpoint)
        with self._exclusive("restore") as engine:
            found = engine.restore(
                self.param_groups,
                which,
                discard_newer=discard_newer,
                verify=verify,
                reencode=reencode,
                require=partial(_require_generation, engine, checkpoint),
            )
            is_arriving = engine.state.seal is not None  # then the tier has it
        if self._uploads is not None and found is not None and not is_arriving:
            self._uploads.offer(found, restored=True)  # its upload may have been interrupted
        if found is not None:
            say_resumed(self._live_engine(), found.step, found.path)
            if self._recorder is not None:
                self._recorder.restored(found.step)
        return found

    def pin(self, name: str, checkpoint: CheckpointName | None = None) -> None:
        """Keep a checkpoint until `unpin`, regardless of `keep`. The pin is durable on return.

        A name that is in use moves: the checkpoint that had it is subject to `keep` again. From
        the next step on, the disk holds one more slot.

        Args:
            name: Name of the pin, such as ``"best"``, of letters, digits, ``.``, ``_`` and ``-``.
            checkpoint: Step number or path of a checkpoint, a `Checkpoint`, or one of
                `checkpoints`; None for the newest. A checkpoint that is being sealed is waited for.

        Raises:
            SealError: The last checkpoint could not be sealed; nothing has been pinned.
            CheckpointNotFoundError: The checkpoint does not exist, or not any more.
            PinError: The name is not allowed.
            gds.StorageError: The pin could not be written durably.
        """
        with self._exclusive("pin") as engine:
            engine.pin(
                name, _which(checkpoint), require=partial(_require_generation, engine, checkpoint)
            )

    def unpin(self, name: str) -> None:
        """Remove a pin, durably. If nothing else keeps its checkpoint, that is recycled later.

        Raises:
            CheckpointNotFoundError: There is no pin of this name. The message lists the pins.
            gds.StorageError: The pin could not be removed durably.
        """
        with self._exclusive("unpin") as engine:
            engine.unpin(name)

    @property
    def directories(self) -> tuple[str, ...]:
        """Absolute paths of the store's directories, one on each drive; the first is the store."""
        return self._live_engine().store.directories

    @property
    def position(self) -> Position:
        """Position of the present state: store, step, generation, and whether it is sealed.

        A state that is being sealed counts as sealed. A store on one drive gets its lasting
        identity with its first checkpoint; before that, each process sees another identity.

        With ``overlap="forward"`` this property waits for the step that runs beside the model, as
        `state_dict` does, and raises the error of that step. Otherwise it does not wait.

        Raises:
            OverlapError: With ``overlap="backward"``, a backward has begun since the last step.
        """
        engine = self._live_engine()
        with neutral():
            engine.join()
        return engine.position

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the usable checkpoints of the store, as this process knows them, oldest first.

        `restore` can continue from each of them that does not have parameters only. The list leaves
        out checkpoints that are known to be damaged, that have been withdrawn, or that
        ``fresh=True`` has given up, and a checkpoint that is still being sealed (`synchronize`
        waits for it). Each call reads the pins from the drive; a pin that cannot be read is left
        out. No state is read.

        Returns:
            The same values as `offload.list_checkpoints` returns for these checkpoints.

        Raises:
            OffloadError: The optimizer is closed, or was made by another process.
            gds.StorageError: The directory of pins, or the size of a file, could not be read.
        """
        return self._live_engine().checkpoints()

    def pins(self) -> dict[str, str]:
        """Return the path of the pinned checkpoint for each pin of the store, by name.

        Each call reads the pins from the drive; a pin that cannot be read is left out. A pinned
        checkpoint may be damaged, and then is not among `checkpoints`.

        Raises:
            OffloadError: The optimizer is closed, or was made by another process.
            gds.StorageError: The directory of pins could not be read.
        """
        return self._live_engine().pins()

    def find(self, position: Position) -> CheckpointInfo:
        """Return the checkpoint of this store that a saved reference names.

        This changes nothing. `restore` takes the result, to continue from it. The call waits as
        `position` does.

        Args:
            position: Position that `offload.reference_of` returned for a saved `state_dict`.

        Raises:
            MismatchError: The state belongs to another store, was never sealed, or is not in the
                store any more. The message says what to do.
            OverlapError: With ``overlap="backward"``, a backward has begun since the last step.
            OffloadError: The optimizer is closed, or was made by another process.
            gds.StorageError: The directory of pins, or the size of a file, could not be read.
        """
        engine = self._live_engine()
        with neutral():
            engine.join()
        return engine.find(position)

    @property
    def num_ranks(self) -> int:
        """Number of processes that train the model together, this one included."""
        return self._live_engine().state.ranks.size

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps that the present state has seen, including a running one."""
        return self._live_engine().num_steps

    def stats(self) -> Stats:
        """Return the totals of transfers and waiting times so far."""
        found = self._live_engine().stats()
        return found if self._uploads is None else replace(found, tier=self._uploads.stats())

    def synchronize(self) -> None:
        """Wait for all transfers, and any step or seal in flight, and raise their errors."""
        with self._exclusive("synchronize") as engine:
            engine.synchronize()


def _record(recorder: Recorder, handle: SealHandle, sealed: Checkpoint) -> None:
    recorder.sealed(
        sealed.step,
        bytes_written=handle.bytes_written,
        seal_s=handle.seal_s,
        metrics=sealed.metrics,
    )


def _which(checkpoint: CheckpointName | None) -> int | str | None:
    if isinstance(checkpoint, Checkpoint | CheckpointInfo):
        return checkpoint.path
    return checkpoint if isinstance(checkpoint, int | None) else os.fsdecode(checkpoint)


def say_resumed(engine: Engine, step: int, path: str) -> None:
    """Say on the terminal, on rank 0, which checkpoint training goes on from."""
    if engine.state.ranks.rank == 0:
        say(f"resumed step {step} from {_as_typed(path)}")


def _as_typed(path: str) -> str:
    """Return a path as people type it: relative if it is below the current directory."""
    if is_remote(path):
        return path
    with suppress(OSError, ValueError):  # the current directory may be gone
        relative = os.path.relpath(path)
        if not relative.startswith(os.pardir):
            return relative
    return path


def _require_generation(engine: Engine, checkpoint: CheckpointName | None) -> None:
    """Refuse a checkpoint that has been replaced by another one of the same step.

    Raises:
        CheckpointNotFoundError: The path of `checkpoint` now holds another generation.
    """
    if not isinstance(checkpoint, Checkpoint | CheckpointInfo):
        return
    for stored in engine.store.keeping.current:
        found = stored.manifest.generation
        if stored.path == checkpoint.path and checkpoint.generation not in (None, found):
            raise CheckpointNotFoundError(
                errno.ENOENT,
                f"generation {checkpoint.generation} of this step was replaced by generation "
                f"{found}. To use the present one, name it by its step number or path",
                stored.path,
            )
