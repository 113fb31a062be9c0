"""Sealing: turns the working slot into a checkpoint, while training goes on.

`capture` copies everything that the next forward pass may change (buffers, train state,
hyper-parameters). `Seal` leaves the rest to a thread, which writes the parameters from the live
tensors, makes everything durable, and renames the slot. The parameters do not change until the next
step. That step waits, chunk by chunk, until the seal has copied the parameters that the step is
about to overwrite.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from gds.waiting import Monitor, Pending, start
from offload.ambient import in_neutral
from offload.checkpoint.checkpoint import Checkpoint
from offload.device.boundary import Marks, marks_of
from offload.errors import SealError, reason_of
from offload.format._manifest_fields import NOT_HYPERPARAMETERS
from offload.format.layout import Layout
from offload.format.manifest import Manifest
from offload.format.train_state import EncodedState
from offload.journal import log_event
from offload.model.model_copy import ModelCopy
from offload.model.stored import Stored
from offload.model.table import ParameterTable
from offload.store.sealing import Composition
from offload.store.state_store import Sealer, StateSlot, StateStore
from offload.stream.meter import Meter
from offload.stream.streamer import Flush
from offload.units import duration, size

SEAL_THREAD = "offload-seal"
"""Name of the threads that seal."""

_EDITED = (
    "while it was being copied into the checkpoint. Between checkpoint() and the next step(), call "
    ".result() on the handle before editing parameters"
)


class SealHandle:
    """Handle of a checkpoint that is being sealed, or has been sealed.

    The checkpoint becomes durable by itself; nothing needs to be called. If sealing fails,
    `result`, the next `step` and the next `checkpoint` raise the error. With several ranks `step`
    warns of it, and `checkpoint` raises it only if `result` has not raised it on all ranks.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        """Number of optimizer steps after which the checkpoint was asked for."""
        self.was_raised = False
        """Whether the user has seen the error with which sealing has failed."""
        self._future: Pending[Checkpoint] = Pending()
        self._caller = threading.get_ident()
        self._is_awaited = False
        """Whether the thread that asked for the checkpoint waits for it."""

    def done(self) -> bool:
        """Return whether sealing has ended, with success or with an error."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is durable and return it.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            SealError: The checkpoint could not be sealed. Older checkpoints are untouched.
            TimeoutError: The checkpoint is still being sealed after `timeout` seconds.
        """
        try:
            return self.outcome(timeout)
        except SealError:
            self.was_raised = True
            raise

    def outcome(self, timeout: float | None = None) -> Checkpoint:
        """Return what `result` returns; the user does not see an error that this raises."""
        with self._awaited():
            return self._future.result(timeout)

    def when_sealed(self, use: Callable[[Checkpoint], object]) -> None:
        """Call a function with the checkpoint once it is durable; not if sealing fails.

        The call is made on the thread that seals, or at once if the checkpoint is durable. The
        function must be short and must not wait. An `Exception` that it raises is logged.
        """

        def ended(future: Pending[Checkpoint]) -> None:
            """Use the checkpoint, if the seal made one."""
            if future.exception() is None:
                use(future.result())

        self._future.add_done_callback(ended)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "SealHandle cannot be copied or pickled: the checkpoint is being made by this process. "
            "Call result(), and send result().path"
        )

    def __repr__(self) -> str:
        return f"SealHandle(step={self.step}, done={self.done()})"

    def wait(self) -> None:
        """Wait until sealing has ended, with success or with an error."""
        with self._awaited():
            self._future.wait()

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        is_caller = threading.get_ident() == self._caller
        self._is_awaited |= is_caller
        try:
            yield
        finally:
            self._is_awaited &= not is_caller

    def place_of_caller(self) -> tuple[int, int] | None:
        """Return where the thread is that asked for the checkpoint; None if it edits nothing.

        If the place is the same at two times, the thread may be in one call, such as an edit.
        """
        frame = None if self._is_awaited else sys._current_frames().get(self._caller)
        return None if frame is None else (id(frame), frame.f_lasti)

    def fail(self, error: SealError) -> None:
        """Make `result` raise an error, because the checkpoint will never be sealed."""
        self._future.set_exception(error)

    @classmethod
    def finished(cls, checkpoint: Checkpoint) -> SealHandle:
        """Return a handle for a checkpoint that is durable already."""
        handle = cls(checkpoint.step)
        handle._future.set_result(checkpoint)
        return handle


@dataclass(frozen=True, slots=True)
class Captured:
    """Content of a checkpoint, as of the call of `checkpoint`."""

    composition: Composition
    """Content of the checkpoint besides its tensors. Digests are filled in as they become known."""

    stored: Sequence[Stored]
    """Tensors of the model file. Those that a forward pass changes are copies."""

    versions: Mapping[str, int]
    """Number of in-place changes of each tensor that is not a copy, by name, at that moment."""

    marks: Marks
    """Positions in the streams of devices at that moment."""

    handle: SealHandle
    """Handle that the caller has received."""

    @property
    def manifest(self) -> Manifest:
        """Manifest of the checkpoint."""
        return self.composition.manifest


class Seal:
    """One seal in flight.

    Args:
        store: Store of the slot. `Sealer.begin` must be called before `start`.
        slot: Working slot that holds the state.
        captured: Content of the checkpoint.
        model: Copy of the model's tensors that the seal makes.
        flush: State that is not in the slot yet.
        meter: Meter that counts the seconds for which other threads wait for the seal.
    """

    def __init__(
        self,
        store: StateStore,
        slot: StateSlot,
        captured: Captured,
        model: ModelCopy,
        flush: Flush,
        meter: Meter,
    ) -> None:
        self._meter = meter
        self.handle = captured.handle
        self._store = store
        self.slot = slot
        self._composition = captured.composition
        self._model: ModelCopy | None = model
        self._is_on_host = not captured.marks
        self._data_bytes = model.data_bytes
        self._flush = flush
        self._progress = Monitor()
        self._copied = 0
        self._is_claimed = False
        self._versions: list[tuple[int, str, torch.Tensor, int]] = []
        """For each tensor that must not change: `ModelCopy.stop_of`, name, memory and version."""
        for item in captured.stored:
            name = item.spec.name
            if not item.by_value and not item.tensor.is_inference():  # these have no version
                version = captured.versions[name]
                self._versions.append((model.stop_of(name), name, item.tensor, version))
        self._versions.sort(key=lambda version: version[0])
        self._num_checked = 0
        self._are_released = False
        """Whether a step may change tensors that have been copied."""
        self._edited = ""
        """Name of a tensor that had been edited when a step was about to change tensors."""
        self._model_bytes = 0
        """Bytes written to the model file."""

    def start(self, succeeded: Callable[[int, float], None]) -> None:
        """Seal on a new thread, which the interpreter waits for before it exits.

        Args:
            succeeded: Called with the number of bytes written and the seconds taken, if the seal
                succeeds.
        """
        try:
            target = in_neutral(self.run)
            start(threading.Thread(target=target, args=(succeeded,), name=SEAL_THREAD))
        except RuntimeError:
            # The interpreter is shutting down and starts no more threads: seal before returning.
            self.run(succeeded)

    def cancel(self) -> bool:
        """Prevent the seal from beginning; return False if it has begun already."""
        return self._claim()

    def _claim(self) -> bool:
        """Return True to the first caller only, which then runs the seal or cancels it."""
        with self._progress:
            is_first, self._is_claimed = not self._is_claimed, True
            return is_first

    def run(self, succeeded: Callable[[int, float], None]) -> None:
        """Seal, unless the seal has been cancelled. Never raises: the outcome is in `handle`.

        Args:
            succeeded: Called with the number of bytes written and the seconds taken, if the seal
                succeeds.
        """
        if not self._claim():
            return
        started, model = time.perf_counter(), self._model
        if model is None:
            raise RuntimeError("a seal runs once, and this one has ended")
        try:
            # A step that has begun meanwhile waits for this thread, and reading a watched parameter
            # waits for that step. Watching is off, so that this thread does not wait for itself.
            with torch._C.DisableTorchFunctionSubclass():
                checkpoint = self._seal(model)
        except BaseException as error:  # noqa: BLE001  (the handle carries it to the caller)
            failure = (
                error
                if isinstance(error, SealError)
                else SealError(
                    f"sealing step {self.handle.step} failed, so it is not a checkpoint; earlier "
                    f"checkpoints are untouched: {reason_of(error)}"
                )
            )
            if failure is not error:
                failure.__cause__ = error
            model.forget()
            self._flush.abandon()
            self._store.sealing.abandon(error)
            self._finish()
            self.handle.fail(failure)
        else:
            written_bytes, seconds = self._written_bytes(), time.perf_counter() - started
            succeeded(written_bytes, seconds)
            self._finish()
            # Freed now, because the thread that waits for the result may allocate as much memory
            # before this thread has ended.
            self._model = None
            del model, self._flush
            self.handle._future.set_result(checkpoint)
            log_event(
                f"{checkpoint.path}: sealed step {checkpoint.step} in {duration(seconds)}, "
                f"{size(written_bytes)} written"
            )
        self._store.journal.tell()  # nobody waits for this thread any more

    def wait_all_copied(self) -> None:
        """Wait until everything has been copied from the model."""
        self.wait_copied(self._data_bytes)

    def stops(self, layout: Layout) -> Sequence[int]:
        """Return, for each chunk of a layout, the bytes that `wait_copied` has to wait for.

        The caller is a pass that is about to change tensors. Until then nobody may edit them.
        """
        with self._progress:
            if not self._are_released:
                self._are_released = True
                self._edited = next(self._changed(self._versions), "")
        model = self._model
        return (0,) * layout.num_chunks if model is None else model.stops(layout)

    def wait_copied_of(self, name: str) -> None:
        """Wait until a tensor has been copied from the model."""
        model = self._model
        if model is not None:
            self.wait_copied(model.stop_of(name))

    def wait_copied(self, nbytes: int) -> None:
        """Wait until `nbytes` bytes of the model file's data have been copied from the model."""
        if self._copied >= nbytes:
            return
        with self._meter.timed("wait_seal_s"):
            self._progress.wait_until(lambda: self._copied >= nbytes)

    def _seal(self, model: ModelCopy) -> Checkpoint:
        slot = self.slot
        self._store.expire()
        self._flush.start(slot)
        digests, self._model_bytes = model.write(self._publish)
        place = self.handle.place_of_caller()
        self._flush.wait()
        if place is not None and place == self.handle.place_of_caller() and self._is_on_host:
            self._require_unchanged(model, digests)
        self._require_unedited()
        stored = self._store.sealing.seal(slot, self._composition, digests)
        return self._store.reader_of(stored)

    def _publish(self, copied: int) -> None:
        first = self._num_checked
        while (n := self._num_checked) < len(self._versions) and self._versions[n][0] <= copied:
            self._num_checked += 1
        self._refuse(next(self._changed(self._versions[first : self._num_checked]), ""))
        with self._progress:
            self._copied = copied
            self._progress.notify_all()

    def _require_unchanged(self, model: ModelCopy, digests: Sequence[str]) -> None:
        """Refuse an edit that began before its tensor was copied, and has not ended yet."""
        is_same = model.is_same(digests)
        with self._progress:
            if not (is_same or self._are_released):
                self._refuse(next(self._changed(self._versions), ""))  # it may have ended by now
                raise RuntimeError(f"the model was being changed in place {_EDITED}")

    def _require_unedited(self) -> None:
        """Refuse edits that began before their tensors were copied, and have ended since.

        torch counts an edit when it ends. So everything is compared once more after the last copy,
        or, if a step comes before that, when the step begins.
        """
        with self._progress:
            if not self._are_released:
                self._edited = next(self._changed(self._versions), "")
            self._refuse(self._edited)

    @staticmethod
    def _changed(versions: Iterable[tuple[int, str, torch.Tensor, int]]) -> Iterator[str]:
        """Yield the names of tensors that were changed in place."""
        return (name for _, name, tensor, version in versions if tensor._version != version)

    @staticmethod
    def _refuse(name: str) -> None:
        """Raise the error for the tensor of this name that was changed in place; "" for none."""
        if name:
            raise RuntimeError(f"{name!r} was changed in place {_EDITED}")

    def _finish(self) -> None:
        self._store.sealing.end()
        with self._progress:
            self._copied = 1 << 62  # no thread needs to wait any longer, whatever the outcome
            self._progress.notify_all()

    def _written_bytes(self) -> int:
        return self._model_bytes + self.slot.document_bytes


def capture(
    sealing: Sealer,
    groups: Sequence[Mapping[str, Any]],
    table: ParameterTable,
    stored: Sequence[Stored],
    slot: StateSlot,
    step: int,
    train_state: EncodedState,
    metrics: Mapping[str, float],
    update_code: str,
) -> Captured:
    """Copy the present content of a checkpoint, except for its parameters.

    Data that is too large raises an error here, before a checkpoint is withdrawn.

    Args:
        sealing: Sealer of the store.
        groups: ``param_groups`` of the optimizer.
        table: Parameters of the optimizer, and their scalar state.
        stored: Tensors that ``model.safetensors`` will have.
        slot: Slot that holds the state.
        step: Optimizer steps taken.
        train_state: Encoded train state of the user.
        metrics: Checked metrics of the user.
        update_code: Code that updates the state, in words.

    Raises:
        OffloadError: The hyper-parameters do not fit into the space that the slot reserves.
        TypeError: A hyper-parameter cannot be stored. The message names it.
        offload.errors.TrainStateTooLargeError: The train state does not fit.
    """
    composition = sealing.compose(
        slot,
        train_state,
        step=step,
        torch_version=torch.__version__,
        optimizer=table.rule.class_name,
        groups=[
            {k: copy.deepcopy(v) for k, v in group.items() if k not in NOT_HYPERPARAMETERS}
            for group in groups
        ],
        scalars=table.scalars,
        order=_parameter_order(groups, stored, slot.layout),
        metrics=metrics,
        update_code=update_code,
    )
    with torch._C.DisableTorchFunctionSubclass():  # as in `versions_of`
        captured = [item.captured() for item in stored]
    marks = marks_of(item.tensor for item in captured)
    return Captured(composition, captured, versions_of(stored), marks, SealHandle(step))


def versions_of(stored: Iterable[Stored]) -> dict[str, int]:
    """Return, by name, how often each tensor has been changed in place.

    Tensors that a seal copies at once are left out. So are tensors that were made in inference
    mode, because torch does not count their changes.
    """
    # A step beside the model may be changing the tensors. Watching is off, so this does not wait.
    with torch._C.DisableTorchFunctionSubclass():
        return {
            item.spec.name: item.tensor._version
            for item in stored
            if not item.by_value and not item.tensor.is_inference()
        }


def _parameter_order(
    groups: Sequence[Mapping[str, Any]], stored: Sequence[Stored], layout: Layout
) -> tuple[tuple[int, ...], ...] | None:
    positions = {tensor.name: position for position, tensor in enumerate(layout.model)}
    known = {item.parameter: positions[item.spec.name] for item in stored}
    if any(p not in known for group in groups for p in group["params"]):
        return None  # a frozen parameter that does not belong to the model
    return tuple(tuple(known[p] for p in group["params"]) for group in groups)
