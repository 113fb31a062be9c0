"""What a process finds when it opens a store: checkpoints, slots, parts, owners, an identity."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from gds import Backend, File, MemoryBackend, StorageError, WrapperBackend
from offload.checkpoint.owner_parts import usable_parts
from offload.errors import CheckpointNotFoundError
from offload.format.names import QUARANTINE_NAME
from offload.store.opening import (
    StoreContent,
    find_stored,
    open_directories,
    open_stored,
)
from offload.store.poison import Poison
from offload.store.shared import SharedStore
from tests.crash.crash_backend import CrashBackend
from tests.crash.opened import SECOND, is_open, made, opened
from tests.ranks_store.test_many_owners import seal_with
from tests.stores import small
from tests.stores.files import overwrite, remove_tree, write
from tests.stores.small import STORE, memory_store

if TYPE_CHECKING:
    from collections.abc import Iterator

ELSEWHERE = "/elsewhere/run"


@contextmanager
def content_of(
    backend: Backend,
    directories: Sequence[str] = (STORE,),
    *,
    shared: SharedStore | None = None,
    store_id: str | None = None,
) -> Iterator[StoreContent]:
    """Open a store for writing, and let go of its locks in the end."""
    content = open_directories(
        [(backend, directory) for directory in directories],
        Poison(STORE),
        allow_volatile=True,
        shared=shared,
        store_id=store_id,
    )
    try:
        yield content
    finally:
        content.lock.release()


def steps_in(content: StoreContent) -> list[int]:
    return [checkpoint.manifest.step for checkpoint in content.checkpoints]


class _Listed(WrapperBackend):
    """A name is listed in the store's directory, and has gone when somebody looks at it."""

    def list_dir(self, path: str) -> list[str]:
        names = super().list_dir(path)
        return [*names, ".slot-6"] if path == STORE else names


class _Recorded(WrapperBackend):
    """The files that have been opened."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.files: list[File] = []

    def wrap_file(self, file: File) -> File:
        self.files.append(file)
        return file

    def still_open(self) -> list[str]:
        """Return the paths of the files that can still be read."""
        found = []
        for file in self.files:
            try:
                file.read_bytes(0, 1)
            except StorageError:
                continue
            found.append(file.path)
        return found


class TestSlots:
    """What is left of the slots of processes that have ended."""

    def test_all_directories_that_are_named_like_slots_may_be_rewritten(self) -> None:
        backend = memory_store()
        for number in (7, 8, 9):
            backend.make_dir(f"{STORE}/.slot-{number}")
        with content_of(backend) as content:
            assert {f"{STORE}/.slot-{number}" for number in (7, 8, 9)} <= {*content.leftover}

    def test_a_file_that_is_named_like_one_is_left_alone_with_a_warning(self) -> None:
        backend = memory_store()
        write(backend, f"{STORE}/.slot-7", b"mine")
        with (
            pytest.warns(RuntimeWarning, match=r"\.slot-7: a file, expected a directory"),
            content_of(backend) as content,
        ):
            assert f"{STORE}/.slot-7" not in content.leftover

    def test_one_that_somebody_removes_meanwhile_is_none(self) -> None:
        with content_of(_Listed(memory_store())) as content:
            assert f"{STORE}/.slot-6" not in content.leftover


class TestCheckpoints:
    """What is in the first directory under the name of a checkpoint."""

    def test_the_newest_is_that_of_the_highest_generation_whatever_its_step(self) -> None:
        """A run that began anew was killed before it could withdraw what it has replaced."""
        backend = memory_store(2)
        with content_of(backend) as content:
            path, manifest = content.checkpoints[0].path, content.checkpoints[0].manifest
        stat = backend.stat(f"{path}/manifest.json")
        assert stat is not None
        later = replace(manifest, generation=manifest.generation + 100)
        overwrite(backend, f"{path}/manifest.json", later.encode(stat.size_bytes))
        with content_of(backend) as content:
            assert steps_in(content) == [2, 1]

    def test_their_names_and_those_of_their_files_are_durable_before_they_are_used(self) -> None:
        backend = CrashBackend()
        with small.make_optimizer(small.make_model(), backend, keep=2) as optimizer:
            small.train(optimizer, 2)
        before = len(backend.log)
        with content_of(backend):
            synced = [str(operation) for operation in backend.log[before:]]
        paths = ["/", STORE, f"{STORE}/step-00000001", f"{STORE}/step-00000002"]
        assert synced == [f"sync_dir {path}" for path in paths]

    @pytest.mark.parametrize("which", [2, "step-00000002", f"{STORE}/step-00000002"])
    def test_one_is_found_by_its_step_its_name_and_its_path(self, which: int | str) -> None:
        with content_of(memory_store(2)) as content:
            found = find_stored(content.checkpoints, which, STORE)
            assert found is content.checkpoints[1]
            found.superseded = True
            with pytest.raises(CheckpointNotFoundError, match=r"it has: step-00000001\)"):
                find_stored(content.checkpoints, which, STORE)


class TestParts:
    """Which parts on the second drive a process may rewrite."""

    @pytest.mark.parametrize(("damage", "num_free"), [("marked", 1), ("renamed", 0)])
    def test_an_unusable_checkpoint_keeps_its_part_or_all_if_its_manifest_may_be_an_old_one(
        self, damage: str, num_free: int
    ) -> None:
        """Somebody has removed another checkpoint, whose part no manifest names any more."""
        backend = made(3, num_drives=2)
        remove_tree(backend, f"{STORE}/step-00000002")
        if damage == "marked":
            write(backend, f"{STORE}/step-00000001/{QUARANTINE_NAME}", b"damaged\n")
        else:
            backend.rename(f"{STORE}/step-00000001", f"{STORE}/step-00000009")
        with opened(backend, 2, num_drives=2) as store:
            assert store.steps == [3]
            assert store.parts.num_free(1) == num_free

    def test_the_part_of_a_checkpoint_that_somebody_removes_is_free(self) -> None:
        backend = made(3, num_drives=2)
        with opened(backend, 3, num_drives=2) as store:
            assert store.parts.num_free(1) == 0
            remove_tree(backend, f"{STORE}/step-00000002")
            store.census.update()
            assert store.steps == [1, 3]
            assert store.parts.num_free(1) == 1


class TestOpenFiles:
    """Files of a checkpoint are opened once, and closed when they are not needed."""

    def test_files_that_are_open_for_reading_are_not_opened_again_to_be_read(self) -> None:
        with opened(memory_store(2), 2) as store:
            slot = store.open(2)
            assert store.open(2) is slot

    def test_they_are_closed_with_the_checkpoint(self) -> None:
        with opened(memory_store(2), 2) as store:
            slot = store.open(2)
            assert is_open(slot)
            store.step(2).close()
            assert not is_open(slot)

    def test_none_is_open_after_a_part_could_not_be_opened(self) -> None:
        backend = _Recorded(made(1, num_drives=2))
        with opened(backend, 1, num_drives=2) as store:
            (name,) = [name for name in backend.list_dir(SECOND) if name.startswith("part-")]
            remove_tree(backend, f"{SECOND}/{name}")
            with pytest.raises(StorageError):
                open_stored(backend, store.step(1), store.parts, writable=False)
            assert backend.still_open() == []
            assert store.step(1).slot is None


class TestIdentity:
    """Which store it is."""

    def test_a_store_of_one_directory_is_known_by_its_newest_checkpoint(self) -> None:
        backend = memory_store(2)
        with content_of(backend) as content:
            store_id = content.store_id
            assert store_id == content.checkpoints[-1].manifest.store_id
        with content_of(backend) as content:
            assert content.store_id == store_id
            assert content.is_identified

    def test_a_new_store_gets_the_one_that_it_is_given(self) -> None:
        with content_of(MemoryBackend(directories=[STORE]), store_id="f" * 32) as content:
            assert content.store_id == "f" * 32


class TestOwners:
    """A process opens a store that ranks have made."""

    @pytest.mark.parametrize("num_moved", [0, 1, 2])
    def test_it_sees_all_owners_in_whichever_directories_they_are(self, num_moved: int) -> None:
        backend = MemoryBackend(directories=[ELSEWHERE])
        seal_with(backend, STORE, 3)
        for owner in range(1, num_moved + 1):
            backend.rename(f"{STORE}/owner-{owner}", f"{ELSEWHERE}/owner-{owner}")
        with content_of(backend, [STORE, ELSEWHERE]) as content:
            assert content.refused == []
            assert steps_in(content) == [1]

    def test_the_parts_of_owners_on_other_nodes_are_not_looked_for_here(self) -> None:
        """Another directory of this name may be on this node, left from a job that ran on it."""
        backend = MemoryBackend()
        seal_with(backend, STORE, 2)
        (seen,) = usable_parts(backend, STORE).values()
        (name,) = seen[1]
        remove_tree(backend, f"{STORE}/owner-1/{name}")
        shared = SharedStore(seen=seen, elsewhere=frozenset({1}))
        with content_of(backend, shared=shared) as content:
            assert content.refused == []
            assert steps_in(content) == [1]
