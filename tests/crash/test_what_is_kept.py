"""What a store keeps: by policies and pins, beside people who change it, and in which room."""

from __future__ import annotations

import errno
import random
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gds import (
    Backend,
    File,
    LockHeldError,
    MemoryBackend,
    PosixBackend,
    StorageError,
    WrapperBackend,
)
from offload import open_checkpoint, verify_before_resume
from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import (
    CheckpointNotFoundError,
    DamagedError,
    PinError,
    StoreError,
    StoreFullError,
    UnreadableError,
)
from offload.format.names import QUARANTINE_NAME
from offload.retention.pins import read_pins, write_pin
from offload.retention.policy import (
    AnyOf,
    BestBy,
    EverySeconds,
    EverySteps,
    LastK,
    Record,
    Retention,
    num_wanted,
)
from offload.store.expiry import pin_of
from offload.store.poison import Poison
from offload.store.quarantine import Quarantine, verify_and_mark, write_quarantine
from offload.store.quarantine_limit import quarantined_after
from offload.store.space import Room, file_bytes, has_room, no_room, require_room
from tests.crash.crash_backend import CrashBackend, Disk
from tests.crash.fault_backend import FaultBackend
from tests.crash.opened import Opened, is_open, made, opened
from tests.ranks_store.job import TWO, Job, part_paths
from tests.ranks_store.test_many_owners import seal_with
from tests.stores import small
from tests.stores.files import contents, everything, flip, overwrite, read, remove_tree, write
from tests.stores.small import STORE

RECORDED = "2026-01-01T00:00:00+00:00"


def path_of(step: int) -> str:
    return f"{STORE}/step-{step:08d}"


def mark_of(step: int) -> str:
    return f"{path_of(step)}/{QUARANTINE_NAME}"


def mark(backend: Backend, step: int) -> None:
    """Mark a checkpoint as damaged, as a person might."""
    write(backend, mark_of(step), b"damaged\n")


def replace_files(backend: Backend, step: int) -> None:
    """Put a copy of each file of a checkpoint in its place."""
    for name, data in contents(backend, path_of(step)).items():
        write(backend, f"{path_of(step)}/{name}", data)


def expired_steps(store: Opened, incoming: Record | None = None) -> list[int]:
    return [checkpoint.manifest.step for checkpoint in store.keeping.expired(incoming)]


def said(call: Callable[..., object], *arguments: object) -> list[str]:
    """Call something, and return the warnings that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*arguments)
    return [str(one.message) for one in caught]


class TestExpiry:
    def test_one_of_the_same_step_makes_room_for_the_incoming_one(self) -> None:
        with opened(made(3), 2) as store:
            newest = store.step(3).manifest
            again = Record(3, newest.generation + 1, newest.created, {}, ())
            assert expired_steps(store) == [1]
            assert expired_steps(store, again) == [1]
            another = Record(4, newest.generation + 1, newest.created, {}, ())
            assert expired_steps(store, another) == [1, 2]

    def test_each_pin_of_a_checkpoint_that_is_gone_is_reported_once(self) -> None:
        with opened(made(3), 3) as store:
            for step in (1, 2, 3):
                store.keeping.pin(f"number-{step}", step)
            for step in (1, 2):
                remove_tree(store.backend, path_of(step))
            assert said(store.census.update) == []
            found = said(store.keeping.warn, [])
            assert len(found) == 2
            for step, message in zip((1, 2), found, strict=True):
                assert f"pinned as 'number-{step}'" in message
                assert f"offload unpin {STORE} number-{step}" in message
            (left,) = said(store.keeping.warn, [path_of(1)])
            assert "number-2" in left

    def test_each_metric_that_no_checkpoint_has_is_reported_at_the_second_step(self) -> None:
        with opened(made(1), BestBy("loss") | BestBy("accuracy")) as store:
            assert said(store.keeping.warn_unranked, 2, []) == []
            found = said(store.keeping.warn_unranked, 3, [])
            assert sorted(m.split("has the metric ")[1].split(",")[0] for m in found) == [
                "'accuracy'",
                "'loss'",
            ]
            assert said(store.keeping.warn_unranked, 4, []) == []

    def test_a_metric_that_was_given_once_is_not_reported(self) -> None:
        """Also if its value was not finite, so that no checkpoint has it."""
        with opened(made(1), BestBy("loss")) as store:
            for step, given in enumerate((["loss"], [], []), 2):
                assert said(store.keeping.warn_unranked, step, given) == []


class TestPins:
    def test_a_pin_keeps_its_checkpoint_and_no_other(self) -> None:
        with opened(made(3), 1) as store:
            store.keeping.pin("kept", 1)
            assert store.keeping.unpinned([store.step(1), store.step(2)]) == [store.step(2)]
            assert expired_steps(store) == [2]

    def test_pins_are_durable_before_one_is_found_to_be_unpinned(self) -> None:
        backend = FaultBackend(made(2))
        with opened(backend, 1) as store:
            store.keeping.pin("kept", 2)
            backend.fail_if(lambda kind, path: (kind, path) == ("sync_dir", f"{STORE}/pins"))
            with pytest.raises(StorageError, match="injected failure of sync_dir"):
                store.keeping.unpinned([store.step(1)])
            assert "the pins could not be made durable" in store.poison.reason
        backend.close()

    @pytest.mark.parametrize("moment", ["before it is read", "after a sync"])
    @pytest.mark.parametrize("call", ["unpinned", "require_replaceable"])
    def test_one_that_is_moved_away_meanwhile_is_lost_by_no_power_cut(
        self, call: str, moment: str
    ) -> None:
        """Another process moves it, and does not make that durable, while it is looked for."""
        crash = CrashBackend()
        with small.make_optimizer(small.make_model(), crash, keep=3) as optimizer:
            small.train(optimizer, 3)
        backend = _Moving(crash)
        with opened(backend, 3) as store:
            one, three = store.step(1), store.step(3)
            write_pin(crash, STORE, pin_of("other", three.path, three.manifest))
            write_pin(crash, STORE, pin_of("best", one.path, one.manifest))
            crash.rename(f"{STORE}/pins/other", f"{STORE}/pins/.best.new")
            crash.sync_dir(f"{STORE}/pins")
            backend.moment = moment
            if call == "unpinned":
                is_kept = not store.keeping.unpinned([one])
            else:
                is_kept = False
                try:
                    store.keeping.require_replaceable(one.path)
                except PinError:
                    is_kept = True
            assert backend.moment == ""
            disk = Disk(crash.log)
            for seed in range(40):
                survivor = disk.power_cut(random.Random(seed)).backend()
                assert is_kept or not read_pins(survivor, STORE).names_at(one.path)

    @pytest.mark.parametrize("call", ["pin", "unpin"])
    def test_none_changes_in_another_store_at_the_same_path(self, call: str) -> None:
        with opened(made(2), 2) as store:
            store.keeping.pin("kept", 1)
            store.backend.rename(STORE, "/moved")
            for path in (STORE, f"{STORE}/pins"):
                store.backend.make_dir(path)
            for name in store.backend.list_dir("/moved"):
                if name.startswith("step-"):
                    store.backend.make_dir(f"{STORE}/{name}")
                    for file, data in contents(store.backend, f"/moved/{name}").items():
                        write(store.backend, f"{STORE}/{name}/{file}", data)
            write(store.backend, f"{STORE}/pins/kept", b"of another store")
            with pytest.raises(StoreError, match="not the directory that was opened"):
                getattr(store.keeping, call)("kept")
            assert contents(store.backend, f"{STORE}/pins") == {"kept": b"of another store"}

    def test_what_was_removed_by_hand_cannot_be_pinned(self) -> None:
        with opened(made(2), 2) as store:
            remove_tree(store.backend, path_of(1))
            with pytest.raises(CheckpointNotFoundError, match="step-00000002"):
                store.keeping.pin("kept", 1)
            assert store.keeping.pins().pins == ()

    @pytest.mark.parametrize("call", ["pin", "unpin"])
    def test_nothing_is_withdrawn_while_one_changes(self, call: str) -> None:
        """A withdrawal holds the lock of the store, as does whoever changes a pin."""
        backend = _Asks(made(2))
        with opened(backend, 2) as store:
            store.keeping.pin("kept", 1)

            def is_locked() -> bool:
                """Return whether another thread would have to wait."""
                got: list[bool] = []

                def try_it() -> None:
                    got.append(store.changed.acquire(blocking=False))
                    if got[0]:
                        store.changed.release()

                thread = threading.Thread(target=try_it)
                thread.start()
                thread.join()
                return got == [False]

            assert not is_locked()
            backend.ask = is_locked
            if call == "pin":
                store.keeping.pin("kept", 2)
            else:
                store.keeping.unpin("kept")
            assert backend.answers
            assert all(backend.answers)
            backend.ask = None

    def test_one_that_cannot_be_read_now_is_no_reason_to_refuse_for_good(self) -> None:
        """Nothing is known of it, so that it may be read later."""
        backend = FaultBackend(made(2))
        with opened(backend, 2) as store:
            store.keeping.require_no_pins("starting over")
            store.keeping.pin("kept", 2)
            backend.fail_if(lambda kind, path: (kind, path) == ("open", f"{STORE}/pins/kept"))
            with pytest.raises(UnreadableError, match="check the drive") as failed:
                store.keeping.require_no_pins("starting over")
            assert failed.value.filename == f"{STORE}/pins/kept"
            with pytest.raises(PinError, match="pinned as 'kept', and starting over would"):
                store.keeping.require_no_pins("starting over")
        backend.close()

    def test_the_advice_names_what_can_be_unpinned(self) -> None:
        with opened(made(2), 2) as store:
            assert store.keeping.advice() == ""
            store.keeping.pin("kept", 2)
            unpin = f"unpin with `offload unpin {STORE} NAME`"
            assert store.keeping.advice() == unpin
            write(store.backend, f"{STORE}/pins/other", b"not a pin")
            first, _, second = store.keeping.advice().partition("; ")
            assert first == unpin
            assert second.startswith(f"{STORE}/pins/other: cannot be read as a pin")
            store.keeping.unpin("kept")
            assert store.keeping.advice() == second


class _Moving(WrapperBackend):
    """Another process gives a complete new pin the name of the old one, at a moment that is set."""

    moment = ""

    def list_dir(self, path: str) -> list[str]:
        self._move("before it is read", path)
        return super().list_dir(path)

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        self._move("after a sync", path)

    def _move(self, moment: str, path: str) -> None:
        if (moment, path) == (self.moment, f"{STORE}/pins"):
            self.moment = ""
            self.inner.rename(f"{path}/.best.new", f"{path}/best")


class _Asks(WrapperBackend):
    """Asks a question whenever the directory of pins changes."""

    of = "/pins/"
    """What the paths have in common that it asks for."""

    ask: Callable[[], bool] | None = None

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.answers: list[bool] = []

    def _changing(self, path: str) -> None:
        if self.ask is not None and self.of in path:
            self.answers.append(self.ask())

    def create(self, path: str, size_bytes: int) -> File:
        self._changing(path)
        return super().create(path, size_bytes)

    def remove(self, path: str) -> None:
        self._changing(path)
        super().remove(path)


class _AsksOfMarks(_Asks):
    """Asks a question whenever a mark of damage is made or removed."""

    of = f"/{QUARANTINE_NAME}"


class TestCensus:
    """Other programs change checkpoints beside the process that has the store open."""

    def test_what_nobody_has_touched_is_unchanged(self) -> None:
        with opened(made(2, 2), 2, 2) as store:
            assert all(store.census.is_unchanged(one) for one in store.checkpoints)
            mark(store.backend, 1)
            assert not store.census.is_unchanged(store.step(1))
            assert store.census.is_unchanged(store.step(2))

    def test_one_that_is_given_up_anyway_may_be_removed(self) -> None:
        with opened(made(2), 2) as store:
            store.step(1).superseded = True
            remove_tree(store.backend, path_of(1))
            store.census.update()
            assert store.steps == [1, 2]
            assert said(lambda: store.census.warn(refused=True)) == []

    @pytest.mark.parametrize("number", [1, 2])
    def test_files_of_the_newest_stay_open_until_they_are_released(self, number: int) -> None:
        """The state of the next step is read from them."""
        with opened(made(3), 3) as store:
            slots = []
            for step in (3, 2):
                slots.append(store.open(step))
                remove_tree(store.backend, path_of(step))
                store.census.update()
            assert store.steps == [1]
            assert not store.census.release(store.open(1))
            assert [is_open(slot) for slot in slots] == [True, True]
            assert store.census.release(slots[number - 1])
            assert [is_open(slot) for slot in slots] == [number != 1, number != 2]
            assert not store.census.release(slots[number - 1])
            store.census.close()
            assert [is_open(slot) for slot in slots] == [False, False]

    def test_all_files_are_closed_with_the_store(self) -> None:
        with opened(made(3), 3) as store:
            slots = []
            for step in (3, 2):
                slots.append(store.open(step))
                remove_tree(store.backend, path_of(step))
                store.census.update()
            store.census.close()
            assert [is_open(slot) for slot in slots] == [False, False]

    def test_files_of_an_older_one_are_closed_at_once(self) -> None:
        """No state is read from them, and a removed file that is open takes space."""
        with opened(made(2, 2), 2, 2) as store:
            slot = store.open(1)
            remove_tree(store.backend, path_of(1))
            store.census.update()
            assert store.steps == [2]
            assert not is_open(slot)
            assert store.parts.num_free(1) == 1
            assert not store.census.release(slot)

    def test_the_newest_need_not_be_open(self) -> None:
        with opened(made(2, 2), 2, 2) as store:
            remove_tree(store.backend, path_of(2))
            store.census.update()
            assert store.steps == [1]
            assert store.parts.num_free(1) == 1

    @pytest.mark.parametrize("step", [1, 2])
    def test_files_that_were_replaced_by_the_same_are_the_checkpoint(self, step: int) -> None:
        with opened(made(2), 2) as store:
            slot = store.open(step)
            replace_files(store.backend, step)
            assert not store.census.is_unchanged(store.step(step))
            store.census.update()
            assert store.census.is_unchanged(store.step(step))
            assert store.open(step) is not slot
            assert store.steps == [1, 2]

    def test_the_parts_of_one_that_was_changed_are_kept(self) -> None:
        """Those that it had, until its name is taken; and those that it names now."""
        with opened(made(3, 2), 3, 2) as store:
            second = store.step(2)
            for name, data in contents(store.backend, path_of(3)).items():
                write(store.backend, f"{path_of(2)}/{name}", data)
            store.census.update()
            assert store.steps == [1, 3]
            ((path, _),) = store.content.refused
            assert path == path_of(2)
            store.parts.release(store.step(3).manifest)
            assert store.parts.num_free(1) == 0
            store.parts.release_claim(path)
            assert second.manifest.parts
            assert store.parts.num_free(1) == 2


class TestPolicies:
    @pytest.mark.parametrize("seconds", [True, "60", None, float("nan"), float("inf"), 0, -1])
    def test_seconds_are_a_finite_number_above_zero(self, seconds: Any) -> None:
        with pytest.raises(ValueError, match="seconds must be a finite number above 0"):
            EverySeconds(seconds)

    def test_policies_that_keep_the_same_are_equal(self) -> None:
        both = LastK(1) | EverySteps(5)
        assert both == EverySteps(5) | LastK(1)
        assert both != LastK(1) | EverySteps(6)
        assert both != LastK(1)
        assert both != object()
        assert AnyOf(LastK(1)) != AnyOf()

    @pytest.mark.parametrize(
        ("policy", "records", "number"),
        [
            (LastK(1) | LastK(3), [], 3),
            (LastK(3) | LastK(1) | BestBy("loss", 2), [], 5),
            (LastK(1), [Record(2, 2, RECORDED, {}, ("kept",)), Record(1, 1, RECORDED, {}, ())], 1),
            (LastK(1), [Record(2, 2, RECORDED, {}, ()), Record(1, 1, RECORDED, {}, ("kept",))], 2),
        ],
    )
    def test_a_store_wants_room_for_what_it_may_keep(
        self, policy: Retention, records: list[Record], number: int
    ) -> None:
        assert num_wanted(policy, records) == number

    def test_a_time_without_a_zone_is_that_of_utc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wherever the machine is: here nine hours to the east."""
        monkeypatch.setenv("TZ", "XXX-9")
        time.tzset()
        try:
            records = [
                Record(1, 1, "2026-01-01T00:00:00+00:00", {}, ()),
                Record(2, 2, "2026-01-01T00:30:00", {}, ()),
                Record(3, 3, "2026-01-01T01:00:00", {}, ()),
                Record(4, 4, "2026-01-01T03:00:00+01:00", {}, ()),
            ]
            assert EverySeconds(3600).kept(records) == {1, 3, 4}
        finally:
            monkeypatch.undo()
            time.tzset()


class _Free(WrapperBackend):
    """Says how many bytes are free in each directory."""

    def __init__(self, **free: int) -> None:
        super().__init__(MemoryBackend())
        self.free = free

    def free_bytes(self, directory: str) -> int:
        return self.free[directory.strip("/")]


class TestRoom:
    """Slots of 100 bytes, in a directory that may have a second one beside it."""

    def rooms(self, *num_free: int, **free: int) -> list[Room]:
        backend = _Free(**free)
        return [
            Room(backend, f"/{name}", number, 100)
            for name, number in zip(free, num_free, strict=True)
        ]

    @pytest.mark.parametrize(
        ("keep", "num_free", "abandoned", "needed"),
        [
            (1, 0, 0, 0),  # both slots are there
            (2, 0, 0, 100),
            (4, 0, 0, 300),
            (4, 1, 0, 200),
            (4, 9, 0, 0),
            (1, 0, 1, 200),  # a new history needs two before an old checkpoint can go
            (1, 1, 1, 100),
            (1, 2, 1, 0),
            (1, 0, 2, 200),
            (4, 0, 1, 300),
        ],
    )
    def test_as_much_is_required_as_is_surely_needed(
        self, keep: int, num_free: int, abandoned: int, needed: int
    ) -> None:
        with opened(made(2), keep) as store:
            for checkpoint in store.checkpoints[:abandoned]:
                checkpoint.superseded = True
            rooms = self.rooms(num_free, first=needed)
            require_room(rooms, store.keeping, store.checkpoints)
            if needed:
                rooms = self.rooms(num_free, first=needed - 1)
                with pytest.raises(StoreFullError, match=f"{needed // 100} more slot") as full:
                    require_room(rooms, store.keeping, store.checkpoints)
                assert full.value.filename == "/first"

    def test_each_directory_has_to_have_it(self) -> None:
        with opened(made(2), 2) as store:
            rooms = self.rooms(0, 0, first=100, second=99)
            with pytest.raises(StoreFullError) as full:
                require_room(rooms, store.keeping, store.checkpoints)
            assert full.value.filename == "/second"

    @pytest.mark.parametrize(
        ("num_free", "free", "expected"),
        [
            ((0, 0), (100, 100), True),
            ((0, 0), (99, 100), False),
            ((0, 0), (100, 99), False),
            ((1, 0), (99, 100), False),  # readers hold the free slots
            ((0, 1), (100, 0), True),
        ],
    )
    def test_one_slot_more_has_room_if_each_directory_has_it(
        self, num_free: tuple[int, int], free: tuple[int, int], expected: bool
    ) -> None:
        first, second = free
        assert bool(has_room(self.rooms(*num_free, first=first, second=second))) == expected

    @pytest.mark.parametrize(
        ("free", "named"),
        [((100, 99), ["second"]), ((0, 100), ["first"]), ((1, 2), ["first", "second"])],
    )
    def test_the_error_names_the_directories_that_are_full(
        self, free: tuple[int, int], named: list[str]
    ) -> None:
        first, second = free
        rooms = self.rooms(0, 0, first=first, second=second)
        with opened(made(2), 2) as store:
            failed = StorageError(errno.EDQUOT, "create", "/first/.slot-1")
            found = no_room(failed, rooms, store.keeping)
        assert found.errno == errno.EDQUOT
        assert "quota" in str(found).lower()
        assert found.filename == f"/{named[0]}"
        assert str(found).count(" free)") == len(named)

    def test_the_files_of_a_directory_are_counted_and_nothing_else(self, tmp_path: Path) -> None:
        (tmp_path / "part" / "directory").mkdir(parents=True)
        for number in (1, 2):
            (tmp_path / "part" / f"file-{number}").write_bytes(bytes(100 * number))
        with closing(PosixBackend()) as backend:
            assert file_bytes(backend, f"{tmp_path}/part") == 300
            assert file_bytes(backend, f"{tmp_path}/gone") == 0


class TestQuarantine:
    @pytest.mark.parametrize("kind", ["sync", "sync_dir"])
    def test_a_mark_that_could_not_be_made_durable_is_an_error(self, kind: str) -> None:
        backend = FaultBackend(made(1))
        poison = Poison(STORE)
        backend.fail_if(lambda found, path: found == kind and path.startswith(path_of(1)))
        with pytest.raises(StorageError, match=f"injected failure of {kind}"):
            write_quarantine(backend, path_of(1), "damaged", poison)
        assert "a damaged checkpoint could not be marked" in poison.reason
        backend.close()

    def test_the_slots_of_marked_checkpoints_are_known_and_closed(self) -> None:
        with opened(made(4), 4) as store:
            quarantine = Quarantine(store.backend, store.poison)
            slots = {step: store.open(step) for step in (1, 2, 4)}
            assert not any(quarantine.has(slot) for slot in slots.values())
            for step in (1, 2, 3):
                quarantine.add(store.step(step), "damaged")
            assert [step for step, slot in slots.items() if quarantine.has(slot)] == [1, 2]
            quarantine.close()
            assert [step for step, slot in slots.items() if is_open(slot)] == [4]
            assert b"damaged" in read(store.backend, mark_of(3))

    @pytest.mark.parametrize("damaged", [True, False])
    def test_no_writer_takes_one_while_it_is_marked_or_its_mark_is_lifted(
        self, damaged: bool
    ) -> None:
        """Also if it was opened without a lock, as the checkpoint that a seal returns is."""
        backend = _AsksOfMarks(made(2))
        if damaged:
            flip(backend, f"{path_of(1)}/exp_avg.safetensors")
        else:
            mark(backend, 1)
        with open_checkpoint(path_of(1), backend=backend, even_quarantined=True) as found:
            unlocked = Checkpoint(backend, found.path, found.manifest)

        def is_held() -> bool:
            try:
                backend.inner.lock(path_of(1)).release()
            except LockHeldError:
                return True
            return False

        assert not is_held()
        backend.ask = is_held
        assert bool(verify_and_mark(unlocked).quarantined) == damaged
        assert backend.answers == [True]

    def test_each_part_of_an_owner_has_a_mark_of_its_own(self) -> None:
        backend = MemoryBackend()
        seal_with(backend, STORE, 4)
        with open_checkpoint(STORE, backend=backend) as found:
            path, parts = found.path, [owner.path for owner in found.owners]
        assert len(parts) == 3
        for part in parts[1:]:
            flip(backend, f"{part}/exp_avg.safetensors")
        with open_checkpoint(path, backend=backend) as found:
            assert verify_and_mark(found).quarantined
        marks = [backend.stat(f"{place}/{QUARANTINE_NAME}") for place in (path, *parts)]
        assert [found is not None for found in marks] == [False, False, True, True]
        for part in parts[1:]:
            flip(backend, f"{part}/exp_avg.safetensors")
        with open_checkpoint(path, backend=backend, even_quarantined=True) as found:
            assert not verify_and_mark(found).quarantined
        assert not [p for p in everything(backend) if p.endswith(f"/{QUARANTINE_NAME}")]

    def test_a_copy_lifts_no_mark_in_the_original(self) -> None:
        """A directory that only the manifest names may be that of the store it was copied from."""
        backend = MemoryBackend()
        with Job([backend, backend]) as job:
            path = job.seal(1).path
        (part,) = part_paths(backend)
        write(backend, f"{part}/{QUARANTINE_NAME}", b"read twice\n")
        with open_checkpoint(path, backend=backend, even_quarantined=True) as found:
            assert verify_and_mark(found).quarantined == "read twice"
        assert backend.stat(f"{part}/{QUARANTINE_NAME}") is not None
        with open_checkpoint(path, backend=backend, even_quarantined=True, parts=[TWO]) as found:
            assert not verify_and_mark(found).quarantined
        assert backend.stat(f"{part}/{QUARANTINE_NAME}") is None


class TestTwoInARow:
    def test_only_a_newer_one_that_is_marked_counts(self) -> None:
        backend = made(4)
        with opened(backend, 4) as store:
            generations = [one.manifest.generation for one in store.checkpoints]
        paths = [path_of(step) for step in (1, 2, 3, 4)]
        assert quarantined_after(backend, paths, generations[1]) is None
        mark(backend, 1)
        assert quarantined_after(backend, paths, generations[1]) is None
        mark(backend, 2)
        assert quarantined_after(backend, paths, generations[1]) is None
        mark(backend, 3)
        overwrite(backend, f"{path_of(3)}/manifest.json", b"no manifest")
        assert quarantined_after(backend, paths, generations[1]) is None
        mark(backend, 4)
        assert quarantined_after(backend, paths, generations[1]) == paths[3]

    def test_one_that_cannot_be_read_may_be_marked_and_newer(self) -> None:
        backend = FaultBackend(made(2))
        backend.fail_if(lambda kind, path: (kind, path) == ("stat", mark_of(2)))
        assert quarantined_after(backend, [path_of(1), path_of(2)], 1) == path_of(2)
        assert quarantined_after(backend, [path_of(1), path_of(2)], 1) is None
        backend.close()

    def test_a_store_that_cannot_be_listed_is_no_reason_to_mark(self) -> None:
        backend = FaultBackend(made(2))
        flip(backend.inner, f"{path_of(1)}/exp_avg.safetensors")
        with open_checkpoint(path_of(1), backend=backend) as found:
            backend.fail_if(lambda kind, path: (kind, path) == ("list_dir", STORE))
            with pytest.raises(UnreadableError, match="could not be read"):
                verify_before_resume(found)
            assert backend.stat(mark_of(1)) is None
            assert verify_before_resume(found).quarantined
        backend.close()

    def test_one_that_can_be_read_in_parts_only_is_not_said_to_be_damaged(self) -> None:
        """Of two in a row, the second may be damaged because it could not be read now."""
        backend = FaultBackend(made(2))
        mark(backend.inner, 2)
        flip(backend.inner, f"{path_of(1)}/exp_avg.safetensors")
        with open_checkpoint(path_of(1), backend=backend) as found:
            backend.fail_if(lambda kind, path: kind == "read" and "master" in path)
            report = verify_before_resume(found)
            assert report.problems
            assert report.unreadable
            assert not report.quarantined
            with pytest.raises(DamagedError, match="two in a row"):
                verify_before_resume(found)
            assert backend.stat(mark_of(1)) is None
        backend.close()

    def test_a_mark_that_cannot_be_examined_is_not_said_to_be_lifted(self) -> None:
        backend = FaultBackend(made(2))
        mark(backend.inner, 2)
        with open_checkpoint(path_of(2), backend=backend, even_quarantined=True) as found:
            backend.fail_if(lambda kind, path: (kind, path) == ("stat", mark_of(2)))
            with pytest.raises(StorageError, match="injected failure of stat"):
                verify_before_resume(found)
            assert backend.stat(mark_of(2)) is not None
            assert not verify_before_resume(found).quarantined
            assert backend.stat(mark_of(2)) is None
        backend.close()
