"""Every operation of a run fails in turn, once or for ever: what users see, and what remains.

As SQLite does it: the N-th operation of a kind fails, for N = 1, 2, ... until a scene ends without
having had that many. However the user goes on (call again, restore, new process), the scene must
end, with the bits that plain torch has, and nothing that was acknowledged may be lost.

A smoke test lets some operations of each kind fail; ``FULL_TESTS=1`` tries one in `FAULT_STRIDE` of
each scene, and all of the first.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from itertools import count, product
from typing import Any

import pytest

from gds import MemoryBackend
from offload import BrokenOptimizerError, CheckpointNotFoundError, OffloadError
from tests.campaigns import FULL
from tests.crash.fault_backend import KINDS, FaultBackend, Kind, When
from tests.crash.scenes import Case, Promise, Trainer
from tests.crash.test_crash_points import check

STRIDE = int(os.environ.get("FAULT_STRIDE", "16"))
USED_KINDS = tuple(kind for kind in KINDS if kind != "remove")
FIRST = Case("sealed behind training", 1)
SMOKE: list[tuple[Kind, Case, bool]] = [
    ("read", FIRST, False),
    ("read", Case("two processes", 1, 2), True),
    ("write", Case("three checkpoints", 2), False),
    ("read_bytes", Case("two processes", 1, 2), False),
    ("write_bytes", Case("replaced train state", 1), False),
    *(
        (kind, Case("pinned", 1), False)
        for kind in ("sync", "sync_dir", "rename", "create", "remove")
    ),
    ("sync_dir", Case("replaced train state", 1), True),
    ("sync_dir", Case("gone back", 2), False),
    ("rename", Case("sealed behind training", 2, 3), False),
    ("create", Case("every second step", 1), False),
    ("make_dir", Case("resident state", 2), True),
    ("open", Case("two processes", 1, 2), False),
    *((kind, Case("parameters only", 1), False) for kind in ("rename", "create", "sync_dir")),
    *((kind, Case("sealed behind training", 1, 1, "drive"), False) for kind in ("read", "write")),
    ("write", Case("resident state", 1, 1, "drive"), True),
]
"""Kinds, cases, and whether they fail for ever."""

CASES = list(dict.fromkeys(case for _, case, _ in SMOKE))
RECOVERIES = ("call again", "restore", "new process")
WHEN: tuple[When, ...] = ("in time", "at once", "later")


class Faults(FaultBackend):
    """Knows how the user goes on, and what has been promised."""

    def __init__(self, when: When, recovery: str, *, forever: bool) -> None:
        super().__init__(MemoryBackend(), when)
        self.recovery = recovery
        self.forever = forever
        self.errors: list[OffloadError] = []
        self.promise = Promise()

    def note(self, promise: Promise) -> None:
        self.promise = promise

    def must_restore(self) -> bool:
        """Check the last error; returns whether the user does not simply call again."""
        assert self.num_failed, "there was no fault"
        assert len(self.errors) < 24, "it does not get on"
        assert len(str(self.errors[-1])) > 20, "it says something"
        is_broken = isinstance(self.errors[-1], BrokenOptimizerError)
        return self.recovery != "call again" or is_broken or self.wants_a_new_process()

    def wants_a_new_process(self) -> bool:
        return bool(self.errors) and "start a new process" in str(self.errors[-1])


class Persistent(Trainer):
    """A user who goes on, whatever happens on the way."""

    backend: Faults
    is_open = False

    def open(self, *, fresh: bool = False) -> None:
        def go() -> None:
            self.backend.new_process()
            super(Persistent, self).open(fresh=fresh)

        self._insist(go)
        self.is_open = True

    def restore(self, step: int | None = None) -> Any:
        return self._insist(lambda: super(Persistent, self).restore(step))

    def train(self, last: int) -> None:
        self._insist(lambda: super(Persistent, self).train(last))

    def seal(self, step: int, **given: Any) -> None:
        def go() -> None:
            if self.optimizer.num_steps > step:  # it failed behind a step
                self._start_again()
            super(Persistent, self).seal(step, **given)

        self._insist(go)

    def pin(self, name: str, step: int | None, how: Callable[[], object]) -> None:
        def insisted() -> None:
            try:
                how()
            except CheckpointNotFoundError:  # the call before has removed it, and failed then
                if step is not None or not self.backend.errors:
                    raise

        self._insist(lambda: super(Persistent, self).pin(name, step, insisted))

    def close(self) -> None:
        with contextlib.suppress(OffloadError):
            super().close()

    def _insist(self, call: Callable[[], Any]) -> Any:
        while True:
            with contextlib.suppress(OffloadError), self._noted():
                return call()
            if self.is_open and self.backend.forever:  # every call ends, and works or says why not
                with contextlib.suppress(OffloadError), self._noted():
                    self.optimizer.synchronize()
                with contextlib.suppress(OffloadError), self._noted():
                    return call()
                with contextlib.suppress(OffloadError), self._noted():
                    super().train(self.optimizer.num_steps + 1)
            self.backend.repair()
            if self.is_open and self.backend.must_restore():
                self._start_again()

    def _start_again(self) -> None:
        """Restore in the same process if it is to be so, or else in a new one."""
        promised = self.backend.promise.newest
        if self.backend.recovery != "new process" and not self.backend.wants_a_new_process():
            with contextlib.suppress(OffloadError):  # there may be no checkpoint yet
                found = super().restore()
                assert found in promised
                if found is not None or self.optimizer.num_steps == 0:
                    return
        self.close()
        self.is_open = False
        self.open()
        assert super().restore() in promised

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OffloadError as error:
            self.backend.errors.append(error)
            raise


def run_with_fault(case: Case, kind: Kind, nth: int, *, forever: bool) -> Faults:
    recoveries = ("new process", "restore") if forever else RECOVERIES
    backend = Faults(
        WHEN[nth // len(RECOVERIES) % len(WHEN)],
        recoveries[nth % len(recoveries)],
        forever=forever,
    )
    backend.fail(kind, nth, forever=forever)
    with warnings.catch_warnings():
        # After a failed sync the store says that it reuses no slot, and a restore what it refuses.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            case.play(backend, Persistent)
            backend.repair()
            assert backend.violations == []
            check(case, backend.inner.reopened(), backend.promise, finish=True)
        except BaseException as error:
            error.add_note(
                f"{kind} number {nth} failed, forever: {forever}; {backend.when}; "
                f"then: {backend.recovery}; errors so far: {backend.errors}"
            )
            raise
    backend.close()
    return backend


def numbers(kind: Kind, case: Case) -> Iterator[int]:
    """Yield which operations of a kind fail, counted from 1."""
    if FULL:
        yield from count(1, 1 if case == FIRST else STRIDE)
    elif kind == "sync_dir" and case.scene == "replaced train state":
        yield from count(1)  # the last one of a seal decides what there is
    elif kind in ("rename", "sync_dir") and case.scene == "pinned":
        yield from count(2, 3)  # names are given, moved and removed between seals
    elif case.scene == "parameters only":
        yield from count(1, 2)
    yield from (1, 3, 6, 14, 36, 90, 300, 900)


@pytest.mark.parametrize(
    ("kind", "case", "forever"),
    list(product(USED_KINDS, CASES, [False, True])) if FULL else SMOKE,
    ids=str,
)
def test_any_operation_may_fail(
    kind: Kind, case: Case, forever: bool, record_property: Callable[[str, object], None]
) -> None:
    num_faults = 0
    for nth in numbers(kind, case):
        if run_with_fault(case, kind, nth, forever=forever).num_failed == 0:
            break
        num_faults += 1
    record_property("faults", num_faults)
    assert num_faults > 0 or FULL, "the scene has operations of this kind"
