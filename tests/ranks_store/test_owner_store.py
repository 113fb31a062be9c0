"""The life of an owner's part: who may rewrite it, when, and what a seal of several ranks needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gds import Backend, LockHeldError, MemoryBackend, PosixBackend, StorageError
from offload import AdamW, DriveTuning, Options, StoreError, StoreLockedError
from offload.format.shares.owners import OwnerReference
from offload.retention import LastK
from offload.store import Store
from offload.store.shared import SharedStore
from tests.crash.fault_backend import FaultBackend
from tests.ranks_store.job import (
    LAYOUTS,
    ONE,
    SCALARS,
    SHAPES,
    TWO,
    Job,
    part_paths,
)
from tests.stores.files import contents, everything, overwrite, read

OF_OWNER = f"{TWO}/owner-1"


def two_nodes() -> tuple[MemoryBackend, MemoryBackend]:
    return MemoryBackend(), MemoryBackend()


def trained(*, keep: int = 2, last: int = 3) -> tuple[MemoryBackend, MemoryBackend]:
    """Return the nodes of a job that has sealed steps 1 to `last` and ended."""
    one, two = two_nodes()
    with Job([one, two], keep=keep) as job:
        for step in range(1, last + 1):
            job.seal(step)
    return one.reopened(), two.reopened()


def part_of(job: Job, step: int | None = None) -> str:
    """Return the path of the part of owner 1 of a checkpoint, else of the newest."""
    found = job.store.newest if step is None else job.store.find(step)
    assert found is not None
    return f"{OF_OWNER}/{found.manifest.owners[0].name}"


def free_locks(job: Job) -> None:
    """Let a job's nodes be cut off, so that the file systems forget who serves the store."""
    job.store._lock.release()
    job.owner._lock.release()


class TestReuse:
    def test_a_part_is_used_again_when_no_checkpoint_names_it_and_is_invalid_first(self) -> None:
        one, two = two_nodes()
        with Job([one, two], keep=2) as job:
            for step in range(1, 4):
                job.seal(step)
            named = {path: contents(two, path) for path in (part_of(job, 2), part_of(job, 3))}
            free = part_of(job, 2)
            for step in (4, 5):
                slots = job.grant()
                assert b"being rewritten" in read(two, f"{slots[1].path}/table.json")
                job.write(slots, step)
                if step == 4:
                    assert {path: contents(two, path) for path in named} == named
                else:
                    assert slots[1].path == free
                job.publish(job.prepare(slots, step))
            assert len([*part_paths(two)]) == 3
            assert job.wrong() == []

    def test_a_part_that_a_reader_holds_is_passed_over(self) -> None:
        one, two = trained(keep=1)
        with Job([one, two]) as job:
            (held,) = {*part_paths(two)} - {part_of(job)}
            before = contents(two, held)
            lock = two.lock(held, shared=True)
            for step in (4, 5):
                job.seal(step)
            assert contents(two, held) == before
            lock.release()
            for step in (6, 7):
                job.seal(step)
            assert len([*part_paths(two)]) == 2
            assert job.wrong() == []

    def test_nothing_sealed_is_touched_while_a_manifest_is_unreadable(self) -> None:
        """It may name any part."""
        one, two = trained()
        overwrite(one, f"{ONE}/step-00000002/manifest.json", b"\0" * 64)
        with Job([one, two], keep=2) as job:
            before = {path: contents(two, path) for path in part_paths(two)}
            job.write(job.grant(), 4)
            assert {path: contents(two, path) for path in before} == before

    @pytest.mark.parametrize("damage", ["missing", "rewritten", "node"])
    def test_a_checkpoint_without_its_part_is_refused_and_not_deleted(self, damage: str) -> None:
        one, two = trained()
        with Job([one, two], keep=2) as job:
            path = part_of(job)
        if damage == "missing":
            for name in two.list_dir(path):
                two.remove(f"{path}/{name}")
        elif damage == "rewritten":
            overwrite(two, f"{path}/table.json", b'{"format": 1, "invalid": "x"}'.ljust(4096))
        else:
            two = MemoryBackend()
        with Job([one.reopened(), two.reopened()], keep=2) as job:
            assert job.newest == (0 if damage == "node" else 2)
            reason = dict(job.store.refused)[f"{ONE}/step-00000003"]
            assert path in reason
            assert "missing" in reason
            job.seal(4)
            assert "step-00000003" in one.reopened().list_dir(ONE)

    def test_a_part_with_another_hard_link_is_not_rewritten(self, tmp_path: Path) -> None:
        directory = str(tmp_path / "run")
        with PosixBackend() as backend:
            for step in (1, 2, 3):
                with Job([backend, backend], directories=(directory, directory)) as job:
                    job.seal(step)
                for part in (tmp_path / "run/owner-1").glob("part-*"):
                    name = tmp_path / f"{part.name} of {step}"
                    name.hardlink_to(part / "master.safetensors")
                before = {path: path.read_bytes() for path in tmp_path.glob("part-*")}
            with Job([backend, backend], directories=(directory, directory)) as job:
                for step in (4, 5, 6):
                    job.seal(step)
                assert job.wrong() == []
        assert {path: path.read_bytes() for path in tmp_path.glob("part-*")} == before

    def test_parts_of_another_store_or_with_directories_are_left_alone(self) -> None:
        _, two = trained(last=1)
        two.make_dir(f"{OF_OWNER}/part-2")
        two.make_dir(f"{OF_OWNER}/part-2/mine")
        before = everything(two)
        with pytest.warns(RuntimeWarning, match="part-1: sealed for another store"):
            job = Job([MemoryBackend(), two])
        with job:
            for step in (1, 2, 3):
                job.seal(step)
        after = everything(two)
        assert {path: after[path] for path in before} == before


class TestFailures:
    @pytest.mark.parametrize("kind", ["sync", "sync_dir", "write_bytes"])
    def test_a_part_that_cannot_be_made_durable_ends_all_reuse(self, kind: str) -> None:
        two = FaultBackend(MemoryBackend())
        with Job([MemoryBackend(), two]) as job:
            job.seal(1)
            slots = job.grant()
            job.write(slots, 2)
            two.fail_if(lambda what, _: what == kind)
            with pytest.raises(StorageError):
                job.prepare(slots, 2)
            assert two.num_failed == 1
            job.store.sealing.end()
            job.store.release(slots[0])
            before = everything(two)
            with pytest.warns(RuntimeWarning, match="reuses no slot any more"):
                job.write(job.grant(), 3)
            after = everything(two)
            assert {path: after[path] for path in before} == before

    @pytest.mark.parametrize("during", ["prepare", "publish"])
    def test_so_does_a_seal_of_the_first_rank(self, during: str) -> None:
        one = FaultBackend(MemoryBackend())
        with Job([one, MemoryBackend()], keep=2) as job:
            job.seal(1)
            slots = job.grant()
            job.write(slots, 2)
            if during == "prepare":
                one.fail_if(lambda what, path: what == "sync" and path == slots[0].train_state.path)
                with pytest.raises(StorageError, match="injected failure of sync"):
                    job.prepare(slots, 2)
            else:
                seal = job.prepare(slots, 2)
                one.fail_if(lambda what, path: what == "sync_dir" and path == ONE)
                with pytest.raises(StorageError, match="injected failure of sync_dir"):
                    job.publish(seal)
                named = job.store.named_parts().of(1)
                assert slots[1].name in named, "the checkpoint may be there after all"
            assert one.num_failed == 1
            assert job.store.poisoned

    def test_a_withdrawal_that_failed_keeps_its_parts(self) -> None:
        one = FaultBackend(MemoryBackend())
        with Job([one, MemoryBackend()], keep=2) as job:
            for step in (1, 2):
                job.seal(step)
            named = job.store.named_parts()
            one.fail_if(lambda what, path: what == "sync_dir" and path == ONE)
            with pytest.raises(StorageError):
                job.store.withdraw_newer(job.store.find(1))
            assert one.num_failed == 1
            assert job.newest == 1
            assert job.store.named_parts() == named

    @pytest.mark.parametrize("kind", ["create", "make_dir"])
    def test_a_full_disk_leaves_nothing_behind(self, kind: str) -> None:
        two = FaultBackend(MemoryBackend())
        with Job([MemoryBackend(), two]) as job:
            job.seal(1)
            before = everything(two)
            slot = job.store.acquire(job.layouts[0], 1)
            two.fail_if(lambda what, _: what == kind, 28)
            with pytest.raises(StorageError, match=r"No space left|reserve"):
                job.owner.ready(LAYOUTS[1], 2, job.store.named_parts(), written=())
            assert everything(two) == before
            job.store.release(slot)
            job.seal(2)
            assert job.wrong() == []

    def test_files_that_were_replaced_meanwhile_are_not_sealed(self) -> None:
        one, two = two_nodes()
        with Job([one, two]) as job:
            slots = job.grant()
            job.write(slots, 1)
            path = f"{slots[1].path}/master.safetensors"
            data = read(two, path)
            two.remove(path)
            with two.create(path, len(data)) as file:
                file.write_bytes(data, 0)
            with pytest.raises(StoreError, match="replaced, moved"):
                job.prepare(slots, 1)


class TestSeveralJobs:
    def test_a_second_process_cannot_serve_an_owner(self) -> None:
        _, two = nodes = two_nodes()
        with Job(nodes), pytest.raises(StoreLockedError, match="owner-1"):
            Job([MemoryBackend(), two])

    def test_the_writer_of_a_part_keeps_others_out_until_it_is_decided(self) -> None:
        _, two = nodes = two_nodes()
        with Job(nodes) as job:
            slots = job.grant()
            job.write(slots, 1)
            with pytest.raises(LockHeldError):
                two.lock(slots[1].path)
            seal = job.prepare(slots, 1)
            with pytest.raises(LockHeldError):
                two.lock(slots[1].path)
            job.publish(seal)
            two.lock(slots[1].path).release()

    @pytest.mark.parametrize("reported", [False, True], ids=["writing", "reported"])
    def test_a_left_over_job_writes_into_nothing_that_a_new_job_uses(self, reported: bool) -> None:
        nodes = two_nodes()
        old = Job(nodes)
        old.seal(1)
        slots = old.grant()
        old.write(slots, 2)
        if reported:
            old.prepare(slots, 2)
        free_locks(old)
        with Job(nodes) as job:
            assert job.newest == 1
            for step in (3, 4, 5):
                job.seal(step)
                old.write(slots, 77)  # what was stopped goes on
                assert job.wrong() == []
            assert job.newest == 5
        old.close()

    def test_a_history_begins_after_one_that_never_arrived(self) -> None:
        """A later attempt to fetch it has its generation; all others have later ones."""
        backend = MemoryBackend()
        for taken, expected in ((500, 500), (503, 503), (502, 502), (None, 504), (None, 504)):
            store = Store(
                backend,
                ONE,
                keep=LastK(2),
                train_state_bytes=8192,
                allow_volatile=True,
                fresh=taken is None,
                shared=SharedStore({1: TWO}, {}),
            )
            if taken is not None:
                store.take_over("f" * 32, taken)
            slot = store.acquire(LAYOUTS[0], 1)
            assert (store.store_id, slot.context.generation) == ("f" * 32, expected)
            store.release(slot)
            store.close()


class TestOneProcess:
    @staticmethod
    def opened(backend: Backend, directory: str, **how: Any) -> AdamW:
        model = torch.nn.Module()
        for name, shape in SHAPES.items():
            model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape).bfloat16()))
        drives = DriveTuning(calibrate=False)
        options = Options(backend=backend, allow_volatile=True, drives=drives)
        return AdamW(model.parameters(), directory=directory, model=model, options=options, **how)

    @pytest.mark.parametrize(
        ("node", "directory", "message"),
        [
            (0, ONE, r"made by 2 ranks, and owner-1 .* is not here"),
            (1, TWO, r"\(owner-1\), and not that store's first directory"),
            (1, OF_OWNER, "directory of one owner of a store"),
        ],
    )
    def test_it_is_refused_by_name_where_it_does_not_see_all_owners(
        self, node: int, directory: str, message: str
    ) -> None:
        backend = trained()[node]
        before = everything(backend)
        with pytest.raises(StoreError, match=message):
            self.opened(backend, directory)
        assert everything(backend) == before
        if node == 0:
            self.opened(backend, directory, fresh=True).close()

    def test_parts_of_ranks_are_held_as_long_as_their_state_is_the_present_one(self) -> None:
        """Else the rank that has a part might write into it while it is still read."""
        backend = MemoryBackend()
        with Job([backend, backend], directories=(ONE, ONE)) as job:
            arrays = (*LAYOUTS[0].parameters[0].arrays, "exp_avg_sq")
            job.layouts = [
                replace(one, parameters=tuple(replace(p, arrays=arrays) for p in one.parameters))
                for one in LAYOUTS
            ]
            job.seal(1)
        (path,) = part_paths(backend, ONE)
        with self.opened(backend, ONE) as optimizer:
            assert optimizer.restore() is not None
            with pytest.raises(LockHeldError):
                backend.lock(path)
        backend.lock(path).release()


class TestSeals:
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
        with Job(two_nodes()) as job:
            slot, part = job.grant()
            job.write((slot, part), 1)
            reference = job.owner.prepare(part, SCALARS[1])
            with pytest.raises(StoreError, match="every rank must seal the same step"):
                job.store.sealing.prepare(slot, job.compose(slot, 1), (), owners=change(reference))
            assert job.newest == 0
