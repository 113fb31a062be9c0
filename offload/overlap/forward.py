"""Engine whose step runs beside the forward that follows it (``overlap="forward"``).

`step` moves the gradients out (and copies those that the program could still write to), starts the
pass on a thread and returns. Hooks on the model wait for the parameters that they need. A
checkpoint that is requested during the pass is captured at once, except for the parameters and the
state; its seal begins when the pass has ended. While a pass is running, the engine belongs to the
pass's thread, and every other call first waits for the pass.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from offload.checkpoint.checkpoint import Checkpoint
from offload.engine.chunk_pass import StatePass
from offload.engine.engine import Groups, Metrics
from offload.engine.seal import Captured, SealHandle, capture
from offload.engine.state_dict import ExchangingEngine
from offload.errors import OffloadError, SealError, reason_of
from offload.format.train_state import encode
from offload.overlap.background_pass import BesideDeviceUpdater, BesideUpdater, RunningPass
from offload.overlap.forward_hooks import ForwardHooks
from offload.overlap.own_gradients import copy_what_others_hold
from offload.store.slot import Slot
from offload.update.rules import Scalars


class ForwardEngine(ExchangingEngine):
    """An engine whose steps overlap with the model's next forward.

    Args:
        model: The module that is called in training. Hooks on its modules wait for its parameters.
        arguments: Positional arguments of `Engine`.
        options: Keyword arguments of `Engine`.
    """

    _updater_class = BesideUpdater
    _device_updater_class = BesideDeviceUpdater

    def __init__(self, *arguments: Any, model: torch.nn.Module, **options: Any) -> None:
        super().__init__(*arguments, model=model, **options)
        self._running: RunningPass | None = None
        self._late_error: OffloadError | None = None
        """Error of a checkpoint that the pass's thread made; the next `join` raises it."""
        self._hooks = ForwardHooks(model)
        self._versions: dict[str, int] = {}
        """Versions of the parameters at the end of the last step, by name; see `Captured`."""

    def attach(self, groups: Callable[[], Groups | None]) -> None:  # noqa: ARG002
        """Put hooks on the model."""
        self._hooks.attach()

    def join(self) -> None:
        """Wait for the running step, and for a checkpoint that was requested during it to begin.

        Raises:
            BaseException: The step failed, and no call has raised its error yet.
            SealError: A checkpoint failed that should have begun at the end of the step.
        """
        running = self._running
        if running is not None:
            running.join()
            self._running = None
            self._hooks.release()
            running.raise_error()
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error

    def before_hooks(self) -> None:
        """Wait for the running step before the user's hooks, if parameters are not watched."""
        if not self._hooks.sees_readers:
            self._hooks.wait()

    def step(self, groups: Groups) -> None:
        """Begin to update every parameter that has a gradient, and set its ``grad`` to None.

        The call returns before the parameters are updated, unless their readers cannot be observed.
        """
        self.join()
        self._require_usable()
        self._collect_seal()
        with self._meter.timed("step_s"):
            if not self._table.is_current(groups):
                self._relayout(groups)
            gradients = self._table.gradients(groups)
            if all(gradient is None for gradient in gradients):
                self.num_steps += 1
                return
            must_wait = self._hooks.plan(self._layout(), self._table.trainables, gradients)
            num_copied = copy_what_others_hold(gradients)
            state_pass = self._begin_pass(groups, gradients)
            running = RunningPass(state_pass, self._pass_ended, self._pass_failed, self._meter)
            try:
                self._move(gradients, num_copied)
                del gradients  # so that the pass frees each gradient when it has been applied
                self._meter.steps += 1
                self.num_steps += 1
                self._running = running  # set first: beginning may be interrupted
                must_wait += self._hooks.begin(running)
                running.start()
            except BaseException as error:
                if running.cancel():
                    self._running = None
                    self._hooks.release()
                    self._pass_failed(state_pass, error)
                raise
            self._hooks.wait_for(must_wait)

    def checkpoint(
        self, groups: Groups, train_state: object, metrics: Metrics = None
    ) -> SealHandle:
        """Seal the present state once the running step has ended.

        See `OffloadedOptimizer.checkpoint`.
        """
        running = self._running
        if running is not None and not running.ended and self._late_error is None:
            with self._hooks.suspended():
                target = running.state_pass.target
                captured = self._capture_early(target, groups, train_state, metrics)
            if captured is not None and running.then(partial(self._seal_after, target, captured)):
                return captured.handle
        self.join()
        return super().checkpoint(groups, train_state, metrics)

    def restore(
        self,
        groups: Groups,
        which: int | str | None,
        *,
        discard_newer: bool,
        verify: bool | None = None,
    ) -> Checkpoint | None:
        """Continue from a checkpoint; an error of the running step becomes a warning.

        See `OffloadedOptimizer.restore`.
        """
        self._require_alive()
        try:
            self.join()
        except Exception as error:  # noqa: BLE001  (the restore replaces the state that failed)
            warnings.warn(f"given up by restore(): {error}", RuntimeWarning, stacklevel=3)
        self._late_error = None
        return super().restore(groups, which, discard_newer=discard_newer, verify=verify)

    def add_parameters(self, groups: Groups) -> None:
        """Lay out parameters that were added to the groups, after the running step."""
        self.join()
        super().add_parameters(groups)

    def synchronize(self) -> None:
        """Wait for the running step and every transfer and seal, and raise their errors."""
        self.join()
        super().synchronize()

    def close(self) -> None:
        """Wait for all work in flight, and release all resources and the model's hooks."""
        if self._closed or os.getpid() != self._pid:
            return
        if self._running is not None:
            self._running.join()  # after an interrupt here, close() can be called again
        self._hooks.remove()
        try:
            self.join()
        finally:
            super().close()

    def _pass_ended(self, state_pass: StatePass, scalars: list[Scalars | None]) -> None:
        super()._pass_ended(state_pass, scalars)
        # This comes before any thread that waits for the pass can edit a parameter.
        self._versions = {t.spec.name: t.tensor._version for t in self._table.trainables}

    def _order(self) -> Sequence[int]:
        chunks = super()._order()
        return self._hooks.order if len(self._hooks.order) == len(chunks) else chunks

    def _relayout(self, groups: Groups) -> None:
        before = self._table.layout
        super()._relayout(groups)
        if before is not None and before is not self._table.layout:
            self._hooks.attach()  # there may be new modules

    def _move(self, gradients: Sequence[torch.Tensor | None], num_copied: int) -> None:
        """Remove the gradients from their parameters, and count their bytes.

        Args:
            gradients: Gradients of the parameters in the table.
            num_copied: Number of bytes in gradients that are copies.
        """
        num_bytes = 0
        for trainable, gradient in zip(self._table.trainables, gradients, strict=True):
            if gradient is not None:
                trainable.tensor.grad = None
                num_bytes += gradient.nbytes
        meter = self._meter
        meter.moved_gradient_bytes = max(meter.moved_gradient_bytes, num_bytes)
        meter.copied_gradient_bytes = max(meter.copied_gradient_bytes, num_copied)

    def _capture_early(
        self, target: Slot, groups: Groups, train_state: object, metrics: Metrics
    ) -> Captured | None:
        """Capture the checkpoint for the end of the running step, while the step still runs.

        This reads nothing that the pass changes, except for scalar state and versions, which are
        read again at the end of the pass.

        Returns:
            None if only an engine at rest can capture: the layout has changed, or the model's state
            dict has tensors that may be computed from parameters or share their memory.
        """
        encoded = encode(train_state)
        layout, _ = self._table.describe(groups)
        if layout != self._layout():
            return None
        stored = self._table.stored(groups)
        model = self._table.model
        buffers = set(map(id, model.buffers())) if model is not None else set()
        if any(
            item.is_alias or (item.by_value and id(item.tensor) not in buffers) for item in stored
        ):
            return None
        return capture(groups, self._table, stored, target, self.num_steps, encoded, metrics or {})

    def _seal_after(self, slot: Slot, captured: Captured, failure: BaseException | None) -> None:
        """Begin a seal at the end of a pass, on the pass's thread.

        Args:
            slot: Slot to seal.
            captured: Content of the checkpoint, as captured during the pass.
            failure: Error of the pass; None if it succeeded.
        """
        try:
            if failure is not None:
                raise failure
            try:
                self._collect_seal(wait=True)
            except SealError as error:
                self._late_error = error  # of the previous checkpoint; this one can still be made
            manifest = replace(captured.manifest, scalars=tuple(self._table.scalars))
            versions = {**captured.versions, **self._versions}
            self._begin_seal(slot, replace(captured, manifest=manifest, versions=versions))
        except BaseException as error:  # noqa: BLE001  (the handle passes it to the caller)
            reason = SealError(
                f"step {captured.handle.step} could not be sealed, so it is not a checkpoint; "
                f"those made before are untouched: {reason_of(error)}"
            )
            reason.__cause__ = error
            captured.handle.fail(reason)
            if failure is None:
                self._late_error = self._late_error or reason
