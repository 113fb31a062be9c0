"""A pin that is made at the moment at which the training process wants its checkpoint back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend, WrapperBackend
from offload import open_checkpoint
from offload.errors import SealError, StoreBusyError
from tests.stores.files import write
from tests.stores.small import STORE
from tests.threads import one_thread
from tests.torch_contract.retention_run import Run, closed_runs, name_of

__all__ = ["closed_runs", "one_thread"]  # fixtures: small tensors on many threads are slow

FIRST = f"{STORE}/{name_of(1)}"


def nothing() -> None:
    """Do nothing: what happens at a moment happens once."""


class Meeting(WrapperBackend):
    """Lets something happen once, at a moment of an operation."""

    before: Callable[[], object] = staticmethod(nothing)
    """Just before the first checkpoint is locked exclusively."""

    after: Callable[[], object] = staticmethod(nothing)
    """Just after that."""

    reading: Callable[[], object] = staticmethod(nothing)
    """Before the train state of the first checkpoint is read."""

    writing: Callable[[], object] = staticmethod(nothing)
    """Before the file of a pin is written."""

    def let(self, moment: str) -> None:
        happens = getattr(self, moment)
        setattr(self, moment, nothing)
        happens()

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Any:
        if path != FIRST or shared:
            return super().lock(path, shared=shared, create=create)
        self.let("before")
        lock = super().lock(path)
        self.let("after")
        return lock

    def open(self, path: str, *, writable: bool = False) -> Any:
        if path == f"{FIRST}/train_state.safetensors":
            self.let("reading")
        return super().open(path, writable=writable)

    def create(self, path: str, size_bytes: int) -> Any:
        if path.startswith(f"{STORE}/pins/"):
            self.let("writing")
        return super().create(path, size_bytes)


def started(keep: int) -> tuple[Meeting, Run]:
    """Return a run that has sealed its first step."""
    backend = Meeting(MemoryBackend())
    run = Run(backend, keep=keep)
    run.seal()
    return backend, run


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # it may have to look for another slot
@pytest.mark.parametrize("kind", ["pin", "unreadable"])
def test_before_it_is_locked_the_pin_is_in_time(kind: str) -> None:
    backend, run = started(keep=1)
    if kind == "pin":
        backend.before = lambda: offload.pin(FIRST, "mine", backend=backend)
    else:
        backend.make_dir(f"{STORE}/pins")
        backend.before = lambda: write(backend, f"{STORE}/pins/mine", b"half")
    for _ in range(2):
        run.seal()
    assert backend.before is nothing
    assert run.steps() == ([1, 3] if kind == "pin" else [1, 2, 3])
    with open_checkpoint(FIRST, backend=backend) as pinned:
        assert pinned.verify().ok


def test_after_it_is_locked_the_pin_is_refused() -> None:
    backend, run = started(keep=1)

    def try_to_pin() -> None:
        with pytest.raises(StoreBusyError, match="being recycled"):
            offload.pin(FIRST, "mine", backend=backend)

    backend.after = try_to_pin
    for _ in range(3):
        run.seal()
    assert backend.after is nothing
    assert run.steps() == [4]
    assert "pins" not in backend.list_dir(STORE)


def test_while_the_pin_is_written_it_is_passed_over() -> None:
    backend, run = started(keep=1)
    backend.writing = lambda: run.seal()  # after which the first one is to go
    assert offload.pin(FIRST, "mine", backend=backend) == FIRST
    run.seal()
    assert run.steps() == [1, 3]


def test_while_a_seal_wants_its_place() -> None:
    backend, run = started(keep=2)
    backend.before = lambda: offload.pin(FIRST, "mine", backend=backend)
    with torch.no_grad():
        run.model.weight.zero_()
    with pytest.raises(SealError, match="pinned as 'mine'"):
        run.optimizer.checkpoint().result()
    with pytest.raises(SealError, match="pinned as 'mine'"):
        run.step()
    run.seal()
    assert run.steps() == [1, 2]
    with open_checkpoint(FIRST, backend=backend) as pinned:
        assert pinned.verify().ok
