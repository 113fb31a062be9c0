"""Contract tests of locks on files and directories."""
# ruff: noqa: S101 - these are tests, which are named for what they show

from __future__ import annotations

import pytest

from gds.contract import Backend
from gds.errors import LockHeldError
from gds.testing._harness import Harness, fails_with, stat_of


class LockContract(Harness):
    """Tests of locks on files and directories."""

    @pytest.mark.parametrize("kind", ["file", "directory"])
    def test_an_exclusive_lock_excludes_and_shared_ones_do_not(
        self, backend: Backend, directory: str, kind: str
    ) -> None:
        path = f"{directory}/locked"
        if kind == "file":
            backend.create(path, 1).close()
        else:
            backend.make_dir(path)
        first, second = backend.lock(path, shared=True), backend.lock(path, shared=True)
        with pytest.raises(LockHeldError) as caught:
            backend.lock(path)
        assert caught.value.filename == path
        first.release()
        first.release()
        with pytest.raises(LockHeldError):
            backend.lock(path)
        second.release()
        exclusive = backend.lock(path)
        for shared in (False, True):
            with pytest.raises(LockHeldError):
                backend.lock(path, shared=shared)
        exclusive.release()
        backend.lock(path).release()

    def test_a_lock_stays_through_the_rename_of_a_directory(
        self, backend: Backend, directory: str
    ) -> None:
        backend.make_dir(f"{directory}/before")
        held = backend.lock(f"{directory}/before")
        backend.rename(f"{directory}/before", f"{directory}/after")
        backend.make_dir(f"{directory}/before")
        backend.lock(f"{directory}/before").release()
        with pytest.raises(LockHeldError):
            backend.lock(f"{directory}/after")
        held.release()
        backend.lock(f"{directory}/after").release()

    @pytest.mark.parametrize("kind", ["file", "directory"])
    def test_a_lock_is_current_while_its_path_names_what_is_locked(
        self, backend: Backend, directory: str, kind: str
    ) -> None:
        path, aside = f"{directory}/locked", f"{directory}/aside"

        def make() -> None:
            if kind == "file":
                backend.create(path, 1).close()
            else:
                backend.make_dir(path)

        make()
        held = backend.lock(path)
        assert held.is_current()
        backend.rename(path, aside)
        assert not held.is_current()
        make()
        assert not held.is_current(), "this is another one"
        other = backend.lock(path)
        assert other.is_current()
        other.release()
        if kind == "file":
            backend.remove(path)
        else:
            backend.remove_dir(path)
        backend.rename(aside, path)
        assert held.is_current()
        held.release()
        assert not held.is_current()

    def test_a_lock_whose_parent_is_gone_is_not_current(
        self, backend: Backend, directory: str
    ) -> None:
        backend.make_dir(f"{directory}/parent")
        held = backend.lock(f"{directory}/parent/LOCK", create=True)
        backend.rename(f"{directory}/parent", f"{directory}/moved")
        assert not held.is_current()
        backend.create(f"{directory}/parent", 1).close()
        assert not held.is_current()

    def test_a_lock_file_is_created_only_when_asked(self, backend: Backend, directory: str) -> None:
        path = f"{directory}/LOCK"
        with fails_with("ENOENT"):
            backend.lock(path)
        held = backend.lock(path, create=True)
        inode = stat_of(backend, path).inode
        held.release()
        backend.lock(path, create=True).release()
        assert stat_of(backend, path).inode == inode
        assert backend.list_dir(directory) == ["LOCK"]
        backend.make_dir(f"{directory}/directory")
        backend.lock(f"{directory}/directory", create=True).release()

    def test_a_lock_that_nobody_refers_to_is_still_held(
        self, backend: Backend, directory: str
    ) -> None:
        backend.lock(f"{directory}/LOCK", create=True)
        with pytest.raises(LockHeldError):
            backend.lock(f"{directory}/LOCK")
