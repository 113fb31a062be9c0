"""Checkpoints that expire become free slots: which ones, in what order, and what stops it."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest

import gds.waiting
import offload
import offload.store.slots.free as waiting_for_readers
from gds import Backend, MemoryBackend, WrapperBackend
from gds.contract import Stat
from offload import open_checkpoint
from offload.errors import CheckpointError, PinError, StoreBusyError, StoreError
from offload.store import Slot, Store
from tests.crash.fault_backend import FaultBackend
from tests.crash.opened import (
    acquire,
    free_paths,
    is_open,
    made,
    newest,
    opened,
    path_of,
    steps,
    with_free_slot,
)
from tests.ranks_store.job import ONE, TWO, Job
from tests.stores.files import contents, everything, remove_tree, write
from tests.stores.small import STORE


class Spacious(WrapperBackend):
    """Has as many bytes free as the test says."""

    free = 1 << 40

    def free_bytes(self, directory: str) -> int:
        assert super().free_bytes(directory)
        return self.free


def pin(backend: Backend, step: int) -> None:
    """Pin a checkpoint, as a user does beside the process."""
    offload.pin(path_of(step), "kept", backend=backend)


class TestExpired:
    @pytest.mark.parametrize("num_drives", [1, 2])
    def test_the_oldest_becomes_the_next_slot_and_no_other(self, num_drives: int) -> None:
        backend = made(4, num_drives)
        with opened(backend, 1, num_drives) as store:
            store.expire()
            assert steps(store) == [2, 3, 4]
            (path,) = free_paths(store)
            with pytest.raises(CheckpointError):
                open_checkpoint(path, backend=backend)
            store.expire()
            assert steps(store) == [2, 3, 4], "as long as that one is free"
            assert acquire(store).path == path
            store.expire()
            assert steps(store) == [3, 4]

    def test_nothing_is_looked_at_as_long_as_nothing_has_expired(self) -> None:
        """A checkpoint that cannot be examined now is then in nobody's way."""
        backend = FaultBackend(made(2))
        with opened(backend, 2) as store:
            backend.fail_if(lambda kind, path: kind == "stat" and "/step-" in path)
            store.expire()
            assert backend.num_failed == 0
        backend.close()

    def test_only_what_is_still_there_makes_others_expire(self) -> None:
        backend = made(2)
        with opened(backend, 1) as store:
            remove_tree(backend, path_of(2))
            store.expire()
            assert steps(store) == [1]
            assert backend.stat(path_of(1)) is not None


class TestGoingBack:
    """A restore of an older checkpoint withdraws those that are newer."""

    @pytest.mark.parametrize("num_drives", [1, 2])
    def test_one_that_was_removed_by_hand_is_closed_and_not_listed(self, num_drives: int) -> None:
        backend = made(3, num_drives)
        with opened(backend, num_drives=num_drives) as store:
            slot = store.slot_of(store.find(3))
            remove_tree(backend, path_of(3))
            store.withdraw_newer(store.find(2))
            assert (steps(store), free_paths(store)) == ([1, 2], [])
            assert not is_open(slot)
            if num_drives == 2:
                assert [part.name for part in acquire(store).parts] == [slot.parts[0].name]

    def test_a_pinned_one_keeps_all_that_are_newer(self) -> None:
        backend = made(4)
        pin(backend, 2)
        with opened(backend) as store:
            with pytest.raises(PinError, match="'kept'"):
                store.withdraw_newer(store.find(1))
            assert steps(store) == [1, 2, 3, 4]

    def test_one_that_is_being_read_ends_it(self) -> None:
        """Those that are newer than that one are withdrawn already."""
        backend = made(4)
        with opened(backend) as store:
            with open_checkpoint(path_of(3), backend=backend):
                with pytest.raises(StoreBusyError, match="close its readers") as caught:
                    store.withdraw_newer(store.find(1))
                assert caught.value.filename == path_of(3)
                assert steps(store) == [1, 2, 3]
            store.withdraw_newer(store.find(1))
            assert steps(store) == [1]

    def test_no_more_slots_stay_than_retention_needs(self) -> None:
        with opened(made(4), 1) as store:
            store.withdraw_newer(store.find(1))
            assert (steps(store), len(free_paths(store))) == ([1], 1)

    def test_a_slot_that_cannot_be_removed_is_no_error(self) -> None:
        backend = FaultBackend(made(4))
        with opened(backend, 1) as store:
            backend.fail("remove", 1, forever=True)
            store.withdraw_newer(store.find(1))
            assert steps(store) == [1]
            acquire(store)  # nor does it fail the next step
        backend.close()


class TestPruning:
    @pytest.mark.parametrize("call", ["prune", "quarantine", "replace"])
    def test_nothing_is_changed_in_another_store(self, call: str) -> None:
        """A copy is in its place, as another file system may hide it."""
        backend = made(2)
        with opened(backend, 1) as store:
            store.slot_of(newest(store))
            backend.rename(STORE, "/away")
            backend.make_dir(STORE)
            for name in backend.list_dir("/away"):
                if name != "LOCK":
                    backend.make_dir(f"{STORE}/{name}")
                    for file, data in contents(backend, f"/away/{name}").items():
                        write(backend, f"{STORE}/{name}/{file}", data)
            before = everything(backend)
            calls = {
                "prune": store.prune,
                "quarantine": lambda: store.quarantine(newest(store), "read twice"),
                "replace": lambda: store.replace_manifest(newest(store), newest(store).manifest),
            }
            with pytest.raises(StoreError, match="not the directory that was opened"):
                calls[call]()
            assert everything(backend) == before
            assert steps(store) == [1, 2]


class TestLeaving:
    """Checkpoints that are being copied to a tier, or wait for it, when a step needs a slot."""

    @staticmethod
    def leave(store: Store, stages: dict[int, str]) -> None:
        for step, stage in stages.items():
            store.keeping.leaving.begin(store.find(step).manifest.generation, stage)

    def test_they_stay_as_long_as_there_is_room_for_one_slot_more(self) -> None:
        with opened(made(4), 1) as store:
            self.leave(store, {1: "sending", 3: "waiting"})
            acquire(store)
            assert steps(store) == [1, 3, 4], "the one that is not leaving goes first"
        with opened(made(2), 1) as store:
            self.leave(store, {1: "sending"})
            slot = acquire(store)
            assert (steps(store), store.keeping.leaving.has_room) == ([1, 2], True)
            store.release(slot)
            assert acquire(store) is slot

    def test_one_that_waits_gives_way_before_one_that_is_sent(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", logger="offload")
        backend = Spacious(made(4))
        with opened(backend, 1) as store:
            self.leave(store, {1: "sending", 2: "waiting", 3: "waiting"})
            backend.free = 0
            for left in ([1, 3, 4], [1, 4], [4]):
                acquire(store)
                assert (steps(store), store.keeping.leaving.has_room) == (left, False)
            store.journal.tell()
        assert f"{path_of(1)}: step 1 is being sent to the tier, and gives way" in caplog.text
        assert f"{path_of(2)}: step 2 waits for the tier, and gives way" in caplog.text
        assert caplog.text.count("gives way") == 3

    @pytest.mark.parametrize("second", [ONE, TWO], ids=["on one node", "on another node"])
    @pytest.mark.parametrize("missing", [0, 1])
    def test_each_owner_of_state_needs_room_for_one_part_more(
        self, second: str, missing: int
    ) -> None:
        """Which is not known of another node."""
        backend = Spacious(MemoryBackend())
        with Job([backend, backend], directories=(ONE, second)) as job:
            job.store.keeping.leaving.begin(job.seal(1).manifest.generation, "sending")
            job.seal(2)
            part = sum(len(d) for d in contents(backend, f"{second}/owner-1/part-1").values())
            backend.free = job.store.slot_bytes(job.layouts[0], 1) + part - missing
            job.store.acquire(job.layouts[0], 1)
            stays = second == ONE and not missing
            assert steps(job.store) == ([1, 2] if stays else [2])


class Clock:
    """A clock that goes on only while somebody sleeps, or by a little for each look at it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.after_sleep: Callable[[], object] = lambda: None
        self._num_looks = 0

    def monotonic(self) -> float:
        self._num_looks += 1
        assert self._num_looks < 10_000, "it looks again and again, and does not sleep"
        return self.now

    def sleep(self, seconds: float) -> None:
        assert self.now < 2000, "it waits for ever"
        self.now += seconds
        self.after_sleep()


class TestReaders:
    """Readers hold every expired checkpoint when the next step needs a slot."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        clock = Clock()
        monkeypatch.setattr(waiting_for_readers, "time", clock)
        return clock

    def test_one_slot_more_is_made_after_a_second(
        self, clock: Clock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "offload")
        backend = made(2)
        with (
            opened(backend, 1, reader_timeout_s=60.0) as store,
            open_checkpoint(path_of(1), backend=backend),
        ):
            slot = acquire(store)
            assert 1.0 < clock.now - 1000 < 1.2
            (record,) = [one for one in caplog.records if "one more slot" in one.getMessage()]
            assert record.levelno == logging.WARNING
            assert "readers hold every expired checkpoint" in record.getMessage()
            assert steps(store) == [1, 2]
            assert slot.path in {f"{STORE}/{name}" for name in backend.list_dir(STORE)}

    @pytest.mark.parametrize("timeout_s", [0.0, 5.0])
    def test_a_step_without_room_for_it_warns_once_and_gives_up_in_time(
        self, timeout_s: float, clock: Clock
    ) -> None:
        backend = Spacious(made(2))
        with (
            opened(backend, 1, reader_timeout_s=timeout_s) as store,
            open_checkpoint(path_of(1), backend=backend),
        ):
            backend.free = 0
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with pytest.raises(StoreBusyError, match="readers still hold every expired"):
                    acquire(store)
            (warning,) = caught
            assert "every expired checkpoint is being read" in str(warning.message)
            assert timeout_s < clock.now - 1000 < timeout_s + 0.2


@pytest.mark.parametrize("how", ["expire", "release"])
def test_a_step_that_waits_for_a_slot_during_a_seal_is_told_of_one(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(gds.waiting, "_LOST_S", 3600.0)  # it does not look by itself
    looked = threading.Event()
    waiting = threading.Thread(target=lambda: found.append(acquire(store)), daemon=True)

    class Watched(WrapperBackend):
        def stat(self, path: str) -> Stat | None:
            if threading.current_thread() is waiting:
                looked.set()
            return super().stat(path)

    found: list[Slot] = []
    backend = Watched(with_free_slot(made(2)))
    with opened(backend, 1) as store:
        slot, manifest = acquire(store), newest(store).manifest
        store.sealing.begin(
            replace(manifest, generation=manifest.generation + 1, step=manifest.step + 1)
        )
        waiting.start()
        assert looked.wait(100)
        if how == "expire":
            store.expire()
        else:
            store.release(slot)
        waiting.join(60)
        assert not waiting.is_alive()
        assert (found[0] is slot) == (how == "release")
        store.sealing.end()
