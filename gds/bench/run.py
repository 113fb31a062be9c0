"""Run of `gds bench`: make the file, measure every workload repeatedly, compare with fio."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from gds import probe
from gds.bench.compare import FioError, FioRunner, compare
from gds.bench.measure import OpenBackend, measure
from gds.bench.report import Point, Report, new_figure, plot_axis
from gds.bench.statistics import MIN_PAIRS, MOST_ROUNDS
from gds.bench.target import Target, targets_at
from gds.bench.workload import Workload
from gds.check.system import System
from gds.errors import RefusedError
from gds.opening import open_path
from gds.paths import PATHS
from gds.probe import kernel_view

_SEEDS: Final = 100_000
"""Distance between the seeds of two directories; more than the files of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of a benchmark: the workloads, and the options of `gds bench`."""

    places: Sequence[str]
    """Directories for scratch files, or existing files, which are only read; measured at once."""

    workloads: Sequence[Workload]
    """Workloads to measure; at least one, all with the same file size."""

    repeat: int = 1
    """Number of runs of each workload; ignored if `until_steady` is True."""

    until_steady: bool = False
    """Whether to repeat the runs of each workload until they are steady; see
    `gds.bench.statistics`."""

    verify: bool = False
    compare_fio: bool = False
    pairs: int = MIN_PAIRS
    seed: int = 0
    allow_volatile: bool = False
    allow_small: bool = False
    plot: bool = False
    """Whether a figure will be drawn. If that is impossible, nothing is measured."""


def run(
    plan: Plan,
    *,
    system: System | None = None,
    backend: OpenBackend | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure all workloads of a plan; a scratch file is removed afterwards.

    Args:
        plan: Plan of the benchmark.
        system: Machine to measure; None is this machine.
        backend: Function that makes backends; None takes `gds.opening.open_path`.
        say: Function that is called with lines for people about the progress.

    Raises:
        RefusedError: A part of the plan is impossible; nothing has been measured then.
    """
    began_s = time.perf_counter()
    system = system or System()
    make = backend or partial(open_path, no_driver=system.library_error("libcuda.so.1"))
    _check_staged(plan)
    _check_paths(plan, make)
    if plan.plot:  # fail before the measurements, not after them
        plot_axis(plan.workloads)
        new_figure()
    with contextlib.ExitStack() as stack:
        lanes = [
            stack.enter_context(
                targets_at(
                    place,
                    plan.workloads[0].file_bytes,
                    count=plan.workloads[0].files,
                    seed=plan.seed + number * _SEEDS,
                    allow_volatile=plan.allow_volatile,
                    allow_small=plan.allow_small,
                    say=say,
                )
            )
            for number, place in enumerate(plan.places)
        ]
        file_bytes = _equal_size(lanes)
        workloads = [dataclasses.replace(each, file_bytes=file_bytes) for each in plan.workloads]
        for workload in workloads:  # check all of them before the first is measured
            for targets in lanes:
                _check_allowed(workload, targets[0], verify=plan.verify)
        points = [Point(workload, until_steady=plan.until_steady) for workload in workloads]
        say(duration_text(plan, lanes[0][0], time.perf_counter() - began_s))
        _measure_all(plan, points, lanes, make, say)
        report = _report(plan, points, lanes[0][0], system)
        notes = _compare_all(plan, report, lanes, make, say) if plan.compare_fio else []
        report.notes = notes + _remarks(report)
    report.took_s = time.perf_counter() - began_s
    return report


def _equal_size(lanes: Sequence[Sequence[Target]]) -> int:
    sizes = {target.size_bytes for targets in lanes for target in targets}
    if len(sizes) > 1:
        raise RefusedError(
            f"the files have different sizes ({min(sizes)} and {max(sizes)} bytes), and only files "
            "of the same size can be measured together: name directories, or one file"
        )
    return sizes.pop()


def _check_allowed(workload: Workload, target: Target, *, verify: bool) -> None:
    """Raise `RefusedError` if a workload would write to or verify an existing file of the user."""
    if target.made:
        return
    if workload.writes:
        raise RefusedError(
            f"{target.path} was not made by gds bench, which only reads such files: to write, "
            "name a directory, in which a scratch file is made"
        )
    if verify:
        raise RefusedError(
            f"--verify cannot check {target.path}, whose expected content is unknown: name a "
            "directory, in which a scratch file is made"
        )


def _check_staged(plan: Plan) -> None:
    if not any(workload.staged for workload in plan.workloads):
        return
    if len(plan.places) > 1:
        raise RefusedError("--staged measures a single directory: name one of them")
    if plan.verify:
        raise RefusedError("--staged measures speed, and --verify takes time: pass one of the two")


def _compare_all(
    plan: Plan,
    report: Report,
    lanes: Sequence[Sequence[Target]],
    make: OpenBackend,
    say: Callable[[str], None],
) -> list[str]:
    """Add a comparison with fio for every workload; returns the reason if one cannot be made."""
    if len(lanes) > 1 or len(lanes[0]) > 1 or plan.workloads[0].reopen:
        return ["not compared with fio: only a single file, opened once, can be compared"]
    if any(workload.staged for workload in plan.workloads):
        return ["not compared with fio: it does not copy and digest what it moves"]
    target = lanes[0][0]
    try:
        runner = FioRunner(os.path.dirname(target.path) or ".")
        for point in report.points:
            report.comparisons.append(
                compare(
                    point.workload, target, runner, make, pairs=plan.pairs, seed=plan.seed, say=say
                )
            )
    except FioError as error:
        return [f"not compared with fio: {error}"]
    return []


def duration_text(plan: Plan, target: Target, filled_s: float) -> str:
    """Return how long the measurement will take, for people."""
    pass_s = filled_s if target.made else 0.0
    runs = MOST_ROUNDS if plan.until_steady else plan.repeat
    seconds = runs * sum(
        max(each.seconds, each.passes * pass_s) + each.ramp_s for each in plan.workloads
    )
    if plan.compare_fio:
        seconds += 2 * plan.pairs * len(plan.workloads) * pass_s
    rows = f"{len(plan.workloads)} {'rows' if len(plan.workloads) > 1 else 'row'}"
    if plan.until_steady:
        return f"{rows}, each until its runs are steady: at most about {_time_text(seconds)}"
    return f"{rows} of {runs} {'runs' if runs > 1 else 'run'}: about {_time_text(seconds)}"


def _time_text(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _check_paths(plan: Plan, make: OpenBackend) -> None:
    """Check, before a file is written, that every path of a plan can be used."""
    for name in dict.fromkeys(workload.path for workload in plan.workloads):
        with contextlib.closing(make(name, 1)) as backend:
            if paths_in := getattr(backend, "paths_in", None):  # of a backend of device memory
                for place in filter(os.path.isdir, plan.places):
                    paths_in(place)  # raises if GPUDirect Storage is demanded and missing
    for place in plan.places:
        _check_directory(plan, place)


def _check_directory(plan: Plan, place: str) -> None:
    """Check that files can be made in a directory, and that direct I/O works if it is demanded."""
    if not os.path.isdir(place) or (
        probe.mount_of(place).volatile and not plan.allow_volatile  # `target_at` refuses it
    ):
        return
    try:
        with probe.scratch_file(place):
            pass
    except OSError as error:
        filesystem = probe.mount_of(place).filesystem
        if filesystem in probe.KERNEL_FILESYSTEMS:
            raise kernel_view(place, filesystem) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # `target_at` refuses these, with sizes
            raise RefusedError(
                f"no file can be made in {place} ({error.strerror}): give a directory that "
                "you may write to"
            ) from error
    if any(workload.path == "direct" for workload in plan.workloads):
        found = probe.direct_io(place)
        if not found.supported:
            raise RefusedError(
                f"no direct I/O in {place} ({found.reason}): pass --path buffered to measure "
                "the page cache together with the drive"
            )


def _measure_all(
    plan: Plan,
    points: Sequence[Point],
    lanes: Sequence[Sequence[Target]],
    make: OpenBackend,
    say: Callable[[str], None],
) -> None:
    """Run every workload, as often as the plan says.

    The workloads take turns in alternating order, to spread drift evenly; but if runs are repeated
    until they are steady, each is finished before the next.
    """

    def measure_once(point: Point) -> None:
        workload = point.workload
        number = len(point.runs)
        staged = "staged " if workload.staged else ""
        say(
            f"{staged}{workload.rw} {workload.path}, requests of {workload.size} bytes, "
            f"{workload.threads} threads, depth {workload.in_flight}, run {number + 1}"
        )
        seed = plan.seed + number
        point.runs.append(measure(workload, lanes, make, verify=plan.verify, seed=seed))

    if plan.until_steady:
        for point in points:
            while not point.found_steady and len(point.runs) < MOST_ROUNDS:
                measure_once(point)
        return
    for number in range(plan.repeat):
        for point in points if number % 2 == 0 else reversed(points):
            measure_once(point)


def _report(plan: Plan, points: list[Point], target: Target, system: System) -> Report:
    mount = probe.mount_of(plan.places[0])
    return Report(
        places=plan.places,
        made=target.made,
        file_bytes=target.size_bytes,
        filesystem=mount.filesystem,
        source=mount.source,
        kernel=system.kernel(),
        cores=len(os.sched_getaffinity(0)),
        verify=plan.verify,
        points=points,
    )


def _remarks(report: Report) -> list[str]:
    """Return the remarks that a reader needs to understand the numbers."""
    found = []
    if report.verify:
        found.append(
            "Every block that was read was compared with the data that had been written: all were "
            "correct. The comparison took CPU time; measure speed without --verify."
        )
    runs = [(point.workload, run) for point in report.points for run in point.runs]
    if any(not run.direct and (run.cached_before or 0) > 0.5 for w, run in runs if w.reads):
        found.append(
            "Some or all reads came from the page cache: their speed is not that of the drive."
        )
    if any(workload.staged for workload, _ in runs):
        found.append(
            "Staged: one thread copied each block between ordinary memory and a buffer, and "
            "digested it, while the drive moved other blocks. The rate is that of all together."
        )
    found += [
        f"{' and '.join(places)} are on the same file system: together they share its rate."
        for places in _on_one_file_system(report.places)
    ]
    if any(not run.direct for workload, run in runs if workload.writes):
        found.append("Writes through the page cache are not on the drive before the sync.")
    of_gpu = [run for workload, run in runs if PATHS[workload.path].memory == "device"]
    if of_gpu:
        found.append(
            "PCIe: GB/s that the GPU received (rx) and sent (tx), as sampled by NVML, including "
            "the traffic of other processes. NVML has no counters of the copy engines alone."
        )
        reasons = dict.fromkeys(run.pcie_reason for run in of_gpu if run.pcie_reason)
        found += [f"PCIe traffic could not be read: {reason}." for reason in reasons]
    if any(PATHS[w.path].memory == "host" and w.cache == "as-is" for w, _ in runs):
        found.append(
            'The page cache was left as it was: the entry "page cache" shows how much of the file '
            "it held."
        )
    return found


def _on_one_file_system(places: Sequence[str]) -> list[list[str]]:
    """Return the groups of two or more places whose files are on one file system."""
    groups: dict[int, list[str]] = {}
    for place in places:
        with contextlib.suppress(OSError):  # a file of the user may be gone by now
            groups.setdefault(os.stat(place).st_dev, []).append(place)
    return [group for group in groups.values() if len(group) > 1]
