"""Contract tests of names and directories, and of closing a backend."""
# ruff: noqa: S101 - these are tests, which are named for what they show

from __future__ import annotations

from collections.abc import Callable

import pytest

from gds.contract import ALIGNMENT, Backend, Capabilities
from gds.errors import StorageError
from gds.testing._harness import (
    FILE_BYTES,
    Harness,
    contents,
    fails_with,
    filled,
    new_file,
    stat_of,
)


class NamesContract(Harness):
    """Tests of names and directories, and of closing a backend."""

    def test_a_backend_is_one(self, backend: Backend) -> None:
        assert isinstance(backend, Backend)
        assert backend.name

    def test_capabilities_are_consistent_and_leave_nothing_behind(
        self, backend: Backend, directory: str
    ) -> None:
        found = backend.capabilities(directory)
        assert isinstance(found, Capabilities)
        assert found.backend == backend.name
        assert found.filesystem
        assert 1 <= found.alignment <= ALIGNMENT
        assert found.direct is (found.reason == "")
        assert backend.list_dir(directory) == []
        with fails_with("ENOENT"):
            backend.capabilities(f"{directory}/missing")

    def test_a_file_is_direct_where_capabilities_say_so(
        self, backend: Backend, directory: str
    ) -> None:
        expected = backend.capabilities(directory).direct
        file = backend.create(f"{directory}/direct", FILE_BYTES)
        assert file.direct is expected
        assert file.alignment == (ALIGNMENT if expected else 1)

    def test_create_refuses_a_name_that_is_taken(self, backend: Backend, directory: str) -> None:
        new_file(backend, f"{directory}/taken").close()
        backend.make_dir(f"{directory}/directory")
        for name in ("taken", "directory"):
            with fails_with("EEXIST"):
                backend.create(f"{directory}/{name}", 1)
        assert stat_of(backend, f"{directory}/taken").size_bytes == FILE_BYTES

    @pytest.mark.parametrize("verb", ["create", "open", "make_dir", "list_dir", "remove", "lock"])
    def test_a_missing_parent_is_reported(
        self, backend: Backend, directory: str, verb: str
    ) -> None:
        arguments = [1] if verb == "create" else []
        with fails_with("ENOENT") as caught:
            getattr(backend, verb)(f"{directory}/missing/name", *arguments)
        assert caught.value.filename == f"{directory}/missing/name"

    def test_a_file_whose_space_cannot_be_reserved_leaves_no_name(
        self, backend: Backend, directory: str
    ) -> None:
        with self.limit(backend) as most_bytes:
            with fails_with("ENOSPC", "EFBIG", "EDQUOT") as caught:
                backend.create(f"{directory}/large", most_bytes + 1)
            assert caught.value.filename == f"{directory}/large"
            assert backend.stat(f"{directory}/large") is None
            backend.create(f"{directory}/large", most_bytes).close()

    def test_open_wants_a_regular_file(self, backend: Backend, directory: str) -> None:
        with fails_with("ENOENT"):
            backend.open(f"{directory}/nothing")
        backend.make_dir(f"{directory}/directory")
        for writable in (False, True):
            with fails_with("EISDIR"):
                backend.open(f"{directory}/directory", writable=writable)

    def test_a_symbolic_link_is_not_followed(self, backend: Backend, directory: str) -> None:
        new_file(backend, f"{directory}/real").close()
        self.make_symlink(f"{directory}/real", f"{directory}/link")
        for writable in (False, True):
            with fails_with("ELOOP"):
                backend.open(f"{directory}/link", writable=writable)
        with fails_with("EEXIST"):
            backend.create(f"{directory}/link", 1)
        with fails_with("ELOOP"):
            backend.lock(f"{directory}/link")
        assert stat_of(backend, f"{directory}/link").kind == "other"

    def test_stat_tells_kinds_apart(self, backend: Backend, directory: str) -> None:
        new_file(backend, f"{directory}/file").close()
        backend.make_dir(f"{directory}/directory")
        file = stat_of(backend, f"{directory}/file")
        assert (file.kind, file.size_bytes) == ("file", FILE_BYTES)
        assert stat_of(backend, f"{directory}/directory").kind == "directory"
        assert backend.stat(f"{directory}/nothing") is None
        assert backend.stat(f"{directory}/nothing/below") is None
        assert backend.stat(f"{directory}/file/below") is None

    def test_the_inode_changes_when_a_name_is_replaced(
        self, backend: Backend, directory: str
    ) -> None:
        new_file(backend, f"{directory}/a").close()
        new_file(backend, f"{directory}/b").close()
        a, b = (stat_of(backend, f"{directory}/{name}").inode for name in "ab")
        assert a != b
        backend.rename(f"{directory}/a", f"{directory}/b")
        assert stat_of(backend, f"{directory}/b").inode == a

    def test_the_time_of_a_directory_changes_with_its_names(
        self, backend: Backend, directory: str
    ) -> None:
        path = f"{directory}/changing"
        backend.make_dir(path)
        seen = [stat_of(backend, path).changed_ns]
        for name in "ab":
            new_file(backend, f"{path}/{name}").close()
            seen.append(stat_of(backend, path).changed_ns)
        backend.rename(f"{path}/a", f"{path}/b")
        seen.append(stat_of(backend, path).changed_ns)
        backend.remove(f"{path}/b")
        seen.append(stat_of(backend, path).changed_ns)
        known = [value for value in seen if value]
        assert len(known) == len(set(known))

    def test_an_open_file_has_the_inode_of_its_name(self, backend: Backend, directory: str) -> None:
        created = new_file(backend, f"{directory}/a")
        assert created.inode == stat_of(backend, f"{directory}/a").inode
        new_file(backend, f"{directory}/b").close()
        backend.rename(f"{directory}/b", f"{directory}/a")
        assert created.inode != stat_of(backend, f"{directory}/a").inode
        opened = backend.open(f"{directory}/a")
        backend.rename(f"{directory}/a", f"{directory}/c")
        created.close()
        opened.close()
        assert opened.inode == stat_of(backend, f"{directory}/c").inode != created.inode

    def test_the_names_of_a_file_are_counted(self, backend: Backend, directory: str) -> None:
        new_file(backend, f"{directory}/file").close()
        backend.make_dir(f"{directory}/other")
        backend.make_dir(f"{directory}/other/below")
        assert stat_of(backend, f"{directory}/file").num_links == 1
        assert stat_of(backend, f"{directory}/other").num_links == 1
        self.make_hard_link(backend, f"{directory}/file", f"{directory}/other/link")
        for path in (f"{directory}/file", f"{directory}/other/link"):
            assert stat_of(backend, path).num_links == 2
        backend.remove(f"{directory}/file")
        left = backend.open(f"{directory}/other/link")
        assert left.read_bytes(0, FILE_BYTES) == contents(filled(backend, FILE_BYTES, 1))
        left.close()
        assert stat_of(backend, f"{directory}/other/link").num_links == 1

    def test_names_are_listed_in_order(self, backend: Backend, directory: str) -> None:
        names = ["b", "a", "step-00000010", "step-00000009", ".hidden", "with space", "\u00fc"]
        for name in names:
            backend.create(f"{directory}/{name}", 1).close()
        assert backend.list_dir(directory) == sorted(names)
        with fails_with("ENOTDIR"):
            backend.list_dir(f"{directory}/a")

    def test_make_dir_refuses_a_name_that_is_taken(self, backend: Backend, directory: str) -> None:
        backend.create(f"{directory}/file", 1).close()
        backend.make_dir(f"{directory}/directory")
        for name in ("file", "directory"):
            with fails_with("EEXIST"):
                backend.make_dir(f"{directory}/{name}")

    def test_a_file_replaces_a_file(self, backend: Backend, directory: str) -> None:
        new_file(backend, f"{directory}/new", seed=1).close()
        new_file(backend, f"{directory}/old", seed=2).close()
        backend.rename(f"{directory}/new", f"{directory}/old")
        assert backend.list_dir(directory) == ["old"]
        file = backend.open(f"{directory}/old")
        assert file.read_bytes(0, FILE_BYTES) == contents(filled(backend, FILE_BYTES, 1))

    def test_a_directory_never_replaces_anything(self, backend: Backend, directory: str) -> None:
        for name in ("source", "empty", "full"):
            backend.make_dir(f"{directory}/{name}")
        backend.create(f"{directory}/full/file", 1).close()
        backend.create(f"{directory}/file", 1).close()
        for target in ("empty", "full", "file"):
            with fails_with("EEXIST", "ENOTEMPTY", "ENOTDIR"):
                backend.rename(f"{directory}/source", f"{directory}/{target}")
        with fails_with("EINVAL"):
            backend.rename(f"{directory}/source", f"{directory}/source/below")
        with fails_with("EISDIR", "EEXIST"):
            backend.rename(f"{directory}/file", f"{directory}/empty")
        assert backend.list_dir(directory) == ["empty", "file", "full", "source"]

    def test_renaming_nothing_is_an_error(self, backend: Backend, directory: str) -> None:
        backend.create(f"{directory}/target", 1).close()
        with fails_with("ENOENT") as caught:
            backend.rename(f"{directory}/nothing", f"{directory}/target")
        assert caught.value.filename == f"{directory}/nothing"
        assert "target" in str(caught.value)
        with fails_with("ENOENT"):
            backend.rename(f"{directory}/target", f"{directory}/missing/target")
        assert backend.list_dir(directory) == ["target"]

    def test_an_open_file_survives_the_rename_of_its_directory(
        self, backend: Backend, directory: str
    ) -> None:
        backend.make_dir(f"{directory}/slot")
        file = new_file(backend, f"{directory}/slot/file")
        backend.rename(f"{directory}/slot", f"{directory}/step")
        file.path = f"{directory}/step/file"
        file.write(filled(backend, FILE_BYTES, 5), 0).result()
        file.sync()
        with pytest.raises(StorageError, match="step/file"):
            file.write_bytes(b"x", FILE_BYTES)
        file.close()
        file = backend.open(f"{directory}/step/file")
        assert file.read_bytes(0, FILE_BYTES) == contents(filled(backend, FILE_BYTES, 5))

    def test_exchange_swaps_files_and_directories(self, backend: Backend, directory: str) -> None:
        backend.create(f"{directory}/file", 1).close()
        backend.make_dir(f"{directory}/directory")
        backend.create(f"{directory}/directory/below", 1).close()
        try:
            backend.exchange(f"{directory}/file", f"{directory}/directory")
        except StorageError as error:
            pytest.skip(f"exchange is not supported: {error}")
        assert backend.list_dir(f"{directory}/file") == ["below"]
        assert stat_of(backend, f"{directory}/directory").kind == "file"
        with fails_with("ENOENT"):
            backend.exchange(f"{directory}/file", f"{directory}/nothing")
        with fails_with("EINVAL"):
            backend.exchange(f"{directory}/file", f"{directory}/file/below")
        assert backend.list_dir(directory) == ["directory", "file"]

    def test_remove_takes_files_only(self, backend: Backend, directory: str) -> None:
        file = new_file(backend, f"{directory}/file")
        backend.make_dir(f"{directory}/directory")
        backend.remove(f"{directory}/file")
        assert backend.stat(f"{directory}/file") is None
        assert file.read_bytes(0, 10) == contents(filled(backend, FILE_BYTES, 1))[:10]
        file.close()
        with fails_with("ENOENT"):
            backend.remove(f"{directory}/file")
        with fails_with("EISDIR", "EPERM"):
            backend.remove(f"{directory}/directory")

    def test_remove_dir_takes_empty_directories_only(
        self, backend: Backend, directory: str
    ) -> None:
        backend.make_dir(f"{directory}/full")
        backend.create(f"{directory}/full/file", 1).close()
        with fails_with("ENOTEMPTY", "EEXIST"):
            backend.remove_dir(f"{directory}/full")
        with fails_with("ENOTDIR"):
            backend.remove_dir(f"{directory}/full/file")
        backend.remove(f"{directory}/full/file")
        backend.remove_dir(f"{directory}/full")
        assert backend.list_dir(directory) == []

    def test_sync_dir_wants_a_directory(self, backend: Backend, directory: str) -> None:
        backend.sync_dir(directory)
        backend.create(f"{directory}/file", 1).close()
        with fails_with("ENOTDIR"):
            backend.sync_dir(f"{directory}/file")
        with fails_with("ENOENT"):
            backend.sync_dir(f"{directory}/nothing")

    def test_free_bytes_are_a_number(self, backend: Backend, directory: str) -> None:
        assert backend.free_bytes(directory) > 0
        with fails_with("ENOENT"):
            backend.free_bytes(f"{directory}/nothing")

    def test_closing_the_backend_drains_it(self, backend: Backend, directory: str) -> None:
        file = backend.create(f"{directory}/file", FILE_BYTES)
        source = filled(backend, FILE_BYTES, seed=6)
        futures = [file.write(source, 0) for _ in range(10)]
        backend.close()
        backend.close()
        assert [future.done() for future in futures] == [True] * 10
        assert [future.result() for future in futures] == [FILE_BYTES] * 10
        assert backend.counters().bytes_written == 10 * FILE_BYTES
        assert contents(source) == self.raw(backend, f"{directory}/file")

    def test_a_backend_is_closed_at_the_end_of_its_block(
        self, backend: Backend, directory: str
    ) -> None:
        with pytest.raises(ZeroDivisionError, match="in the block"), backend:
            raise ZeroDivisionError("in the block")
        with fails_with("EBADF"):
            backend.stat(directory)

    def test_a_closed_backend_refuses_everything(self, backend: Backend, directory: str) -> None:
        file = new_file(backend, f"{directory}/file")
        memory = backend.allocate(1)
        backend.close()
        operations: dict[str, Callable[[], object]] = {
            "read": lambda: file.read(memory, 0).result(),
            "read_again": lambda: file.read_again(memory, 0, direct=True).result(),
            "write": lambda: file.write(memory, 0).result(),
            "sync": file.sync,
            "allocate": lambda: backend.allocate(1),
            "capabilities": lambda: backend.capabilities(directory),
            "create": lambda: backend.create(f"{directory}/new", 1),
            "open": lambda: backend.open(f"{directory}/file"),
            "stat": lambda: backend.stat(directory),
            "list_dir": lambda: backend.list_dir(directory),
            "make_dir": lambda: backend.make_dir(f"{directory}/new"),
            "rename": lambda: backend.rename(f"{directory}/file", f"{directory}/new"),
            "remove": lambda: backend.remove(f"{directory}/file"),
            "sync_dir": lambda: backend.sync_dir(directory),
            "lock": lambda: backend.lock(directory),
            "free_bytes": lambda: backend.free_bytes(directory),
        }
        for name, operation in operations.items():
            with pytest.raises(StorageError, match="closed"):
                pytest.fail(f"{name} returned {operation()}")
        assert contents(memory) == b"\0"

    def test_a_new_backend_finds_files_but_no_locks(self, backend: Backend, directory: str) -> None:
        file = new_file(backend, f"{directory}/file")
        backend.lock(directory)
        file.sync()
        backend.close()
        successor = self.reopened(backend)
        try:
            successor.lock(directory)
            found = successor.open(f"{directory}/file")
            assert found.read_bytes(0, FILE_BYTES) == contents(filled(successor, FILE_BYTES, 1))
        finally:
            successor.close()
