"""A backup of hard links (``cp -al``) stays what it was, whatever training does afterwards."""

from __future__ import annotations

import errno
import random
import subprocess
from pathlib import Path

import pytest

from gds import MemoryBackend, PosixBackend, StorageError, WrapperBackend
from gds.contract import Stat
from offload import open_checkpoint
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.runs import OTHER, STORE, assert_at_step, slots_in, start
from tests.stores.files import everything
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

BACKUP = "/backup"


def link_tree(backend: MemoryBackend | CrashBackend, source: str, target: str) -> None:
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


@pytest.mark.parametrize("new_process", [False, True], ids=["same process", "new process"])
@pytest.mark.parametrize(
    ("what", "drives"), [("all", 1), ("all", 2), ("one file", 1), ("one file", 2), ("a part", 2)]
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


class _Unsure(WrapperBackend):
    """One look at a file of a slot that has just been withdrawn fails."""

    num_failed = 0
    _withdrawn = "/none"

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        if "/.slot-" in target:
            self._withdrawn = target

    def stat(self, path: str) -> Stat | None:
        if path == f"{self._withdrawn}/exp_avg.safetensors" and not self.num_failed:
            self.num_failed += 1
            raise StorageError(errno.EIO, "injected failure of stat", path)
        return super().stat(path)


def test_what_cannot_be_told_counts_as_linked() -> None:
    backend = _Unsure(MemoryBackend())
    model, optimizer = start(backend, keep=1)
    train(model, optimizer, 1, 2, 3, 4)
    optimizer.close()
    assert backend.num_failed == 1
    assert_at_step(backend.inner, 4)


def test_power_lost_at_any_moment() -> None:
    """No state of the disk has a backup whose bytes are not the checkpoint's."""
    backend = CrashBackend()
    model, optimizer = start(backend, keep=1)
    train(model, optimizer, 1, 2)
    link_tree(backend, f"{STORE}/step-00000002", BACKUP)
    backend.sync_dir("/")
    linked, expected = len(backend.log), everything(backend, BACKUP)
    train(model, optimizer, 3, 4)
    optimizer.close()
    rng, disk = random.Random("links"), Disk(backend.log[:linked])
    num_states = 0
    for operation in backend.log[linked:]:
        disk.apply(operation)
        for _ in range(2):
            survivor = disk.power_cut(rng).backend()
            assert everything(survivor, BACKUP) == expected, operation
            num_states += 1
    assert num_states > 50


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
