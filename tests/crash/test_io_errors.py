"""Every operation of a run fails in turn, once or for ever: what users see, and what remains.

As SQLite does it: the N-th operation of a kind fails, for N = 1, 2, ... until a run ends without
having had that many. However the user goes on (call again, restore, new process), the run must end
with the bits that plain torch has, and nothing that was acknowledged may be lost.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch

from gds import MemoryBackend
from offload import AdamW, Checkpoint, OffloadError, SealHandle, open_checkpoint
from offload.errors import BrokenOptimizerError, SealError
from tests.crash.fault_backend import KINDS, FaultBackend, Kind, When
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    same_bits,
)

STORE = "/run"
OTHER = "/other"
"""The second directory of a store on two drives."""

STRIDE = int(os.environ.get("FAULT_STRIDE", "8"))
"""With two drives every so many-th operation fails in turn; 1 for all of them."""

LAST_STEP = 6
SEALED = (2, 3, 6)
BEHIND = 4
"""The step that is taken while a checkpoint is being sealed; then comes another process."""

USED_KINDS = tuple(kind for kind in KINDS if kind != "remove")

Recovery = Literal["call again", "restore", "new process"]
RECOVERIES: tuple[Recovery, ...] = ("call again", "restore", "new process")
WHEN: tuple[When, ...] = ("in time", "at once", "later")


@functools.cache
def reference() -> Reference:
    return Reference()


class Session:
    """A user who trains to the last step, whatever happens on the way."""

    def __init__(
        self, keep: int, recovery: Recovery, when: When, *, forever: bool, drives: int = 1
    ) -> None:
        self.backend = FaultBackend(MemoryBackend(), when)
        self.directories = [STORE, OTHER][:drives]
        self.keep = keep
        self.recovery = recovery
        self.forever = forever
        self.errors: list[Exception] = []
        self.acknowledged = 0
        self.handle: SealHandle | None = None
        self.model = Model()
        self.optimizer: AdamW | None = None
        self._gradients_of = 0
        self._buffers: list[torch.Tensor] = []
        self._restarted = False

    def run(self) -> None:
        """Train to the last step, and check what is there in the end."""
        while error := named_error(self._go_on):
            self.errors.append(error)
            assert len(self.errors) < 12, "it does not get on"
            assert self.backend.num_failed, "there was no fault"
            self._recover(error)
        assert self.optimizer is not None
        self.backend.repair()
        assert self._newest() == LAST_STEP
        assert same_bits(self.model.state_dict(), reference().after(LAST_STEP).model)
        self.optimizer.close()
        assert self.backend.violations == []
        self.backend.close()

    def _go_on(self) -> None:
        if self.optimizer is None:
            self._start()
        assert self.optimizer is not None
        while (step := self.optimizer.num_steps) < LAST_STEP:
            if step in SEALED:
                self._seal(step)
            self._step()
            self._acknowledge()
            if step + 1 == BEHIND and not self._restarted:
                self._restarted = True
                closed, self.optimizer = self.optimizer, None
                closed.close()
                self._start()
        self._seal(LAST_STEP)
        self._acknowledge()

    def _start(self) -> None:
        self.backend.new_process()
        self.model = Model()
        self._gradients_of = 0
        optimizer = optimizer_for(
            self.model, self.directories, options(self.backend), keep=self.keep
        )
        try:
            found = optimizer.restore()
        except BaseException:
            optimizer.close()
            raise
        assert (found.step if found else 0) >= self.acknowledged, "what cannot be read stops it"
        self.optimizer = optimizer

    def _step(self) -> None:
        assert self.optimizer is not None
        before = self.optimizer.num_steps
        if self._gradients_of != before + 1:  # else the last call did not take the step
            # Only a step that is taken counts, also for the buffers that its forward has changed.
            present = [buffer.clone() for buffer in self.model.buffers()]
            backward(self.model, before + 1)
            self._gradients_of = before + 1
            self._buffers = [buffer.clone() for buffer in self.model.buffers()]
            self._set_buffers(present)
        self.optimizer.step()
        assert self.optimizer.num_steps == before + 1
        self._set_buffers(self._buffers)

    def _set_buffers(self, values: Sequence[torch.Tensor]) -> None:
        for buffer, value in zip(self.model.buffers(), values, strict=True):
            buffer.copy_(value)

    def _seal(self, step: int) -> None:
        if step <= self.acknowledged or self.handle is not None:
            return
        assert self.optimizer is not None
        self.handle = self.optimizer.checkpoint({"step": step})
        if step == SEALED[0]:  # this one is waited for, and then replaced
            self._acknowledge()
            self.optimizer.checkpoint({"step": step, "only": "its train state"}).result()
            self.optimizer.param_groups[0]["note"] = "all of it, under the same name"
            self.optimizer.checkpoint({"step": step}).result()

    def _acknowledge(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            self.acknowledged = handle.result().step

    def _recover(self, error: Exception) -> None:
        self.handle = None
        if self.forever:
            self._try_everything_else()
        self.backend.repair()
        assert self._newest() >= self.acknowledged
        optimizer = self.optimizer
        if optimizer is None:
            return
        if self.recovery == "call again" and not isinstance(error, BrokenOptimizerError):
            return
        if self.recovery != "new process" and self._restored(optimizer):
            return
        with contextlib.suppress(SealError):
            optimizer.close()
        self.optimizer = None

    def _restored(self, optimizer: AdamW) -> bool:
        """Restore in the same process; False if there is nothing to restore."""
        found: list[Checkpoint | None] = []
        error = named_error(lambda: found.append(optimizer.restore()))
        if error is not None:
            assert self.acknowledged == 0
            assert "there is no checkpoint yet" in str(error)
            return False
        if found[0] is None:
            assert self.acknowledged == 0
            return optimizer.num_steps == 0
        assert found[0].step == optimizer.num_steps >= self.acknowledged
        assert self._newest() >= self.acknowledged, "whoever comes now must find it too"
        self._gradients_of = 0
        return True

    def _try_everything_else(self) -> None:
        """While the fault lasts: every call ends, and says what is wrong or works."""
        optimizer = self.optimizer
        if optimizer is None:
            return
        for call in (
            optimizer.synchronize,
            lambda: optimizer.checkpoint({"number": 1}).result(),
            self._step,
            lambda: optimizer.checkpoint({"number": 2}).result(),
            self._step,
        ):
            if optimizer.num_steps == LAST_STEP and call == self._step:
                continue
            error = named_error(call)
            if isinstance(error, BrokenOptimizerError) and self.acknowledged:
                assert f"call restore() to continue from {STORE}/" in str(error)

    def _newest(self) -> int:
        """Check the newest checkpoint, as a reader beside the run; returns its step, 0 if none."""
        store = self.backend.inner
        names = store.list_dir(STORE) if store.stat(STORE) else []
        if not self.acknowledged and not any(name.startswith("step-") for name in names):
            return 0
        with open_checkpoint(STORE, backend=store) as found:
            assert differences(found, store, reference().after(found.step)) == []
            return found.step


def named_error(call: Callable[[], object]) -> Exception | None:
    """Return the error that a call raises; one that is not meant for users passes through."""
    try:
        call()
    except OffloadError as error:
        if len(str(error)) < 20:
            raise
        return error
    return None


def run_with_fault(
    kind: Kind, nth: int, keep: int, recovery: Recovery, *, forever: bool, drives: int = 1
) -> Session:
    when = WHEN[nth // len(RECOVERIES) % len(WHEN)]
    session = Session(keep, recovery, when, forever=forever, drives=drives)
    session.backend.fail(kind, nth, forever=forever)
    with warnings.catch_warnings():
        # After a failed sync the store says that it reuses no slot, and a restore what it refuses.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            session.run()
        except BaseException as error:
            error.add_note(
                f"{kind} number {nth} failed {'for ever' if forever else 'once'}; keep={keep}; "
                f"{when}; then: {recovery}; errors so far: {session.errors}"
            )
            raise
    return session


@pytest.mark.parametrize(
    ("forever", "keep", "drives"),
    [
        pytest.param(False, 1, 1, id="once-keep=1"),
        pytest.param(False, 2, 1, id="once-keep=2"),
        pytest.param(True, 1, 1, id="for-ever-keep=1"),
        pytest.param(False, 1, 2, id="once-keep=1-drives=2"),
        pytest.param(True, 2, 2, id="for-ever-keep=2-drives=2"),
    ],
)
@pytest.mark.parametrize("kind", USED_KINDS)
def test_any_operation_may_fail(
    kind: Kind,
    forever: bool,
    keep: int,
    drives: int,
    record_property: Callable[[str, object], None],
) -> None:
    nth = num_faults = num_reported = 0
    while True:
        nth += 1 if drives == 1 or not nth else STRIDE
        recoveries = RECOVERIES if not forever else RECOVERIES[1:]
        session = run_with_fault(
            kind, nth, keep, recoveries[nth % len(recoveries)], forever=forever, drives=drives
        )
        num_reported += bool(session.errors)
        if session.backend.num_failed == 0:
            break
        num_faults += 1
    print(f"{kind}: {num_faults} faults, {num_reported} reported to the caller")
    record_property("faults", num_faults)
    assert nth > 2, "the run has operations of this kind"
    assert num_reported > 0
