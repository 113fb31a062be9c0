"""Sealing: turns the working slot into a checkpoint, while training goes on.

`capture` copies everything that the next forward may change (buffers, train state,
hyper-parameters). A `Seal` writes the parameters from the live tensors, makes everything durable,
and renames the slot, on a thread. The next step waits, chunk by chunk, until the parameters that it
is about to overwrite have been copied.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gds.waiting import Monitor, start
from offload.ambient import in_neutral
from offload.checkpoint.checkpoint import Checkpoint
from offload.device.boundary import Marks, marks_of
from offload.engine.seal_handle import SEAL_THREAD, SealHandle
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
from offload.stream.passes import SealInFlight
from offload.stream.streamer import Flush
from offload.units import duration, size

_EDITED = (
    "while it was being copied into the checkpoint. Between checkpoint() and the next step(), call "
    ".result() on the handle before editing parameters"
)


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


class Seal(SealInFlight):
    """One seal in flight."""

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
        self.slot: StateSlot = slot
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

    @property
    def copied(self) -> list[tuple[torch.Tensor, int]]:
        """Tensors that the checkpoint gets, each with its number of in-place changes at the call.

        Tensors that were copied at once are left out.
        """
        return [(tensor, version) for *_, tensor, version in self._versions]

    def start(self) -> None:
        """Seal on a new thread, which the interpreter waits for before it exits."""
        try:
            start(threading.Thread(target=in_neutral(self.run), name=SEAL_THREAD))
        except RuntimeError:
            # The interpreter is shutting down and starts no more threads: seal before returning.
            self.run()

    def claim(self) -> bool:
        """Return True to the first caller only, which then runs the seal, or has cancelled it."""
        with self._progress:
            is_first, self._is_claimed = not self._is_claimed, True
            return is_first

    def run(self) -> None:
        """Seal, unless the seal has been cancelled. Never raises: the outcome is in `handle`."""
        if not self.claim():
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
            self._meter.note_failed_seal(self.handle.step, failure)
            model.forget()
            self._flush.abandon()
            self._store.sealing.abandon(error)
            self._finish()
            self.handle.fail(failure)
        else:
            written_bytes = self._model_bytes + self.slot.document_bytes
            seconds = time.perf_counter() - started
            self._meter.count_seal(written_bytes, seconds)
            self.handle.bytes_written, self.handle.seal_s = written_bytes, seconds
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
        """Wait for all bytes."""
        self.wait_copied(self._data_bytes)

    def stops(self, layout: Layout) -> Sequence[int]:
        """Return the stops of the copy; from the first call on, edits are the step's own."""
        with self._progress:
            if not self._are_released:
                self._are_released = True
                self._edited = next(self._changed(self._versions), "")
        model = self._model
        return (0,) * layout.num_chunks if model is None else model.stops(layout)

    def wait_copied_of(self, name: str) -> None:
        """Wait, unless the seal has ended."""
        model = self._model
        if model is not None:
            self.wait_copied(model.stop_of(name))

    def wait_copied(self, nbytes: int) -> None:
        """Wait, and count the seconds."""
        if self._copied >= nbytes:
            return
        with self._meter.timed("wait_seal_s"):
            self._progress.wait_until(lambda: self._copied >= nbytes)

    def _seal(self, model: ModelCopy) -> Checkpoint:
        slot = self.slot
        self._store.expire()
        self._flush.start(slot)
        self._flush.wait_parameters()
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
