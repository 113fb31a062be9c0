"""The directories that ranks are given besides the first, and directories that are made durably."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from gds import Backend, MemoryBackend, StorageError, WrapperBackend
from gds.contract import Capabilities
from offload.errors import RemoteStoreError, StoreError, UnreadableError
from offload.format.names import LOCK_NAME, PART_FILE_NAME, TABLE_NAME
from offload.format.part_file import SealedPart, invalid_part
from offload.store.directories import (
    check_directories,
    check_further_directories,
    spread_directories,
)
from offload.store.new_directories import make_directories
from tests.crash.crash_backend import CrashBackend
from tests.crash.fault_backend import FaultBackend
from tests.crash.opened import SECOND, made
from tests.ranks_store.test_many_owners import seal_with
from tests.stores.files import contents, overwrite, write
from tests.stores.small import STORE, memory_store

A, B, C = "/a/run", "/b/run", "/c/run"
OWN, FOREIGN = "1" * 32, "2" * 32
MANIFEST = f"{STORE}/step-00000001/manifest.json"


def give_part(backend: Backend, path: str, *, of: str | None = None, drive: int = 1) -> None:
    """Make a part: one that is sealed for a store, or one that is not sealed."""
    backend.make_dir(path)
    part = invalid_part() if of is None else SealedPart(of, 1, drive, "0" * 32).encode()
    write(backend, f"{path}/{PART_FILE_NAME}", part)


def copy_checkpoint(source: Backend, target: Backend, step: int, name: str) -> None:
    """Copy the checkpoint of a step from the store in one backend to that in another."""
    target.make_dir(f"{STORE}/{name}")
    for file, data in contents(source, f"{STORE}/step-{step:08d}").items():
        write(target, f"{STORE}/{name}/{file}", data)


@pytest.fixture
def backend() -> MemoryBackend:
    """Return a store of one checkpoint on one drive, and three more directories."""
    backend: MemoryBackend = memory_store(1)
    for path in (A, B, C):
        for directory in (path.removesuffix("/run"), path):
            backend.make_dir(directory)
    return backend


class TestSpread:
    """Over which of the directories one process has spread its store before there were ranks."""

    def test_those_with_parts_of_the_store_come_in_the_order_of_the_drives(
        self, backend: MemoryBackend
    ) -> None:
        give_part(backend, f"{A}/part-1", of=OWN, drive=3)
        give_part(backend, f"{B}/part-1", of=OWN, drive=1)
        give_part(backend, f"{C}/part-1", of=OWN, drive=2)
        assert spread_directories(backend, STORE, [A, B, C], OWN) == [B, C, A]

    def test_one_with_parts_of_several_drives_comes_where_the_first_of_them_is(
        self, backend: MemoryBackend
    ) -> None:
        """Somebody has copied the parts of the drive 8 to the directory of the drive 1."""
        give_part(backend, f"{A}/part-1", of=OWN, drive=8)
        give_part(backend, f"{A}/part-2", of=OWN, drive=1)
        give_part(backend, f"{B}/part-1", of=OWN, drive=2)
        assert spread_directories(backend, STORE, [B, A], OWN) == [A, B]

    def test_it_is_known_without_the_first_directory(self, backend: MemoryBackend) -> None:
        give_part(backend, f"{A}/part-1", of=OWN)
        give_part(backend, f"{B}/part-1")
        assert spread_directories(backend, "/missing", [A, B], OWN) == [A]

    def test_parts_of_other_stores_and_empty_directories_are_none_of_it(
        self, backend: MemoryBackend
    ) -> None:
        give_part(backend, f"{A}/part-1", of=FOREIGN)
        give_part(backend, f"{A}/part-2")
        assert spread_directories(backend, STORE, [A, B], OWN) == []

    def test_unsealed_parts_are_its_own_if_no_checkpoint_is_spread(
        self, backend: MemoryBackend
    ) -> None:
        """A process with more directories has ended before its first checkpoint."""
        give_part(backend, f"{A}/part-1")
        give_part(backend, f"{C}/part-1", of=OWN)
        assert spread_directories(backend, STORE, [A, B, C], OWN) == [C, A]

    def test_unsealed_parts_beside_a_checkpoint_that_cannot_be_read_are_its_own(
        self, backend: MemoryBackend
    ) -> None:
        overwrite(backend, MANIFEST, b"\0" * 100)
        give_part(backend, f"{A}/part-1")
        assert spread_directories(backend, STORE, [A], OWN) == [A]

    def test_unsealed_parts_of_another_first_directory_are_not(
        self, backend: MemoryBackend
    ) -> None:
        give_part(backend, f"{A}/part-1")
        backend.make_dir(f"{A}/.slot-1")
        assert spread_directories(backend, STORE, [A], OWN) == []

    def test_unsealed_parts_are_not_if_the_first_directory_has_no_checkpoint(
        self, backend: MemoryBackend
    ) -> None:
        give_part(backend, f"{A}/part-1")
        assert spread_directories(backend, B, [A], OWN) == []

    def test_unsealed_parts_are_not_if_any_checkpoint_is_spread(self) -> None:
        """The store of one process was spread, and ranks have gone on with it."""
        backend = made(1, num_drives=2)
        copy_checkpoint(memory_store(1), backend, 1, "step-00000002")
        backend.make_dir("/a")
        give_part(backend, "/a/part-1")
        assert spread_directories(backend, STORE, ["/a"], OWN) == []

    @pytest.mark.parametrize("where", [STORE, B])
    def test_an_error_says_that_nothing_has_changed(
        self, backend: MemoryBackend, where: str
    ) -> None:
        failing = FaultBackend(backend)
        failing.fail_if(lambda kind, path: kind == "list_dir" and path == where)
        with pytest.raises(UnreadableError, match="No checkpoint has been changed"):
            spread_directories(failing, STORE, [A, B], OWN)


class TestFurther:
    """Directories that ranks are given for their parts, besides the first."""

    def test_empty_ones_and_those_of_the_store_are_taken(self, backend: MemoryBackend) -> None:
        give_part(backend, f"{B}/part-1", of=OWN)
        write(backend, f"{B}/notes.txt", b"mine")
        check_further_directories(backend, [A, B, "/missing"], [B])

    def test_one_with_other_things_is_refused(self, backend: MemoryBackend) -> None:
        write(backend, f"{B}/notes.txt", b"mine")
        with pytest.raises(StoreError, match=r"holds other files: 'notes.txt'") as caught:
            check_further_directories(backend, [A, B])
        assert (caught.value.errno, caught.value.filename) == (errno.ENOTEMPTY, B)

    def test_the_first_directory_of_another_store_is_refused(self, backend: MemoryBackend) -> None:
        with pytest.raises(StoreError, match="is the first directory of a store") as caught:
            check_further_directories(backend, [A, STORE], [STORE])
        assert caught.value.filename == STORE

    def test_one_with_parts_of_one_process_is_refused(self, backend: MemoryBackend) -> None:
        give_part(backend, f"{B}/part-1", of=OWN)
        with pytest.raises(StoreError, match="was given for parts of ranks") as caught:
            check_further_directories(backend, [A, B], [A])
        assert caught.value.filename == B

    def test_an_error_says_that_nothing_has_changed(self, backend: MemoryBackend) -> None:
        failing = FaultBackend(backend)
        failing.fail_if(lambda kind, path: kind == "list_dir" and path == B)
        with pytest.raises(UnreadableError, match="No checkpoint has been changed"):
            check_further_directories(failing, [A, B])


class TestOwnersOnly:
    """Directories that have parts of ranks, given to one process as a store."""

    @pytest.mark.parametrize(
        ("others", "advice"),
        [
            ([], "is on another node: start the same ranks again"),
            ([A], "is on another node: start the same ranks again"),
            ([STORE], f"the first directory of their store is {STORE}: put that one first"),
        ],
        ids=["alone", "with an empty one", "with the first"],
    )
    def test_are_refused_with_what_is_to_be_done(
        self, backend: MemoryBackend, others: list[str], advice: str
    ) -> None:
        ranks = MemoryBackend()
        seal_with(ranks, STORE, 2)
        (part,) = (n for n in ranks.list_dir(f"{STORE}/owner-1") if n.startswith("part-"))
        backend.make_dir(f"{B}/owner-1")
        backend.make_dir(f"{B}/owner-1/{part}")
        for name, data in contents(ranks, f"{STORE}/owner-1/{part}").items():
            write(backend, f"{B}/owner-1/{part}/{name}", data)
        drives = [(backend, directory) for directory in (B, *others)]
        with pytest.raises(StoreError, match=advice) as caught:
            check_directories(drives, fresh=False)
        assert caught.value.filename == B

    def test_the_directory_of_an_owner_is_known_by_any_of_its_parts(
        self, backend: MemoryBackend
    ) -> None:
        backend.lock(f"{A}/{LOCK_NAME}", create=True).release()
        give_part(backend, f"{A}/part-1")
        backend.make_dir(f"{A}/part-2")
        write(backend, f"{A}/part-2/{TABLE_NAME}", b"begun")
        with pytest.raises(StoreError, match="this is the directory of one owner"):
            check_directories([(backend, A)], fresh=False)


class _Remote(WrapperBackend):
    """The file system of the second drive is that of another machine."""

    def capabilities(self, directory: str) -> Capabilities:
        found = super().capabilities(directory)
        return replace(found, remote=directory == SECOND, filesystem="nfs4")


class _Raced(WrapperBackend):
    """Another process makes something at the path of a directory that is about to be made."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__(MemoryBackend())
        self.kind = kind
        self.number = number

    def make_dir(self, path: str) -> None:
        if self.kind == "directory":
            super().make_dir(path)
        elif self.kind == "file":
            write(self, path, b"mine")
        raise StorageError(self.number, "making a directory", path)


class TestMade:
    """How the directories of a store come into being."""

    def test_each_is_durable_before_the_next_one_is_made(self) -> None:
        backend = CrashBackend()
        make_directories([(backend, "/a/b")], allow_volatile=True, allow_remote=False)
        assert [str(operation) for operation in backend.log] == [
            "sync_dir /", "make_dir /a", "sync_dir /", "make_dir /a/b", "sync_dir /a",
        ]  # fmt: skip

    def test_one_that_another_process_makes_meanwhile_is_taken(self) -> None:
        backend = _Raced("directory", errno.EEXIST)
        make_directories([(backend, "/a/b")], allow_volatile=True, allow_remote=False)
        assert backend.list_dir("/a") == ["b"]

    @pytest.mark.parametrize(
        ("kind", "number", "error"),
        [
            ("directory", errno.EIO, UnreadableError),
            ("file", errno.EEXIST, StoreError),
            ("nothing", errno.EEXIST, StoreError),
        ],
    )
    def test_any_other_outcome_is_an_error(
        self, kind: str, number: int, error: type[StoreError]
    ) -> None:
        backend = _Raced(kind, number)
        with pytest.raises(error, match="making a directory"):
            make_directories([(backend, "/a")], allow_volatile=True, allow_remote=False)

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EINVAL])
    def test_a_parent_that_this_user_may_not_sync_is_passed_over(self, number: int) -> None:
        backend = FaultBackend(MemoryBackend(directories=[STORE]))
        backend.fail_if(lambda kind, path: kind == "sync_dir" and path == "/", number)
        make_directories([(backend, STORE)], allow_volatile=True, allow_remote=False)
        assert backend.num_failed == 1

    def test_a_parent_that_could_not_be_synced_is_an_error(self) -> None:
        backend = FaultBackend(MemoryBackend(directories=[STORE]))
        backend.fail_if(lambda kind, path: kind == "sync_dir" and path == "/", errno.EIO)
        with pytest.raises(UnreadableError, match="No checkpoint has been changed"):
            make_directories([(backend, STORE)], allow_volatile=True, allow_remote=False)

    def test_each_is_looked_at_for_the_machine_that_serves_it(self) -> None:
        backend = _Remote(MemoryBackend(directories=[SECOND]))
        drives = [(backend, STORE), (backend, SECOND)]
        with pytest.raises(RemoteStoreError) as caught:
            make_directories(drives, allow_volatile=True, allow_remote=False)
        assert caught.value.filename == SECOND
        assert backend.stat(STORE) is None
