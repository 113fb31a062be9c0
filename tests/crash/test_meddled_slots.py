"""Slots that are replaced or removed beside training, and meddling that only real files show."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gds import Backend, MemoryBackend, PosixBackend, WrapperBackend
from gds.contract import File, Stat
from offload import AdamW, open_checkpoint
from offload.errors import SealError
from tests.crash.runs import (
    STORE,
    Meddle,
    assert_at_step,
    assert_goes_on,
    cut,
    mark,
    move_away,
    replace_directory,
    replace_files,
    replace_manifest,
    replace_state,
    slots_in,
    start,
    step_path,
)
from tests.eventually import eventually
from tests.stores.files import remove_tree
from tests.stores.training import (
    Model,
    Reference,
    differences,
    optimizer_for,
    options,
    same_bits,
    take_step,
    train,
)


def free_slot(backend: Backend) -> str:
    (slot,) = [name for name in slots_in(backend) if name.startswith(".slot-")]
    return f"{STORE}/{slot}"


@pytest.mark.parametrize("how", [replace_files, replace_state, replace_manifest, replace_directory])
def test_a_slot_that_is_replaced_while_it_is_sealed_is_no_checkpoint(how: Meddle) -> None:
    class Meddles(WrapperBackend):
        """Does something to a slot once, when its names have been synced, before its rename."""

        due = False

        def sync_dir(self, path: str) -> None:
            super().sync_dir(path)
            if self.due and "/.slot-" in path:
                self.due = False
                how(self.inner, path)

    backend = Meddles(MemoryBackend())
    model, optimizer = start(backend, keep=1)
    train(model, optimizer, 1, 2)
    take_step(model, optimizer, 3)
    backend.due = True
    with pytest.raises(SealError, match="replaced"):
        optimizer.checkpoint({"step": 3}).result()
    assert_at_step(backend, 2)
    with pytest.raises(SealError, match="replaced"):
        optimizer.checkpoint({"step": 3})
    optimizer.checkpoint({"step": 3}).result()
    train(model, optimizer, 4, 5)
    optimizer.close()
    assert_at_step(backend, 5)


@pytest.mark.parametrize(
    ("how", "keep"),
    [
        (replace_files, 1), (replace_directory, 2), (replace_state, 2), (remove_tree, 1),
        (remove_tree, 2), (move_away, 2),
    ],
)  # fmt: skip
def test_a_slot_that_was_replaced_while_it_is_stepped_is_no_checkpoint(
    how: Meddle, keep: int
) -> None:
    """The seal fails by name, and the step after it goes on in another slot.

    If it was removed, its name may meanwhile be that of another slot, which is in use.
    """
    backend = MemoryBackend()
    model, optimizer = start(backend, keep=keep)
    train(model, optimizer, 1, 2)
    take_step(model, optimizer, 3)
    slot = free_slot(backend)
    how(backend, slot)
    with pytest.raises(SealError, match=slot):
        optimizer.checkpoint({"step": 3}).result()
    assert_at_step(backend, 2)
    with pytest.raises(SealError, match=slot):
        optimizer.checkpoint({"step": 3})
    optimizer.checkpoint({"step": 3}).result()
    assert_at_step(backend, 3)
    for step in (4, 5, 6, 7):
        take_step(model, optimizer, step)
        assert_at_step(backend, step - 1)
        optimizer.checkpoint({"step": step}).result()
    optimizer.close()
    assert_goes_on(backend, 1, 7)


@pytest.mark.parametrize("how", ["mv-cp", "cp-mv"])
def test_cp_and_mv_on_the_local_file_system(tmp_path: Path, how: str) -> None:
    store, away, model = tmp_path / "run", tmp_path / "away", Model()
    path = store / "step-00000003"
    with optimizer_for(model, str(store), options(), keep=2) as optimizer:
        train(model, optimizer, 1, 2, 3)
        if how == "mv-cp":
            subprocess.run(["mv", path, away], check=True)
            subprocess.run(["cp", "-a", away, path], check=True)
        else:
            subprocess.run(["cp", "-a", path, away], check=True)
            subprocess.run(["mv", *away.iterdir(), path], check=True)
        train(model, optimizer, 4, 5, 6, 7)
    with PosixBackend(direct=False) as backend, open_checkpoint(store, backend=backend) as found:
        assert differences(found, backend, Reference().after(7)) == []
    model = Model()
    with optimizer_for(model, str(store), options(), keep=2) as optimizer:
        assert optimizer.restore(verify=True).step == 7
        train(model, optimizer, 8)
        assert same_bits(dict(model.state_dict()), Reference().after(8).model)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    """``mv run/step-2 away; ln -s away run/step-2``: the files are the same, and are left alone."""
    store, away, model = tmp_path / "run", tmp_path / "away", Model()
    with optimizer_for(model, str(store), options(), keep=2) as optimizer:
        train(model, optimizer, 1, 2, 3)
        (store / "step-00000002").rename(away)
        (store / "step-00000002").symlink_to(away)
        with pytest.warns(RuntimeWarning, match="symbolic link"):
            train(model, optimizer, 4, 5, 6, 7)
    for path, step in ((away, 2), (store / "step-00000007", 7)):
        with open_checkpoint(path) as found:
            assert found.step == step
            assert found.verify().problems == ()


MANY = 12
"""More checkpoints than those whose files are all looked at before each withdrawal."""


class _Calls(WrapperBackend):
    """Notes what is asked for."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.asked: list[str] = []

    def stat(self, path: str) -> Stat | None:
        self.asked.append(path)
        return super().stat(path)

    def list_dir(self, path: str) -> list[str]:
        self.asked.append(path)
        return super().list_dir(path)

    def open(self, path: str, *, writable: bool = False) -> File:
        self.asked.append(path)
        return super().open(path, writable=writable)


@contextmanager
def many_kept(directory: Path) -> Iterator[tuple[_Calls, Model, AdamW]]:
    """Yield training that keeps steps 3 to 14, after it has looked at each of them once."""
    backend, model = _Calls(PosixBackend()), Model()
    with optimizer_for(model, [str(directory)], options(backend), keep=MANY) as optimizer:
        train(model, optimizer, *range(1, MANY + 3))
        for folder in (directory, *directory.glob("step-*")):
            assert eventually(lambda f=folder: backend.stat(str(f)).changed_ns)
        optimizer.pin("looks-at-all")
        optimizer.unpin("looks-at-all")
        yield backend, model, optimizer


def test_what_is_kept_is_not_looked_through_at_each_checkpoint(tmp_path: Path) -> None:
    with many_kept(tmp_path / "run") as (backend, model, optimizer):
        backend.asked.clear()
        train(model, optimizer, MANY + 3)
        for step in (4, 5, 6):
            path = f"{tmp_path}/run/step-{step:08d}"
            assert [one for one in backend.asked if one.startswith(path)] == [path]


@pytest.mark.parametrize("how", [mark, remove_tree, cut, replace_files])
def test_an_old_one_of_many_that_is_lost_does_not_count(how: Meddle, tmp_path: Path) -> None:
    with many_kept(tmp_path / "run") as (backend, model, optimizer):
        how(backend.inner, f"{tmp_path}/run/step-00000004")
        train(model, optimizer, MANY + 3)
        assert (tmp_path / "run/step-00000003").exists() == (how is not replace_files)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the one that was lost
            train(model, optimizer, MANY + 4)
        assert not (tmp_path / "run/step-00000003").exists()


@pytest.mark.parametrize("drives", [1, 2])
def test_many_go_at_once_after_a_change_of_policy_and_what_is_held_stays(drives: int) -> None:
    backend = MemoryBackend()
    model, optimizer = start(backend, drives, 30)
    train(model, optimizer, *range(1, 31))
    optimizer.pin("kept", 7)
    optimizer.close()
    model, optimizer = start(backend, drives, 2)
    optimizer.restore()
    with open_checkpoint(step_path(20), backend=backend):
        train(model, optimizer, 31)
        left = slots_in(backend)
    assert left[1:] == [f"step-{step:08d}" for step in (7, 20, 30, 31)]
    train(model, optimizer, 32)
    optimizer.close()
    assert_goes_on(backend, drives, 32)
