"""System calls that fail, move nothing or never return: the n-th of each kind, by strace.

Every run is followed by a new process, which must go on from what was acknowledged and end with
the bits of an uninterrupted run. All points instead of a sample: ``KERNEL_FAULTS=all``.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from tests.kernel import tracing
from tests.kernel.trainee import (
    LAST_STEP,
    Plan,
    Report,
    Trainees,
    copied,
    let_go,
    wait_until_it_waits,
)

pytestmark = pytest.mark.usefixtures("strace")

SEED: Final = int(os.environ.get("KERNEL_SEED", "20260711"))
ALL: Final = os.environ.get("KERNEL_FAULTS") == "all"
MANY: Final = ("preadv", "pwritev", "fallocate", "fdatasync", "fsync", "rename", "renameat2")
"""The calls that fail at two places in each case; the others do at one."""

SEALED_BEFORE: Final = 2
"""The newest checkpoint of the store that most runs begin with."""

SCENES: Final = {
    "new": Plan(last_step=SEALED_BEFORE, wait_before=0, transfer_threads=1),
    "resume": Plan(wait_before=0, transfer_threads=1),
    "amid": Plan(wait_before=SEALED_BEFORE + 2, keep=1, transfer_threads=1),
    "last": Plan(wait_before=LAST_STEP, transfer_threads=1),
}
"""From when on a child is traced: before it opens an empty store or one with checkpoints, or in
the middle of its training."""

TRANSFERS: Final = ("preadv", "pwritev")


@dataclass(frozen=True)
class Point:
    """The n-th call of a thread since the child is traced."""

    scene: str
    call: str
    n: int


class Survey:
    """What children call if nothing fails, and where they begin."""

    def __init__(self, trainees: Trainees, directory: Path) -> None:
        self.trainees = trainees
        directory.mkdir()
        self.template = directory / "template"
        trainees.run(self.template, Plan(last_step=SEALED_BEFORE))
        self.most: dict[str, dict[str, int]] = {}
        for scene, plan in SCENES.items():
            log = directory / f"{scene}.log"
            place = self.begin(scene, directory / scene)
            pid = trainees.start(place, plan)
            wait_until_it_waits(place, pid)
            with tracing.traced(pid, f"{place}/run", log, ()):
                let_go(place, pid)
                ended = trainees.wait(pid, place)
            assert ended.status == 0, Report(place).lines()
            self.most[scene] = tracing.most_calls_of_a_thread(log)

    def begin(self, scene: str, directory: Path) -> Path:
        """Make the directory of a child."""
        if scene == "new":
            directory.mkdir()
            return directory
        return copied(self.template, directory)

    def points(self, call: str, case: str) -> list[Point]:
        """Return where a call is to fail: everywhere, or at a few places."""
        most = {scene: found[call] for scene, found in self.most.items() if call in found}
        if ALL:
            return [Point(scene, call, n + 1) for scene in most for n in range(most[scene])]
        rng = random.Random(f"{SEED} {call} {case}")
        scenes = rng.sample(sorted(most), len(most))
        points = []
        for number in range(1 + (call in MANY)):
            scene = scenes[number % len(scenes)]
            ends = [1, most[scene]]
            n = rng.choice(ends) if number == 0 else rng.randint(*ends)
            points.append(Point(scene, call, n))
        return points


@pytest.fixture(scope="module")
def survey(strace: None, trainees: Trainees, quick_directory: Path) -> Survey:
    return Survey(trainees, quick_directory / "survey")


def test_no_system_call_is_left_out(survey: Survey) -> None:
    found = {call for most in survey.most.values() for call in most}
    assert found >= set(tracing.ERRORS), "each is called in one of the scenes"
    assert found <= {*tracing.ERRORS, *tracing.HARMLESS}


@pytest.mark.parametrize("case", ["once", "once-then-restore", "for-ever", "killed"])
@pytest.mark.parametrize("call", tracing.ERRORS)
def test_a_system_call_fails_or_never_returns(
    call: str,
    case: str,
    survey: Survey,
    quick_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    num_faults = num_reported = 0
    for number, point in enumerate(survey.points(call, case)):
        error = "EIO" if call == "pwritev" and number % 2 else tracing.ERRORS[call]
        injection = {
            "once": f"error={error}:when={point.n}",
            "once-then-restore": f"error={error}:when={point.n}",
            "for-ever": f"error={error}:when={point.n}+",
            "killed": f"signal=KILL:when={point.n}",
        }[case]
        faults, report = troubled(
            survey,
            quick_path / str(number),
            point,
            injection,
            killed=case == "killed",
            restore=case == "once-then-restore",
        )
        num_faults += faults
        num_reported += bool(report.values("error"))
    record_property(f"{tracing.FAULTS}{call} ({case})", num_faults)
    print(f"KERNEL_SEED={SEED}, {call}, {case}: {num_faults} faults, {num_reported} runs told of")


@pytest.mark.parametrize("call", TRANSFERS)
def test_a_transfer_moves_nothing(
    call: str,
    survey: Survey,
    quick_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    num_faults = 0
    for number, point in enumerate(survey.points(call, "nothing")):
        faults, _ = troubled(survey, quick_path / str(number), point, f"retval=0:when={point.n}")
        num_faults += faults
    record_property(f"{tracing.FAULTS}{call} (moves nothing)", num_faults)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("call", TRANSFERS)
def test_a_direct_transfer_moves_less_than_a_block(
    call: str,
    n: int,
    survey: Survey,
    quick_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    # After the masters, which end within a block, come the moments of the first chunk: direct, and
    # of a whole block. The kernel has moved nothing: so all of it must be moved again.
    point = Point("amid", call, n)
    faults, report = troubled(
        survey, quick_path / "run", point, f"retval=512:when={n}", files="arrays"
    )
    assert report.values("error") == []
    assert report.values("ended") == [str(LAST_STEP)]
    log = (quick_path / "run" / "log").read_text()
    injected = [line for line in log.splitlines() if "(INJECTED)" in line]
    assert len(injected) == faults == 1
    assert re.search(r"iov_len=4096}\], 1, \d+.*= 512 \(INJECTED\)", injected[0]), injected
    record_property(f"{tracing.FAULTS}{call} (short)", faults)


def troubled(
    survey: Survey,
    place: Path,
    point: Point,
    injection: str,
    *,
    killed: bool = False,
    restore: bool = False,
    files: tracing.Files = "all",
) -> tuple[int, Report]:
    """Let a child train with a fault, and another one after it; check what each of them leaves.

    Returns:
        How many calls failed, and what the first child has said.
    """
    trainees, plan = survey.trainees, replace(SCENES[point.scene], restore_after_error=restore)
    survey.begin(point.scene, place)
    log = place / "log"
    try:
        pid = trainees.start(place, plan)
        wait_until_it_waits(place, pid)
        with tracing.traced(pid, f"{place}/run", log, (point.call,), injection, files=files):
            let_go(place, pid)
            if restore:
                wait_until_it_waits(place, pid, times=2)
            else:
                ended = trainees.wait(pid, place)
        if restore:
            if len(Report(place).values("waiting")) == 2:
                let_go(place, pid)
            ended = trainees.wait(pid, place)
        report = Report(place)
        code = os.waitstatus_to_exitcode(ended.status or 0)
        faults = 1 if killed else tracing.num_injected(log)
        assert faults, "the fault has not fired"
        assert code in ((-signal.SIGKILL,) if killed else (0, 1))
        assert (code == 0) == bool(report.values("ended"))
        promised = report.promised
        assert code == 0 or not (restore and len(report.values("waiting")) == 2)
        newest = trainees.newest(place / "run")
        assert newest >= report.acknowledged
        assert code or newest == plan.last_step
        report.put_aside()
        trainees.resume(place, replace(plan, wait_before=None, last_step=LAST_STEP), promised)
    except BaseException as error:
        error.add_note(f"KERNEL_SEED={SEED}: {point}, {injection}; {Report(place).lines()}")
        raise
    return faults, report
