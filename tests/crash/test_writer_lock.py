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

from gds import MemoryBackend, PosixBackend, WrapperBackend
from offload import AdamW, DriveTuning, open_checkpoint
from offload.errors import SealError, StoreError, StoreLockedError
from tests.crash import second_writers as second
from tests.forking import Children
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    same_bits,
)

STORE = "/run"


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    server = Children("tests.crash.second_writers")
    yield server
    server.close()


class Training:
    """The first writer: this process."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.store = second.directories(str(directory))
        self.model = Model()
        changes = {"drives": DriveTuning(shares=second.SHARES)} if len(self.store) > 1 else {}
        self.optimizer: AdamW = optimizer_for(self.model, self.store, options(**changes), keep=keep)
        self.step = 0

    def steps_and_seals(self, num_steps: int) -> None:
        for _ in range(num_steps):
            backward(self.model, self.step + 1)
            self.optimizer.step()
            self.optimizer.checkpoint({"by": "the first"}).result()
            self.step += 1


def bits_on_disk(store: Path) -> dict[str, bytes]:
    """Return everything that is there but the output of children."""
    return {str(path): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def assert_whole(store: Path, step: int) -> None:
    """The newest checkpoint is that of a step, to the bit."""
    backend = PosixBackend(direct=False)
    try:
        with open_checkpoint(store, backend=backend) as found:
            assert found.step == step
            assert found.train_state == {"by": "the first"}
            assert differences(found, backend, Reference().after(step)) == []
    finally:
        backend.close()


def is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("lost", [["run"], ["other"], ["run", "other"]], ids="+".join)
def test_a_removed_lock_lets_nobody_in(
    children: Children, tmp_path: Path, keep: int, lost: list[str]
) -> None:
    """What people do who are told that the store is locked."""
    if "other" in lost:
        (tmp_path / "other").mkdir()
    first = Training(tmp_path, keep)
    first.steps_and_seals(3)
    for name in lost:
        (tmp_path / name / "LOCK").unlink()
    refused = children.run(second.train_as_well, tmp_path)
    assert refused.output.startswith("StoreLockedError")
    assert "another process" in refused.output
    with pytest.warns(RuntimeWarning, match=r"LOCK: was removed, and has been made") as caught:
        first.steps_and_seals(4)
    assert len([w for w in caught if "LOCK" in str(w.message)]) == 1
    for name in lost:
        assert is_locked(tmp_path / name / "LOCK")
    assert children.run(second.train_as_well, tmp_path).output.startswith("StoreLockedError")
    first.optimizer.close()
    assert_whole(tmp_path / "run", 7)
    assert same_bits(dict(first.model.state_dict()), Reference().after(7).model)
    assert children.run(second.train_as_well, tmp_path).output == "trained to step 11\n"


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
        Training(tmp_path)
    first = Training(tmp_path)
    with older_version(children, tmp_path, "refused"):
        first.steps_and_seals(1)
    first.optimizer.close()
    assert_whole(tmp_path / "run", 1)


@pytest.mark.parametrize("ended", [False, True], ids=["trains", "has-ended"])
def test_an_earlier_version_that_got_in_ends_all_writing(
    children: Children, tmp_path: Path, ended: bool
) -> None:
    """It can, once LOCK is gone; then nothing is committed or withdrawn any more, for good."""
    store = tmp_path / "run"
    first = Training(tmp_path, keep=1)
    first.steps_and_seals(2)
    (store / "LOCK").unlink()
    with older_version(children, tmp_path, "locked"):
        if not ended:
            refuses_to_write(first, store)
    if ended:
        refuses_to_write(first, store)
    (store / "LOCK").unlink()
    refuses_to_write(first, store)
    first.optimizer.close()
    assert_whole(store, 2)
    assert children.run(second.train_as_well, tmp_path).output == "trained to step 6\n"


def refuses_to_write(first: Training, store: Path) -> None:
    """Every call that would write names what has happened, and no checkpoint changes."""
    before = bits_on_disk(store)
    locked = r"another process may have created and locked a new one"
    for call in (
        lambda: first.steps_and_seals(1),
        lambda: first.optimizer.checkpoint({"again": 1}).result(),
        lambda: first.optimizer.pin("mine"),
        lambda: first.optimizer.restore(),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            error = raised(call)
        if error is not None:
            assert isinstance(error, SealError | StoreLockedError), error
    with pytest.raises((StoreLockedError, SealError), match=locked):
        first.steps_and_seals(2)
    after = bits_on_disk(store)
    assert {p: d for p, d in after.items() if "/.slot-" not in p} == {
        p: d for p, d in before.items() if "/.slot-" not in p
    }


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


def test_a_directory_that_was_moved_away_is_written_to_by_nobody_else(
    children: Children, tmp_path: Path
) -> None:
    """``mv run run2; mkdir run``, and a second process starts in ``run``."""
    store, moved = tmp_path / "run", tmp_path / "run2"
    first = Training(tmp_path)
    first.steps_and_seals(3)
    store.rename(moved)
    store.mkdir()
    assert children.run(second.train_as_well, tmp_path).output == "trained to step 4\n"
    of_second, of_first = bits_on_disk(store), checkpoints_in(moved)
    with pytest.raises(StoreError, match="this is not the directory that was opened") as error:
        first.steps_and_seals(1)
    assert error.value.errno == errno.ESTALE
    assert error.value.filename == str(store)
    for call in (lambda: first.steps_and_seals(1), lambda: first.optimizer.pin("mine")):
        with pytest.raises((SealError, StoreError), match="this is not the directory"):
            call()
    close(first.optimizer)
    assert bits_on_disk(store) == of_second
    assert checkpoints_in(moved) == of_first
    assert_whole(moved, 3)


def checkpoints_in(store: Path) -> dict[str, bytes]:
    return {p: d for p, d in bits_on_disk(store).items() if "/step-" in p}


def test_a_directory_that_comes_back_is_gone_on_with(tmp_path: Path) -> None:
    """Nobody else could lock it meanwhile: the lock stays through a rename."""
    store, moved = tmp_path / "run", tmp_path / "run2"
    first = Training(tmp_path)
    first.steps_and_seals(2)
    store.rename(moved)
    with pytest.raises(StoreLockedError):
        optimizer_for(Model(), str(moved), options())
    backward(first.model, 3)
    with pytest.raises(StoreError, match="until it is back"):
        first.optimizer.step()  # which is not taken
    moved.rename(store)
    first.optimizer.step()
    first.optimizer.checkpoint().result()
    backward(first.model, 4)
    first.optimizer.step()
    store.rename(moved)
    with pytest.raises(SealError, match="until it is back"):
        first.optimizer.checkpoint().result()
    assert isinstance(raised(first.optimizer.synchronize), SealError)  # which says so once more
    moved.rename(store)
    first.optimizer.checkpoint().result()
    first.step = 4
    first.steps_and_seals(1)
    first.optimizer.close()
    assert_whole(store, 5)


def test_a_store_that_is_removed_is_named(tmp_path: Path) -> None:
    first = Training(tmp_path)
    first.steps_and_seals(1)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises((SealError, StoreError), match="this is not the directory that was opened"):
        first.steps_and_seals(2)
    close(first.optimizer)
    assert list(tmp_path.iterdir()) == []


def test_a_store_behind_a_link_is_locked_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "drive")
    first = Training(tmp_path)
    first.steps_and_seals(1)
    with pytest.raises(StoreLockedError):
        optimizer_for(Model(), str(tmp_path / "drive"), options())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").unlink()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="this is not the directory that was opened"):
        first.steps_and_seals(1)
    close(first.optimizer)
    assert os.listdir(tmp_path / "elsewhere") == []
    assert_whole(tmp_path / "drive", 1)


class _Intruder(WrapperBackend):
    """Somebody takes LOCK away, and locks another one, just before an operation of the test's."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.before: Callable[[str, str], bool] = lambda *_: False
        self.came = False
        self.changed_since: list[str] = []

    def _look(self, kind: str, path: str) -> None:
        if self.came and kind in ("rename", "exchange"):
            self.changed_since.append(f"{kind} {path}")
        if not self.came and self.before(kind, path):
            self.came = True
            self.inner.remove(f"{STORE}/LOCK")
            self.inner.lock(f"{STORE}/LOCK", create=True)

    def rename(self, source: str, target: str) -> None:
        self._look("rename", source)
        super().rename(source, target)

    def exchange(self, a: str, b: str) -> None:
        self._look("exchange", a)
        super().exchange(a, b)

    def sync_dir(self, path: str) -> None:
        self._look("sync_dir", path)
        super().sync_dir(path)

    def create(self, path: str, size_bytes: int) -> object:
        self._look("create", path)
        return super().create(path, size_bytes)


def test_it_is_looked_at_again_just_before_the_commit() -> None:
    backend, model = _Intruder(), Model()
    optimizer = optimizer_for(model, STORE, options(backend))
    backward(model, 1)
    optimizer.step()
    backend.before = lambda kind, path: kind == "sync_dir" and "/.slot-" in path
    with pytest.raises(SealError, match="another process may have created and locked"):
        optimizer.checkpoint().result()
    assert backend.came
    assert not backend.changed_since
    close(optimizer)
    assert not any(name.startswith("step-") for name in backend.list_dir(STORE))


@pytest.mark.parametrize("at", [2, 3], ids=["before-the-commit", "behind-the-commit"])
def test_it_is_looked_at_before_each_withdrawal(at: int) -> None:
    """Retention gives up several at once: LOCK is taken away while one of them is withdrawn."""
    backend, model = _Intruder(), Model()
    with optimizer_for(model, STORE, options(backend), keep=4) as optimizer:
        for step in range(1, 5):
            backward(model, step)
            optimizer.step()
            optimizer.checkpoint().result()
    optimizer = optimizer_for(model, STORE, options(backend), keep=1)
    optimizer.restore()
    backward(model, 5)
    optimizer.step()  # withdraws one, to have a slot to write to
    assert sealed_in(backend) == ["step-00000002", "step-00000003", "step-00000004"]
    withdrawn = f"{STORE}/step-0000000{at}"
    backend.before = lambda kind, path: kind == "rename" and path == withdrawn
    error = raised(optimizer.checkpoint().result)
    assert backend.came
    assert isinstance(error, SealError) == (at == 2), "once it is durable, it is acknowledged"
    assert sealed_in(backend)[-1] == ("step-00000004" if at == 2 else "step-00000005")
    for call in (optimizer.step, lambda: optimizer.checkpoint({"again": 1}).result()):
        assert isinstance(raised(call), SealError | StoreLockedError)
    assert not backend.changed_since, "nothing behind the one during which it went"
    close(optimizer)


def sealed_in(backend: WrapperBackend) -> list[str]:
    return [name for name in backend.list_dir(STORE) if name.startswith("step-")]


LEFT = {
    "its-own": ("", "", rf"\(process {os.getpid()} on host \S+, since 20\S+\)"),
    "no-such-process": ("process [0-9]+", "process 4194304", ""),
    "another-process-of-this-number": ("started at [0-9]+", "started at 1", ""),
    "before-the-machine-was-started-again": ("boot [0-9a-f-]+", "boot 0-0", ""),
    "a-container": ("namespace [0-9]+", "namespace 1", "in another container on host "),
    "another-host": (
        r"host \S+ since (\S+)\nboot [0-9a-f-]+",
        r"host x.y since \1\nboot 0-0",
        r"\(process [0-9]+ on host x\.y, since ",
    ),
    "torn": (r"\nboot(?s:.*)", "", ""),
    "control-characters": ("host ", "host \x1b[2J", ""),
    "long": (r"\Z", " " * 100_000, ""),
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
