"""What a directory is known by, how one that does not fit is refused, and how a new one is made."""

from __future__ import annotations

import errno
import json

import pytest

from gds import Backend, MemoryBackend, StorageError, WrapperBackend
from offload import list_checkpoints
from offload.errors import SealError, StoreError, UnreadableError
from offload.format.document import digest_of
from tests.crash.crash_backend import CrashBackend
from tests.crash.fault_backend import FaultBackend
from tests.crash.test_drives import (
    BOTH,
    ONE,
    TWO,
    assert_goes_on,
    copied,
    damage_invalid,
    manifest_of,
    optimizer_in,
    part_of,
    parts_in,
    store_of_two,
)
from tests.ranks_store import job
from tests.stores.files import everything, overwrite, read, remove_tree, write
from tests.stores.training import Model, train

X, Y, Z = "/x/run", "/y/run", "/z/run"
FOREIGN = "f" * 32


def store_in(*directories: str, last: int = 1) -> MemoryBackend:
    """Return files with checkpoints of steps 1, 2, ..., made by a process that has ended."""
    backend, model = MemoryBackend(), Model()
    with optimizer_in(backend, model, directories, keep=last) as optimizer:
        train(model, optimizer, *range(1, last + 1))
    return backend.reopened()


def store_id_in(backend: Backend, directory: str) -> str:
    return json.loads(read(backend, f"{directory}/store.json"))["store_id"]


def refused(backend: MemoryBackend, *directories: str, fresh: bool = False) -> StoreError:
    """Return the error of the constructor, having checked that it has changed nothing."""
    before = everything(backend)
    with pytest.raises(StoreError) as caught:
        optimizer_in(backend, Model(), directories, fresh=fresh)
    assert everything(backend) == before
    return caught.value


def edit_part(backend: Backend, path: str, **changes: object) -> None:
    """Change what a part says, as someone would who knows how to make its digest right."""
    data = read(backend, f"{path}/part.json")
    document = json.loads(data)
    document["body"] |= changes
    document["digest"] = digest_of(document["body"])
    write(backend, f"{path}/part.json", json.dumps(document).encode().ljust(len(data)))


class TestRoles:
    @pytest.mark.parametrize("left", ["step-00000001", ".slot-7", "store.json"])
    def test_a_first_directory_is_known_by_any_name_that_only_it_has(self, left: str) -> None:
        made = store_of_two(keep=1)
        backend = MemoryBackend(directories=["/new", ONE])
        if left == "store.json":
            write(backend, f"{ONE}/{left}", read(made, f"{ONE}/{left}"))
        else:
            copied(made, f"{ONE}/step-00000001", backend, f"{ONE}/{left}")
        error = refused(backend, "/new", ONE)
        assert "is the first directory of a store, but was given as number 2" in str(error)
        assert error.filename == ONE

    @pytest.mark.parametrize("fresh", [False, True], ids=["resume", "fresh"])
    def test_the_second_of_another_store_is_refused(self, fresh: bool) -> None:
        """Also where the first of its parts is not sealed."""
        backend = store_of_two()
        damage_invalid(backend, f"{TWO}/{min(parts_in(backend))}")
        backend.make_dir("/other")
        error = refused(backend, "/other", TWO, fresh=fresh)
        store = manifest_of(backend, 2)["store_id"]
        assert f"is number 2 of the store {store}, but was" in str(error)
        assert "If that store is gone, remove its part-<k>" in str(error)
        assert error.filename == TWO

    def test_the_third_is_looked_at_as_the_second_is(self) -> None:
        backend, other = store_in(X, Y, Z), store_in(X, Y, Z)
        with optimizer_in(backend, model := Model(), ["/first"]) as optimizer:
            train(model, optimizer, 1)
        error = refused(backend, X, Y, "/first", fresh=True)
        assert "is the first directory of a store, but was given as number 3" in str(error)
        backend.make_dir("/empty")
        error = refused(backend, X, Y, "/empty")
        assert f"this directory is empty, and the checkpoints of the store in {X}" in str(error)
        assert error.filename == "/empty"
        (part,) = parts_in(other, Z)
        copied(other, f"{Z}/{part}", backend, f"/empty/{part}")
        error = refused(backend, X, Y, "/empty")
        store = store_id_in(other, X)
        assert f"is number 3 of the store {store}, but was given as number 3" in str(error)

    def test_a_file_that_is_named_like_a_part_is_no_part(self) -> None:
        backend = store_of_two()
        write(backend, f"{TWO}/part-77", b"mine")
        assert_goes_on(backend, 2)
        assert read(backend, f"{TWO}/part-77") == b"mine"
        backend.make_dir("/notes")
        write(backend, "/notes/part-1", b"mine")
        assert "holds other files: 'part-1'" in str(refused(backend, "/new", "/notes"))


class TestOrder:
    @pytest.mark.parametrize("fresh", [False, True], ids=["resume", "fresh"])
    def test_directories_in_another_order_are_noticed(self, fresh: bool) -> None:
        backend = store_in(X, Y, Z)
        error = str(refused(backend, X, Z, Y, fresh=fresh))
        assert "is number 3 of this store, but was given as number 2" in error
        assert f"pass directory={[X, Y, Z]!r}" in error
        assert_goes_on(backend, 1, [X, Y, Z])

    def test_a_refusal_changes_and_syncs_nothing(self) -> None:
        backend = CrashBackend()
        with optimizer_in(backend, model := Model()) as optimizer:
            train(model, optimizer, 1)
        before = len(backend.log)
        with pytest.raises(StoreError, match="but was given as number 1"):
            optimizer_in(backend, Model(), BOTH[::-1])
        assert [str(operation) for operation in backend.log[before:]] == []


class TestCheckpointsThatDoNotFit:
    """Somebody has put a checkpoint of another store beside the present ones."""

    def test_a_store_whose_checkpoints_differ_in_their_drives_is_refused_untouched(self) -> None:
        backend, other = store_of_two(keep=1), store_in(ONE, last=2)
        copied(other, f"{ONE}/step-00000002", backend, f"{ONE}/step-00000002")
        remove_tree(backend, TWO)
        backend.make_dir(TWO)
        error = refused(backend, ONE, TWO, fresh=True)
        assert "step 2 of this store is spread over 1 directories" in str(error)


class TestIdentity:
    """What ``store.json`` says, before a checkpoint does."""

    def test_a_store_goes_on_after_the_power_went_before_its_first_commit(self) -> None:
        """Its part is sealed, and nothing but ``store.json`` says that it is the store's own."""
        backend = FaultBackend(MemoryBackend())
        optimizer = optimizer_in(backend, model := Model())
        train(model, optimizer, 1, seal=False)
        backend.fail_if(lambda kind, _: kind == "rename")
        with pytest.raises(SealError, match="injected failure of rename"):
            optimizer.checkpoint().result()
        after = backend.inner.reopened()
        assert list_checkpoints(ONE, backend=after) == []
        with optimizer_in(after, model := Model()) as optimizer:
            assert optimizer.restore() is None
            train(model, optimizer, 1)
        assert_goes_on(after, 1)

    def test_parts_are_not_refused_while_it_is_unknown_whose_the_checkpoints_are(self) -> None:
        backend = store_of_two(keep=1)
        backend.remove(f"{ONE}/store.json")
        manifest = f"{ONE}/step-00000001/manifest.json"
        good = read(backend, manifest)
        overwrite(backend, manifest, b"\0" * 100, 40)
        with pytest.warns(RuntimeWarning, match="sealed for another store, and left alone"):
            optimizer_in(backend, Model()).close()
        overwrite(backend, manifest, good)
        assert_goes_on(backend, 1)

    def test_that_of_the_checkpoints_counts_and_not_one_that_somebody_put_there(self) -> None:
        """Nor its generation: if that counted, none would be left for the next checkpoints."""
        backend = store_of_two()
        path = f"{ONE}/store.json"
        record = {"format": 1, "store_id": FOREIGN, "generation": 2**53 - 1}
        assert json.loads(read(backend, path)).keys() == {"format", "store_id"}
        write(backend, path, json.dumps(record).encode().ljust(512))
        own = manifest_of(backend, 2)["store_id"]
        assert_goes_on(backend, 2)
        assert manifest_of(backend, 4)["store_id"] == own
        assert manifest_of(backend, 4)["generation"] < 100

    def test_it_is_durable_before_a_slot_that_was_left_is_changed(self) -> None:
        backend = CrashBackend()
        with optimizer_in(backend, model := Model()) as optimizer:
            train(model, optimizer, 1, seal=False)
        backend.remove(f"{ONE}/store.json")
        before = len(backend.log)
        with optimizer_in(backend, model := Model()) as optimizer:
            train(model, optimizer, 1)
        log = [str(operation) for operation in backend.log[before:]]
        synced = log.index(f"sync {ONE}/store.json")
        assert log[synced + 1] == f"sync_dir {ONE}"
        assert not any(".slot-" in one or "part-" in one for one in log[:synced])


WRONG_PARTS = {
    "store_id": (5, None, "f" * 31),
    "generation": ("7", None, True, 7.0, -1, 1 << 63),
    "drive": (False, -1),
    "content": (["0" * 32],),
}


@pytest.mark.parametrize("field", WRONG_PARTS)
def test_a_part_whose_file_has_a_field_of_another_kind_is_not_its_own(field: str) -> None:
    backend = store_of_two()
    path = f"{TWO}/{part_of(backend, 2)}"
    for value in WRONG_PARTS[field]:
        edit_part(backend, path, **{field: value})
        (info,) = [i for i in list_checkpoints(ONE, backend=backend) if not i.valid]
        assert f"{path}/part.json: not a part's file" in info.reason


class TestMade:
    """How the directories of a store come into being."""

    class Raced(WrapperBackend):
        """Another process makes something at the path of a directory that is about to be made."""

        kind, number = "", 0

        def make_dir(self, path: str) -> None:
            kind, self.kind = self.kind, ""
            if not kind:
                super().make_dir(path)
                return
            if kind == "directory":
                super().make_dir(path)
            elif kind == "file":
                write(self, path, b"mine")
            raise StorageError(self.number, "making a directory", path)

    def test_each_is_durable_before_the_next_one_is_made(self) -> None:
        backend = CrashBackend()
        optimizer_in(backend, Model(), ["/a/b"]).close()
        assert [str(operation) for operation in backend.log[:5]] == [
            "sync_dir /", "make_dir /a", "sync_dir /", "make_dir /a/b", "sync_dir /a",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("kind", "number", "error"),
        [
            ("directory", errno.EEXIST, None),
            ("directory", errno.EIO, UnreadableError),
            ("file", errno.EEXIST, StoreError),
            ("nothing", errno.EEXIST, StoreError),
        ],
    )
    def test_one_that_another_process_makes_meanwhile_is_taken_and_nothing_else(
        self, kind: str, number: int, error: type[StoreError] | None
    ) -> None:
        backend = self.Raced(MemoryBackend())
        backend.kind, backend.number = kind, number
        if error is None:
            optimizer_in(backend, Model(), ["/a/b"]).close()
            return
        with pytest.raises(error, match="making"):
            optimizer_in(backend, Model(), ["/a/b"])

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EINVAL, errno.EIO])
    def test_a_parent_that_this_user_may_not_sync_is_passed_over(self, number: int) -> None:
        backend = FaultBackend(MemoryBackend(directories=[ONE]))
        backend.fail_if(lambda kind, path: (kind, path) == ("sync_dir", "/first"), number)
        if number == errno.EIO:
            with pytest.raises(UnreadableError, match="No checkpoint has been changed"):
                optimizer_in(backend, Model(), [ONE])
        else:
            optimizer_in(backend, Model(), [ONE]).close()
        assert backend.num_failed == 1
        backend.close()


def test_parts_of_ranks_given_to_one_process_are_refused_with_what_is_to_be_done() -> None:
    backend = MemoryBackend(directories=["/b", "/empty"])
    with job.Job([backend, backend], directories=[job.ONE, job.ONE]) as ranks:
        ranks.seal(1)
    backend.rename(f"{job.ONE}/owner-1", "/b/owner-1")
    for others, advice in (
        ([], r"\(owner-1\).*is on another node: start the same ranks again"),
        (["/empty"], "is on another node: start the same ranks again"),
        ([job.ONE], f"the first directory of their store is {job.ONE}: put that one first"),
    ):
        with pytest.raises(StoreError, match=advice) as caught:
            optimizer_in(backend, Model(), ["/b", *others])
        assert caught.value.filename == "/b"
    with pytest.raises(StoreError, match="this is the directory of one owner"):
        optimizer_in(backend, Model(), ["/b/owner-1"])
