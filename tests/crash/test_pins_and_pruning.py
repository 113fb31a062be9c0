"""Files of pins, read and written with errors and races, and pruning without a training process."""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from gds import Backend, MemoryBackend, StorageError, WrapperBackend
from gds.contract import Capabilities, File
from offload import open_checkpoint
from offload.errors import DamagedError, PinError, StoreError, UnwritableError
from offload.format import document
from offload.retention.pins import (
    FoundPins,
    Pin,
    drop_unfinished,
    read_pins,
    remove_pin,
    write_pin,
)
from offload.retention.policy import LastK, Record, Retention
from offload.store.maintenance.pinning import pin
from offload.store.maintenance.pruning import Pruned, PruneReport, prune
from tests.crash.crash_backend import CrashBackend
from tests.crash.fault_backend import FaultBackend
from tests.crash.opened import SECOND, made
from tests.ranks_store.job import ONE, TWO, Job, part_paths
from tests.ranks_store.test_many_owners import seal_with
from tests.stores.files import contents, flip, overwrite, remove_tree, write
from tests.stores.small import STORE, memory_store

PINS = f"{STORE}/pins"
FIRST, NEWEST = f"{STORE}/step-00000001", f"{STORE}/step-00000002"
BODY = {"checkpoint": "step-00000001", "store_id": "1" * 32, "generation": 1}
BEST = Pin(name="best", checkpoint="step-00000001", store_id="1" * 32, generation=1)


def with_pins(*names: str) -> MemoryBackend:
    """Return files of a store that has only pins."""
    backend = MemoryBackend(directories=[STORE])
    for name in names:
        write_pin(backend, STORE, replace(BEST, name=name))
    return backend


def names_of(found: FoundPins) -> list[str]:
    return [pin.name for pin in found.pins]


class _Meddled(WrapperBackend):
    """Somebody meddles in a call, and the open files are counted."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.files: list[File] = []
        self.listed_too: dict[str, str] = {}
        """Name that is listed besides, by path of the directory."""

        self.made_meanwhile = False
        """Whether another process makes each directory a moment before this one does."""

        self.remote = False

    def wrap_file(self, file: File) -> File:
        self.files.append(file)
        return file

    def list_dir(self, path: str) -> list[str]:
        names = super().list_dir(path)
        return [*names, self.listed_too[path]] if path in self.listed_too else names

    def make_dir(self, path: str) -> None:
        super().make_dir(path)
        if self.made_meanwhile:
            raise StorageError(errno.EEXIST, "making a directory", path)

    def capabilities(self, directory: str) -> Capabilities:
        return replace(super().capabilities(directory), remote=self.remote)


class TestReadingPins:
    """What can be read, what cannot, and why."""

    def test_those_on_a_directory_are_told_from_the_others(self) -> None:
        other = replace(BEST, name="other", checkpoint="step-00000002")
        assert FoundPins((BEST, other)).names_at(NEWEST) == ("other",)

    @pytest.mark.parametrize(
        "changes",
        [
            {"generation": None},
            {"generation": True},
            {"generation": -1},
            {"generation": 1 << 63},
            {"checkpoint": "best"},
            {"store_id": "1" * 31},
        ],
        ids=lambda changes: " ".join(f"{key} {value}" for key, value in changes.items()),
    )
    def test_one_that_says_nothing_sensible_keeps_an_unknown_checkpoint(
        self, changes: dict[str, Any]
    ) -> None:
        backend = with_pins("a", "best")
        body = {key: value for key, value in {**BODY, **changes}.items() if value is not None}
        write(backend, f"{PINS}/a", document.padded(document.signed(1, body), 512))
        found = read_pins(backend, STORE)
        assert names_of(found) == ["best"]
        assert len(found.unreadable) == 1
        assert f"{PINS}/a: cannot be read as a pin" in found.unreadable[0]
        assert found.failures == ()

    @pytest.mark.parametrize(
        ("number", "words"),
        [(errno.EIO, "Until then it is not known which checkpoint it keeps"),
         (errno.ELOOP, "cannot be read as a pin")],
    )  # fmt: skip
    def test_an_error_that_may_pass_is_told_from_one_about_the_content(
        self, number: int, words: str
    ) -> None:
        backend = FaultBackend(with_pins("a", "best"))
        backend.fail_if(lambda kind, path: kind == "open" and path == f"{PINS}/a", number)
        found = read_pins(backend, STORE)
        assert names_of(found) == ["best"]
        assert len(found.unreadable) == 1
        assert words in found.unreadable[0]
        assert [error.errno for error in found.failures] == [number] * (number == errno.EIO)

    @pytest.mark.parametrize("when", ["before it is looked at", "before it is opened"])
    def test_one_that_is_removed_meanwhile_is_none(self, when: str) -> None:
        there = FaultBackend(with_pins("a", "best"))
        there.fail_if(lambda kind, path: kind == "open" and path == f"{PINS}/a", errno.ENOENT)
        gone = _Meddled(with_pins("best"))
        gone.listed_too[PINS] = "a"
        found = read_pins(gone if when == "before it is looked at" else there, STORE)
        assert found == FoundPins((BEST,))

    def test_their_files_are_closed(self) -> None:
        backend = _Meddled(with_pins("best"))
        assert names_of(read_pins(backend, STORE)) == ["best"]
        (file,) = backend.files
        with pytest.raises(StorageError):
            file.read_bytes(0, 1)


class TestWritingPins:
    """A pin is made, moved and removed durably, or not at all."""

    def test_one_is_complete_before_it_has_its_name_which_is_durable_on_return(self) -> None:
        backend = CrashBackend()
        backend.make_dir(STORE)
        backend.make_dir(PINS)
        before = len(backend.log)
        write_pin(backend, STORE, BEST)
        *_, synced, named, of_pins, of_store = backend.log[before:]
        kinds = [operation.kind for operation in backend.log[before:]]
        assert kinds == ["create", "write", "sync", "rename", "sync_dir", "sync_dir"]
        assert (named.path, named.other) == (synced.path, f"{PINS}/best")
        assert [of_pins.path, of_store.path] == [PINS, STORE]

    def test_one_is_removed_durably(self) -> None:
        backend = CrashBackend()
        backend.make_dir(STORE)
        write_pin(backend, STORE, BEST)
        before = len(backend.log)
        remove_pin(backend, STORE, "best")
        log = [str(operation) for operation in backend.log[before:]]
        assert log == [f"remove {PINS}/best", f"sync_dir {PINS}"]

    def test_another_process_may_make_the_first_one_at_the_same_time(self) -> None:
        backend = _Meddled(with_pins())
        backend.made_meanwhile = True
        write_pin(backend, STORE, BEST)
        assert read_pins(backend, STORE) == FoundPins((BEST,))

    def test_a_directory_that_cannot_be_made_is_an_error(self) -> None:
        backend = FaultBackend(with_pins())
        backend.fail_if(lambda kind, _: kind == "make_dir")
        with pytest.raises(StorageError, match="injected failure of make_dir"):
            write_pin(backend, STORE, BEST)

    def test_what_an_error_has_left_is_not_in_the_way(self) -> None:
        """The file that was to be renamed could not be removed either."""
        backend = FaultBackend(with_pins())
        backend.fail("rename", 1, forever=False)
        backend.fail_if(lambda kind, _: kind == "remove")
        with pytest.raises(StorageError, match="injected failure of rename"):
            write_pin(backend, STORE, BEST)
        assert backend.num_failed == 2
        assert read_pins(backend, STORE) == FoundPins()
        write_pin(backend, STORE, BEST)
        assert read_pins(backend, STORE) == FoundPins((BEST,))

    @pytest.mark.parametrize("kind", ["create", "remove"])
    def test_a_user_who_may_not_write_is_told_so(self, kind: str) -> None:
        backend = FaultBackend(with_pins("best"))
        backend.fail_if(lambda found, _: found == kind, errno.EACCES)
        with pytest.raises(UnwritableError, match=r"this store cannot be written .*, at pins"):
            write_pin(backend, STORE, BEST) if kind == "create" else remove_pin(
                backend, STORE, "best"
            )

    def test_only_files_of_pins_that_were_not_finished_are_dropped(self) -> None:
        backend = with_pins("a.new", "best")
        for name in (".keep", ".one.1-1.new", ".two.1-1.new"):
            write(backend, f"{PINS}/{name}", b"")
        drop_unfinished(backend, STORE)
        assert sorted(backend.list_dir(PINS)) == [".keep", "a.new", "best"]


class TestPinning:
    """Pins that are made beside a process that trains."""

    def test_the_backend_that_is_given_has_the_store(self) -> None:
        backend = memory_store(2)
        given = FaultBackend(backend)
        with open_checkpoint(FIRST, backend=backend) as opened:
            assert pin(opened, "best", backend=given) == FIRST
        assert given.num_done["rename"] == 1
        assert names_of(read_pins(backend, STORE)) == ["best"]

    def test_a_copy_under_another_name_in_the_store_needs_no_pin(self) -> None:
        backend = memory_store(1)
        backend.make_dir(f"{STORE}/copy")
        for name, data in contents(backend, FIRST).items():
            write(backend, f"{STORE}/copy/{name}", data)
        with pytest.raises(PinError, match="not a checkpoint in a store"):
            pin(f"{STORE}/copy", "best", backend=backend)
        assert backend.stat(PINS) is None


class _Meanwhile(Retention):
    """Keeps the newest checkpoint, and lets something happen whenever it is asked."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.happens = happens

    def kept(self, records: Sequence[Record]) -> set[int]:
        self.happens()
        return LastK(1).kept(records)


def bytes_in(backend: Backend, *directories: str) -> int:
    return sum(len(data) for each in directories for data in contents(backend, each).values())


class TestReport:
    """What a call says that it has removed, or would remove."""

    def test_checkpoints_and_leftovers_count(self) -> None:
        assert PruneReport((Pruned("a", 1),), (Pruned("b", 2),), (), (), ()).bytes == 3

    def test_nothing_of_what_would_be_removed_is_called_kept(self) -> None:
        backend = memory_store(2)
        size = bytes_in(backend, FIRST)
        report = prune(STORE, LastK(1), dry_run=True, backend=backend)
        assert report == PruneReport((Pruned(FIRST, size),), (), (NEWEST,), (), ())

    def test_nothing_of_what_stays_is_called_read(self) -> None:
        backend = memory_store(2)
        size = bytes_in(backend, FIRST)
        report = prune(STORE, LastK(1), backend=backend)
        assert report == PruneReport((Pruned(FIRST, size),), (), (NEWEST,), (), ())

    def test_what_is_being_read_is_kept(self) -> None:
        backend = memory_store(2)
        with open_checkpoint(FIRST, backend=backend):
            report = prune(STORE, LastK(1), backend=backend)
        assert report == PruneReport((), (), (FIRST, NEWEST), (FIRST,), ())

    def test_the_parts_on_other_drives_count(self) -> None:
        backend = made(2, num_drives=2)
        with open_checkpoint(FIRST, backend=backend) as opened:
            (part,) = opened.manifest.parts
        size = bytes_in(backend, FIRST, f"{SECOND}/{part.name}")
        report = prune(STORE, LastK(1), parts=[SECOND], backend=backend)
        assert report.checkpoints == (Pruned(FIRST, size),)

    def test_a_leftover_that_a_reader_holds_is_none(self) -> None:
        backend = memory_store(2)
        backend.make_dir(f"{STORE}/.slot-8")
        backend.make_dir(f"{STORE}/.slot-9")
        with closing_lock(backend, f"{STORE}/.slot-8"):
            report = prune(STORE, backend=backend)
        assert report.leftovers == (Pruned(f"{STORE}/.slot-9", 0),)
        assert backend.stat(f"{STORE}/.slot-8") is not None

    def test_a_leftover_that_somebody_removes_meanwhile_has_no_bytes(self) -> None:
        backend = memory_store(2)
        leftover = f"{STORE}/.slot-8"
        backend.make_dir(leftover)
        write(backend, f"{leftover}/mine", b"12345")
        policy = _Meanwhile(lambda: backend.stat(leftover) and remove_tree(backend, leftover))
        report = prune(STORE, policy, dry_run=True, backend=backend)
        assert report.leftovers == (Pruned(leftover, 0),)

    def test_a_file_that_somebody_removes_meanwhile_has_no_bytes(self) -> None:
        inner = memory_store(2)
        inner.make_dir(f"{STORE}/.slot-8")
        write(inner, f"{STORE}/.slot-8/mine", b"12345")
        backend = _Meddled(inner)
        backend.listed_too[f"{STORE}/.slot-8"] = "gone"
        report = prune(STORE, dry_run=True, backend=backend)
        assert report.leftovers == (Pruned(f"{STORE}/.slot-8", 5),)


def closing_lock(backend: Backend, path: str) -> Any:
    """Hold a directory as a reader does, until the block ends."""
    lock = backend.lock(path, shared=True)

    class _Held:
        def close(self) -> None:
            lock.release()

    return closing(_Held())


class TestPruning:
    """Stores of one process."""

    def test_only_a_call_that_is_asked_to_reads_what_is_kept(self) -> None:
        backend = memory_store(2)
        flip(backend, f"{NEWEST}/exp_avg.safetensors")
        with pytest.raises(DamagedError, match="nothing was removed"):
            prune(STORE, LastK(1), verify=True, backend=backend)
        assert backend.stat(FIRST) is not None
        report = prune(STORE, LastK(1), backend=backend)
        assert not report.verified
        assert backend.stat(FIRST) is None

    def test_the_parts_are_read_where_they_are_now(self) -> None:
        """The directory that the manifests name is that of the store that this one is a copy of."""
        backend = made(2, num_drives=2)
        backend.make_dir("/moved")
        backend.rename(SECOND, "/moved/run")
        report = prune(STORE, LastK(1), verify=True, parts=["/moved/run"], backend=backend)
        assert report.verified
        assert report.kept == (NEWEST,)

    def test_every_directory_that_is_given_has_to_be_there(self) -> None:
        backend = made(2, num_drives=2)
        with pytest.raises(StoreError, match=r"given with --part, does not exist") as caught:
            prune(STORE, LastK(1), parts=[SECOND, "/missing"], backend=backend)
        assert caught.value.filename == "/missing"

    def test_a_store_that_another_machine_serves_is_pruned(self) -> None:
        backend = _Meddled(memory_store(2))
        backend.remote = True
        assert prune(STORE, LastK(1), backend=backend).kept == (NEWEST,)

    @pytest.mark.parametrize("newest", ["none", "of one process"])
    def test_parts_of_ranks_are_left_alone_if_the_newest_checkpoint_is_not_theirs(
        self, newest: str
    ) -> None:
        backend = MemoryBackend()
        seal_with(backend, STORE, 2)
        with open_checkpoint(FIRST, backend=backend) as opened:
            store_id = opened.manifest.store_id
            (part,) = opened.manifest.owners
        remove_tree(backend, FIRST)
        if newest == "of one process":
            source = memory_store(1)
            backend.make_dir(FIRST)
            for name, data in contents(source, FIRST).items():
                write(backend, f"{FIRST}/{name}", data)
            with open_checkpoint(FIRST, backend=source) as opened:
                manifest = replace(opened.manifest, store_id=store_id)
            size_bytes = len(contents(source, FIRST)["manifest.json"])
            overwrite(backend, f"{FIRST}/manifest.json", manifest.encode(size_bytes))
        report = prune(STORE, backend=backend)
        assert report.leftovers == ()
        assert backend.stat(f"{STORE}/owner-1/{part.name}") is not None


class TestRanks:
    """Stores of several ranks, whose parts may be in further directories."""

    @pytest.fixture
    def backend(self) -> MemoryBackend:
        """Return two checkpoints of two ranks with a directory each, on one machine."""
        backend = MemoryBackend()
        with Job([backend, backend], keep=2) as job:
            job.seal(1)
            job.seal(2)
        return backend.reopened()

    def test_parts_in_all_given_directories_are_removed_with_their_checkpoint(
        self, backend: MemoryBackend
    ) -> None:
        old, new = part_paths(backend)
        report = prune(ONE, LastK(1), parts=[TWO], backend=backend)
        assert old in [removed.path for removed in report.leftovers]
        assert [*part_paths(backend)] == [new]
        assert report.kept == (f"{ONE}/step-00000002",)

    def test_their_directories_are_pruned_by_a_node_that_does_not_see_all(
        self, backend: MemoryBackend
    ) -> None:
        remove_tree(backend, TWO)
        assert prune(ONE, LastK(1), backend=backend).kept == (f"{ONE}/step-00000002",)

    def test_parts_in_all_given_directories_are_read(self, backend: MemoryBackend) -> None:
        _, new = part_paths(backend)
        flip(backend, f"{new}/exp_avg.safetensors")
        with pytest.raises(DamagedError, match=posixpath.basename(new)):
            prune(ONE, LastK(1), verify=True, parts=[TWO], backend=backend)
        assert len([*part_paths(backend)]) == 2

    def test_a_directory_that_is_not_there_is_named(self, backend: MemoryBackend) -> None:
        with pytest.raises(StoreError, match="does not exist") as caught:
            prune(ONE, LastK(1), parts=[TWO, "/missing"], backend=backend)
        assert caught.value.filename == "/missing"
        assert len([*part_paths(backend)]) == 2
