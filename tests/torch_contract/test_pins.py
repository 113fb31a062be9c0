"""Pins: what they keep, what they refuse, and what a damaged one does."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend, StorageError, WrapperBackend
from offload import LastK, list_checkpoints, open_checkpoint
from offload.errors import CheckpointNotFoundError, PinError, UnreadableError
from offload.store import prune
from tests.attacks import good
from tests.crash.meanwhile import Looking
from tests.stores.files import read, remove_tree, write
from tests.stores.small import STORE
from tests.threads import one_thread
from tests.torch_contract.retention_run import Run, closed_runs, name_of

__all__ = ["closed_runs", "one_thread"]  # fixtures: small tensors on many threads are slow

FIRST = f"{STORE}/{name_of(1)}"


def zero(run: Run) -> None:
    """Change the model, so that a checkpoint of the same step would replace the one there is."""
    with torch.no_grad():
        run.model.weight.zero_()


def test_a_pinned_checkpoint_stays_whatever_keep_says(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(keep=1)
    run.seal()
    run.optimizer.pin("best")
    for _ in range(4):
        run.seal()
    assert run.steps() == [1, 5]
    assert len(run.slots()) == 3
    run = run.next_process(keep=1)
    run.seal()
    assert run.steps() == [1, 6]
    run.optimizer.unpin("best")
    run.seal()
    assert run.steps() == [7]
    assert len(run.slots()) == 2
    assert "one more slot" not in caplog.text, "a step waited for what is pinned"


def test_a_name_moves_and_is_never_gone_meanwhile() -> None:
    class Looking(WrapperBackend):
        num_seen = 0

        def remove(self, path: str) -> None:
            super().remove(path)
            self.look()

        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            self.look()

        def look(self) -> None:
            if self.num_seen:
                assert self.inner.stat(f"{STORE}/pins/best") is not None
                self.num_seen += 1

    backend = Looking(MemoryBackend())
    run = Run(backend, keep=1)
    run.seal()
    run.optimizer.pin("best")
    run.seal()
    backend.num_seen = 1
    run.optimizer.pin("best", 2)
    assert backend.num_seen > 1
    run.optimizer.pin("also", f"{STORE}/{name_of(2)}")
    run.seal()
    assert run.steps() == [2, 3]
    infos = list_checkpoints(STORE, backend=backend)
    assert [info.pins for info in infos] == [("also", "best"), ()]


def test_by_another_process_and_by_handle() -> None:
    run = Run(keep=1)
    run.step()
    first = run.optimizer.checkpoint().result()
    assert offload.pin(STORE, "best", backend=run.backend) == first.path
    offload.pin(first, "first")
    run.seal()
    run.seal()
    assert run.steps() == [1, 3]
    offload.unpin(STORE, "best", backend=run.backend)
    run.optimizer.unpin("first")
    run.seal()
    assert run.steps() == [4]
    for pin in (offload.pin, lambda which, name: run.optimizer.pin(name, which)):
        with pytest.raises(CheckpointNotFoundError):
            pin(first, "first")
    run.step()
    again = run.optimizer.checkpoint().result()
    zero(run)
    run.seal(0)
    with pytest.raises(CheckpointNotFoundError, match=r"generation \d has been recycled"):
        offload.pin(again, "again")


@pytest.mark.parametrize("which", [None, 7, "step-00000007"])
def test_of_what_is_not_there(which: Any) -> None:
    run = Run()
    with pytest.raises(CheckpointNotFoundError):
        run.optimizer.pin("best", which)
    with pytest.raises(CheckpointNotFoundError, match=r"no pin 'best'.*it has: none"):
        run.optimizer.unpin("best")
    assert run.backend.list_dir(STORE) == ["LOCK"]


def test_names_never_become_paths() -> None:
    run = Run()
    path = run.seal()
    before = run.backend.list_dir(STORE)
    names: list[Any] = ["", ".", "..", "a/b", ".hidden", "x" * 65, "a b", "a\0", "ä", 3]
    for name in names:
        for call in (
            lambda name=name: run.optimizer.pin(name),
            lambda name=name: run.optimizer.unpin(name),
            lambda name=name: offload.pin(path, name, backend=run.backend),
            lambda name=name: offload.unpin(STORE, name, backend=run.backend),
        ):
            with pytest.raises(PinError, match="cannot be the name of a pin"):
                call()
    assert run.backend.list_dir(STORE) == before


def test_what_replaces_or_withdraws_a_pinned_one_is_refused() -> None:
    run = Run(keep=3)
    for _ in range(3):
        run.seal()
    run.optimizer.pin("mine", 3)
    before = run.parameters()
    with pytest.raises(PinError, match=r"step-00000003: pinned as 'mine', and going back"):
        run.optimizer.restore(1, discard_newer=True)
    assert all(map(torch.equal, before, run.parameters()))
    zero(run)
    with pytest.raises(PinError, match=r"'mine', and sealing this step anew would replace it"):
        run.optimizer.checkpoint()
    assert run.steps() == [1, 2, 3]
    run.seal()  # training is able to go on
    run.optimizer.close()
    with pytest.raises(PinError, match=r"fresh=True would withdraw it. Call unpin\('mine'\)"):
        Run(run.backend.reopened(), fresh=True)
    run = Run(run.backend.reopened())  # the refusal has let go of the lock
    run.optimizer.unpin("mine")
    assert run.optimizer.restore(2, discard_newer=True).step == 2


def test_an_unusable_one_is_not_replaced_either() -> None:
    run = Run(keep=2)
    run.seal()
    run.seal()
    run.optimizer.pin("mine")
    run.optimizer.close()
    backend = run.backend.reopened()
    backend.remove(f"{STORE}/{name_of(2)}/exp_avg.safetensors")
    run = Run(backend, keep=2)
    with pytest.warns(RuntimeWarning, match="not using"):
        assert run.optimizer.restore().step == 1
    run.step()
    with pytest.raises(PinError, match="take another step first"):
        run.optimizer.checkpoint()
    assert [i.pins for i in list_checkpoints(STORE, backend=backend)] == [(), ("mine",)]
    run.seal()
    assert [i.step for i in list_checkpoints(STORE, backend=backend)] == [1, 2, 3]


def test_of_a_checkpoint_that_was_removed_by_hand_is_reported() -> None:
    run = Run(keep=2)
    run.seal()
    run.optimizer.pin("mine")
    run.seal()
    run.optimizer.close()
    backend = run.backend.reopened()
    remove_tree(backend, FIRST)
    with pytest.warns(RuntimeWarning, match=r"pinned as 'mine', step-00000001.*no longer exists"):
        run = Run(backend)
    run.optimizer.restore()
    run.seal()
    run.optimizer.restore(2, discard_newer=True)
    run.optimizer.unpin("mine")
    assert run.optimizer.restore().step == 2


def test_of_another_generation_of_the_same_name_keeps_nothing() -> None:
    run = Run(keep=1)
    run.seal()
    run.optimizer.pin("mine")
    data = read(run.backend, f"{STORE}/pins/mine")
    assert json.loads(data)["body"]["checkpoint"] == name_of(1)
    other = Run(keep=1)  # another store, with a checkpoint of the same name and generation
    other.seal()
    other.backend.make_dir(f"{STORE}/pins")
    write(other.backend, f"{STORE}/pins/mine", data)
    other.seal()
    assert other.steps() == [2]


class Beside(Looking):
    """Does something at some moments, once; but what fails there fails every time."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.due: dict[tuple[str, str], Callable[[], object]] = {}

    def look(self, moment: str, path: str) -> None:
        if (moment, path) in self.due:
            self.due[moment, path]()
            del self.due[moment, path]


def test_two_processes_make_the_first_pins_of_a_store_at_once() -> None:
    run = Run(backend := Beside(MemoryBackend()), keep=1)
    run.seal()
    backend.due["after stat", f"{STORE}/pins"] = lambda: offload.pin(
        FIRST, "theirs", backend=backend.inner
    )
    run.optimizer.pin("mine")
    assert [info.pins for info in list_checkpoints(STORE, backend=backend)] == [("mine", "theirs")]


@pytest.mark.parametrize("moment", [("after list_dir", "pins"), ("before open", "pins/mine")])
def test_one_that_is_removed_while_it_is_read_is_none(moment: tuple[str, str]) -> None:
    run = Run(backend := Beside(MemoryBackend()), keep=1)
    run.seal()
    run.optimizer.pin("mine")
    run.optimizer.close()
    backend.due[moment[0], f"{STORE}/{moment[1]}"] = lambda: offload.unpin(
        STORE, "mine", backend=backend.inner
    )
    prune(STORE, LastK(1), backend=backend)  # which refuses if there are pins that it cannot read
    assert not backend.due
    assert [info.pins for info in list_checkpoints(STORE, backend=backend)] == [()]


def test_one_that_cannot_be_read_at_this_moment_keeps_everything_until_it_can() -> None:
    run = Run(backend := Beside(MemoryBackend()), keep=1)
    run.seal()
    run.optimizer.pin("mine")
    path = f"{STORE}/pins/mine"

    def fail() -> None:
        raise StorageError(errno.EIO, "open", path)

    backend.due["before open", path] = fail
    for _ in range(2):
        run.seal()
    with pytest.raises(PinError, match="it is not known which checkpoint it keeps"):
        run.optimizer.restore(1, discard_newer=True)
    run.optimizer.close()
    for call in (
        lambda: list_checkpoints(STORE, backend=backend),
        lambda: Run(backend, keep=1),
        lambda: Run(backend, fresh=True),
    ):
        with pytest.raises(UnreadableError, match="not known whether its content is damaged") as e:
            call()
        assert e.value.filename == path
    with pytest.raises(PinError, match="nothing is removed"):
        prune(STORE, LastK(1), backend=backend)
    backend.due.clear()
    run = Run(backend, keep=1)
    assert run.steps() == [1, 2, 3]
    run.optimizer.restore()
    run.seal()
    assert run.steps() == [1, 4]


def lie(**changes: object) -> Callable[[bytes], bytes]:
    """Return what changes the body of a pin, and its digest to match."""

    def change(data: bytes) -> bytes:
        body = {**json.loads(data)["body"], **changes}
        return good.as_json(good.signed(body)).ljust(len(data))

    return change


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "not text": lambda _: b"\xff" * 512,
    "another version": lambda _: b'{"format":2}'.ljust(512),
    "edited": lambda data: data.replace(b'"generation": 1', b'"generation": 3'),
    "too long": lambda data: data + b" ",
    "of generation -1": lie(generation=-1),
    "of generation True": lie(generation=True),
    "of a path": lie(checkpoint=f"../{name_of(1)}"),
    "of a list": lie(checkpoint=[name_of(1)]),
    "of no store": lie(store_id="g" * 32),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_one_that_cannot_be_read_keeps_everything(
    damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(keep=1)
    run.seal()
    run.optimizer.pin("mine")
    path = f"{STORE}/pins/mine"
    data = read(run.backend, path)
    assert DAMAGE[damage](data) != data
    write(run.backend, path, DAMAGE[damage](data))
    for _ in range(2):
        run.seal()
    assert run.steps() == [1, 2, 3]
    assert "one more slot" not in caplog.text, "a step waited for what is kept"
    weight = run.model.weight.detach().clone()
    zero(run)
    with pytest.raises(PinError, match=r"would be replaced, but .*cannot be read as a pin"):
        run.optimizer.checkpoint()
    with torch.no_grad():
        run.model.weight.copy_(weight)
    with pytest.raises(PinError, match="nothing is removed"):
        prune(STORE, LastK(1), backend=run.backend)
    run.optimizer.close()
    backend = run.backend.reopened()
    with pytest.warns(RuntimeWarning, match=r"pins/mine: cannot be read as a pin.*until then"):
        run = Run(backend, keep=1)
    run.optimizer.restore()
    with pytest.raises(PinError, match="cannot be read as a pin"):
        run.optimizer.restore(1, discard_newer=True)
    run.optimizer.unpin("mine")
    run.seal()
    assert run.steps() == [4]


def test_a_file_in_the_place_of_all_pins_keeps_everything() -> None:
    run = Run(keep=1)
    run.seal()
    write(run.backend, f"{STORE}/pins", b"mine")
    run.seal()
    assert run.steps() == [1, 2]
    with pytest.raises(StorageError):
        run.optimizer.pin("mine")
    run.optimizer.close()
    with pytest.warns(RuntimeWarning, match="pins: a file, expected the directory of pins"):
        Run(run.backend.reopened(), keep=1)


def test_files_that_nobody_could_have_made_a_pin_are_ignored() -> None:
    run = Run(keep=1)
    run.seal()
    run.optimizer.pin("mine")
    write(run.backend, f"{STORE}/pins/.mine.9-9.new", b"half")
    write(run.backend, f"{STORE}/pins/~backup", b"")
    run.seal()
    run.seal()
    assert run.steps() == [1, 3]


def test_on_several_drives() -> None:
    backend = MemoryBackend()
    run = Run(backend, directory=[STORE, "/other"], keep=1)
    run.seal()
    run.optimizer.pin("best")
    for _ in range(3):
        run.seal()
    assert run.steps() == [1, 4]
    with open_checkpoint(FIRST, backend=backend) as pinned:
        assert pinned.verify().ok
    assert len([n for n in backend.list_dir("/other") if n.startswith("part-")]) == 3
    run.optimizer.unpin("best")
    run.seal()
    assert len([n for n in backend.list_dir("/other") if n.startswith("part-")]) == 2
