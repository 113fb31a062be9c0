"""Slots that are replaced or removed beside training, links to files, and what only drives show."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gds import Backend, MemoryBackend, PosixBackend
from offload import open_checkpoint
from offload.errors import SealError
from tests.crash.meanwhile import Looking
from tests.crash.runs import (
    OTHER,
    STORE,
    Meddle,
    assert_at_step,
    assert_goes_on,
    move_away,
    replace_directory,
    replace_files,
    replace_manifest,
    replace_state,
    slots_in,
    start,
)
from tests.stores.files import everything, remove_tree
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
    class Meddles(Looking):
        """Does something to a slot once, when its names have been synced, before its rename."""

        due = False

        def look(self, moment: str, path: str) -> None:
            if self.due and moment == "after sync_dir" and "/.slot-" in path:
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


BACKUP = "/backup"


def link_tree(backend: MemoryBackend, source: str, target: str) -> None:
    """Do what ``cp -al source target`` does."""
    backend.make_dir(target)
    for name in backend.list_dir(source):
        stat = backend.stat(f"{source}/{name}")
        assert stat is not None
        if stat.kind == "directory":
            link_tree(backend, f"{source}/{name}", f"{target}/{name}")
        else:
            backend.link(f"{source}/{name}", f"{target}/{name}")
    backend.sync_dir(target)


@pytest.mark.parametrize(
    ("what", "drives", "new_process"),
    [("all", 1, False), ("all", 2, True), ("one file", 1, True), ("a part", 2, False)],
)
def test_a_linked_checkpoint_stays_what_it_was(what: str, drives: int, new_process: bool) -> None:
    """Also if only one file of it is linked, and whoever withdraws it."""
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2)
    part = optimizer.checkpoint({"step": 2}).result().parts
    backend.make_dir(BACKUP)
    if what == "all":
        link_tree(backend, f"{STORE}/step-00000002", f"{BACKUP}/step-00000002")
        for path in part:
            link_tree(backend, path, f"{BACKUP}/part")
    elif what == "one file":
        backend.link(f"{STORE}/step-00000002/exp_avg.safetensors", f"{BACKUP}/exp_avg")
    else:
        link_tree(backend, part[0], f"{BACKUP}/part")
    before = everything(backend, BACKUP)
    if new_process:
        optimizer.close()
        backend = backend.reopened()
        model, optimizer = start(backend, drives)
        optimizer.restore()
    train(model, optimizer, 3, 4, 5, 6)
    optimizer.close()
    assert everything(backend, BACKUP) == before
    assert_at_step(backend, 6)
    if what == "all" and drives == 1:
        with open_checkpoint(f"{BACKUP}/step-00000002", backend=backend) as backup:
            assert backup.step == 2
            assert differences(backup, backend, Reference().after(2)) == []
    assert len(slots_in(backend)) == 3, "what is linked is removed, and made anew"
    if drives == 2:
        assert len([n for n in backend.list_dir(OTHER) if n.startswith("part-")]) == 3


def test_a_leftover_slot_that_is_linked_is_made_anew() -> None:
    """Training goes on in a backup of a whole store, whose working slot has become a checkpoint."""
    backend = MemoryBackend()
    model, optimizer = start(backend)
    train(model, optimizer, 1, 2)
    take_step(model, optimizer, 3)  # in a slot that is linked as such
    link_tree(backend, STORE, BACKUP)
    optimizer.checkpoint({"step": 3}).result()
    optimizer.close()
    backend = backend.reopened()
    before = everything(backend, STORE)
    backend.remove(f"{BACKUP}/LOCK")  # else it is that of the store itself
    copy = Model()
    with optimizer_for(copy, BACKUP, options(backend)) as optimizer:
        assert optimizer.restore().step == 2
        train(copy, optimizer, 3, 4, 5)
    assert everything(backend, STORE) == before
    assert_at_step(backend, 3)
    assert same_bits(dict(copy.state_dict()), Reference().after(5).model)


def test_cp_al_on_the_local_file_system(tmp_path: Path) -> None:
    store, backup = tmp_path / "run", tmp_path / "backup"
    model = Model()
    with optimizer_for(model, str(store), options()) as optimizer:
        train(model, optimizer, 1, 2)
        subprocess.run(["cp", "-al", store / "step-00000002", backup], check=True)
        train(model, optimizer, 3, 4, 5, 6)
        take_step(model, optimizer, 7)
    backend = PosixBackend(direct=False)
    with open_checkpoint(backup, backend=backend) as found:
        assert found.step == 2
        assert differences(found, backend, Reference().after(2)) == []
    with open_checkpoint(store, backend=backend) as found:
        assert differences(found, backend, Reference().after(6)) == []
    backend.close()
    assert {path.stat().st_nlink for path in store.glob("*/*")} == {1}
