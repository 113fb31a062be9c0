"""Parts on further drives, and what directories are known by, whatever has gone wrong."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable

import pytest

from gds import Backend, MemoryBackend
from offload import list_checkpoints, open_checkpoint
from offload.errors import SealError, StoreError, UnreadableError
from tests.crash.crash_backend import CrashBackend
from tests.crash.fault_backend import FaultBackend
from tests.crash.test_drives import (
    BOTH,
    ONE,
    TWO,
    assert_goes_on,
    copied,
    manifest_of,
    optimizer_in,
    part_of,
    parts_in,
    slots_in,
    store_of_two,
)
from tests.ranks_store import job
from tests.stores.files import contents, everything, overwrite, read, remove_tree, write
from tests.stores.training import Model, Reference, differences, train

THREE = [*BOTH, "/third/run"]
FOREIGN = "f" * 32


def refused(backend: MemoryBackend, *directories: str, fresh: bool = False) -> StoreError:
    """Return the error of the constructor, having checked that it has changed nothing."""
    before = everything(backend)
    with pytest.raises(StoreError) as caught:
        optimizer_in(backend, Model(), directories, fresh=fresh)
    assert everything(backend) == before
    return caught.value


def assert_newest(backend: Backend, step: int) -> None:
    with open_checkpoint(ONE, backend=backend) as newest:
        assert newest.step == step
        assert differences(newest, backend, Reference().after(step)) == []


def zero_manifest(backend: Backend) -> None:
    overwrite(backend, f"{ONE}/step-00000003/manifest.json", b"\0" * 100, 40)


def remove_model(backend: Backend) -> None:
    backend.remove(f"{ONE}/step-00000003/model.safetensors")


class TestOfRefusedCheckpoints:
    @pytest.mark.parametrize("damage", [zero_manifest, remove_model])
    def test_none_is_rewritten_as_long_as_the_checkpoint_is_there(
        self, damage: Callable[[Backend], None]
    ) -> None:
        """Also if its manifest, which would name its part, cannot be read."""
        backend = store_of_two(keep=3)
        part = f"{TWO}/{part_of(backend, 3)}"
        of_part, of_slot = contents(backend, part), contents(backend, f"{ONE}/step-00000003")
        damage(backend)
        model = Model()
        with optimizer_in(backend, model, keep=2) as optimizer:
            with pytest.warns(RuntimeWarning, match=r"not using.*step-00000003"):
                assert optimizer.restore().step == 2
            # not step 3, which would take the name of the damaged one
            train(model, optimizer, 3, seal=False)
            train(model, optimizer, 4, 5, 6, 7)
        assert contents(backend, part) == of_part
        for name, data in of_slot.items():
            write(backend, f"{ONE}/step-00000003/{name}", data)
        with open_checkpoint(f"{ONE}/step-00000003", backend=backend) as repaired:
            assert repaired.verify().ok

    @pytest.mark.parametrize("how", ["removed", "replaced by the next of its step"])
    def test_one_is_free_when_the_name_of_the_checkpoint_is(self, how: str) -> None:
        backend = store_of_two(keep=2)
        if how == "removed":
            remove_tree(backend, f"{ONE}/step-00000002")
            assert_goes_on(backend, 1)
        else:
            overwrite(backend, f"{ONE}/step-00000002/manifest.json", b"\0" * 100, 40)
            with pytest.warns(RuntimeWarning, match="not using"):
                assert_goes_on(backend, 1)
        assert len(parts_in(backend)) == len(slots_in(backend)) == 3


class TestByHand:
    def test_that_of_a_free_slot_is_removed_in_mid_run(self) -> None:
        """The slot is of no use without it, and its name in the first directory says nothing."""
        backend, model = MemoryBackend(), Model()
        with optimizer_in(backend, model, keep=1) as optimizer:
            train(model, optimizer, 1, 2)
            (free,) = set(parts_in(backend)) - {part_of(backend, 2)}
            remove_tree(backend, f"{TWO}/{free}")
            train(model, optimizer, 3, 4)
        assert_newest(backend, 4)
        assert len(parts_in(backend)) == len(slots_in(backend)) == 2


class TestNumbers:
    def test_one_that_is_kept_on_one_drive_is_used_on_no_other(self) -> None:
        first, second, third = THREE
        kept = f"{third}/part-7/not-ours"
        backend, model = MemoryBackend(directories=[first, f"{second}/part-7", kept]), Model()
        for directory in (second, third):  # so they are of a store, whatever else is in them
            backend.create(f"{directory}/LOCK", 0).close()
        with optimizer_in(backend, model, THREE) as optimizer:
            train(model, optimizer, 1, 2)
        assert_newest(backend, 2)
        assert backend.list_dir(f"{third}/part-7") == ["not-ours"]


def test_starting_over_keeps_the_old_parts_until_the_new_ones_are_durable() -> None:
    backend, model = store_of_two(), Model()
    old = f"{TWO}/{part_of(backend, 2)}"
    before = contents(backend, old)
    with optimizer_in(backend, model, fresh=True) as optimizer:
        train(model, optimizer, 1, 2, 3, seal=False)
        assert contents(backend, old) == before
        optimizer.checkpoint({"step": 3}).result()
    assert [info.step for info in list_checkpoints(ONE, backend=backend)] == [3]
    assert len(parts_in(backend)) <= 3


class TestCheckpointsThatDoNotFit:
    """Somebody has put a checkpoint of another store beside the present ones."""

    def test_a_store_whose_checkpoints_differ_in_their_drives_is_refused_untouched(self) -> None:
        backend, other, model = store_of_two(keep=1), MemoryBackend(), Model()
        with optimizer_in(other, model, [ONE]) as optimizer:
            train(model, optimizer, 1, 2)
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


class TestMade:
    """How the directories of a store come into being."""

    def test_each_is_durable_before_the_next_one_is_made(self) -> None:
        backend = CrashBackend()
        optimizer_in(backend, Model(), ["/a/b"]).close()
        assert [str(operation) for operation in backend.log[:5]] == [
            "sync_dir /", "make_dir /a", "sync_dir /", "make_dir /a/b", "sync_dir /a",
        ]  # fmt: skip

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
