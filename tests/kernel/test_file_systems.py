"""Real file systems on loop devices: killed, powered off, full, and without true direct I/O."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from gds import PosixBackend, StorageError
from gds.probe import DirectIOUnavailable
from offload import AdamW, open_checkpoint
from offload.errors import StoreFullError
from tests.kernel import loop_devices
from tests.kernel.loop_devices import Mounted, mounted
from tests.kernel.tracing import has_ended
from tests.kernel.trainee import LAST_STEP, Plan, Report, Trainees, wait_until_it_waits
from tests.stores.training import (
    Model,
    Reference,
    add_head,
    backward,
    differences,
    optimizer_for,
    options,
)

SEED: Final = int(os.environ.get("KERNEL_SEED", "20260711"))
NUM_KILLS: Final = 3
NUM_POWER_CUTS: Final = 2
LITTLE: Final = 100_000
"""Bytes: more than one slot of the run, and less than three."""

ENDLESS: Final = 1 << 40
"""Steps of a run that is killed, or whose power is lost, wherever it has got to by then."""

STEPS_AFTERWARDS: Final = 3


@pytest.fixture(params=loop_devices.MAKE)
def filesystem(request: pytest.FixtureRequest) -> str:
    if reason := loop_devices.why_not(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def drive(filesystem: str, tmp_path: Path) -> Iterator[Mounted]:
    with mounted(filesystem, tmp_path) as found:
        yield found


def test_killed_at_random_moments(drive: Mounted, trainees: Trainees, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    place, plan = tmp_path / "child", Plan(store=(f"{drive.path}/run",), last_step=ENDLESS)
    report = Report(place)
    for _ in range(NUM_KILLS):
        pid = trainees.start(place, plan)
        wait_for_a_moment(rng, report, pid)
        os.kill(pid, signal.SIGKILL)
        ended = trainees.wait(pid, place)
        assert os.waitstatus_to_exitcode(ended.status or 0) == -signal.SIGKILL, report.lines()
        assert trainees.newest(f"{drive.path}/run") >= report.acknowledged
    print(f"KERNEL_SEED={SEED}: {NUM_KILLS} killed, {report.acknowledged} acknowledged")
    assert not report.values("error")
    assert not any("direct I/O" in warning for warning in report.values("warning"))
    go_on(place, plan, report, trainees)


def go_on(place: Path, plan: Plan, report: Report, trainees: Trainees) -> None:
    """Resume, and take a few more steps."""
    newest = trainees.newest(plan.store[0])
    plan = replace(plan, last_step=newest + STEPS_AFTERWARDS)
    assert trainees.resume(place, plan, report.acknowledged) == newest


def wait_for_a_moment(rng: random.Random, report: Report, pid: int) -> None:
    """Wait until a child has got on by a step or two, and then a little."""
    wanted = report.acknowledged + 1 + rng.randrange(2)
    while report.acknowledged < wanted and not has_ended(pid):
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.02))


@pytest.mark.parametrize("filesystem", ["ext4", "xfs"], indirect=True)
def test_power_is_lost(drive: Mounted, filesystem: str, trainees: Trainees, tmp_path: Path) -> None:
    rng = random.Random(f"{SEED} {filesystem}")
    place, plan = tmp_path / "child", Plan(store=(f"{drive.path}/run",), last_step=ENDLESS)
    report = Report(place)
    for _ in range(NUM_POWER_CUTS):
        pid = trainees.start(place, plan)
        wait_for_a_moment(rng, report, pid)
        acknowledged = report.acknowledged
        drive.lose_power()
        trainees.wait(pid, place)
        # What was acknowledged afterwards was synced before: a sync fails without power.
        assert report.values("error"), "it must notice"
        assert report.acknowledged >= acknowledged
        drive.mount_again()
        assert trainees.newest(f"{drive.path}/run") >= report.acknowledged
    go_on(place, plan, report, trainees)


class Training:
    """A run in this process, on a drive that fills up."""

    def __init__(self, drive: Mounted, trainees: Trainees, keep: int) -> None:
        self.model = Model()
        self.store = f"{drive.path}/run"
        self.trainees = trainees
        self.optimizer: AdamW = optimizer_for(self.model, self.store, options(), keep=keep)
        self.optimizer.restore()

    @property
    def step_number(self) -> int:
        return self.optimizer.num_steps

    def step(self) -> None:
        backward(self.model, self.step_number + 1)
        self.optimizer.step()

    def seal(self) -> int:
        return self.optimizer.checkpoint({"step": self.step_number}).result().step

    def sealed_steps(self) -> list[int]:
        """Check every checkpoint that is there."""
        found = []
        for path in sorted(Path(self.store).glob("step-*")):
            with open_checkpoint(path) as checkpoint:
                expected = self.trainees.reference.after(checkpoint.step)
                assert differences(checkpoint, PosixBackend(), expected) == []
                found.append(checkpoint.step)
        return found


SIZE = r"[\d.]+ (?:[KMG]iB|bytes)"


class TestFull:
    def test_at_construction(self, drive: Mounted) -> None:
        optimizer_for(Model(), f"{drive.path}/run", options()).close()
        filler = drive.fill(leave_bytes=LITTLE)
        with pytest.raises(
            StoreFullError, match=rf"needs 3 more slots .*\({SIZE} free\)"
        ) as caught:
            optimizer_for(Model(), f"{drive.path}/run", options())
        assert caught.value.errno == errno.ENOSPC
        filler.unlink()
        filler = drive.fill()
        with pytest.raises(StoreFullError, match=rf"(\({SIZE}|: \d+ bytes are) free") as caught:
            optimizer_for(Model(), f"{drive.path}/other", options())
        assert caught.value.errno == errno.ENOSPC
        filler.unlink()
        optimizer_for(Model(), f"{drive.path}/run", options()).close()

    def test_what_needs_space_is_refused_and_can_be_repeated(
        self, drive: Mounted, trainees: Trainees
    ) -> None:
        """A train state, parameters, and a slot, one after another."""
        run = Training(drive, trainees, keep=2)
        run.step()
        run.seal()
        filler = drive.fill()
        with pytest.raises(StorageError, match=r"reserve 8.0 KiB for train_state") as told:
            run.optimizer.checkpoint({"step": 1, "more": True}).result()
        assert told.value.errno == errno.ENOSPC
        no_slot = rf"the slot .* needs {SIZE} \({SIZE} free\)"
        with pytest.raises(StorageError, match=no_slot) as told:
            add_head(run.model, run.optimizer)
        assert told.value.errno == errno.ENOSPC
        assert len(run.optimizer.param_groups) == 1
        with pytest.raises(StorageError, match=no_slot) as told:
            run.optimizer.step()  # with the gradients of the step before
        assert told.value.errno == errno.ENOSPC
        assert run.step_number == 1
        assert run.sealed_steps() == [1]
        with open_checkpoint(run.store) as found:
            assert found.train_state == {"step": 1}
        filler.unlink()
        assert run.optimizer.checkpoint({"step": 1, "more": True}).result().step == 1
        with open_checkpoint(run.store) as found:
            assert found.train_state == {"step": 1, "more": True}
        run.step()  # without the head: nothing has changed
        run.seal()
        assert run.sealed_steps() == [1, 2]
        add_head(run.model, run.optimizer)
        run.step()
        run.seal()
        with open_checkpoint(run.store) as found:
            expected = Reference(head_from=3).after(3)
            assert differences(found, PosixBackend(), expected) == []
        run.optimizer.close()

    def test_when_all_slots_are_there(self, drive: Mounted, trainees: Trainees) -> None:
        run = Training(drive, trainees, keep=1)
        for _ in range(3):
            run.step()
            run.seal()
        drive.fill()
        for _ in range(4):  # nothing of it needs space that is not reserved
            run.step()
            run.seal()
        assert run.sealed_steps() == [7]
        run.optimizer.close()
        run = Training(drive, trainees, keep=1)
        assert run.step_number == 7
        run.step()
        run.seal()
        assert run.sealed_steps() == [8]
        run.optimizer.close()


def test_a_drive_of_4096_byte_sectors(loops: None, trainees: Trainees, tmp_path: Path) -> None:
    with mounted("ext4", tmp_path, sector_bytes=4096) as drive:
        backend = PosixBackend(direct=True)
        assert backend.capabilities(str(drive.path)).alignment == 4096
        backend.close()
        plan = Plan(store=(f"{drive.path}/run",))
        report = trainees.run(tmp_path / "child", plan)
        assert not report.values("warning")
        assert trainees.newest(plan.store[0]) == LAST_STEP


def test_a_file_system_that_takes_the_flag_and_uses_the_page_cache(
    loops: None, trainees: Trainees, tmp_path: Path
) -> None:
    # ext4 with its data in the journal accepts O_DIRECT, and ignores it.
    with mounted("ext4", tmp_path, mount_options=["data=journal"]) as drive:
        fd = os.open(drive.path / "file", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
        os.close(fd)
        with pytest.raises(StorageError, match="direct=True, but direct I/O is not available"):
            PosixBackend(direct=True).create(f"{drive.path}/other", 8192)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            PosixBackend().create(f"{drive.path}/third", 8192).close()
        assert [w.category for w in caught] == [DirectIOUnavailable]
        place, plan = tmp_path / "child", Plan(store=(f"{drive.path}/run",), wait_before=4)
        pid = trainees.start(place, plan)
        wait_until_it_waits(place, pid)
        os.kill(pid, signal.SIGKILL)
        trainees.wait(pid, place)
        report = Report(place)
        told = [warning for warning in report.values("warning") if "page cache" in warning]
        assert len(told) == 1, "once, whatever it does"
        acknowledged = report.acknowledged
        assert trainees.resume(place, Plan(store=plan.store), acknowledged) == 3
