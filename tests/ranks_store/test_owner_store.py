"""The life of an owner's part: who may rewrite it, and when."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gds import Backend, LockHeldError, MemoryBackend, PosixBackend, StorageError
from offload.errors import CheckpointError, DamagedError, StoreError, StoreLockedError
from offload.format.shares.owners import OwnerReference
from offload.format.shares.part_table import owner_sizes
from offload.retention.policy import LastK
from offload.store.owners.claims import NamedParts
from offload.store.owners.slot import OwnerSlot, OwnerSlotState
from offload.store.owners.store import OwnerStore, remove_unnamed_parts
from offload.store.shared import SharedStore
from offload.store.store import Store
from tests.crash.fault_backend import FaultBackend
from tests.ranks_store.job import LAYOUTS, ONE, SCALARS, TWO, Job, part_paths, write_state
from tests.stores.files import contents, everything, overwrite, read

STORE_ID = "0123456789abcdef" * 2
NOTHING = NamedParts({})


def open_owner(backend: Backend, owner: int = 1, directory: str = TWO) -> OwnerStore:
    return OwnerStore(backend, directory, owner, store_id=STORE_ID, allow_volatile=True)


def ready(store: OwnerStore, named: NamedParts = NOTHING, generation: int = 1) -> OwnerSlot:
    return store.ready(LAYOUTS[1], generation, named, written=())


def sealed(store: OwnerStore, generation: int = 1, named: NamedParts = NOTHING) -> OwnerReference:
    """Seal a part of a generation, and release it."""
    slot = ready(store, named, generation)
    write_state(slot, 1, generation)
    reference = store.prepare(slot, SCALARS[1])
    store.published(slot)
    store.release(slot)
    return reference


def naming(*references: OwnerReference) -> NamedParts:
    return NamedParts({1: frozenset(reference.name for reference in references)})


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


def test_a_ready_part_is_invalid_and_has_its_final_size(backend: MemoryBackend) -> None:
    with_headers = LAYOUTS[1].array_headers[0]
    store = open_owner(backend)
    slot = ready(store)
    assert slot.path == f"{TWO}/owner-1/part-1"
    assert b"being rewritten" in read(backend, f"{slot.path}/table.json")
    assert {name.partition(".")[0] for name in slot.sizes} == {"master", "exp_avg", "table"}
    for name, header in with_headers.items():
        data = read(backend, f"{slot.path}/{name}.safetensors")
        assert len(data) == header.file_bytes
        assert data.startswith(header.encoded)
    assert slot.state is OwnerSlotState.WORKING


def test_parts_of_an_identity_that_was_taken_over_are_written_again(
    backend: MemoryBackend,
) -> None:
    """As after a restore from a tier: the owner has one part more than checkpoints."""
    store = open_owner(backend)
    store.take_over("f" * 32)
    newest = sealed(store, 1)
    for generation in range(2, 6):
        newest = sealed(store, generation, naming(newest))
        assert newest.name in ("part-1", "part-2")
    assert len([*part_paths(backend)]) == 2
    assert store.remove_unnamed(naming(newest)) != []
    assert [*part_paths(backend)] == [f"{store.path}/{newest.name}"]


def test_a_part_that_a_checkpoint_names_is_never_rewritten(backend: MemoryBackend) -> None:
    store = open_owner(backend)
    first = sealed(store, 1)
    second = sealed(store, 2, naming(first))
    assert [first.name, second.name] == ["part-1", "part-2"]
    before = {r.name: contents(backend, f"{store.path}/{r.name}") for r in (first, second)}
    third = ready(store, naming(first, second), 3)
    write_state(third, 1, 3)
    assert third.name == "part-3"
    after = {r.name: contents(backend, f"{store.path}/{r.name}") for r in (first, second)}
    assert after == before


def test_a_part_that_none_names_any_more_is_the_next(backend: MemoryBackend) -> None:
    store = open_owner(backend)
    first = sealed(store, 1)
    second = sealed(store, 2, naming(first))
    assert ready(store, naming(second), 3).name == first.name


def test_a_part_that_is_used_again_is_made_invalid_first(backend: MemoryBackend) -> None:
    store = open_owner(backend)
    first = sealed(store, 1)
    assert [part.name for part in store.seen()] == [first.name]
    slot = ready(store, NOTHING, 2)
    assert slot.name == first.name
    assert store.seen() == []
    assert b"being rewritten" in read(backend, f"{slot.path}/table.json")


def test_superfluous_parts_are_removed(backend: MemoryBackend) -> None:
    store = open_owner(backend)
    references: list[OwnerReference] = []
    for generation in (1, 2, 3):
        references.append(sealed(store, generation, naming(*references)))
    ready(store, naming(references[2]), 4)
    assert [*part_paths(backend)] == [f"{store.path}/part-1", f"{store.path}/part-3"]


def test_nothing_sealed_is_touched_while_a_manifest_is_unreadable(backend: MemoryBackend) -> None:
    store = open_owner(backend)
    reference = sealed(store)
    slot = ready(store, NamedParts({}, ("/one/run/step-00000001",)), 2)
    assert slot.name != reference.name
    assert reference.name in backend.list_dir(store.path)
    assert store.remove_unnamed(NamedParts({}, ("x",))) == []


@pytest.mark.parametrize("held_by", ["reader", "left-over rank"])
def test_a_part_on_which_somebody_holds_a_lock_is_passed_over(
    backend: MemoryBackend, held_by: str
) -> None:
    store = open_owner(backend)
    if held_by == "reader":
        reference = sealed(store)
        lock = backend.lock(f"{store.path}/{reference.name}", shared=True)
    else:
        lock = None
        slot = ready(store)
        store._lock.release()  # its node was cut off, and the file system forgot this lock
        store = open_owner(backend)
    before = contents(backend, f"{store.path}/part-1")
    other = ready(store, NOTHING, 2)
    write_state(other, 1, 2)
    assert other.name == "part-2"
    assert store.remove_unnamed(NOTHING) == []
    assert contents(backend, f"{store.path}/part-1") == before
    if lock is not None:
        lock.release()
    else:
        slot.close()
    store.release(other)
    assert len(store.remove_unnamed(NOTHING)) == 2


def test_the_writer_of_a_part_keeps_others_out_until_it_is_decided(backend: MemoryBackend) -> None:
    store = open_owner(backend)
    slot = ready(store)

    def is_held() -> bool:
        try:
            backend.lock(slot.path).release()
        except LockHeldError:
            return True
        return False

    assert is_held()
    store.prepare(slot, SCALARS[1])
    assert is_held()
    store.published(slot)
    assert not is_held()


def test_a_second_process_cannot_serve_an_owner(backend: MemoryBackend) -> None:
    with_lock = open_owner(backend)
    with pytest.raises(StoreLockedError, match="owner-1"):
        open_owner(backend)
    open_owner(backend, 2).close()
    with_lock.close()
    open_owner(backend).close()


def test_an_aborted_part_is_durably_invalid_and_may_be_written_again(
    backend: MemoryBackend,
) -> None:
    store = open_owner(backend)
    slot = ready(store)
    write_state(slot, 1, 1)
    first = store.prepare(slot, SCALARS[1])
    store.aborted(slot)
    assert b"being rewritten" in read(backend, f"{slot.path}/table.json")
    write_state(slot, 1, 2)
    second = store.prepare(slot, SCALARS[1])
    assert (first.name, first.generation) == (second.name, second.generation)
    assert first.digest != second.digest


@pytest.mark.parametrize("how", ["abandon", "release"])
def test_an_undecided_part_is_never_written_again(backend: MemoryBackend, how: str) -> None:
    store = open_owner(backend)
    slot = ready(store)
    write_state(slot, 1, 1)
    store.prepare(slot, SCALARS[1])
    before = everything(backend)
    getattr(store, how)(slot)
    assert slot.state is OwnerSlotState.ABANDONED
    with pytest.raises(StorageError, match="closed"):
        slot.array("master", 0).write_bytes(b"x", 0)
    for wrong in (store.prepare, store.published, store.aborted):
        with pytest.raises(RuntimeError, match="is abandoned"):
            wrong(slot, SCALARS[1]) if wrong == store.prepare else wrong(slot)  # type: ignore[call-arg]
    other = ready(store, NOTHING, 2)
    assert other.name == "part-2"
    assert store.remove_unnamed(NOTHING) == []
    after = everything(backend)
    assert {path: after[path] for path in before} == before


def test_a_reported_part_is_not_reported_again(backend: MemoryBackend) -> None:
    store = open_owner(backend)
    slot = ready(store)
    with pytest.raises(RuntimeError, match="is working, expected reported"):
        store.published(slot)
    store.prepare(slot, SCALARS[1])
    with pytest.raises(RuntimeError, match="is reported, expected working"):
        store.prepare(slot, SCALARS[1])


@pytest.mark.parametrize("kind", ["sync", "sync_dir", "write_bytes"])
def test_a_part_that_cannot_be_made_durable_is_given_up(kind: str) -> None:
    backend = FaultBackend(MemoryBackend())
    store = open_owner(backend)
    slot = ready(store)
    write_state(slot, 1, 1)
    number = backend.num_failed
    backend.fail_if(lambda what, _: what == kind)
    with pytest.raises(StorageError):
        store.prepare(slot, SCALARS[1])
    assert backend.num_failed == number + 1
    assert slot.state is OwnerSlotState.ABANDONED
    assert store.poisoned
    with pytest.warns(RuntimeWarning, match="reuses no slot any more"):
        assert ready(store, NOTHING, 2).name == "part-2"
    assert store.remove_unnamed(NOTHING) == []


@pytest.mark.parametrize("kind", ["create", "make_dir"])
def test_a_full_disk_leaves_nothing_behind(kind: str) -> None:
    backend = FaultBackend(MemoryBackend())
    store = open_owner(backend)
    first = sealed(store)
    before = everything(backend)
    backend.fail_if(lambda what, _: what == kind, 28)
    with pytest.raises(StorageError, match=r"No space left|reserve"):
        ready(store, naming(first), 2)
    assert everything(backend) == before
    assert ready(store, naming(first), 2).name == "part-2"


def test_a_part_of_another_layout_is_replaced(backend: MemoryBackend) -> None:
    store = open_owner(backend)
    sealed(store)
    slot = store.ready(LAYOUTS[0], 2, NOTHING, written=())
    assert slot.sizes["master.safetensors"] == LAYOUTS[0].file_sizes()["master.safetensors"]
    assert len([*part_paths(backend)]) == 1


def test_a_part_with_another_hard_link_is_not_rewritten(tmp_path: Path) -> None:
    with PosixBackend() as backend:
        store = open_owner(backend, directory=f"{tmp_path}/run")
        reference = sealed(store)
        path = Path(store.path) / reference.name / "master.safetensors"
        (tmp_path / "backup").hardlink_to(path)
        before = (tmp_path / "backup").read_bytes()
        write_state(ready(store, NOTHING, 2), 1, 2)
        assert (tmp_path / "backup").read_bytes() == before
        store.close()


def test_parts_of_another_store_or_with_directories_are_left_alone(backend: MemoryBackend) -> None:
    store = open_owner(backend)
    sealed(store)
    store.close()
    with pytest.warns(RuntimeWarning, match="part-1: sealed for another store"):
        store = OwnerStore(backend, TWO, 1, store_id="f" * 32, allow_volatile=True)
    assert store.seen() == []
    backend.make_dir(f"{store.path}/part-2")
    backend.make_dir(f"{store.path}/part-2/mine")
    before = everything(backend)
    assert ready(store).name == "part-3"
    assert store.remove_unnamed(NOTHING) == []
    after = everything(backend)
    assert {path: after[path] for path in before} == before


def test_files_that_were_replaced_meanwhile_are_not_sealed(backend: MemoryBackend) -> None:
    store = open_owner(backend)
    slot = ready(store)
    write_state(slot, 1, 1)
    path = f"{slot.path}/master.safetensors"
    data = read(backend, path)
    backend.remove(path)
    with backend.create(path, len(data)) as file:
        file.write_bytes(data, 0)
    with pytest.raises(StoreError, match="replaced, moved"):
        store.prepare(slot, SCALARS[1])


def test_missing_space_is_known_in_advance() -> None:
    needed = sum(owner_sizes(LAYOUTS[1], ()).values())
    backend = MemoryBackend(capacity_bytes=4 * needed)
    store = open_owner(backend)
    assert store.missing_bytes(LAYOUTS[1], 3, written=()) == 0
    free = backend.free_bytes(TWO)
    assert store.missing_bytes(LAYOUTS[1], 5, written=()) == 5 * needed - free
    sealed(store)
    assert store.missing_bytes(LAYOUTS[1], 5, written=()) == 5 * needed - free


@pytest.mark.parametrize("named", [NOTHING, NamedParts({1: frozenset({"part-1"})}, ("/a/step-1",))])
def test_named_parts_travel_as_json(named: NamedParts) -> None:
    assert NamedParts.from_json(json.loads(json.dumps(named.to_json()))) == named


def test_the_largest_owner_is_stated(backend: MemoryBackend) -> None:
    for owner in (0, 4096):
        with pytest.raises(ValueError, match="expected 1 to 4095"):
            open_owner(backend, owner)


class TestJob:
    """Both ranks together."""

    def job(self) -> tuple[MemoryBackend, MemoryBackend]:
        backends = MemoryBackend(), MemoryBackend()
        with Job(backends, keep=2) as job:
            for step in (1, 2, 3):
                job.seal(step)
        return backends[0].reopened(), backends[1].reopened()

    def test_a_quarantined_part_takes_its_checkpoint_out_of_use(self) -> None:
        one, two = self.job()
        with Job([one, two], keep=2) as job:
            newest = job.store.newest
            assert newest is not None
            slot = job.owner.open(newest.manifest.owners[0], newest.manifest)
            job.owner.quarantine(slot, "read twice")
        with Job([one.reopened(), two.reopened()], keep=2) as job:
            assert job.newest == 2
            assert job.wrong() == []
            ((path, reason),) = job.store.refused
            assert path.endswith("step-00000003")
            assert "/two/run/owner-1/part-" in reason
            # Its part stays as it is, because the checkpoint still names it.
            assert newest.manifest.owners[0].name in job.store.named_parts().of(1)
            with pytest.raises(DamagedError, match="read twice"):
                job.owner.open(newest.manifest.owners[0], newest.manifest)

    @pytest.mark.parametrize("damage", ["missing", "rewritten", "node"])
    def test_a_checkpoint_without_its_part_is_refused_and_not_deleted(self, damage: str) -> None:
        one, two = self.job()
        with Job([one, two], keep=2) as job:
            assert job.store.newest is not None
            (reference,) = job.store.newest.manifest.owners
        path = f"{TWO}/owner-1/{reference.name}"
        if damage == "missing":
            for name in two.list_dir(path):
                two.remove(f"{path}/{name}")
        elif damage == "rewritten":
            overwrite(two, f"{path}/table.json", b'{"format": 1, "invalid": "x"}'.ljust(4096))
        else:
            two = MemoryBackend()
        with Job([one.reopened(), two.reopened()], keep=2) as job:
            assert job.newest == (0 if damage == "node" else 2)
            reasons = dict(job.store.refused)
            assert path in reasons[f"{ONE}/step-00000003"]
            assert "missing" in reasons[f"{ONE}/step-00000003"]
            assert job.store.named_parts().of(1) >= {reference.name}
            job.seal(4)
            assert "step-00000003" in one.reopened().list_dir(ONE)

    def test_a_process_alone_that_does_not_see_all_owners_is_refused_by_name(self) -> None:
        one, _ = self.job()
        with pytest.raises(StoreError, match=r"made by 2 ranks, and owner-1 .* is not here"):
            Store(one, ONE, keep=_keep(), train_state_bytes=8192, allow_volatile=True)

    def test_starting_over_needs_no_ranks(self) -> None:
        one, _ = self.job()
        store = Store(
            one, ONE, keep=_keep(), train_state_bytes=8192, allow_volatile=True, fresh=True
        )
        assert store.newest is None
        store.close()

    def test_an_unreadable_manifest_may_name_any_part(self) -> None:
        one, two = self.job()
        overwrite(one, f"{ONE}/step-00000002/manifest.json", b"\0" * 64)
        with Job([one, two], keep=2) as job:
            assert job.store.named_parts().unknown == (f"{ONE}/step-00000002",)
            before = {path: contents(two, path) for path in part_paths(two)}
            job.write(job.grant(), 4)
            assert {path: contents(two, path) for path in before} == before

    def test_a_withdrawal_that_failed_keeps_its_parts(self) -> None:
        one, two = FaultBackend(MemoryBackend()), MemoryBackend()
        with Job([one, two], keep=2) as job:
            for step in (1, 2):
                job.seal(step)
            named = job.store.named_parts()
            one.fail_if(lambda what, path: what == "sync_dir" and path == ONE)
            with pytest.raises(StorageError):
                job.store.withdraw_newer(job.store.find(1))
            assert one.num_failed == 1
            assert job.newest == 1
            assert job.store.named_parts() == named

    def test_a_seal_in_doubt_keeps_its_parts(self) -> None:
        one, two = FaultBackend(MemoryBackend()), MemoryBackend()
        with Job([one, two], keep=2) as job:
            slots = job.grant()
            job.write(slots, 1)
            seal = job.prepare(slots, 1)
            assert job.store.named_parts() == NOTHING
            one.fail_if(lambda what, path: what == "sync_dir" and path == ONE)
            with pytest.raises(StorageError):
                job.publish(seal)
            assert one.num_failed == 1
            assert job.store.named_parts().of(1) == {slots[1].name}

    @pytest.mark.parametrize(
        "change",
        [
            lambda _: [],
            lambda r: [r, r],
            lambda r: [OwnerReference(2, r.directory, r.name, r.generation, r.digest)],
            lambda r: [OwnerReference(1, r.directory, r.name, r.generation + 1, r.digest)],
        ],
        ids=["none", "twice", "another-owner", "another-generation"],
    )
    def test_ranks_that_do_not_agree_seal_nothing(
        self, change: Callable[[OwnerReference], list[OwnerReference]]
    ) -> None:
        with Job([MemoryBackend(), MemoryBackend()]) as job:
            slot, part = job.grant()
            job.write((slot, part), 1)
            reference = job.owner.prepare(part, SCALARS[1])
            with pytest.raises(StoreError, match="every rank must seal the same step"):
                job.store.sealing.prepare(slot, job.compose(slot, 1), (), owners=change(reference))
            assert job.newest == 0

    def test_the_slot_of_a_left_over_rank_0_is_passed_over(self) -> None:
        one, two = MemoryBackend(), MemoryBackend()
        old = Job([one, two])
        slot, _ = old.grant()
        before = contents(one, slot.path)
        old.store._lock.release()  # its node was cut off, and the file system forgot its locks
        old.owner._lock.release()
        with Job([one, two]) as job:
            job.seal(1)
            assert contents(one, slot.path) == before
        slot.close()

    def test_a_late_decision_publishes_what_was_reported(self) -> None:
        """Rank 0 stalls, rank 1 gives its part up and writes another, rank 0 wakes and renames."""
        one, two = MemoryBackend(), MemoryBackend()
        with Job([one, two], keep=2) as job:
            job.seal(1)
            slots = job.grant()
            job.write(slots, 2)
            seal = job.prepare(slots, 2)
            job.owner.abandon(slots[1])
            other = job.owner.ready(LAYOUTS[1], 99, job.store.named_parts(), written=())
            write_state(other, 1, 99)
            job.store.sealing.publish(seal.prepared)
            assert job.newest == 2
            assert job.wrong() == []
        with Job([one.reopened(), two.reopened()], keep=2) as job:
            assert job.newest == 2
            assert job.wrong() == []

    @pytest.mark.parametrize("reported", [False, True], ids=["writing", "reported"])
    def test_a_left_over_rank_writes_into_nothing_that_a_new_job_uses(self, reported: bool) -> None:
        one, two = MemoryBackend(), MemoryBackend()
        old = Job([one, two])
        old.seal(1)
        slots = old.grant()
        old.write(slots, 2)
        if reported:
            old.prepare(slots, 2)
        old.store._lock.release()  # both nodes were cut off, and the file systems forgot the locks
        old.owner._lock.release()
        with Job([one, two]) as job:
            assert job.newest == 1
            for step in (3, 4, 5):
                job.seal(step)
                old.write(slots, 77)  # what was stopped goes on
                assert job.wrong() == []
            assert job.newest == 5
            assert job.wrong() == []
        old.close()

    def test_parts_of_owners_that_nobody_serves_are_removed(self) -> None:
        one, two = self.job()
        with Job([one, two], keep=2) as job:
            extra = OwnerStore(two, TWO, 3, store_id=job.store.store_id, allow_volatile=True)
            sealed(extra)
            named = job.store.named_parts()
            arguments = {"store_id": job.store.store_id, "named": named, "served": (1,)}
            assert remove_unnamed_parts(two, TWO, **arguments) == []  # type: ignore[arg-type]
            extra.close()
            removed = remove_unnamed_parts(two, TWO, **arguments)  # type: ignore[arg-type]
            assert removed == [f"{TWO}/owner-3/part-1"]
            assert job.wrong() == []

    def test_the_directory_of_an_owner_is_no_store(self) -> None:
        _, two = self.job()
        with pytest.raises(StoreError, match="directory of one owner of a store"):
            Store(two, f"{TWO}/owner-1", keep=_keep(), train_state_bytes=8192, allow_volatile=True)

    def test_owners_without_a_first_directory_never_become_a_new_store(self) -> None:
        _, two = self.job()
        before = everything(two)
        with pytest.raises(StoreError, match=r"\(owner-1\), and not that store's first directory"):
            Store(two, TWO, keep=_keep(), train_state_bytes=8192, allow_volatile=True)
        assert everything(two) == before

    def test_a_part_of_another_checkpoint_is_not_opened(self) -> None:
        one, two = self.job()
        with Job([one, two], keep=2) as job:
            older, newer = (c.manifest for c in job.store.checkpoints)
            with pytest.raises(CheckpointError, match="is not the part that was sealed with it"):
                job.owner.open(
                    OwnerReference(1, TWO, older.owners[0].name, 3, newer.owners[0].digest), newer
                )

    def test_a_shared_store_of_no_owner_is_an_ordinary_one(self) -> None:
        backend = MemoryBackend()
        store = Store(
            backend, ONE, keep=_keep(), train_state_bytes=8192, allow_volatile=True,
            shared=SharedStore(),
        )  # fmt: skip
        assert store.named_parts() == NOTHING
        store.close()


def _keep() -> LastK:
    return LastK(2)
