"""Verdicts and time series of `gds bench` on drives that are made slow and uneven on purpose.

The drives sleep, and do so by the count of their requests, not by a clock. No time is judged: only
which part of a series is slower than another part, and what the verdict says.
"""

from __future__ import annotations

import csv
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from gds import Buffer, File, IOFuture, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.bench.report import Report
from gds.bench.run import Plan, run
from gds.bench.series import write_csv
from gds.bench.steadiness import MOST_ROUNDS, WINDOW_ROUNDS, assess, slope_share, window_is_steady
from gds.bench.workload import Workload
from gds.opening import open_path
from gds.paths import PathName

SIZE = 64 << 10
REQUESTS = 16
FAST_S = 0.004
SLOW_S = 0.04


class SlowFile(WrapperFile):
    """Sleeps before each transfer for as long as the drive says."""

    def __init__(self, inner: File, sleep: Callable[[bool], None]) -> None:
        super().__init__(inner)
        self._sleep = sleep

    def read(self, into: Buffer, offset: int) -> IOFuture:
        """Read, slowly."""
        self._sleep(True)
        return self._done(self.inner.read(into, offset))

    def write(self, source: Buffer, offset: int) -> IOFuture:
        """Write, slowly."""
        self._sleep(False)
        return self._done(self.inner.write(source, offset))

    def _done(self, inner: IOFuture) -> IOFuture:
        """Return a future that is done, so that each request takes its sleep and little more."""
        future: Future[int] = Future()
        future.set_result(inner.result())
        return future


class SlowDrive:
    """A drive whose requests take the times of a function of their number and direction."""

    def __init__(self, takes_s: Callable[[int, int, bool], float]) -> None:
        self._takes_s = takes_s
        self.opened = -2  # the plan is checked with one backend before the first run

    def open(self, path: PathName, threads: int) -> WrapperBackend:
        """Return a backend for one run."""
        self.opened += 1
        number = itertools.count()
        opened = self.opened

        def sleep(is_read: bool) -> None:
            time.sleep(self._takes_s(opened, next(number), is_read))

        class Slow(WrapperBackend):
            def wrap_file(self, file: File) -> File:
                return SlowFile(file, sleep)

        return Slow(open_path(path, threads))


def bench(
    drive: Path, takes_s: Callable[[int, int, bool], float], repeat: int = 3, **settings: object
) -> Report:
    workload = Workload(
        **{"size": SIZE, "threads": 1, "file_bytes": REQUESTS * SIZE, **settings}  # type: ignore[arg-type]
    )
    plan = Plan(
        place=str(drive),
        workloads=[workload],
        repeat=repeat,
        until_steady=repeat == 0,
        allow_small=True,
    )
    return run(plan, backend=SlowDrive(takes_s).open)


def test_runs_of_different_speed_are_unstable(drive: Path) -> None:
    (point,) = bench(drive, lambda opened, _, __: SLOW_S if opened == 1 else FAST_S).points
    found = point.stability
    assert found.word == "unstable"
    low, high = (f"{edge(point.rates()) / 1e9:.3g}" for edge in (min, max))
    assert found.reasons[0] == f"unstable: {low} to {high} GB/s between runs"
    assert point.rates()[1] == min(point.rates())
    assert any(reason.startswith("too short: ") for reason in found.reasons)


def test_a_cliff_is_seen_in_the_series_and_in_the_verdict(drive: Path, tmp_path: Path) -> None:
    def cliff(_: int, number: int, __: bool) -> float:
        return FAST_S if number < 7 * REQUESTS else SLOW_S

    report = bench(drive, cliff, repeat=1, rw="write", passes=8, interval_s=0.08)
    (point,) = report.points
    assert point.stability.word == "falling"
    (result,) = point.runs
    counts = [each.num_writes for each in result.intervals]
    assert sum(counts) == 8 * REQUESTS
    assert max(counts[-4:]) <= 2, "80 ms have at most two ends of requests of 40 ms"
    assert max(counts) > 2 * max(counts[-4:])
    slowest = result.intervals[-2].write_latency_max_s
    assert slowest is not None
    assert slowest >= SLOW_S
    with open(tmp_path / "series.csv", "w+", newline="") as file:
        write_csv(file, report.series())
        file.seek(0)
        rows = list(csv.DictReader(file))
    assert [int(row["num_writes"]) for row in rows] == counts
    assert {row["read_latency_max_s"] for row in rows} == {""}
    assert {(row["rw"], row["run"]) for row in rows} == {("write", "0")}


def test_slow_writes_do_not_hide_in_a_mixed_run(drive: Path) -> None:
    report = bench(drive, lambda _, __, is_read: FAST_S if is_read else SLOW_S, rw="mixed")
    for result in report.points[0].runs:
        assert result.reads is not None
        assert result.writes is not None
        assert result.writes.latency.min_s >= SLOW_S
        assert result.reads.latency.min_s < SLOW_S


def test_what_comes_before_the_ramp_ends_does_not_count(drive: Path) -> None:
    def starts_slowly(_: int, number: int, __: bool) -> float:
        return 1.5 if number == 0 else FAST_S

    report = bench(drive, starts_slowly, repeat=1, ramp_s=0.01)
    (result,) = report.points[0].runs
    assert result.ramp_s >= 1.5
    assert result.total.num_requests == REQUESTS
    assert result.total.latency.max_s < 1.5


def test_rounds_are_run_until_a_window_of_them_is_steady(drive: Path) -> None:
    def settles(opened: int, _: int, __: bool) -> float:
        return 0.05 / (opened + 1) if opened < 4 else 0.03

    report = bench(drive, settles, repeat=0)
    (point,) = report.points
    assert len(point.runs) > WINDOW_ROUNDS
    assert point.found_steady
    assert len(point.counted) == WINDOW_ROUNDS
    rates = [each.bytes_per_s for each in point.runs]
    assert window_is_steady(rates)
    assert not any(window_is_steady(rates[:end]) for end in range(len(rates)))


def test_a_drive_that_never_settles_is_said_so(drive: Path) -> None:
    def never(opened: int, _: int, __: bool) -> float:
        return (0.0, 0.01)[opened % 2]

    (point,) = bench(drive, never, repeat=0, file_bytes=2 * SIZE).points
    assert len(point.runs) == MOST_ROUNDS
    assert point.stability.word == "not steady"
    assert point.to_json()["steady"] is False


LONG = [2.0] * 5


@pytest.mark.parametrize(
    ("rates", "intervals", "word"),
    [
        ([1.0] * 5, [1.0] * 10, "steady"),
        ([0.9, 1.0, 1.1, 1.0, 1.0], [], "steady"),
        ([0.89, 1.0, 1.1, 1.0, 1.0], [], "unstable"),
        ([1.0] * 5, [1.0, 1.0, 1.3, 1.0, 1.0, 0.9], "uneven"),
        ([1.0] * 5, [2.0, 1.9, 1.8, 0.5, 0.5, 0.5], "falling"),
        ([1.0] * 5, [1.0, 1.05, 1.1, 1.15, 1.2], "rising"),
        ([1.0] * 5, [1.0, 9.0], "steady"),
    ],
)
def test_the_rule_is_that_of_the_range_and_of_the_slope(rates, intervals, word) -> None:
    assert (
        assess([1e9 * rate for rate in rates], LONG, [1e9 * one for one in intervals]).word == word
    )


@pytest.mark.parametrize(
    ("count", "seconds", "reason"),
    [
        (3, 0.4, "too short: a run of 0.4 s, less than 1 s"),
        (3, 1.5, "too short: 4.5 s in all runs, less than 5 s"),
        (2, 60.0, "too few runs: 2 runs, less than 3"),
    ],
)
def test_what_is_not_enough_is_said(count: int, seconds: float, reason: str) -> None:
    assert assess([1e9] * count, [seconds] * count, []).reasons == (reason,)


def test_the_slope_is_the_rise_over_the_window_beside_the_average() -> None:
    assert slope_share([9.0, 9.5, 10.0, 10.5, 11.0]) == pytest.approx(0.2)
    assert slope_share([11.0, 10.5, 10.0, 9.5, 9.0]) == pytest.approx(-0.2)
