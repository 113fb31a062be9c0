"""Checkpoints that expire become free slots: which ones, in what order, and what stops it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gds import MemoryBackend, StorageError
from offload.checkpoint.reading import decode_manifest
from offload.errors import CheckpointError, StoreError
from offload.retention.pins import write_pin
from offload.retention.policy import BestBy, LastK, Record
from offload.store.expiry import pin_of
from tests.crash.fault_backend import FaultBackend
from tests.crash.opened import Opened, is_open, made, opened
from tests.stores.files import remove_tree
from tests.stores.small import STORE, make_model, make_optimizer, train


def path_of(step: int) -> str:
    return f"{STORE}/step-{step:08d}"


def pin(store: Opened, step: int) -> None:
    checkpoint = store.step(step)
    write_pin(store.backend, STORE, pin_of("kept", checkpoint.path, checkpoint.manifest))


def add_free_slots(store: Opened, number: int) -> None:
    """Make slots like the newest checkpoint, which nobody needs."""
    newest = store.checkpoints[-1]
    sizes = store.open(newest.manifest.step).sizes
    for _ in range(number):
        store.free.add(store.free.create(newest.manifest.layout, sizes))


class TestOne:
    """The withdrawal of one checkpoint, whether it has expired or not."""

    @pytest.mark.parametrize("num_drives", [1, 2])
    def test_its_slot_is_free_and_ready_to_be_written(self, num_drives: int) -> None:
        with opened(made(2, num_drives), 2, num_drives) as store:
            layout, before = store.step(1).manifest.layout, len(store.free)
            sizes = store.open(1).sizes
            assert store.withdrawal.withdraw(store.step(1))
            assert store.steps == [2]
            assert len(store.free) == before + 1
            assert store.on_drive[-1] == "step-00000002"
            for name in store.free.paths():
                assert name.removeprefix(f"{STORE}/") in store.on_drive
                with pytest.raises(CheckpointError):
                    decode_manifest(store.backend, name)
            assert [store.parts.num_free(n) for n in range(1, num_drives)] == [0] * (num_drives - 1)
            slot = store.free.take(layout, sizes)
            assert slot is not None
            slot.manifest.write_bytes(b"{", 0)
            assert not store.poison

    @pytest.mark.parametrize("num_drives", [1, 2])
    def test_one_that_was_removed_by_hand_is_no_longer_listed(self, num_drives: int) -> None:
        with opened(made(2, num_drives), 2, num_drives) as store:
            slot = store.open(1)
            remove_tree(store.backend, path_of(1))
            assert store.withdrawal.withdraw(store.step(1))
            assert store.steps == [2]
            assert not is_open(slot)
            assert len(store.free) == 0
            assert [store.parts.num_free(n) for n in range(1, num_drives)] == [1] * (num_drives - 1)

    def test_one_that_is_being_read_stays(self) -> None:
        with opened(made(2), 2) as store:
            reader = store.backend.lock(path_of(1), shared=True)
            assert not store.withdrawal.withdraw(store.step(1))
            assert store.steps == [1, 2]
            reader.release()
            assert store.withdrawal.withdraw(store.step(1))

    def test_one_that_is_pinned_stays(self) -> None:
        with opened(made(2), 2) as store:
            pin(store, 1)
            assert not store.withdrawal.withdraw(store.step(1))
            assert store.withdrawal.withdraw(store.step(2))
            assert store.steps == [1]

    def test_nothing_is_withdrawn_after_a_failure(self) -> None:
        with opened(made(2), 2) as store:
            with pytest.raises(StorageError), store.poison.fatal("a sync failed"):
                raise StorageError(5, "sync", STORE)
            assert not store.withdrawal.withdraw(store.step(1))
            assert store.steps == [1, 2]
            assert store.on_drive == ["step-00000001", "step-00000002"]

    def test_nothing_is_withdrawn_from_a_directory_that_was_moved(self) -> None:
        with opened(made(2), 2) as store:
            store.backend.rename(STORE, "/moved")
            with pytest.raises(StoreError, match="not the directory that was opened"):
                store.withdrawal.withdraw(store.step(1))
            assert store.steps == [1, 2]
            store.backend.rename("/moved", STORE)
            assert store.withdrawal.withdraw(store.step(1))

    def test_one_whose_name_could_not_be_changed_is_still_listed(self) -> None:
        """It is on the drive as before, and nothing that is there is reused any more."""
        backend = FaultBackend(made(2))
        with opened(backend, 2) as store:
            backend.fail_if(lambda kind, path: kind == "rename" and path == path_of(1))
            with pytest.raises(StorageError, match="injected failure of rename"):
                store.withdrawal.withdraw(store.step(1))
            assert store.steps == [1, 2]
            assert "a checkpoint could not be withdrawn" in store.poison.reason
        backend.close()

    def test_one_of_which_nothing_can_be_told_is_not_written_to(self) -> None:
        """Its files may have other names; the slot is listed, and is made anew when it is taken."""
        backend = FaultBackend(made(2))
        with opened(backend, 2) as store:
            slot = store.open(1)
            before = slot.manifest.read_bytes(0, slot.manifest.size_bytes)
            withdrawn: list[str] = []

            def chosen(kind: str, path: str) -> bool:
                withdrawn.extend([path] if kind == "rename" else [])
                return bool(withdrawn) and kind == "stat" and "/.slot-" in path

            backend.fail_if(chosen)
            assert store.withdrawal.withdraw(store.step(1))
            assert backend.num_failed == 1
            (path,) = store.free.paths()
            file = store.backend.open(f"{path}/manifest.json")
            assert file.read_bytes(0, file.size_bytes) == before
            file.close()
        backend.close()

    def test_the_files_of_one_that_was_replaced_are_closed(self) -> None:
        with opened(made(1, 2), 1, 2) as store:
            slot = store.open(1)
            store.withdrawal.forget(store.step(1))
            assert not is_open(slot)
            assert store.parts.num_free(1) == 1


class TestExpired:
    def test_the_oldest_is_withdrawn_and_no_other(self) -> None:
        with opened(made(4), 1) as store:
            assert store.withdrawal.withdraw_expired()
            assert store.steps == [2, 3, 4]

    def test_nothing_is_looked_at_as_long_as_nothing_has_expired(self) -> None:
        """A checkpoint that cannot be examined now is then in nobody's way."""
        backend = FaultBackend(made(2))
        with opened(backend, 2) as store:
            backend.fail_if(lambda kind, path: kind == "stat" and "/step-" in path)
            assert not store.withdrawal.withdraw_expired()
            assert backend.num_failed == 0
        backend.close()

    def test_only_what_is_still_there_makes_others_expire(self) -> None:
        with opened(made(2), 1) as store:
            remove_tree(store.backend, path_of(2))
            assert not store.withdrawal.withdraw_expired()
            assert store.steps == [1]
            assert "step-00000001" in store.on_drive

    def test_a_checkpoint_that_is_being_sealed_displaces_none_by_its_metrics(self) -> None:
        """Of a policy that keeps the best, the present best stays until the better one is there."""
        backend = MemoryBackend()
        with make_optimizer(make_model(), backend, keep=9) as optimizer:
            train(optimizer, 3, losses={1: 0.1, 2: 0.5, 3: 0.6})
        with opened(backend.reopened(), BestBy("loss")) as store:
            newest = store.step(3).manifest
            better = Record(4, newest.generation + 1, newest.created, {"loss": 0.01}, ())
            assert store.withdrawal.withdraw_expired(better)
            assert store.steps == [1, 3]
            assert not store.withdrawal.withdraw_expired(better)
            assert store.steps == [1, 3]


class TestLeaving:
    """Checkpoints that are being copied to a tier, or wait for it."""

    @pytest.fixture
    def said(self, caplog: pytest.LogCaptureFixture) -> Callable[[Opened], str]:
        """Return what the journal of a store has said until now."""
        caplog.set_level("INFO", logger="offload")

        def tell(store: Opened) -> str:
            store.journal.tell()
            return caplog.text

        return tell

    def leave(self, store: Opened, **stages: Any) -> None:
        for name, stage in stages.items():
            generation = store.step(int(name.removeprefix("step_"))).manifest.generation
            store.keeping.leaving.begin(generation, stage)

    def test_they_stay_unless_they_have_to_give_way(self, said: Callable[[Opened], str]) -> None:
        with opened(made(4), 1) as store:
            self.leave(store, step_1="sending", step_3="waiting")
            assert store.withdrawal.withdraw_expired()
            assert store.steps == [1, 3, 4]
            assert not store.withdrawal.withdraw_expired()
            assert store.steps == [1, 3, 4]
            assert "gives way" not in said(store)

    def test_one_that_waits_gives_way_before_one_that_is_sent(
        self, said: Callable[[Opened], str]
    ) -> None:
        with opened(made(4), 1) as store:
            self.leave(store, step_1="sending", step_2="waiting", step_3="waiting")
            for left in ([1, 3, 4], [1, 4], [4]):
                assert store.withdrawal.withdraw_expired(even_leaving=True)
                assert store.steps == left
            assert not store.withdrawal.withdraw_expired(even_leaving=True)
            text = said(store)
        assert f"{path_of(1)}: step 1 is being sent to the tier, and gives way" in text
        assert f"{path_of(2)}: step 2 waits for the tier, and gives way" in text

    def test_of_one_that_is_not_leaving_it_is_not_said(self, said: Callable[[Opened], str]) -> None:
        with opened(made(2), 1) as store:
            assert store.withdrawal.withdraw_expired(even_leaving=True)
            assert store.steps == [2]
            assert "gives way" not in said(store)

    def test_one_that_is_read_does_not_give_way(self, said: Callable[[Opened], str]) -> None:
        with opened(made(2), 1) as store:
            self.leave(store, step_1="sending")
            reader = store.backend.lock(path_of(1), shared=True)
            assert not store.withdrawal.withdraw_expired(even_leaving=True)
            reader.release()
            assert store.steps == [1, 2]
            assert "gives way" not in said(store)


class TestSpareSlots:
    def test_as_many_stay_as_retention_has_room_for(self) -> None:
        with opened(made(1), 3) as store:
            add_free_slots(store, 2)
            store.withdrawal.drop_spare_slots()
            assert len(store.free) == 2
            add_free_slots(store, 2)
            store.withdrawal.drop_spare_slots()
            assert len(store.free) == 3

    def test_the_one_that_the_next_step_needs_stays(self) -> None:
        """Although checkpoints that cannot be withdrawn yet take all of the room."""
        with opened(made(3), 1) as store:
            add_free_slots(store, 2)
            store.withdrawal.drop_spare_slots()
            assert len(store.free) == 1

    def test_they_go_after_a_commit(self) -> None:
        with opened(made(3), 1) as store:
            add_free_slots(store, 2)
            store.withdrawal.trim()
            assert store.steps == [3]
            assert len(store.free) == 1
            assert len(store.on_drive) == 2

    def test_parts_that_no_slot_will_need_go_with_them(self) -> None:
        with opened(made(4, 2), 4, 2) as store:
            for step in (1, 2, 3):
                remove_tree(store.backend, path_of(step))
                store.withdrawal.withdraw(store.step(step))
            assert store.parts.num_free(1) == 3
        with opened(store.backend, LastK(1), 2) as store:
            store.withdrawal.drop_spare_slots()
            assert store.parts.num_free(1) == 1
