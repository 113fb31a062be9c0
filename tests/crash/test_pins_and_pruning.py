"""Files of pins, read and written with errors and races, and pruning without a training process."""

from __future__ import annotations

import errno
import json
import posixpath
from dataclasses import replace

import pytest

import offload
from gds import Backend, MemoryBackend, StorageError, WrapperBackend
from gds.contract import Capabilities
from offload import LastK, open_checkpoint, unpin
from offload.errors import DamagedError, PinError, StoreError
from offload.format.document import digest_of
from offload.retention import read_pins
from offload.store import PruneReport, prune
from tests.crash.crash_backend import CrashBackend
from tests.crash.fault_backend import FaultBackend
from tests.crash.opened import SECOND, made
from tests.ranks_store.job import ONE, TWO, Job, part_paths
from tests.stores import small
from tests.stores.files import contents, flip, overwrite, read, remove_tree, write
from tests.stores.small import STORE

PINS = f"{STORE}/pins"
FIRST, NEWEST = f"{STORE}/step-00000001", f"{STORE}/step-00000002"


def pin(backend: Backend, name: str = "best", path: str = FIRST) -> None:
    offload.pin(path, name, backend=backend)


def with_pins(*names: str) -> MemoryBackend:
    """Return files of a store whose first checkpoint is pinned."""
    backend = made(2)
    for name in names:
        pin(backend, name)
    return backend


def names(backend: Backend) -> list[str]:
    return [one.name for one in read_pins(backend, STORE).pins]


class _Meddled(WrapperBackend):
    """Somebody meddles in a call."""

    listed_too = ("", "")
    """A directory, and the name that is listed in it besides."""

    made_meanwhile = False
    """Whether another process makes each directory a moment before this one does."""

    remote = False

    def list_dir(self, path: str) -> list[str]:
        found = super().list_dir(path)
        return [*found, self.listed_too[1]] if path == self.listed_too[0] else found

    def make_dir(self, path: str) -> None:
        super().make_dir(path)
        if self.made_meanwhile:
            raise StorageError(errno.EEXIST, "making a directory", path)

    def capabilities(self, directory: str) -> Capabilities:
        return replace(super().capabilities(directory), remote=self.remote)


class TestReadingPins:
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
        ids=str,
    )
    def test_one_that_says_nothing_sensible_keeps_an_unknown_checkpoint(
        self, changes: dict[str, object]
    ) -> None:
        backend = with_pins("a", "best")
        data = read(backend, f"{PINS}/a")
        document = json.loads(data)
        body = {**document["body"], **changes}
        document["body"] = {key: value for key, value in body.items() if value is not None}
        document["digest"] = digest_of(document["body"])
        write(backend, f"{PINS}/a", json.dumps(document).encode().ljust(len(data)))
        found = read_pins(backend, STORE)
        assert [one.name for one in found.pins] == ["best"]
        (reason,) = found.unreadable
        assert f"{PINS}/a: cannot be read as a pin" in reason
        assert found.failures == ()
        with pytest.raises(PinError, match="nothing is removed"):
            prune(STORE, LastK(1), backend=backend)

    @pytest.mark.parametrize(
        ("number", "words"),
        [
            (errno.EIO, ["Until then it is not known which checkpoint it keeps"]),
            (errno.ELOOP, ["cannot be read as a pin"]),
            (errno.ENOENT, []),  # it has been removed meanwhile
        ],
    )
    def test_an_error_that_may_pass_is_told_from_one_about_the_content(
        self, number: int, words: list[str]
    ) -> None:
        backend = FaultBackend(with_pins("a", "best"))
        backend.fail_if(lambda kind, path: kind == "open" and path == f"{PINS}/a", number)
        found = read_pins(backend, STORE)
        assert [one.name for one in found.pins] == ["best"]
        assert len(found.unreadable) == len(words)
        assert all(word in reason for word, reason in zip(words, found.unreadable, strict=True))
        assert [error.errno for error in found.failures] == [number] * (number == errno.EIO)
        backend.close()


class TestWritingPins:
    """A pin is made, moved and removed durably, or not at all."""

    def test_one_has_its_name_when_it_is_durable_and_so_has_the_name_on_return(self) -> None:
        backend = CrashBackend()
        with small.make_optimizer(small.make_model(), backend) as optimizer:
            small.train(optimizer, 1)
        for name in ("first", "best"):
            before = len(backend.log)
            pin(backend, name)
        log = backend.log[before:]
        kinds = ["create", "write", "sync", "rename", "sync_dir", "sync_dir"]
        assert [operation.kind for operation in log] == kinds
        assert (log[3].path, log[3].other) == (log[2].path, f"{PINS}/best")
        assert [operation.path for operation in log[4:]] == [PINS, STORE]
        before = len(backend.log)
        unpin(STORE, "best", backend=backend)
        assert [str(op) for op in backend.log[before:]] == [
            f"remove {PINS}/best", f"sync_dir {PINS}",
        ]  # fmt: skip

    def test_another_process_may_make_the_first_one_at_the_same_time(self) -> None:
        backend = _Meddled(made(2))
        backend.made_meanwhile = True
        pin(backend)
        assert names(backend) == ["best"]

    def test_what_an_error_has_left_is_not_in_the_way(self) -> None:
        """The file that was to be renamed could not be removed either."""
        backend = FaultBackend(made(2))
        for kind in ("make_dir", "rename"):
            backend.fail(kind, 1, forever=False)
            backend.fail_if(lambda what, _: what == "remove")
            with pytest.raises(StorageError, match=f"injected failure of {kind}"):
                pin(backend)
        assert names(backend) == []
        pin(backend)
        assert names(backend) == ["best"]
        backend.close()


def bytes_in(backend: Backend, *directories: str) -> int:
    return sum(len(data) for each in directories for data in contents(backend, each).values())


def removed(report: PruneReport) -> dict[str, int]:
    """Return the paths of what was removed, or would be, with their bytes."""
    found = {one.path: one.bytes for one in (*report.checkpoints, *report.leftovers)}
    assert report.bytes == sum(found.values())
    return found


class TestReport:
    """What a call says that it has removed, or would remove."""

    @pytest.mark.parametrize("dry_run", [True, False])
    def test_checkpoints_and_their_parts_on_other_drives_count(self, dry_run: bool) -> None:
        backend = made(2, num_drives=2)
        with open_checkpoint(FIRST, backend=backend) as opened:
            size = bytes_in(backend, FIRST, *opened.parts)
        given = {"parts": [SECOND], "backend": backend}
        report = prune(STORE, LastK(1), dry_run=dry_run, **given)
        assert removed(report) == {FIRST: size}
        assert (report.kept, report.being_read, report.unnamed) == ((NEWEST,), (), ())
        assert (backend.stat(FIRST) is not None) == dry_run

    def test_leftovers_count_unless_a_reader_holds_them(self) -> None:
        backend = made(2)
        for number in (8, 9):
            backend.make_dir(f"{STORE}/.slot-{number}")
            write(backend, f"{STORE}/.slot-{number}/mine", b"12345")
        reader = backend.lock(f"{STORE}/.slot-8", shared=True)
        report = prune(STORE, backend=backend)
        reader.release()
        assert removed(report) == {f"{STORE}/.slot-9": 5}
        assert backend.stat(f"{STORE}/.slot-8") is not None

    def test_files_of_pins_that_were_not_finished_go_and_others_stay(self) -> None:
        backend = with_pins("a.new", "best")
        for name in (".keep", ".one.1-1.new", ".two.1-1.new"):
            write(backend, f"{PINS}/{name}", b"")
        prune(STORE, LastK(1), backend=backend)
        assert sorted(backend.list_dir(PINS)) == [".keep", "a.new", "best"]


class TestPruning:
    """Stores of one process."""

    def test_only_a_call_that_is_asked_to_reads_what_is_kept(self) -> None:
        backend = made(2)
        flip(backend, f"{NEWEST}/exp_avg.safetensors")
        with pytest.raises(DamagedError, match="nothing was removed"):
            prune(STORE, LastK(1), verify=True, backend=backend)
        assert backend.stat(FIRST) is not None
        assert not prune(STORE, LastK(1), backend=backend).verified
        assert backend.stat(FIRST) is None

    def test_the_parts_are_read_where_they_are_now(self) -> None:
        """The directory that the manifests name is that of the store that this one is a copy of."""
        backend = made(2, num_drives=2)
        backend.make_dir("/moved")
        backend.rename(SECOND, "/moved/run")
        report = prune(STORE, LastK(1), verify=True, parts=["/moved/run"], backend=backend)
        assert (report.verified, report.kept) == (True, (NEWEST,))


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
        assert old in removed(report)
        assert [*part_paths(backend)] == [new]
        assert report.kept == (f"{ONE}/step-00000002",)

    def test_nothing_is_removed_if_a_part_is_damaged_or_a_directory_is_not_there(
        self, backend: MemoryBackend
    ) -> None:
        _, new = part_paths(backend)
        with pytest.raises(StoreError, match="does not exist") as caught:
            prune(ONE, LastK(1), parts=[TWO, "/missing"], backend=backend)
        assert caught.value.filename == "/missing"
        flip(backend, f"{new}/exp_avg.safetensors")
        with pytest.raises(DamagedError, match=posixpath.basename(new)):
            prune(ONE, LastK(1), verify=True, parts=[TWO], backend=backend)
        assert len([*part_paths(backend)]) == 2

    @pytest.mark.parametrize("newest", ["none", "of one process"])
    def test_parts_are_left_alone_if_the_newest_checkpoint_is_not_theirs(self, newest: str) -> None:
        backend = MemoryBackend()
        with Job([backend, backend], directories=[ONE, ONE]) as job:
            path = job.seal(1).path
        (part,) = part_paths(backend, ONE)
        with open_checkpoint(path, backend=backend) as opened:
            store_id = opened.manifest.store_id
        remove_tree(backend, path)
        if newest == "of one process":
            source = made(1)
            backend.make_dir(path)
            for name, data in contents(source, FIRST).items():
                write(backend, f"{path}/{name}", data)
            with open_checkpoint(FIRST, backend=source) as opened:
                manifest = replace(opened.manifest, store_id=store_id)
            size_bytes = len(contents(source, FIRST)["manifest.json"])
            overwrite(backend, f"{path}/manifest.json", manifest.encode(size_bytes))
        report = prune(ONE, backend=backend)
        assert part not in removed(report)
        assert backend.stat(part) is not None
