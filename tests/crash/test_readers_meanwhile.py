"""What a reader does if a checkpoint goes away, comes back or cannot be read while it looks.

A process that trains recycles checkpoints, and renames a directory for that. Here the moment is
chosen by the operation of the reader before which something happens.
"""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from gds import Backend, File, LockHeldError, MemoryBackend, StorageError, WrapperBackend
from gds.contract import Lock, Stat
from offload import Checkpoint, list_checkpoints, open_checkpoint
from offload.checkpoint import reader_lock
from offload.checkpoint.opening import open_for_parameters
from offload.checkpoint.reader_lock import lock_for_reading, was_recycled
from offload.checkpoint.reading import checkpoint_paths
from offload.errors import (
    CheckpointError,
    DamagedError,
    ManifestError,
    RecycledError,
    StoreBusyError,
    UnreadableError,
)
from offload.format.manifest import Manifest
from tests.crash.fault_backend import FaultBackend
from tests.crash.test_beside_training import MeanwhileBackend
from tests.crash.test_drives import ONE, TWO, store_of_two
from tests.stores.files import contents, everything, flip, overwrite, read, remove_tree, write
from tests.stores.small import STORE, memory_store
from tests.torch_contract.test_damaged_checkpoints import edit_manifest

FIRST = f"{STORE}/step-00000001"
NEWEST = f"{STORE}/step-00000002"
MANIFEST = f"{NEWEST}/manifest.json"
AWAY = f"{STORE}/.slot-9"
MOST_LOOKS = 20_000
"""A search that takes more looks at one name than this does not end."""


class Meanwhile(WrapperBackend):
    """Lets something happen before chosen operations, once for each call of `before`."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.due: list[tuple[str, str, Callable[[], object]]] = []

    def before(self, kind: str, path: str, what: Callable[[], object]) -> None:
        """Let something happen before the next operation of a kind on a path, or in its place."""
        self.due.append((kind, path, what))

    def fail(self, kind: str, path: str, number: int = errno.EIO) -> None:
        """Let the next operation of a kind on a path fail."""

        def raised() -> None:
            raise StorageError(number, kind, path)

        self.before(kind, path, raised)

    def _look(self, kind: str, path: str) -> None:
        for one in self.due:
            if one[:2] == (kind, path):
                self.due.remove(one)
                one[2]()
                return

    def stat(self, path: str) -> Stat | None:
        self._look("stat", path)
        return super().stat(path)

    def list_dir(self, path: str) -> list[str]:
        self._look("list_dir", path)
        return super().list_dir(path)

    def open(self, path: str, *, writable: bool = False) -> File:
        self._look("open", path)
        return super().open(path, writable=writable)

    def lock(self, path: str, *, shared: bool = False, create: bool = False) -> Lock:
        self._look("lock", path)
        return super().lock(path, shared=shared, create=create)


class Seen(Meanwhile):
    """Changes what a look at the newest checkpoint's directory says."""

    def __init__(self, inner: Backend, said: Callable[[int, Stat], Stat | None]) -> None:
        """Wrap a backend.

        Args:
            inner: Has the files.
            said: Called with the number of the look, from 1, and with what is there; returns what
                the reader is told.
        """
        super().__init__(inner)
        self._said = said
        self.num_looks = 0

    def stat(self, path: str) -> Stat | None:
        found = super().stat(path)
        if path != NEWEST or found is None:
            return found
        self.num_looks += 1
        assert self.num_looks < MOST_LOOKS, "the search does not end"
        return self._said(self.num_looks, found)


def another(found: Stat) -> Stat:
    """Return the status of another directory with the same name."""
    return replace(found, inode=found.inode + 1_000_000)


def take_away(backend: Backend) -> None:
    """Recycle the newest checkpoint, as far as its name goes."""
    backend.rename(NEWEST, AWAY)


def copied(backend: Backend) -> MemoryBackend:
    """Return the same directories and files once more."""
    found = everything(backend)
    copy = MemoryBackend(directories=[path for path, data in found.items() if data is None])
    for path, data in found.items():
        if data is not None:
            write(copy, path, data)
    return copy


def put(backend: Backend, files: dict[str, bytes], directory: str) -> None:
    """Make a directory with files."""
    backend.make_dir(directory)
    for name, data in files.items():
        write(backend, f"{directory}/{name}", data)


def manifest_of(backend: Backend, path: str = NEWEST) -> Manifest:
    with open_checkpoint(path, backend=backend) as opened:
        return opened.manifest


def unlocked(backend: Backend, path: str = NEWEST) -> Checkpoint:
    """Return a checkpoint as a seal or `restore` returns it: it may be recycled at any time."""
    return Checkpoint(backend, path, manifest_of(backend, path))


def listed(backend: Backend) -> list[tuple[int, bool]]:
    return [(info.step, info.valid) for info in list_checkpoints(STORE, backend=backend)]


class Clock:
    """The time of those who wait for a lock: each look at it is later, and a sleep does a thing."""

    def __init__(self, sleeping: Callable[[], object]) -> None:
        self._now = 0.0
        self._sleeping = sleeping
        self.num_sleeps = 0

    def monotonic(self) -> float:
        self._now += 0.05
        return self._now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.num_sleeps += 1
        assert self.num_sleeps < 1000, "the wait does not end"
        self._sleeping()


class TestLock:
    def test_readers_share_it_and_keep_writers_out(self) -> None:
        backend = memory_store()
        with (
            open_checkpoint(NEWEST, backend=backend),
            open_checkpoint(NEWEST, backend=backend) as two,
        ):
            assert two.step == 2
            with pytest.raises(LockHeldError):
                backend.lock(NEWEST)
        backend.lock(NEWEST).release()

    def test_a_writer_that_lets_go_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = memory_store()
        writer = backend.lock(NEWEST)
        clock = Clock(writer.release)
        monkeypatch.setattr(reader_lock, "time", clock)
        lock = lock_for_reading(backend, NEWEST)
        assert clock.num_sleeps == 1
        with pytest.raises(LockHeldError):
            backend.lock(NEWEST)
        lock.release()

    def test_a_writer_that_does_not_is_not_waited_for_without_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = memory_store()
        writer = backend.lock(NEWEST)
        clock = Clock(lambda: None)
        monkeypatch.setattr(reader_lock, "time", clock)
        with pytest.raises(StoreBusyError, match="is being recycled; open a newer one"):
            lock_for_reading(backend, NEWEST)
        assert clock.num_sleeps > 1
        writer.release()

    def test_a_name_that_is_gone_at_the_first_look_is_recycled(self) -> None:
        """The seal of another one of this step may put it back a moment later."""
        backend = Seen(memory_store(), lambda look, found: None if look == 1 else found)
        with pytest.raises(RecycledError):
            lock_for_reading(backend, NEWEST)
        backend.lock(NEWEST).release()

    def test_a_name_that_goes_before_the_lock_is_recycled(self) -> None:
        backend = Meanwhile(memory_store())
        backend.before("lock", NEWEST, lambda: take_away(backend))
        with pytest.raises(RecycledError, match="has just been recycled"):
            lock_for_reading(backend, NEWEST)

    def test_what_takes_the_name_before_the_lock_is_let_go_of(self) -> None:
        backend = Meanwhile(memory_store())

        def replaced() -> None:
            files = contents(backend, NEWEST)
            take_away(backend)
            put(backend, files, NEWEST)

        backend.before("lock", NEWEST, replaced)
        with pytest.raises(RecycledError) as caught:
            lock_for_reading(backend, NEWEST)
        backend.lock(NEWEST).release()
        assert caught.value.filename == NEWEST

    def test_another_error_is_not_taken_for_that(self) -> None:
        backend = Meanwhile(memory_store())
        backend.fail("lock", NEWEST)
        with pytest.raises(UnreadableError, match="try again"):
            open_checkpoint(NEWEST, backend=backend)
        backend.fail("lock", NEWEST)
        with pytest.raises(StorageError) as caught:
            lock_for_reading(backend, NEWEST)
        assert caught.value.errno == errno.EIO

    def test_a_reader_that_nobody_closed_lets_go_even_if_warnings_are_errors(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = memory_store()
        raised: list[type[BaseException]] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda found: raised.append(found.exc_type))
        opened = open_checkpoint(NEWEST, backend=backend)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del opened
        assert raised == [ResourceWarning]
        backend.lock(NEWEST).release()


class TestRecycled:
    """A checkpoint without a lock, as `restore` returns it."""

    def test_one_whose_name_another_one_has_is_said_to_be(self) -> None:
        backend = memory_store()
        before = unlocked(backend)
        edit_manifest(lambda body: body.update(generation=7))(backend, NEWEST)
        assert was_recycled(backend, NEWEST, before.manifest)
        with pytest.raises(RecycledError), before.held():
            pytest.fail("the block is entered")
        backend.lock(NEWEST).release()
        assert not was_recycled(backend, NEWEST, manifest_of(backend))

    def test_one_whose_manifest_is_damaged_is_not(self) -> None:
        backend = memory_store()
        manifest = manifest_of(backend)
        overwrite(backend, MANIFEST, b"{{{")
        assert not was_recycled(backend, NEWEST, manifest)

    def test_one_whose_manifest_cannot_be_read_is_not(self) -> None:
        backend = Meanwhile(memory_store())
        manifest = manifest_of(backend)
        backend.fail("open", MANIFEST)
        assert not was_recycled(backend, NEWEST, manifest)
        assert backend.due == []

    def test_one_that_goes_while_its_manifest_is_read_is(self) -> None:
        backend = Meanwhile(memory_store())
        manifest = manifest_of(backend)
        backend.before("stat", MANIFEST, lambda: take_away(backend))
        assert was_recycled(backend, NEWEST, manifest)

    def test_the_train_state_of_one_that_is_gone_is_not_called_unreadable(self) -> None:
        backend = Meanwhile(memory_store())
        before = unlocked(backend)
        take_away(backend)
        backend.fail("open", f"{NEWEST}/train_state.safetensors")
        with pytest.raises(RecycledError):
            _ = before.train_state

    def test_the_train_state_of_one_that_is_there_is_called_what_it_is(self) -> None:
        backend = Meanwhile(memory_store())
        before, path = unlocked(backend), f"{NEWEST}/train_state.safetensors"
        backend.fail("open", path)
        with pytest.raises(UnreadableError, match="check the drive"):
            _ = before.train_state
        flip(backend, path, 40)
        with pytest.raises(DamagedError, match=path):
            _ = before.train_state
        backend.remove(path)
        with pytest.raises(CheckpointError, match=path):
            _ = before.train_state

    def test_one_that_is_locked_and_moved_by_hand_is_damaged(self) -> None:
        """No process recycles what a reader has locked, so this is somebody's mistake."""
        backend = memory_store()
        with open_checkpoint(NEWEST, backend=backend) as opened:
            take_away(backend)
            report = opened.verify()
            assert any("no manifest.json" in problem for problem in report.problems)
            with pytest.raises(CheckpointError, match="train_state"):
                _ = opened.train_state


class TestOpening:
    def test_a_checkpoint_that_goes_at_any_moment_is_said_to_be_recycled(self) -> None:
        original, counts = memory_store(), {"recycled": 0, "opened": 0}
        for nth in count(2):  # what is gone before the first look was never there
            inner = copied(original)
            backend = MeanwhileBackend(inner, nth, lambda inner=inner: take_away(inner))
            try:
                open_checkpoint(NEWEST, backend=backend).close()
                counts["opened"] += 1
            except RecycledError:
                counts["recycled"] += 1
            if backend.left > 0:
                break
        assert counts["recycled"] > 10
        assert counts["opened"] > 0

    def test_the_newest_of_a_store_that_goes_at_any_moment_is_not_missed(self) -> None:
        original, steps = memory_store(), []
        for nth in count(1):
            inner = copied(original)
            backend = MeanwhileBackend(inner, nth, lambda inner=inner: take_away(inner))
            with open_checkpoint(STORE, backend=backend) as opened:
                steps.append(opened.step)
            if backend.left > 0:
                break
        assert steps.count(1) > 20
        assert steps[-1] == 2

    def test_the_only_one_of_a_store_that_goes_leaves_none(self) -> None:
        """The path of a store is not that of a checkpoint which has been recycled."""
        backend = Meanwhile(memory_store())
        remove_tree(backend, FIRST)
        backend.before("lock", NEWEST, lambda: take_away(backend))
        with pytest.raises(CheckpointError, match="no usable checkpoint here"):
            open_checkpoint(STORE, backend=backend)

    @pytest.mark.parametrize("kind", ["stat", "open"])
    def test_the_newest_that_cannot_be_read_because_it_goes_is_not_missed(self, kind: str) -> None:
        backend = Meanwhile(memory_store())

        def gone() -> None:
            take_away(backend)
            raise StorageError(errno.ESTALE, kind, MANIFEST)

        backend.before(kind, MANIFEST, gone)
        with open_checkpoint(STORE, backend=backend) as opened:
            assert opened.step == 1

    def test_a_first_look_that_fails_is_not_taken_for_all_that_there_is(self) -> None:
        """What could not be looked at may be what goes a moment later."""
        backend = Meanwhile(memory_store())
        backend.fail("stat", NEWEST)
        backend.before("lock", NEWEST, lambda: take_away(backend))
        with open_checkpoint(STORE, backend=backend) as opened:
            assert opened.step == 1
        assert backend.due == []

    def test_a_search_that_finds_another_one_each_time_ends(self) -> None:
        backend = Seen(
            memory_store(), lambda look, found: replace(found, inode=found.inode + 1000 * look)
        )
        with pytest.raises(RecycledError):
            open_checkpoint(NEWEST, backend=backend)
        assert backend.num_looks > 100

    def test_a_relative_path_is_made_absolute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir("/")
        with open_checkpoint(STORE[1:], backend=memory_store()) as opened:
            assert opened.path == NEWEST

    def test_a_checkpoint_that_is_refused_is_not_kept_locked(self) -> None:
        backend = memory_store()
        overwrite(backend, MANIFEST, b"{{{")
        with pytest.raises(ManifestError) as caught:
            open_checkpoint(NEWEST, backend=backend)
        backend.lock(NEWEST).release()
        assert MANIFEST in str(caught.value)

    def test_one_whose_warnings_are_errors_is_not_kept_locked(self) -> None:
        backend = memory_store()
        overwrite(backend, MANIFEST, b"{{{")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="not using") as caught:
                open_checkpoint(STORE, backend=backend)
        backend.lock(FIRST).release()
        assert NEWEST in str(caught.value)

    def test_each_newer_one_that_is_not_usable_is_warned_of(self) -> None:
        backend = memory_store(3)
        for step in (2, 3):
            overwrite(backend, f"{STORE}/step-0000000{step}/manifest.json", b"{{{")
        with (
            pytest.warns(RuntimeWarning) as caught,
            open_checkpoint(STORE, backend=backend) as opened,
        ):
            assert opened.step == 1
        assert ["step-00000002" in str(w.message) for w in caught] == [True, False]
        assert ["step-00000003" in str(w.message) for w in caught] == [False, True]

    def test_other_drives_are_not_asked_for_when_only_parameters_are_wanted(self) -> None:
        """Not even of a checkpoint that was not whole at the first look, and is at the second."""
        backend = FaultBackend(store_of_two())
        backend.rename(TWO, "/second/moved")
        train_state = f"{ONE}/step-00000002/train_state.safetensors"
        backend.fail_if(lambda kind, path: (kind, path) == ("stat", train_state), errno.ENOENT)
        with open_for_parameters(ONE, backend=backend) as opened:
            assert opened.step == 1
        assert backend.num_failed == 1


class TestListing:
    def test_one_that_takes_the_place_of_another_is_listed(self) -> None:
        backend = Meanwhile(memory_store(3))
        third, prepared = f"{STORE}/step-00000003", f"{STORE}/.slot-8"
        backend.rename(third, prepared)

        def sealed() -> None:
            take_away(backend)
            backend.rename(prepared, third)

        backend.before("open", MANIFEST, sealed)
        assert listed(backend) == [(1, True), (3, True)]

    def test_one_that_is_another_at_each_look_is_left_out(self) -> None:
        backend = Seen(
            memory_store(), lambda look, found: replace(found, inode=found.inode + 1000 * look)
        )
        assert listed(backend) == [(1, True)]

    @pytest.mark.parametrize("number", [0, errno.ENOENT, errno.EIO], ids=["read", "gone", "error"])
    def test_one_that_is_replaced_in_each_listing_is_described_anew(self, number: int) -> None:
        """Whatever was wrong with what had the name before says nothing about it."""

        class Replaced(Seen):
            def list_dir(self, path: str) -> list[str]:
                self.num_looks = 0
                if number and path == STORE:
                    self.due = []
                    self.fail("open", MANIFEST, number)
                return super().list_dir(path)

        backend = Replaced(
            memory_store(), lambda look, found: found if look == 1 else another(found)
        )
        assert listed(backend) == [(1, True), (2, True)]

    def test_a_name_that_is_gone_at_any_one_look_is_listed_when_it_is_back(self) -> None:
        original = memory_store()
        for hidden in count(1):

            def said(look: int, found: Stat, hidden: int = hidden) -> Stat | None:
                if look == hidden:
                    return None
                return found if look == 1 else another(found)

            backend = Seen(original, said)
            assert listed(backend) == [(1, True), (2, True)], f"gone at look {hidden}"
            if backend.num_looks < hidden:
                break
        assert hidden > 4

    def test_pins_that_cannot_be_read_are_said_to_be(self) -> None:
        backend = Meanwhile(memory_store())
        backend.make_dir(f"{STORE}/pins")
        backend.fail("list_dir", f"{STORE}/pins")
        with pytest.raises(UnreadableError, match=r"could not be read .* try again"):
            list_checkpoints(STORE, backend=backend)
        assert listed(backend) == [(1, True), (2, True)]

    def test_a_store_that_cannot_be_read_is_said_to_be(self) -> None:
        backend = Meanwhile(memory_store())
        backend.fail("list_dir", STORE)
        with pytest.raises(UnreadableError, match=r"could not be read .* try again"):
            list_checkpoints(STORE, backend=backend)

    def test_what_is_no_store_is_said_to_be_what_it_is(self) -> None:
        backend = memory_store()
        for path, words in (
            (f"{STORE}/LOCK", "a file, expected the directory of a store"),
            (NEWEST, f"this is a checkpoint; its store is {STORE}"),
        ):
            with pytest.raises(CheckpointError, match=f"^{path}: {words}"):
                list_checkpoints(path, backend=backend)

    def test_checkpoints_make_a_store_and_so_does_a_lock(self) -> None:
        backend = memory_store()
        backend.remove(f"{STORE}/LOCK")
        assert listed(backend) == [(1, True), (2, True)]
        remove_tree(backend, FIRST)
        remove_tree(backend, NEWEST)
        with pytest.raises(CheckpointError, match="not a store"):
            listed(backend)
        write(backend, f"{STORE}/LOCK", b"")
        assert listed(backend) == []

    def test_the_order_is_that_of_generations_and_not_of_steps(self) -> None:
        backend = memory_store(3)
        edit_manifest(lambda body: body.update(generation=9))(backend, FIRST)
        assert listed(backend) == [(2, True), (3, True), (1, True)]

    def test_one_that_is_not_valid_comes_after_a_valid_one_of_its_step(self) -> None:
        backend = memory_store(3)
        backend.make_dir(f"{STORE}/step-2")
        assert listed(backend) == [(1, True), (2, True), (2, False), (3, True)]


class TestNames:
    """A directory that has the name of another step, or of none."""

    WRONG = f"{STORE}/step-00000009"

    def test_a_wrong_one_is_refused_unless_it_is_looked_at_nevertheless(self) -> None:
        backend = memory_store()
        backend.rename(NEWEST, self.WRONG)
        with pytest.raises(CheckpointError, match="is of step 2, expected 9"):
            open_checkpoint(self.WRONG, backend=backend)
        with open_checkpoint(self.WRONG, even_quarantined=True, backend=backend) as opened:
            assert opened.step == 2

    def test_a_store_that_has_a_wrong_one_is_opened_at_another(self) -> None:
        backend = memory_store()
        backend.rename(NEWEST, self.WRONG)
        with (
            pytest.warns(RuntimeWarning, match=f"not using {self.WRONG}: .*expected 9"),
            open_checkpoint(STORE, backend=backend) as opened,
        ):
            assert opened.step == 1

    def test_a_wrong_one_is_listed_as_such_before_its_files_are_looked_at(self) -> None:
        backend = Meanwhile(memory_store())
        backend.rename(NEWEST, self.WRONG)
        backend.fail("stat", f"{self.WRONG}/model.safetensors")
        found = list_checkpoints(STORE, backend=backend)
        assert [(info.step, info.valid) for info in found] == [(1, True), (9, False)]
        assert "is of step 2, expected 9" in found[1].reason

    def test_they_are_in_the_order_of_steps_and_not_of_letters(self) -> None:
        names = ["step-00000002", "step-00000009", "step-10", "step-1234567890"]
        backend = MemoryBackend(directories=[f"{STORE}/{name}" for name in ("pins", *names)])
        assert checkpoint_paths(backend, STORE) == [f"{STORE}/{name}" for name in names]
        backend.rename(f"{STORE}/step-00000009", f"{STORE}/step-11")
        assert checkpoint_paths(backend, STORE)[1:3] == [f"{STORE}/step-10", f"{STORE}/step-11"]
        backend.rename(f"{STORE}/step-11", f"{STORE}/step-9")
        assert checkpoint_paths(backend, STORE)[1:3] == [f"{STORE}/step-9", f"{STORE}/step-10"]

    def test_one_that_no_store_gives_is_as_good_as_any(self) -> None:
        backend = memory_store()
        backend.rename(NEWEST, f"{STORE}/backup")
        with open_checkpoint(f"{STORE}/backup", backend=backend) as opened:
            assert opened.step == 2
            assert opened.verify().ok
        assert read(backend, f"{STORE}/backup/manifest.json")
