"""Strategy whose step runs beside the forward that follows it (``overlap="forward"``).

`step` moves the gradients out (and copies those that the program could still write to), starts the
pass on a thread and returns. Hooks on the model wait for the parameters that they need. A
checkpoint that is requested meanwhile is captured at once, except for parameters and state; its
seal begins when the pass has ended. Until then the engine belongs to that thread, and every other
call waits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from sys import getrefcount
from typing import Any, TypeAlias
from weakref import getweakrefcount

import torch

from offload.engine.seal import Captured
from offload.engine.seal_handle import SealHandle
from offload.engine.stepping import (
    Metrics,
    StepStrategy,
    advance,
    advanced,
    begin_pass,
    begin_values,
    pass_ended,
    pass_failed,
)
from offload.engine.training_state import Groups, TrainingState
from offload.errors import OffloadError, SealError, reason_of
from offload.format.train_state import encode
from offload.gradients import OutsideGradient
from offload.overlap.background_pass import RunningPass
from offload.overlap.compiling import compile_lock
from offload.overlap.forward_hooks import ForwardHooks
from offload.store.state_store import StateSlot
from offload.stream.passes import StatePass
from offload.update.kept_state import Scalars


class BesideForward(StepStrategy):
    """The strategy of steps that overlap with the model's next forward."""

    def __init__(self, state: TrainingState, model: torch.nn.Module) -> None:
        super().__init__(state)
        # While any thread compiles a graph, torch's optimizers compute in another way, with results
        # that differ in the last bit.
        state.update_lock = compile_lock
        self._running: RunningPass | None = None
        self._late_error: OffloadError | None = None
        """Error of a checkpoint that the pass's thread made; the next `raise_pending` raises it."""
        self._hooks = ForwardHooks(model)
        self._versions: dict[str, int] = {}
        """Versions of the parameters that the step has changed so far, by name; see `Captured`."""

    def attach(self, groups: Callable[[], Groups | None]) -> None:  # noqa: ARG002
        """Put hooks on the model."""
        self._hooks.attach()

    def settle(self, call: str) -> None:  # noqa: ARG002
        """Wait for the running step, and for a checkpoint that was requested during it to begin."""
        self.raise_pending()

    def raise_pending(self) -> None:
        """Wait for the running step, and for a checkpoint that was requested during it to begin."""
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
        self.raise_pending()
        state, table = self._state, self._state.table
        state.require_step()
        with state.meter.timed("step_s"):
            gradients, is_new = state.begin_step(groups)
            if is_new:
                self.laid_out()
            changes, has_gradient = advanced(state, groups)
            if not has_gradient:
                advance(groups, changes)
                state.num_steps += 1
                return
            try:
                elsewhere = table.named_elsewhere(groups) if state.ranks.gathers else []
                must_wait = self._hooks.plan(state.layout, table.trainables, gradients, elsewhere)
                state.learned_order = self._hooks.order
                num_copied = copy_shared_gradients(gradients)
            except Exception as error:
                state.refuse_step(error)
                raise
            state_pass = begin_pass(state, groups, gradients)
            values = begin_values(state, groups, state_pass)
            self._versions = {}
            running = RunningPass(
                state_pass,
                self._pass_ended,
                self._pass_failed,
                state.meter,
                values,
                updated=self._note_versions,
            )
            try:
                self._move(gradients, num_copied)
                self._clear_elsewhere(groups)
                del gradients  # so that the pass frees each gradient when it has been applied
                state.meter.steps += 1
                state.num_steps += 1
                self._running = running  # set first: beginning may be interrupted
                must_wait += self._hooks.begin(running)
                running.start()
                advance(groups, changes)
            except BaseException as error:
                if running.cancel():
                    self._running = None
                    self._hooks.release()
                    failure = error if values is None else values.fail(error)
                    self._pass_failed(state_pass, failure)
                raise
            self._hooks.wait_for(must_wait)

    def seal_at_end(
        self, groups: Groups, train_state: object, metrics: Metrics
    ) -> SealHandle | None:
        """Capture a checkpoint during the running step, and seal it when the step has ended."""
        running = self._running
        if running is not None and self._may_seal_early(running, groups):
            captured = None
            try:
                with self._hooks.suspended():
                    target = running.state_pass.target
                    captured = self._capture_early(target, groups, train_state, metrics)
            except Exception:
                if self._state.ranks.size == 1:
                    raise
                # `checkpoint` raises the error again, and as on ranks whose step has ended.
            if captured is not None and running.then(partial(self._seal_after, target, captured)):
                return captured.handle
        self.raise_pending()
        return None

    def _may_seal_early(self, running: RunningPass, groups: Groups) -> bool:
        """Return whether a checkpoint may be captured before the running step has ended.

        With several ranks, on some of which the step may have ended, all of them must begin the
        seal, or none, and make the same collective calls before. So each waits for the seal before
        this one, whose outcome is the same on all ranks. What has to be laid out anew is left to
        `checkpoint`, when the step has ended.
        """
        if running.ended or running.has_next or self._late_error is not None:
            return False
        state = self._state
        if state.ranks.size == 1:
            return True
        try:
            if state.seal is not None:
                with state.meter.timed("wait_seal_s"):
                    state.seal.handle.outcome()
        except SealError:
            return False  # `checkpoint` raises it when the step has ended
        state.know_parameters(groups)
        return state.table.is_agreed(groups)

    def give_up(self) -> None:
        """Wait for the running step. If it failed, warn of its error."""
        try:
            self.raise_pending()
        except Exception as error:  # noqa: BLE001  (the restore replaces the state that failed)
            warnings.warn(f"given up by restore(): {error}", RuntimeWarning, stacklevel=4)
        self._late_error = None

    def laid_out(self) -> None:
        """Put hooks on the model's modules again, since some modules may be new."""
        self._hooks.attach()

    def end(self) -> None:
        """Wait for the running step, and remove the hooks from the model."""
        if self._running is not None:
            self._running.join()
        self._hooks.remove()

    def _pass_ended(self, state_pass: StatePass, scalars: list[Scalars | None]) -> None:
        pass_ended(self._state, state_pass, scalars)
        if self._state.ranks.gathers:  # values of other ranks have come after this rank's chunks
            trainables = self._state.table.trainables
            self._versions = {t.spec.name: t.memory._version for t in trainables}

    def _note_versions(self, chunk: int) -> None:
        """Note the versions of a chunk's parameters before any thread can edit them."""
        for piece in self._state.layout.plans[chunk].pieces:
            trainable = self._state.table.trainables[piece.parameter]
            self._versions[trainable.spec.name] = trainable.memory._version

    def _pass_failed(self, state_pass: StatePass, error: BaseException) -> BaseException:
        self._state.ranks.failed(error)
        return pass_failed(self._state, state_pass, error)

    def _move(self, gradients: Sequence[torch.Tensor | None], num_copied: int) -> None:
        """Remove the gradients from their parameters, and count their bytes."""
        num_bytes = 0
        for trainable, gradient in zip(self._state.table.trainables, gradients, strict=True):
            if gradient is not None:
                trainable.parameter.grad = None
                if isinstance(gradient, OutsideGradient):
                    gradient.home.is_taken = True
                num_bytes += gradient.nbytes
        meter = self._state.meter
        meter.moved_gradient_bytes = max(meter.moved_gradient_bytes, num_bytes)
        meter.copied_gradient_bytes = max(meter.copied_gradient_bytes, num_copied)

    def _clear_elsewhere(self, groups: Groups) -> None:
        """Set the gradients of parameters that only other ranks step to None, as those ranks do."""
        for parameter in self._state.table.stepped_elsewhere(groups):
            parameter.grad = None

    def _capture_early(
        self, target: StateSlot, groups: Groups, train_state: object, metrics: Metrics
    ) -> Captured | None:
        """Capture the checkpoint for the end of the running step, while the step still runs.

        This reads nothing that the pass changes, except for scalar state and versions, which are
        read again at the end of the pass.
        """
        encoded = encode(train_state)
        layout, _ = self._state.table.describe(groups)
        if layout != self._state.layout:
            return None
        stored = self._state.table.stored(groups)
        model = self._state.table.model
        buffers = set(map(id, model.buffers())) if model is not None else set()
        if any(
            item.is_alias or (item.by_value and id(item.parameter) not in buffers)
            for item in stored
            if item.is_here
        ):
            return None
        return self._state.capture(groups, stored, target, encoded, metrics)

    def _seal_after(
        self, slot: StateSlot, captured: Captured, failure: BaseException | None
    ) -> None:
        """Begin a seal at the end of a pass, on the pass's thread."""
        try:
            if failure is not None:
                if self._state.ranks.size > 1 and isinstance(failure, Exception):
                    # The step may have ended well on other ranks.
                    self._state.collect_seal(wait=True, errors=False)
                    self._state.fail_seal(failure)  # the state is torn, so this does not raise
                raise failure
            try:
                self._state.collect_seal(wait=True)
            except SealError as error:
                self._late_error = error  # of the previous checkpoint; this one can still be made
            manifest = replace(captured.manifest, scalars=tuple(self._state.table.scalars))
            # A parameter may have been edited before the checkpoint was asked for, or changed by
            # the step after that, but not in the other order: an edit waits for the step.
            versions = {
                name: max(version, self._versions.get(name, version))
                for name, version in captured.versions.items()
            }
            captured = replace(
                captured,
                composition=captured.composition._replace(manifest=manifest),
                versions=versions,
            )
            self._state.begin_seal(slot, captured)
        except BaseException as error:  # noqa: BLE001  (the handle passes it to the caller)
            reason = SealError(
                f"step {captured.handle.step} could not be sealed, so it is not a checkpoint; "
                f"earlier checkpoints are untouched: {reason_of(error)}"
            )
            reason.__cause__ = error
            self._state.meter.note_failed_seal(captured.handle.step, reason)
            captured.handle.fail(reason)
            if failure is None and self._state.seal is None:  # else `collect_seal` raises it
                self._late_error = self._late_error or reason


# torch's type stubs declare neither function.
_num_owners: Any = torch.Tensor._use_count  # type: ignore[attr-defined]
_num_storage_owners: Any = torch._C._storage_Use_Count


_Owners: TypeAlias = tuple[int, int, int, int, bool, int]
"""Counts of references to a gradient, including those that exist only for counting.

In order: Python's references to the tensor; weak references to it; C++'s references to it (by its
parameter, Python, DLPack, a graph); Python's references to the storage; whether the memory belongs
to NumPy or another library, or is shared with other processes; C++'s references to the storage (by
each tensor that is a view of it, NumPy, Python).
"""


def copy_shared_gradients(gradients: list[torch.Tensor | None]) -> int:
    """Replace gradients in the list by copies, if the program could still write to them.

    A gradient that is not copied takes 2 to 4 microseconds, whatever its size. The function may
    copy more than necessary (a gradient that a local variable still names), but never less. It
    cannot detect code that has only an address, such as ``gradient.data_ptr()``.
    """
    probe = torch.empty(1, dtype=torch.float32, device="cpu")
    probe.grad = torch.empty(1, dtype=torch.float32, device="cpu")
    # Count an unshared gradient at each call, in the same way, for comparison: the counts depend on
    # the versions of torch and Python, and on debuggers.
    (alone,) = _owners_of([probe.grad])
    owners = _owners_of(gradients)
    held: list[int] = []
    parts: dict[int, list[int]] = {}  # numbers of gradients that share a storage, by storage
    for number, found in enumerate(owners):
        gradient = gradients[number]
        if found is None or found == alone or gradient is None:
            continue
        if alone is not None and found[:-1] == alone[:-1]:
            parts.setdefault(gradient.untyped_storage()._cdata, []).append(number)
        else:
            held.append(number)
    for numbers in parts.values():
        found = owners[numbers[0]]
        if found is None or alone is None or found[-1] - alone[-1] != len(numbers) - 1:
            held += numbers  # something else refers to the storage
    copied = {number: _copy(gradients[number]) for number in held}
    num_bytes = 0
    for number, gradient in copied.items():
        gradients[number] = gradient
        num_bytes += gradient.nbytes
    return num_bytes


def _owners_of(gradients: list[torch.Tensor | None]) -> list[_Owners | None]:
    """Count the references to each gradient. The caller must refer to it only by the list."""
    found: list[_Owners | None] = []
    for gradient in gradients:
        if gradient is None or isinstance(gradient, OutsideGradient):
            found.append(None)
            continue
        storage = gradient.untyped_storage()
        shared = gradient.is_cpu and storage.is_shared()  # is_shared() is always true on a GPU
        found.append(
            (
                getrefcount(gradient),
                getweakrefcount(gradient),
                _num_owners(gradient),
                getrefcount(storage),
                shared or not storage.resizable(),
                _num_storage_owners(storage._cdata),
            )
        )
    return found


def _copy(gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        raise RuntimeError("there is no gradient to copy")
    return gradient.detach().clone()
