"""``mv run run2; mkdir run`` at each moment at which a process is about to use the path.

Nothing is written into the new directory, in which another process may train by then.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gds import MemoryBackend
from offload import AdamW, open_checkpoint
from offload.errors import SealError, StoreError
from tests.crash.meanwhile import Looking
from tests.crash.runs import copy_tree
from tests.stores.files import everything, remove_tree
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    take_step,
    train,
)

STORE, MOVED = "/run", "/run2"
STALE = "this is not the directory that was opened"


class Moving(Looking):
    """Moves the directory away at an operation of the test's choice, once."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.at: Callable[[str, str], bool] = lambda *_: False
        self.copies = False
        """Whether the new directory is a copy, in which others might train on."""
        self.moved = False
        self.there: dict[str, bytes | None] = {}
        """What is in the new directory at first."""

    def look(self, moment: str, path: str) -> None:
        if not self.moved and self.at(moment, path):
            self.move()

    def move(self) -> None:
        self.moved = True
        self.inner.rename(STORE, MOVED)
        self.inner.make_dir(STORE)
        for name in self.inner.list_dir(MOVED) if self.copies else []:
            if name != "LOCK":
                copy_tree(self.inner, f"{MOVED}/{name}", f"{STORE}/{name}")
        self.there = everything(self.inner, STORE)

    def move_back(self) -> None:
        remove_tree(self.inner, STORE)
        self.inner.rename(MOVED, STORE)


def start(backend: Moving, keep: int = 1) -> tuple[Model, AdamW]:
    model = Model()
    settings = options(backend, reader_timeout_s=60.0)
    return model, optimizer_for(model, STORE, settings, keep=keep)


def goes_on_once_it_is_back(model: Model, optimizer: AdamW, backend: Moving) -> None:
    """What was refused is done now, to the same bits."""
    backend.move_back()
    optimizer.step()  # with the gradients that were refused
    optimizer.checkpoint().result()
    step = optimizer.num_steps + 1
    train(model, optimizer, step)
    optimizer.close()
    with open_checkpoint(f"{STORE}/step-{step:08d}", backend=backend) as found:
        assert differences(found, backend, Reference().after(step)) == []


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises((StoreError, SealError), match=STALE) as error:
        call()
    if isinstance(error.value, StoreError):
        assert error.value.errno == errno.ESTALE
        assert error.value.filename == STORE


def test_it_is_moved_while_a_step_waits_for_a_seal() -> None:
    backend = Moving()
    model, optimizer = start(backend)
    train(model, optimizer, 1)
    take_step(model, optimizer, 2)
    backward(model, 3)
    stepping, armed, reached = threading.current_thread(), threading.Event(), threading.Event()

    def is_being_sealed(moment: str, path: str) -> bool:
        """Hold the seal up until the step has looked at the store; then move it."""
        if threading.current_thread() is stepping:
            if armed.is_set():
                reached.set()
            return False
        return moment == "after sync_dir" and "/.slot-" in path and reached.wait(60)

    backend.at = is_being_sealed
    handle = optimizer.checkpoint()
    armed.set()
    refused(optimizer.step)
    assert backend.moved
    refused(handle.result)
    for _ in range(2):  # the seal has failed; and its slot is not at its path
        refused(optimizer.step)
    assert everything(backend, STORE) == {}
    backend.move_back()
    optimizer.step()
    found = optimizer.checkpoint().result()
    assert differences(found, backend, Reference().after(3)) == []
    optimizer.close()


def test_it_is_moved_while_a_step_waits_for_a_reader() -> None:
    backend = Moving()
    model, optimizer = start(backend)
    train(model, optimizer, 1)
    reader = open_checkpoint(f"{STORE}/step-00000001", backend=backend)
    train(model, optimizer, 2)
    backward(model, 3)
    backend.at = lambda moment, _: moment == "refused lock"
    for _ in range(2):
        refused(optimizer.step)
    assert backend.moved
    assert everything(backend, STORE) == {}
    reader.close()
    goes_on_once_it_is_back(model, optimizer, backend)


@pytest.mark.parametrize("moment", ["before make_dir", "after create"])
def test_a_slot_that_came_to_lie_in_another_directory_is_not_written_to(moment: str) -> None:
    """It is left where it is, empty: whoever trains there may have taken it for a leftover."""
    backend = Moving()
    model, optimizer = start(backend)
    backend.at = lambda now, path: (
        now == moment and (moment == "before make_dir" or path.endswith("manifest.json"))
    )
    backward(model, 1)
    refused(optimizer.step)
    assert backend.moved
    left = everything(backend, STORE)
    assert [path for path in left if path.count("/") == 2] == (
        [f"{STORE}/.slot-1"] if moment == "before make_dir" else []
    )
    for _ in range(2):
        refused(optimizer.step)
    assert everything(backend, STORE) == left
    goes_on_once_it_is_back(model, optimizer, backend)


def test_spare_slots_are_not_removed_from_another_store() -> None:
    """Nor those that have been backed up by hard links, which are not open."""
    backend = Moving()
    model, optimizer = start(backend, keep=4)
    with optimizer:
        train(model, optimizer, 1, 2, 3, 4)
    model, optimizer = start(backend)
    optimizer.restore()
    take_step(model, optimizer, 5)  # withdraws the first
    backend.inner.make_dir("/backup")
    for file in backend.list_dir(f"{STORE}/step-00000003"):  # cp -al
        backend.inner.link(f"{STORE}/step-00000003/{file}", f"/backup/{file}")
    backend.copies = True
    backend.at = lambda moment, path: (
        moment == "after rename"
        and "/.slot-" in path
        and "step-00000004" not in backend.list_dir(STORE)
    )
    assert optimizer.checkpoint().result().step == 5
    assert sorted(backend.list_dir(STORE)) == [".slot-1", ".slot-2", ".slot-3", "step-00000005"]
    assert everything(backend, STORE) == backend.there
    optimizer.close()


def test_a_train_state_is_not_replaced_in_another_store() -> None:
    backend = Moving()
    model, optimizer = start(backend)
    train(model, optimizer, 1)
    backend.copies = True
    backend.at = lambda moment, path: moment == "after create" and path.endswith(".new")
    refused(lambda: optimizer.checkpoint({"step": "again"}).result())
    assert backend.list_dir(STORE) == ["step-00000001"]
    assert everything(backend, STORE) == backend.there
    optimizer.close()
