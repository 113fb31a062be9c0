"""Somebody replaces, removes or marks checkpoints, or files of them, beside a process that trains.

What training acknowledges after that is there, and what was not meddled with is not spent for it.
"""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gds import Backend, MemoryBackend, PosixBackend, WrapperBackend
from gds.contract import File, Lock, Stat
from offload import AdamW, BestBy, LastK, open_checkpoint
from offload.errors import CheckpointNotFoundError, DamagedError, SealError
from offload.format.names import QUARANTINE_NAME
from offload.retention.policy import Retention
from offload.store.quarantine import verify_and_mark
from tests.eventually import eventually
from tests.stores.files import flip, read, remove_tree, write
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    same_bits,
    train,
)

STORE, OTHER, AWAY = "/run", "/other", "/away"


def step_path(step: int) -> str:
    return f"{STORE}/step-{step:08d}"


def start(
    backend: Backend, num_drives: int = 1, keep: int | Retention = 2, **changes: int
) -> tuple[Model, AdamW]:
    model = Model()
    directories = [STORE, OTHER][:num_drives]
    return model, optimizer_for(model, directories, options(backend, **changes), keep=keep)


def copy_file(backend: Backend, source: str, target: str) -> None:
    """Do what ``cp`` does: the same bytes, in another file."""
    write(backend, target, read(backend, source))


def copy_tree(backend: Backend, source: str, target: str) -> None:
    backend.make_dir(target)
    for name in backend.list_dir(source):
        copy_file(backend, f"{source}/{name}", f"{target}/{name}")


def replace_files(backend: Backend, path: str, *names: str) -> None:
    """Do what ``rsync`` does: write a copy of each file beside it, and rename that over it."""
    for name in names or backend.list_dir(path):
        copy_file(backend, f"{path}/{name}", f"{path}/.{name}.tmp")
        backend.rename(f"{path}/.{name}.tmp", f"{path}/{name}")


def replace_directory(backend: Backend, path: str) -> None:
    """Do what ``mv step-N away; cp -a away step-N`` does."""
    backend.rename(path, AWAY)
    copy_tree(backend, AWAY, path)


def replace_state(backend: Backend, path: str) -> None:
    replace_files(backend, path, "exp_avg.safetensors")


def replace_manifest(backend: Backend, path: str) -> None:
    replace_files(backend, path, "manifest.json")


def replace_part(backend: Backend, path: str) -> None:
    with open_checkpoint(path, backend=backend) as checkpoint:
        (part,) = checkpoint.parts
    replace_files(backend, part)


def replace_directory_of_part(backend: Backend, path: str) -> None:
    with open_checkpoint(path, backend=backend) as checkpoint:
        (part,) = checkpoint.parts
    replace_directory(backend, part)


REPLACE = [replace_files, replace_directory, replace_state, replace_manifest]
REPLACE_PART = [replace_part, replace_directory_of_part]


def mark(backend: Backend, path: str, name: str = "exp_avg.safetensors") -> None:
    """Do what ``offload verify --quarantine`` does, after a bit has flipped."""
    flip(backend, f"{path}/{name}")
    with open_checkpoint(path, backend=backend) as checkpoint:
        assert verify_and_mark(checkpoint).quarantined


def move_away(backend: Backend, path: str) -> None:
    backend.rename(path, AWAY)


def cut(backend: Backend, path: str) -> None:
    """Leave a file that has lost its second half."""
    name = f"{path}/exp_avg.safetensors"
    file = backend.open(name)
    half = file.read_bytes(0, file.size_bytes // 2)
    file.close()
    backend.remove(name)
    copy = backend.create(name, len(half))
    copy.write_bytes(half, 0)
    copy.close()


def remove_part(backend: Backend, path: str) -> None:
    with open_checkpoint(path, backend=backend) as checkpoint:
        (part,) = checkpoint.parts
    remove_tree(backend, part)


def mark_for_part(backend: Backend, path: str) -> None:
    with open_checkpoint(path, backend=backend) as checkpoint:
        (part,) = checkpoint.parts
    flip(backend, f"{part}/exp_avg.safetensors")
    drive = part.rpartition("/")[0]  # damage there is marked only if the drive was given
    with open_checkpoint(path, parts=[drive], backend=backend) as checkpoint:
        assert verify_and_mark(checkpoint).quarantined


LOSE = [mark, remove_tree, move_away, cut]
LOSE_PART = [remove_part, mark_for_part]

Meddle = Callable[[Backend, str], None]


def on_drives(one: list[Meddle], two: list[Meddle]) -> pytest.MarkDecorator:
    """Try each on a store of one directory, and on one of two."""
    cases = [(how, drives) for how in one for drives in (1, 2)] + [(how, 2) for how in two]
    ids = [f"{how.__name__}-{drives}" for how, drives in cases]
    return pytest.mark.parametrize(("how", "drives"), cases, ids=ids)


def assert_at_step(backend: Backend, step: int) -> None:
    """Check that a reader finds a step as the newest, with the bits of plain torch."""
    with open_checkpoint(STORE, backend=backend) as newest:
        assert newest.step == step
        assert differences(newest, backend, Reference().after(step)) == []
        assert newest.verify().problems == ()


def assert_goes_on(backend: MemoryBackend, num_drives: int, step: int) -> None:
    """Check that a new process restores a step, and takes more of them, to the bit."""
    backend = backend.reopened()
    model, optimizer = start(backend, num_drives)
    with optimizer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what is not usable
        restored = optimizer.restore(verify=True)
        assert restored is not None
        assert restored.step == step
        train(model, optimizer, step + 1, step + 2)
        assert same_bits(dict(model.state_dict()), Reference().after(step + 2).model)
    assert_at_step(backend, step + 2)


@contextmanager
def warned_of(path: str) -> Iterator[None]:
    """Expect one warning of a path; others are of what a test has done to other paths."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert all(w.category is RuntimeWarning for w in caught)
    assert sum(path in str(w.message) for w in caught) == 1, [str(w.message) for w in caught]


@on_drives(REPLACE, REPLACE_PART)
@pytest.mark.parametrize("keep", [1, 2, 5])
@pytest.mark.parametrize("age", [0, 1], ids=["newest", "one-before"])
def test_what_is_acknowledged_after_files_were_replaced_is_there(
    how: Meddle, drives: int, keep: int, age: int
) -> None:
    """The process has the old files open: it must not write its steps into those."""
    if age >= keep:
        pytest.skip("there is no such checkpoint")
    backend = MemoryBackend()
    model, optimizer = start(backend, drives, keep)
    train(model, optimizer, *range(1, 7))
    how(backend, step_path(6 - age))
    for step in range(7, 13):
        train(model, optimizer, step)
        assert_at_step(backend, step)
    optimizer.close()
    slots = [n for n in backend.list_dir(STORE) if n.startswith((".slot-", "step-"))]
    assert len(slots) <= keep + 1, "the space of what was replaced is used again"
    assert_goes_on(backend, drives, 12)


@pytest.mark.parametrize("how", [replace_files, replace_directory])
def test_a_copy_that_was_moved_away_beside_training_is_not_written_to(how: Meddle) -> None:
    backend = MemoryBackend()
    model, optimizer = start(backend)
    train(model, optimizer, 1, 2, 3)
    backend.rename(step_path(2), AWAY)
    copy_tree(backend, AWAY, step_path(2))
    train(model, optimizer, *range(4, 9))
    optimizer.close()
    with open_checkpoint(AWAY, backend=backend) as moved:
        assert moved.step == 2
        assert moved.verify().problems == ()


class _LooksBeforeTheRename(WrapperBackend):
    """Notes what a process that starts just before a checkpoint's rename would go on from."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.found: list[int] = []

    def _look(self, target: str) -> None:
        if "/step-" in target:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with open_checkpoint(STORE, backend=self.inner) as newest:
                    assert newest.verify().problems == ()
                    self.found.append(newest.step)

    def rename(self, source: str, target: str) -> None:
        self._look(target)
        super().rename(source, target)

    def exchange(self, a: str, b: str) -> None:
        self._look(b)
        super().exchange(a, b)


@on_drives(LOSE, LOSE_PART)
@pytest.mark.parametrize("keep", [2, 3])
def test_the_last_one_that_is_usable_is_not_withdrawn(how: Meddle, drives: int, keep: int) -> None:
    """What was marked or removed beside training does not count as the newest durable one."""
    inner = MemoryBackend()
    backend = _LooksBeforeTheRename(inner)
    model, optimizer = start(inner, drives, keep)
    train(model, optimizer, 1, 2, 3, 4, 5)
    optimizer.close()
    model, optimizer = start(backend, drives, keep)
    optimizer.restore()
    train(model, optimizer, 6, 7)
    how(inner, step_path(7))
    if keep == 3:
        remove_tree(inner, step_path(6))
    backend.found.clear()
    backward(model, 8)
    optimizer.step()
    optimizer.checkpoint({"step": 8}).result()
    with warned_of(step_path(7)):
        optimizer.checkpoint({"step": 8}).result()
    assert backend.found == [6 if keep == 2 else 5]
    optimizer.close()


class _MarksInCheckpoint(WrapperBackend):
    """Marks a checkpoint when the next one has been asked for, and is not yet being sealed."""

    at, what = "", ""

    def stat(self, path: str) -> Stat | None:
        if path == self.at:
            self.at = ""
            mark(self.inner, self.what)
        return super().stat(path)


def test_what_is_marked_after_checkpoint_has_looked_does_not_count_either() -> None:
    backend = _MarksInCheckpoint(MemoryBackend())
    model, optimizer = start(backend)
    train(model, optimizer, 1, 2, 3)
    backward(model, 4)
    optimizer.step()
    backend.at, backend.what = step_path(4), step_path(3)
    optimizer.checkpoint({"step": 4}).result()
    assert backend.at == ""
    with open_checkpoint(step_path(2), backend=backend) as kept:
        assert kept.verify().problems == ()
    with warned_of(step_path(3)):
        train(model, optimizer, 5)
    optimizer.close()


def test_the_best_that_is_usable_is_kept() -> None:
    backend = MemoryBackend()
    model, optimizer = start(backend, keep=LastK(1) | BestBy("loss"))
    for step in (1, 2, 3, 4):
        backward(model, step)
        optimizer.step()
        if step == 2:
            mark(backend, step_path(1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.checkpoint({"step": step}, metrics={"loss": float(step)}).result()
    optimizer.close()
    backend = backend.reopened()
    with open_checkpoint(step_path(2), backend=backend) as best:
        assert best.metrics == {"loss": 2.0}


@on_drives([*REPLACE, remove_tree, move_away, cut], [*REPLACE_PART, remove_part])
@pytest.mark.parametrize("train_state", ["another", "the-same"])
def test_a_step_is_sealed_anew_if_its_checkpoint_is_not_what_it_was(
    how: Meddle, drives: int, train_state: str
) -> None:
    """`.result()` of a second checkpoint() of one step means that it is there."""
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2, 3)
    how(backend, step_path(3))
    state = {"step": 3} if train_state == "the-same" else {"another": "state"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sealed = optimizer.checkpoint(state, metrics={"loss": 1.0}).result()
    assert (sealed.step, sealed.train_state) == (3, state)
    assert_at_step(backend, 3)
    with open_checkpoint(STORE, backend=backend) as newest:
        assert (newest.train_state, newest.metrics) == (state, {"loss": 1.0})
    optimizer.close()
    assert_goes_on(backend, drives, 3)


@pytest.mark.parametrize("drives", [1, 2])
def test_a_step_whose_checkpoint_was_marked_wrongly_is_sealed_anew(drives: int) -> None:
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2)
    backend.create(f"{step_path(2)}/{QUARANTINE_NAME}", 0).close()
    with warned_of(step_path(2)):
        assert optimizer.checkpoint({"final": True}).result().train_state == {"final": True}
    optimizer.close()
    assert_at_step(backend, 2)
    assert_goes_on(backend, drives, 2)


def test_state_that_was_marked_and_is_in_memory_is_sealed_anew() -> None:
    """The damage is on the drive only: two chunks are all, and have been read ahead."""
    backend = MemoryBackend()
    model, optimizer = start(backend)
    train(model, optimizer, 1, 2)
    mark(backend, step_path(2))
    with warned_of(step_path(2)):
        optimizer.checkpoint({"final": True}).result()
    assert_at_step(backend, 2)
    optimizer.close()


def test_state_that_was_marked_and_is_damaged_is_not_sealed_anew() -> None:
    """Sealed again, it would have new digests, and nobody would find the damage any more."""
    backend = MemoryBackend()
    model = torch.nn.Linear(64, 100).bfloat16()  # of more chunks than are read ahead
    optimizer = AdamW(model.parameters(), directory=STORE, options=options(backend))
    for step in (1, 2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.checkpoint({"step": step}).result()
    mark(backend, step_path(2))
    with warned_of(step_path(2)), pytest.raises(DamagedError, match=r"exp_avg\.safetensors"):
        optimizer.checkpoint({"final": True}).result()
    with warned_of(step_path(2)):
        restored = optimizer.restore()
    assert restored is not None
    assert restored.step == 1
    assert optimizer.checkpoint({"step": 1}).result().verify().problems == ()
    optimizer.close()


@on_drives(LOSE, LOSE_PART)
def test_what_was_marked_or_removed_cannot_be_pinned(how: Meddle, drives: int) -> None:
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2)
    how(backend, step_path(2))
    with warned_of(step_path(2)), pytest.raises(CheckpointNotFoundError, match="step-00000001"):
        optimizer.pin("mine", 2)
    optimizer.pin("mine")
    train(model, optimizer, 3, 4, 5)
    optimizer.close()
    with open_checkpoint(step_path(1), backend=backend) as pinned:
        assert differences(pinned, backend, Reference().after(1)) == []


@on_drives(REPLACE, REPLACE_PART)
def test_what_was_replaced_by_the_same_can_be_pinned(how: Meddle, drives: int) -> None:
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2)
    how(backend, step_path(2))
    optimizer.pin("mine")
    train(model, optimizer, 3, 4, 5, 6)
    optimizer.close()
    with open_checkpoint(step_path(2), backend=backend) as pinned:
        assert pinned.verify().problems == ()


@on_drives(REPLACE, REPLACE_PART)
@pytest.mark.parametrize("which", [None, 3, 2])
def test_a_process_goes_back_to_what_was_replaced_beside_it(
    how: Meddle, drives: int, which: int | None
) -> None:
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2, 3)
    how(backend, step_path(which or 3))
    backward(model, 4)
    optimizer.step()
    restored = optimizer.restore(which, discard_newer=which == 2)
    assert restored is not None
    assert restored.step == (which or 3)
    train(model, optimizer, *range(restored.step + 1, 8))
    optimizer.close()
    assert_at_step(backend, 7)
    assert_goes_on(backend, drives, 7)


@on_drives(LOSE, LOSE_PART)
def test_a_process_goes_back_behind_what_was_lost_beside_it(how: Meddle, drives: int) -> None:
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2, 3)
    how(backend, step_path(3))
    with warned_of(step_path(3)), pytest.raises(CheckpointNotFoundError, match="step-00000002"):
        optimizer.restore(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored = optimizer.restore()
    assert restored is not None
    assert restored.step == 2
    train(model, optimizer, 3, 4, 5)
    optimizer.close()
    assert_at_step(backend, 5)


@pytest.mark.parametrize("drives", [1, 2])
def test_another_checkpoint_in_its_place_is_left_alone(drives: int) -> None:
    """One of another run, say: this process knows nothing of it, and counts it as none of its."""
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2, 3)
    foreign = MemoryBackend()
    stranger = Model(history=1)
    with optimizer_for(stranger, STORE, options(foreign)) as other:
        for step in (1, 2):
            backward(stranger, step, history=1)
            other.step()
        other.checkpoint({"foreign": True}).result()
    remove_tree(backend, step_path(2))
    backend.make_dir(step_path(2))
    for name in foreign.list_dir(step_path(2)):
        path = f"{step_path(2)}/{name}"
        write(backend, path, read(foreign, path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, 4, 5, 6, 7)
    optimizer.close()
    assert_at_step(backend, 7)
    with open_checkpoint(step_path(2), backend=backend) as found:
        assert found.train_state == {"foreign": True}


class _Meddles(WrapperBackend):
    """Does something to a directory once, in the middle of a seal."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.when_synced: Meddle | None = None
        """Done to a slot when its names have been synced, just before its rename."""
        self.when_locked: tuple[str, Meddle] | None = None
        """Path of a checkpoint, and what is done to it just before it is withdrawn."""

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        if self.when_synced is not None and "/.slot-" in path:
            meddle, self.when_synced = self.when_synced, None
            meddle(self.inner, path)

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        if self.when_locked is not None and self.when_locked[0] == path:
            (_, meddle), self.when_locked = self.when_locked, None
            meddle(self.inner, path)
        return super().lock(path, shared=shared, create=create)


@pytest.mark.parametrize("how", [replace_files, replace_state, replace_manifest, replace_directory])
def test_a_slot_that_is_replaced_while_it_is_sealed_is_no_checkpoint(how: Meddle) -> None:
    backend = _Meddles(MemoryBackend())
    model, optimizer = start(backend, keep=1)
    train(model, optimizer, 1, 2, 3)
    backward(model, 4)
    optimizer.step()
    backend.when_synced = how
    with pytest.raises(SealError, match="replaced"):
        optimizer.checkpoint({"step": 4}).result()
    assert_at_step(backend, 3)
    with pytest.raises(SealError, match="replaced"):
        optimizer.checkpoint({"step": 4})
    optimizer.checkpoint({"step": 4}).result()
    train(model, optimizer, 5, 6)
    optimizer.close()
    assert_at_step(backend, 6)


def test_what_is_replaced_at_the_moment_of_its_withdrawal_is_not_written_to() -> None:
    backend = _Meddles(MemoryBackend())
    model, optimizer = start(backend)
    train(model, optimizer, 1, 2, 3)
    backend.when_locked = (step_path(2), replace_directory)
    train(model, optimizer, 4, 5, 6, 7)
    assert backend.when_locked is None
    optimizer.close()
    assert_at_step(backend, 7)
    with open_checkpoint(AWAY, backend=backend) as moved:
        assert moved.step == 2
        assert moved.verify().problems == ()


@pytest.mark.parametrize("drives", [1, 2])
def test_what_was_marked_wrongly_can_be_used_again_later(drives: int) -> None:
    """Neither it nor its parts are rewritten as long as it is there."""
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2, 3)
    for step in (2, 3):
        backend.create(f"{step_path(step)}/{QUARANTINE_NAME}", 0).close()
    with warned_of(step_path(2)):
        train(model, optimizer, 4, 5, 6, 7)
    optimizer.close()
    for step in (2, 3):
        backend.remove(f"{step_path(step)}/{QUARANTINE_NAME}")
        with open_checkpoint(step_path(step), backend=backend) as found:
            assert differences(found, backend, Reference().after(step)) == []


@pytest.mark.parametrize("drives", [1, 2])
def test_state_is_read_from_the_parts_of_a_checkpoint_that_was_removed(drives: int) -> None:
    """The next step reads them while it writes others, of a slot that has to be made."""
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2, 3)
    (slot,) = [name for name in backend.list_dir(STORE) if name.startswith(".slot-")]
    remove_tree(backend, f"{STORE}/{slot}")
    needed: set[str] = set()
    for step in (2, 3):
        with open_checkpoint(step_path(step), backend=backend) as checkpoint:
            needed.update(checkpoint.parts)
    for part in [f"{OTHER}/{n}" for n in backend.list_dir(OTHER)] if drives == 2 else []:
        if "/part-" in part and part not in needed:
            remove_tree(backend, part)
    remove_tree(backend, step_path(3))
    with warned_of(step_path(3)):
        optimizer.checkpoint({"step": 3}).result()
    assert_at_step(backend, 3)
    train(model, optimizer, 4, 5, 6)
    optimizer.close()
    if drives == 2:
        assert len([n for n in backend.list_dir(OTHER) if n.startswith("part-")]) == 3
    assert_goes_on(backend, drives, 6)


SLOT = [replace_files, replace_directory, replace_state, remove_tree, move_away]


@pytest.mark.parametrize("how", SLOT)
@pytest.mark.parametrize("keep", [1, 2])
def test_a_slot_that_was_replaced_while_it_is_stepped_is_no_checkpoint(
    how: Meddle, keep: int
) -> None:
    """The seal fails by name, and the step after it goes on in another slot.

    If it was removed, its name may meanwhile be that of another slot, which is in use.
    """
    backend = MemoryBackend()
    model, optimizer = start(backend, keep=keep)
    train(model, optimizer, 1, 2)
    backward(model, 3)
    optimizer.step()
    (slot,) = [name for name in backend.list_dir(STORE) if name.startswith(".slot-")]
    how(backend, f"{STORE}/{slot}")
    with pytest.raises(SealError, match=slot):
        optimizer.checkpoint({"step": 3}).result()
    assert_at_step(backend, 2)
    with pytest.raises(SealError, match=slot):
        optimizer.checkpoint({"step": 3})
    optimizer.checkpoint({"step": 3}).result()
    assert_at_step(backend, 3)
    for step in range(4, 10):
        backward(model, step)
        optimizer.step()
        assert_at_step(backend, step - 1)
        optimizer.checkpoint({"step": step}).result()
        assert_at_step(backend, step)
    optimizer.close()
    assert_goes_on(backend, 1, 9)


@pytest.mark.parametrize("how", [remove_tree, replace_files, replace_directory, move_away])
@pytest.mark.parametrize("drives", [1, 2])
def test_a_free_slot_that_was_removed_or_replaced_is_made_anew(how: Meddle, drives: int) -> None:
    backend = MemoryBackend()
    model, optimizer = start(backend, drives)
    train(model, optimizer, 1, 2, 3)
    (slot,) = [name for name in backend.list_dir(STORE) if name.startswith(".slot-")]
    how(backend, f"{STORE}/{slot}")
    train(model, optimizer, 4, 5, 6)
    optimizer.close()
    assert_at_step(backend, 6)
    slots = [n for n in backend.list_dir(STORE) if n.startswith((".slot-", "step-"))]
    assert len(slots) <= (3 if how in (remove_tree, move_away) else 4), "one is left alone"
    assert_goes_on(backend, drives, 6)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("how", ["mv-cp", "cp-mv"])
def test_cp_and_mv_on_the_local_file_system(tmp_path: Path, keep: int, how: str) -> None:
    store, away, model = tmp_path / "run", tmp_path / "away", Model()
    with optimizer_for(model, str(store), options(), keep=keep) as optimizer:
        train(model, optimizer, 1, 2, 3)
        path = store / "step-00000003"
        subprocess.run(
            ["mv", path, away] if how == "mv-cp" else ["cp", "-a", path, away], check=True
        )
        if how == "mv-cp":
            subprocess.run(["cp", "-a", away, path], check=True)
        else:
            subprocess.run(["mv", *away.iterdir(), path], check=True)
        train(model, optimizer, 4, 5, 6, 7)
    backend = PosixBackend(direct=False)
    with open_checkpoint(store, backend=backend) as found:
        assert differences(found, backend, Reference().after(7)) == []
    backend.close()
    model = Model()
    with optimizer_for(model, str(store), options(), keep=keep) as optimizer:
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
    with open_checkpoint(away) as moved:
        assert moved.step == 2
        assert moved.verify().problems == ()
    with open_checkpoint(store / "step-00000007") as newest:
        assert newest.verify().problems == ()


@pytest.mark.parametrize("keep", [2, 9], ids=["its-name-is-taken", "nothing-has-its-name"])
def test_a_slot_that_is_removed_on_the_local_file_system_is_made_anew(
    tmp_path: Path, keep: int
) -> None:
    """Nothing has failed but that one seal: slots are used again, and nobody is warned."""
    store, model = tmp_path / "run", Model()
    with optimizer_for(model, str(store), options(), keep=keep) as optimizer:
        train(model, optimizer, 1, 2)
        backward(model, 3)
        optimizer.step()
        (slot,) = store.glob(".slot-*")
        shutil.rmtree(slot)
        handle = optimizer.checkpoint({"step": 3})
        with pytest.raises(SealError, match="some have been replaced"):
            handle.result()
        with pytest.raises(SealError, match="some have been replaced"):
            optimizer.synchronize()
        optimizer.checkpoint({"step": 3}).result()
        train(model, optimizer, 4, 5, 6)
        assert not optimizer._engine.store.poisoned
    with open_checkpoint(store) as newest:
        assert newest.step == 6


def test_a_slot_that_has_taken_the_name_of_a_removed_one_stays() -> None:
    """The store makes names anew that are not taken; the removed slot's files are still open."""
    backend = MemoryBackend()
    model, optimizer = start(backend, 2, keep=3)
    train(model, optimizer, 1, 2)
    backward(model, 3)
    optimizer.step()
    store = optimizer._engine.store
    (name,) = [name for name in backend.list_dir(STORE) if name.startswith(".slot-")]
    remove_tree(backend, f"{STORE}/{name}")
    layout = store.newest.manifest.layout
    other = store.acquire(layout, 1)
    assert other.path == f"{STORE}/{name}"
    removed = optimizer._engine.state.slots.present
    assert removed.path == other.path
    store._free.discard(removed)
    assert other.is_in_place()
    optimizer.close()


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
def many_kept(directory: Path, *, pinned: bool = False) -> Iterator[tuple[_Calls, Model, AdamW]]:
    """Yield training that keeps steps 3 to 14, after it has looked at each of them once."""
    backend, model = _Calls(PosixBackend()), Model()
    keep = 2 if pinned else MANY
    optimizer = optimizer_for(model, [str(directory)], options(backend), keep=keep)
    with optimizer:
        for step in range(1, MANY + 3):
            train(model, optimizer, step)
            if pinned:
                optimizer.pin(f"of-{step}")
        for folder in (directory, *directory.glob("step-*"), *directory.glob("pins/*")):
            assert eventually(lambda f=folder: backend.stat(str(f)).changed_ns)
        optimizer.pin("looks-at-all")
        optimizer.unpin("looks-at-all")
        if pinned:
            assert eventually(lambda: backend.stat(f"{directory}/pins").changed_ns)
            train(model, optimizer, MANY + 3, MANY + 4)
        yield backend, model, optimizer


@pytest.mark.parametrize("pinned", [False, True])
def test_what_is_kept_is_not_looked_through_at_each_checkpoint(
    pinned: bool, tmp_path: Path
) -> None:
    with many_kept(tmp_path / "run", pinned=pinned) as (backend, model, optimizer):
        backend.asked.clear()
        train(model, optimizer, MANY + 3 + 2 * pinned)
        for step in (4, 5, 6):
            path = f"{tmp_path}/run/step-{step:08d}"
            asked = [one for one in backend.asked if one.startswith(path)]
            assert asked == [path]
        of_pins = [one for one in backend.asked if one.startswith(f"{tmp_path}/run/pins/")]
        assert len(of_pins) == len(set(of_pins)) == (MANY + 2) * pinned


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
    model, optimizer = start(backend, drives, 40)
    train(model, optimizer, *range(1, 41))
    optimizer.pin("kept", 7)
    optimizer.close()
    model, optimizer = start(backend, drives, 2)
    optimizer.restore()
    with open_checkpoint(step_path(20), backend=backend):
        train(model, optimizer, 41)
        left = [n for n in backend.list_dir(STORE) if n.startswith((".slot-", "step-"))]
    assert left[1:] == [f"step-{step:08d}" for step in (7, 20, 40, 41)]
    train(model, optimizer, 42)
    optimizer.close()
    assert_goes_on(backend, drives, 42)
