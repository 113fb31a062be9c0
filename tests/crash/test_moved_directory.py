"""``mv run run2; mkdir run`` at each moment at which a process is about to use the path.

Nothing is written into the new directory, in which another process may train by then.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gds import MemoryBackend, WrapperBackend
from gds.contract import File
from offload import AdamW, open_checkpoint
from offload.engine.seal import SEAL_THREAD
from offload.errors import SealError, StoreError
from offload.format.names import MANIFEST_NAME
from offload.store.slots.free import ReaderWait
from tests.crash.test_overlooked_steps import copy
from tests.stores.files import contents
from tests.stores.training import Model, Reference, backward, differences, optimizer_for, options

STORE, MOVED = "/run", "/run2"
STALE = "this is not the directory that was opened"


class Moving(WrapperBackend):
    """Moves the directory away just before an operation of the test's choice, once."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.before: Callable[[str, str], bool] = lambda *_: False
        self.moved = False

    def look(self, kind: str, path: str) -> None:
        if not self.moved and self.before(kind, path):
            self.move()

    def move(self) -> None:
        self.moved = True
        self.inner.rename(STORE, MOVED)
        self.inner.make_dir(STORE)

    def move_back(self) -> None:
        for name in self.written():
            for file in self.inner.list_dir(f"{STORE}/{name}"):
                self.inner.remove(f"{STORE}/{name}/{file}")
            self.inner.remove_dir(f"{STORE}/{name}")
        self.inner.remove_dir(STORE)
        self.inner.rename(MOVED, STORE)

    def back_up(self, directory: str) -> None:
        """``cp -al``: give the files of all checkpoints another name."""
        self.inner.make_dir(directory)
        for name in (n for n in self.inner.list_dir(STORE) if n.startswith("step-")):
            self.inner.make_dir(f"{directory}/{name}")
            for file in self.inner.list_dir(f"{STORE}/{name}"):
                self.inner.link(f"{STORE}/{name}/{file}", f"{directory}/{name}/{file}")

    def written(self) -> list[str]:
        """Return what has been written into the new directory."""
        return self.inner.list_dir(STORE)

    def make_dir(self, path: str) -> None:
        self.look("make_dir", path)
        super().make_dir(path)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.look("renamed", target)

    def create(self, path: str, size_bytes: int) -> File:
        file = super().create(path, size_bytes)
        self.look("created", path)
        return file

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        self.look("synced", path)


class Training:
    def __init__(self, keep: int = 1, backend: Moving | None = None) -> None:
        self.backend = backend or Moving()
        self.model = Model()
        self.optimizer: AdamW = optimizer_for(
            self.model, STORE, options(self.backend, reader_timeout_s=60.0), keep=keep
        )
        self.step = 0

    def steps(self, num_steps: int, *, seal: bool = True) -> None:
        for _ in range(num_steps):
            backward(self.model, self.step + 1)
            self.optimizer.step()
            self.step += 1
            if seal:
                self.optimizer.checkpoint({"step": self.step}).result()

    def goes_on_once_it_is_back(self) -> None:
        """What was refused is done now, to the same bits."""
        self.backend.move_back()
        self.optimizer.step()  # with the gradients that were refused
        self.optimizer.checkpoint().result()
        self.step = self.optimizer.num_steps
        self.steps(2)
        path = f"{STORE}/step-{self.step:08d}"
        self.optimizer.close()
        with open_checkpoint(path, backend=self.backend) as found:
            assert differences(found, self.backend, Reference().after(self.step)) == []


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises((StoreError, SealError), match=STALE) as error:
        call()
    if isinstance(error.value, StoreError):
        assert error.value.errno == errno.ESTALE
        assert error.value.filename == STORE


def test_a_directory_that_is_moved_while_a_step_waits_for_a_seal_is_not_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training()
    backend, store = training.backend, training.optimizer._engine.store
    training.steps(1)
    training.steps(1, seal=False)
    require, looked = store._lock.require, threading.Event()

    def look() -> None:
        require()
        if threading.current_thread() is threading.main_thread():
            looked.set()

    def is_being_sealed(kind: str, path: str) -> bool:
        sealing = threading.current_thread().name.startswith(SEAL_THREAD)
        return kind == "synced" and "/.slot-" in path and sealing and looked.wait(60.0)

    monkeypatch.setattr(store._lock, "require", look)
    backend.before = is_being_sealed
    handle = training.optimizer.checkpoint()
    looked.clear()
    backward(training.model, 3)
    refused(training.optimizer.step)  # it had looked, and then waits for the seal
    assert backend.moved
    refused(handle.result)
    refused(training.optimizer.step)  # says that the seal has failed
    refused(training.optimizer.step)  # the slot of the seal that failed is not at its path
    assert backend.written() == []
    backend.move_back()
    training.optimizer.step()
    found = training.optimizer.checkpoint().result()
    assert differences(found, backend, Reference().after(3)) == []
    training.optimizer.close()


def test_a_directory_that_is_moved_while_a_step_waits_for_a_reader_is_not_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training()
    backend = training.backend
    training.steps(1)
    reader = open_checkpoint(f"{STORE}/step-00000001", backend=backend)
    training.steps(1)
    wait = ReaderWait.wait

    def moved_meanwhile(reader_wait: ReaderWait) -> None:
        wait(reader_wait)
        if not backend.moved:
            backend.move()

    monkeypatch.setattr(ReaderWait, "wait", moved_meanwhile)
    backward(training.model, 3)
    for _ in range(2):
        refused(training.optimizer.step)
    assert backend.moved
    assert backend.written() == []
    reader.close()
    training.goes_on_once_it_is_back()


@pytest.mark.parametrize("when", ["make_dir", "created"])
def test_a_slot_that_came_to_lie_in_another_directory_is_not_written_to(when: str) -> None:
    """It is left where it is, empty: whoever trains there may have taken it for a leftover."""
    training = Training()
    backend = training.backend
    backend.before = lambda kind, path: (
        kind == when and (when == "make_dir" or path.endswith(MANIFEST_NAME))
    )
    backward(training.model, 1)
    refused(training.optimizer.step)
    assert backend.moved
    written = [".slot-1"] if when == "make_dir" else []
    assert backend.written() == written
    left = {name: contents(backend, f"{STORE}/{name}") for name in written}
    for _ in range(2):
        refused(training.optimizer.step)
    assert {name: contents(backend, f"{STORE}/{name}") for name in backend.written()} == left
    training.goes_on_once_it_is_back()


def move_and_copy(backend: Moving) -> dict[str, dict[str, bytes]]:
    """Make the new directory a copy, in which others might train on; return what it has."""
    backend.move()
    names = [name for name in backend.inner.list_dir(MOVED) if name != "LOCK"]
    for name in names:
        copy(backend.inner, contents(backend.inner, f"{MOVED}/{name}"), f"{STORE}/{name}")
    return {name: contents(backend, f"{STORE}/{name}") for name in names}


@pytest.mark.parametrize("backed_up", [False, True], ids=["", "backed-up"])
def test_spare_slots_are_not_removed_from_another_store(backed_up: bool) -> None:
    """Those that have been backed up by hard links are to be removed as well, and are not open."""
    training = Training(keep=4)
    training.steps(4)
    training.optimizer.close()
    backend = training.backend
    training = Training(keep=1, backend=backend)
    training.optimizer.restore()
    training.step = 4
    training.steps(1, seal=False)  # withdraws the first
    if backed_up:
        backend.back_up("/backup")
    there: dict[str, dict[str, bytes]] = {}

    def is_last_withdrawal(kind: str, path: str) -> bool:
        names = backend.list_dir(STORE)
        if kind == "renamed" and "/.slot-" in path and "step-00000004" not in names:
            backend.before = lambda *_: False
            there.update(move_and_copy(backend))
        return False

    backend.before = is_last_withdrawal
    assert training.optimizer.checkpoint().result().step == 5
    assert sorted(there) == [".slot-1", ".slot-2", ".slot-3", "step-00000005"]
    assert {name: contents(backend, f"{STORE}/{name}") for name in backend.written()} == there
    training.optimizer.close()


def test_a_train_state_is_not_replaced_in_another_store() -> None:
    training = Training()
    training.steps(1)
    backend = training.backend
    there: dict[str, dict[str, bytes]] = {}

    def is_replacement(kind: str, path: str) -> bool:
        if kind == "created" and path.endswith(".new"):
            backend.before = lambda *_: False
            there.update(move_and_copy(backend))
        return False

    backend.before = is_replacement
    refused(lambda: training.optimizer.checkpoint({"step": "again"}).result())
    assert list(there) == ["step-00000001"]
    assert contents(backend, f"{STORE}/step-00000001") == there["step-00000001"]
    training.optimizer.close()
