"""A tier on a drive of its own, whose power is lost: the copies that it had are there afterwards.

The store is on another drive, which stays. So what retention has removed from the store exists
nowhere but in the tier.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import offload
from gds import PosixBackend
from offload.errors import TierError, TierNotFoundError
from offload.tiers import list_tier, pull, push, verify_tier
from tests.kernel import loop_devices
from tests.kernel.loop_devices import Mounted, mounted
from tests.stores.files import steps
from tests.stores.training import Model, Reference, differences, optimizer_for, options, train

SEED: Final = int(os.environ.get("KERNEL_SEED", "20260711"))
NUM_POWER_CUTS: Final = 2
NUM_RECYCLED: Final = 2
"""Checkpoints that only the tier has when the power is lost, at least."""

SMALL: Final = 8192
"""Bytes of an object: two chunks, so that there are several."""

SETTINGS: Final = {"drives": offload.DriveTuning(calibrate=False)}


@pytest.fixture(params=["ext4", "xfs"])
def drive(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mounted]:
    """The drive of the tier: a file system that can lose its power."""
    if reason := loop_devices.why_not(request.param):
        pytest.skip(reason)
    with mounted(request.param, tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with the checkpoint of step 1."""
    model, directory = Model(), tmp_path / "store"
    with optimizer_for(model, str(directory), options(**SETTINGS)) as optimizer:
        train(model, optimizer, 1)
    return directory


def require_same(tier: str, step: int, place: Path, reference: Reference) -> None:
    """Download the checkpoint of a step, and compare every bit with the training in memory."""
    pull(tier, place, step=step)
    with offload.open_checkpoint(place) as found:
        assert found.step == step
        assert found.train_state == {"step": step}
        assert differences(found, PosixBackend(), reference.after(step)) == []
    shutil.rmtree(place)


def test_what_was_recycled_locally_is_in_the_tier_after_its_power_was_lost(
    drive: Mounted, tmp_path: Path, reference: Reference
) -> None:
    """Training recycles checkpoints as their copies are complete, and the tier loses its power."""
    rng = random.Random(SEED)
    store, tier, last = tmp_path / "store", f"file://{drive.path}/tier", 0
    model, complete, failed = Model(), set[int](), set[int]()
    settings = options(tier=tier, **SETTINGS)
    with optimizer_for(model, str(store), settings, keep=1) as optimizer:
        uploads = optimizer._uploads
        assert uploads is not None

        def note() -> set[int]:
            """Note what the uploads say; return the checkpoints that only the tier has."""
            stats = optimizer.stats().tier
            assert stats is not None
            for event in stats.events:
                if event.choice == "upload":
                    complete.update({event.step} if event.outcome == "complete" else ())
                    failed.update({event.step} if event.outcome == "failed" else ())
            return complete - {*steps(store)}

        for _ in range(NUM_POWER_CUTS):
            enough = len(note()) + NUM_RECYCLED
            while len(note()) < enough:
                last += 1
                train(model, optimizer, last)
                threading.Event().wait(rng.uniform(0, 0.05))
            drive.lose_power()  # at some moment of an upload, or between two
            before = {*failed}
            while not failed - before:
                last += 1
                train(model, optimizer, last)
                assert uploads.wait(60)
                note()
            drive.mount_again()
            only_there = note()
            assert len(only_there) >= enough
            copies = list_tier(tier)
            found = {copy.marker.step for copy in copies if copy.marker is not None}
            assert complete <= found
            assert all(report.ok for report in verify_tier(tier))
            for step in sorted(only_there)[-NUM_RECYCLED:]:
                require_same(tier, step, tmp_path / "back", reference)
        last += 1
        train(model, optimizer, last)
        assert uploads.wait(60)
        note()
        assert last in complete, "uploads go on when the drive is back"
    print(f"KERNEL_SEED={SEED}: {len(complete)} complete, {len(failed)} failed")


@pytest.mark.parametrize("num_sent", [1, 4])
def test_a_push_goes_on_after_the_power_was_lost(
    num_sent: int, drive: Mounted, store: Path, tmp_path: Path, reference: Reference
) -> None:
    """What counts as sent is there afterwards, and is not sent again."""
    tier, done = f"file://{drive.path}/tier", []

    def progress(nbytes: int, _: int) -> None:
        done.append(nbytes)
        if len(done) == num_sent:
            drive.lose_power()

    with pytest.raises(TierError, match="Input/output error"):
        push(store, tier, object_bytes=SMALL, num_transfers=1, progress=progress)
    assert len(done) == num_sent
    drive.mount_again()
    with pytest.raises(TierNotFoundError, match="not complete"):
        pull(tier, tmp_path / "back")
    again = push(store, tier, object_bytes=SMALL)
    assert again.num_kept == num_sent
    assert again.num_sent > 0
    drive.lose_power()  # what push has sent is there as soon as it has returned
    drive.mount_again()
    assert [report.ok for report in verify_tier(tier)] == [True]
    assert push(store, tier).already_complete
    require_same(tier, 1, tmp_path / "back", reference)


@pytest.mark.parametrize("folder", ["", "/tier"])
def test_nothing_is_sent_to_the_mount_point_of_a_drive_that_is_away(
    folder: str, drive: Mounted, store: Path, tmp_path: Path
) -> None:
    """A store that has seen the tier knows its drive; another one sees an empty mount point."""
    tier = f"file://{drive.path}{folder}"
    assert push(store, tier).num_sent > 0
    model = Model()
    with drive.away():
        with pytest.raises(TierNotFoundError, match="is its drive mounted"):
            optimizer_for(model, str(tmp_path / "new"), options(tier=tier, **SETTINGS))
        note = drive.path / "note"
        note.touch()
        with pytest.raises(TierNotFoundError, match="is its drive mounted"):
            push(store, tier)
        assert [*drive.path.iterdir()] == [note]
        note.unlink()
    assert push(store, tier).already_complete
    shutil.rmtree(f"{drive.path}/tier", ignore_errors=True)
    if folder:  # somebody has removed it, and the drive is the same
        assert not push(store, tier).already_complete
