"""One writer, whatever becomes of LOCK and of the directory while it trains."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gds import MemoryBackend, PosixBackend
from offload import AdamW, DriveTuning, open_checkpoint
from offload.errors import SealError, StoreError, StoreLockedError
from tests.crash import second_writers as second
from tests.crash.meanwhile import Looking
from tests.forking import Children
from tests.stores.files import tree
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

STORE = "/run"
NOT_OPENED = "this is not the directory that was opened"
ANOTHER = "another process may have created and locked a new one"


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    server = Children("tests.crash.second_writers")
    yield server
    server.close()


def start(directory: Path, keep: int = 2) -> tuple[Model, AdamW]:
    """Begin to train in this process, the first writer."""
    store, model = second.directories(str(directory)), Model()
    changes = {"drives": DriveTuning(shares=second.SHARES)} if len(store) > 1 else {}
    return model, optimizer_for(model, store, options(**changes), keep=keep)


def assert_whole(store: Path, step: int) -> None:
    """The newest checkpoint is one of the first writer, to the bit."""
    with PosixBackend(direct=False) as backend, open_checkpoint(store, backend=backend) as found:
        assert (found.step, found.train_state) == (step, {"step": step})
        assert differences(found, backend, Reference().after(step)) == []


def checkpoints_in(store: Path) -> dict[Path, bytes]:
    return {path: data for path, data in tree(store).items() if "/step-" in str(path)}


def close(optimizer: AdamW) -> None:
    """Close it; the last seal may have failed."""
    with contextlib.suppress(SealError):
        optimizer.close()


def raised(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  (the caller looks at it)
        return error
    return None


@pytest.mark.parametrize(
    ("lost", "keep"), [(["run"], 1), (["other"], 2), (["run", "other"], 1)], ids=str
)
def test_a_removed_lock_lets_nobody_in(
    children: Children, tmp_path: Path, lost: list[str], keep: int
) -> None:
    """What people do who are told that the store is locked."""
    if "other" in lost:
        (tmp_path / "other").mkdir()
    model, optimizer = start(tmp_path, keep)
    train(model, optimizer, 1, 2)
    for name in lost:
        (tmp_path / name / "LOCK").unlink()
    refused = children.run(second.train_as_well, tmp_path)
    assert refused.output.startswith("StoreLockedError")
    assert "another process" in refused.output
    with pytest.warns(RuntimeWarning, match=r"LOCK: was removed, and has been made") as caught:
        train(model, optimizer, 3, 4, 5)
    assert len([w for w in caught if "LOCK" in str(w.message)]) == 1
    for name in lost:
        with open(tmp_path / name / "LOCK", "rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert children.run(second.train_as_well, tmp_path).output.startswith("StoreLockedError")
    optimizer.close()
    assert_whole(tmp_path / "run", 5)
    assert same_bits(dict(model.state_dict()), Reference().after(5).model)
    assert children.run(second.train_as_well, tmp_path).output.endswith("trained to step 9\n")


@contextlib.contextmanager
def older_version(children: Children, directory: Path, expected: str) -> Iterator[None]:
    """Let a process of an earlier version, which locks LOCK only, try to get in."""
    if not (directory / "announcements").exists():
        os.mkfifo(directory / "announcements")
    holder = children.start(second.lock_as_before, directory)
    try:
        assert (directory / "announcements").read_text() == expected
        yield
    finally:
        os.kill(holder, signal.SIGKILL)
        children.wait(holder, directory)


def test_an_earlier_version_and_this_one_keep_each_other_out(
    children: Children, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    with older_version(children, tmp_path, "locked"), pytest.raises(StoreLockedError):
        start(tmp_path)
    _, optimizer = start(tmp_path)
    with older_version(children, tmp_path, "refused"):
        optimizer.close()


@pytest.mark.parametrize("ended", [False, True], ids=["trains", "has ended"])
def test_an_earlier_version_that_got_in_ends_all_writing(
    children: Children, tmp_path: Path, ended: bool
) -> None:
    """It can, once LOCK is gone; then nothing is committed or withdrawn any more, for good."""
    store = tmp_path / "run"
    model, optimizer = start(tmp_path, keep=1)
    train(model, optimizer, 1, 2)

    def refuses_to_write() -> None:
        """Every call that would write names what has happened, and no checkpoint changes."""
        before = checkpoints_in(store)
        calls = [
            lambda: train(model, optimizer, 3),
            lambda: optimizer.checkpoint({"again": 1}).result(),
            lambda: optimizer.pin("mine"),
            optimizer.restore,
            lambda: train(model, optimizer, 3, 4),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            errors = [raised(call) for call in calls]
        assert all(isinstance(e, SealError | StoreLockedError) for e in errors if e is not None)
        assert ANOTHER in str(errors[-1])
        assert checkpoints_in(store) == before

    (store / "LOCK").unlink()
    with older_version(children, tmp_path, "locked"):
        if not ended:
            refuses_to_write()
    if ended:
        refuses_to_write()
    (store / "LOCK").unlink()
    refuses_to_write()
    optimizer.close()
    assert_whole(store, 2)
    assert children.run(second.train_as_well, tmp_path).output.endswith("trained to step 6\n")


def test_a_directory_that_was_moved_away_is_written_to_by_nobody_else(
    children: Children, tmp_path: Path
) -> None:
    """``mv run run2; mkdir run``, and a second process starts in ``run``."""
    store, moved = tmp_path / "run", tmp_path / "run2"
    model, optimizer = start(tmp_path)
    train(model, optimizer, 1, 2, 3)
    store.rename(moved)
    store.mkdir()
    assert children.run(second.train_as_well, tmp_path).output.endswith("trained to step 4\n")
    of_second, of_first = tree(store), checkpoints_in(moved)
    with pytest.raises(StoreError, match=NOT_OPENED) as error:
        train(model, optimizer, 4)
    assert (error.value.errno, error.value.filename) == (errno.ESTALE, str(store))
    for call in (lambda: train(model, optimizer, 4), lambda: optimizer.pin("mine")):
        with pytest.raises((SealError, StoreError), match=NOT_OPENED):
            call()
    close(optimizer)
    assert (tree(store), checkpoints_in(moved)) == (of_second, of_first)
    assert_whole(moved, 3)


def test_a_store_that_is_removed_or_whose_link_leads_elsewhere_is_named(tmp_path: Path) -> None:
    """It is locked where it is, not where a link to it is."""
    drive, link = tmp_path / "drive", tmp_path / "run"
    drive.mkdir()
    link.symlink_to(drive)
    model, optimizer = start(tmp_path)
    train(model, optimizer, 1)
    with pytest.raises(StoreLockedError):
        optimizer_for(Model(), str(drive), options())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link.unlink()
    link.symlink_to(elsewhere)
    with pytest.raises(StoreError, match=NOT_OPENED):
        train(model, optimizer, 2)
    assert_whole(drive, 1)
    shutil.rmtree(drive)
    with pytest.raises((SealError, StoreError), match=NOT_OPENED):
        train(model, optimizer, 2)
    close(optimizer)
    assert (os.listdir(elsewhere), drive.exists()) == ([], False)


class _Intruder(Looking):
    """Somebody takes LOCK away, and locks another one, just before an operation of the test's."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.at: Callable[[str, str], bool] = lambda *_: False
        self.came = False
        self.changed_since: list[str] = []

    def look(self, moment: str, path: str) -> None:
        if self.came and moment in ("before rename", "before exchange"):
            self.changed_since.append(path)
        if not self.came and self.at(moment, path):
            self.came = True
            self.inner.remove(f"{STORE}/LOCK")
            self.inner.lock(f"{STORE}/LOCK", create=True)

    @property
    def sealed(self) -> list[int]:
        return [int(name[5:]) for name in self.list_dir(STORE) if name.startswith("step-")]


@pytest.mark.parametrize(
    ("kind", "where", "newest"),
    [("sync_dir", "/.slot-", 4), ("rename", "/step-00000002", 4), ("rename", "/step-00000003", 5)],
    ids=["just before the commit", "in a withdrawal before it", "in one behind it"],
)
def test_it_is_looked_at_again_before_the_commit_and_each_withdrawal(
    kind: str, where: str, newest: int
) -> None:
    """Retention gives up several at once: LOCK is taken away while one of them is withdrawn."""
    backend, model = _Intruder(), Model()
    with optimizer_for(model, STORE, options(backend), keep=4) as optimizer:
        train(model, optimizer, 1, 2, 3, 4)
    optimizer = optimizer_for(model, STORE, options(backend), keep=1)
    optimizer.restore()
    take_step(model, optimizer, 5)  # withdraws one, to have a slot to write to
    assert backend.sealed == [2, 3, 4]
    backend.at = lambda moment, path: moment == f"before {kind}" and where in path
    error = raised(optimizer.checkpoint().result)
    assert backend.came
    assert isinstance(error, SealError) == (newest == 4), "once it is durable, it is acknowledged"
    assert backend.sealed[-1] == newest
    for call in (optimizer.step, lambda: optimizer.checkpoint({"again": 1}).result()):
        assert isinstance(raised(call), SealError | StoreLockedError)
    assert not backend.changed_since, "nothing behind the one during which it went"
    close(optimizer)


LEFT = {
    "its own": ("", "", rf"\(process {os.getpid()} on host \S+, since 20\S+\)"),
    "a container": ("namespace [0-9]+", "namespace 1", "in another container on host "),
    "another host": (
        r"host \S+ since (\S+)\nboot [0-9a-f-]+",
        r"host x.y since \1\nboot 0-0",
        r"\(process [0-9]+ on host x\.y, since ",
    ),
    "torn": (r"\nboot(?s:.*)", "", ""),
    "nothing": (r"(?s:.+)", "", ""),
}
"""What is changed in the content of LOCK, and what is then said of it."""


@pytest.mark.parametrize(("old", "new", "said"), LEFT.values(), ids=LEFT)
def test_only_the_lock_decides_and_what_it_says_is_a_hint(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "LOCK"
    with optimizer_for(Model(), str(tmp_path / "run"), options()):
        inode, text = path.stat().st_ino, path.read_text()
    assert path.read_text() == ""
    path.write_text(re.sub(old, new, text))
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(StoreLockedError, match="another process is writing") as error:
            optimizer_for(Model(), str(tmp_path / "run"), options())
        assert re.search(said, str(error.value))
        assert ("(process" in str(error.value)) == bool(said)
    optimizer_for(Model(), str(tmp_path / "run"), options()).close()
    assert path.stat().st_ino == inode
