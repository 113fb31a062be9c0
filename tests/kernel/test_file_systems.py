"""Real file systems on loop devices: killed, powered off, full, and without true direct I/O."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import subprocess
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
from tests.kernel.loop_devices import Mounted, mounted, unmount
from tests.kernel.tracing import has_ended
from tests.kernel.trainee import LAST_STEP, Plan, Report, Trainees, let_go, wait_until_it_waits
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
NUM_KILLS: Final = 4
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


def in_bytes(size: str) -> float:
    number, unit = size.split()
    return float(number) * {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]


class TestFull:
    def test_at_construction(self, drive: Mounted) -> None:
        optimizer_for(Model(), f"{drive.path}/run", options()).close()
        filler = drive.fill(leave_bytes=LITTLE)
        before = drive.free_bytes()
        with pytest.raises(StoreFullError, match=r"needs 3 more slots of [\d.]+ [MK]iB,") as caught:
            optimizer_for(Model(), f"{drive.path}/run", options())
        after = drive.free_bytes()  # a file system may tidy up by itself
        assert caught.value.errno == errno.ENOSPC
        found = re.search(rf"({SIZE}) in all \(({SIZE}) free\)", str(caught.value))
        needed, free = map(in_bytes, found.groups())  # type: ignore[union-attr]
        assert min(before, after) * 0.98 <= free <= max(before, after) * 1.01 < needed
        filler.unlink()
        optimizer_for(Model(), f"{drive.path}/run", options()).close()

    def test_at_construction_to_the_last_byte(self, drive: Mounted) -> None:
        filler = drive.fill()
        with pytest.raises(StoreFullError, match=rf"(\({SIZE}|: \d+ bytes are) free") as caught:
            optimizer_for(Model(), f"{drive.path}/run", options())
        assert caught.value.errno == errno.ENOSPC
        filler.unlink()
        optimizer_for(Model(), f"{drive.path}/run", options()).close()

    def test_when_a_slot_is_needed(self, drive: Mounted, trainees: Trainees) -> None:
        run = Training(drive, trainees, keep=2)
        for _ in range(2):
            run.step()
            run.seal()
        filler = drive.fill()
        backward(run.model, 3)
        with pytest.raises(
            StorageError, match=rf"the slot .* needs {SIZE} \({SIZE} free\)"
        ) as told:
            run.optimizer.step()
        assert told.value.errno == errno.ENOSPC
        assert run.step_number == 2
        assert run.sealed_steps() == [1, 2]
        filler.unlink()
        run.optimizer.step()
        run.seal()
        run.step()
        run.seal()
        assert run.sealed_steps() == [3, 4]
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

    def test_when_a_train_state_is_replaced(self, drive: Mounted, trainees: Trainees) -> None:
        run = Training(drive, trainees, keep=2)
        run.step()
        run.seal()
        filler = drive.fill()
        with pytest.raises(StorageError, match=r"reserve 8.0 KiB for train_state") as told:
            run.optimizer.checkpoint({"step": 1, "more": True}).result()
        assert told.value.errno == errno.ENOSPC
        assert run.sealed_steps() == [1]
        with open_checkpoint(run.store) as found:
            assert found.train_state == {"step": 1}
        filler.unlink()
        assert run.optimizer.checkpoint({"step": 1, "more": True}).result().step == 1
        with open_checkpoint(run.store) as found:
            assert found.train_state == {"step": 1, "more": True}
        run.step()
        run.seal()
        assert run.sealed_steps() == [1, 2]
        run.optimizer.close()

    def test_when_parameters_are_added(self, drive: Mounted, trainees: Trainees) -> None:
        run = Training(drive, trainees, keep=2)
        run.step()
        run.seal()
        filler = drive.fill()
        with pytest.raises(
            StorageError, match=rf"the slot .* needs {SIZE} \({SIZE} free\)"
        ) as told:
            add_head(run.model, run.optimizer)
        assert told.value.errno == errno.ENOSPC
        assert len(run.optimizer.param_groups) == 1
        filler.unlink()
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

    def test_another_process_goes_on(
        self, drive: Mounted, trainees: Trainees, tmp_path: Path
    ) -> None:
        place, plan = tmp_path / "child", Plan(store=(f"{drive.path}/run",), wait_before=3)
        pid = trainees.start(place, plan)
        wait_until_it_waits(place, pid)
        filler = drive.fill()
        let_go(place, pid)
        ended = trainees.wait(pid, place)
        report = Report(place)
        assert os.waitstatus_to_exitcode(ended.status or 0) == 1
        assert any("No space left" in error for error in report.values("error"))
        assert trainees.newest(plan.store[0]) >= report.acknowledged == 1
        filler.unlink()
        acknowledged = report.acknowledged
        trainees.resume(place, Plan(store=plan.store), acknowledged)


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


def test_an_overlay(loops: None, trainees: Trainees, tmp_path: Path) -> None:
    with mounted("ext4", tmp_path) as drive:
        layers = {name: drive.path / name for name in ("lower", "upper", "work")}
        for layer in layers.values():
            layer.mkdir()
        # What is in the lower layer is copied up when it is first written; without redirect_dir
        # the directories there cannot be renamed, and no seal could reuse one (EXDEV).
        trainees.run(tmp_path / "child", Plan(store=(f"{layers['lower']}/run",), last_step=3))
        overlay = tmp_path / "overlay"
        overlay.mkdir()
        joined = ",".join(f"{name}dir={path}" for name, path in layers.items())
        mount = [
            "mount",
            "-t",
            "overlay",
            "overlay",
            "-o",
            f"{joined},redirect_dir=on",
            str(overlay),
        ]
        if (ended := subprocess.run(mount, capture_output=True, text=True)).returncode:
            pytest.skip(f"no overlay can be mounted here: {ended.stderr.strip()}")
        try:
            restored = trainees.resume(
                tmp_path / "child", Plan(store=(f"{overlay}/run",)), acknowledged=3
            )
            assert restored == 3
            assert trainees.newest(layers["lower"] / "run") == 3, "it is what it was"
        finally:
            unmount(overlay)
