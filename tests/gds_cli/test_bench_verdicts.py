"""What `gds bench` concludes: verdicts, time series, percentiles, agreement with fio; and its end.

The drives take time by the count of their requests, on a clock of their own.
"""

import csv
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from gds import WrapperBackend
from gds.backends import WrapperFile
from gds.bench.compare import AGREEMENT, Comparison
from gds.bench.result import write_csv
from gds.bench.run import Plan, run
from gds.bench.statistics import MOST_ROUNDS, WINDOW_ROUNDS, assess
from gds.bench.workload import Workload, expand, parse_size, parse_sweep
from gds.opening import open_path
from tests.dying import dying

SIZE = 64 << 10
REQUESTS = 16
FAST_S = 0.004
SLOW_S = 0.04
TIMEOUT_S = 240.0


class SlowFile(WrapperFile):
    """Sleeps before each transfer for as long as the drive says, and has then done it."""

    def __init__(self, inner, sleep):
        super().__init__(inner)
        self._sleep = sleep

    def read(self, into, offset):
        self._sleep(True)
        return self._done(self.inner.read(into, offset))

    def write(self, source, offset):
        self._sleep(False)
        return self._done(self.inner.write(source, offset))

    def _done(self, future):
        future.result()
        return future


class Clock:
    """Time that passes only while drives sleep, and a little with each look at it."""

    now_s = 0.0

    def __call__(self):
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", found := Clock())
    return found


def bench(drive, clock, takes_s, repeat=3, **settings):
    """Measure a drive whose requests take the times of a function of run, number and direction."""
    opened = itertools.count(-1)  # the plan is checked with one backend before the first run

    def open_slow(path, threads):
        number, one = itertools.count(), next(opened)

        def sleep(is_read):
            clock.sleep(takes_s(one, next(number), is_read))

        class Slow(WrapperBackend):
            def wrap_file(self, file):
                return SlowFile(file, sleep)

        return Slow(open_path(path, threads))

    defaults = {"size": SIZE, "threads": 1, "file_bytes": REQUESTS * SIZE}
    plan = Plan(
        places=[str(drive)],
        workloads=[Workload(**(defaults | settings))],
        repeat=repeat,
        until_steady=repeat == 0,
        allow_small=True,
    )
    return run(plan, backend=open_slow)


def test_runs_of_different_speed_are_unstable(drive, clock):
    (point,) = bench(drive, clock, lambda opened, _, __: SLOW_S if opened == 1 else FAST_S).points
    assert point.stability.word == "unstable"
    assert point.stability.reasons[0].startswith("unstable: ")
    assert any(reason.startswith("too short: ") for reason in point.stability.reasons)


def test_a_cliff_is_seen_in_the_series_and_in_the_verdict(drive, clock, tmp_path):
    def cliff(_, number, __):
        return FAST_S if number < 7 * REQUESTS else SLOW_S

    report = bench(drive, clock, cliff, repeat=1, rw="write", passes=8, interval_s=0.08)
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


def test_slow_writes_do_not_hide_in_a_mixed_run(drive):
    """Both directions run at the same time, so these drives sleep in earnest."""
    report = bench(drive, time, lambda _, __, is_read: 0.0 if is_read else 0.02, 1, rw="mixed")
    (found,) = report.points[0].runs
    assert found.reads.latency.min_s < 0.02 <= found.writes.latency.min_s


def test_what_comes_before_the_ramp_ends_does_not_count(drive, clock):
    def starts_slowly(_, number, __):
        return 1.5 if number == 0 else FAST_S

    report = bench(drive, clock, starts_slowly, repeat=1, ramp_s=0.01)
    (result,) = report.points[0].runs
    assert result.ramp_s >= 1.5
    assert result.total.num_requests == REQUESTS
    assert result.total.latency.max_s < 1.5


def test_rounds_are_run_until_a_window_of_them_is_steady_or_for_so_long(drive, clock):
    def settles(opened, _, __):
        return 0.05 / (opened + 1) if opened < 4 else 0.03

    (point,) = bench(drive, clock, settles, repeat=0).points
    assert point.found_steady
    assert len(point.counted) == WINDOW_ROUNDS < len(point.runs) < MOST_ROUNDS

    def never(opened, _, __):
        return (0.0, 0.01)[opened % 2]

    (point,) = bench(drive, clock, never, repeat=0, file_bytes=2 * SIZE).points
    assert len(point.runs) == MOST_ROUNDS
    assert point.stability.word == "not steady"
    assert point.to_json()["steady"] is False


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
def test_the_rule_is_that_of_the_range_and_of_the_slope(rates, intervals, word):
    assert (
        assess([1e9 * rate for rate in rates], [2.0] * 5, [1e9 * one for one in intervals]).word
        == word
    )


# Figures and words


def test_sizes_are_powers_of_1024_and_sweeps_are_combined_the_last_one_fastest():
    sizes = {"4096": 4096, "64k": 65536, "1MiB": 1 << 20, "1MB": 1 << 20, "2G": 2 << 30}
    assert {text: parse_size(text) for text in sizes} == sizes
    assert parse_sweep("size=64K..1M") == ("size", [2**16, 2**17, 2**18, 2**19, 2**20])
    assert parse_sweep("threads=3..10") == ("threads", [3, 6])
    assert parse_sweep("rw=read, write") == ("rw", ["read", "write"])
    found = expand(Workload(), [("rw", ["read", "write"]), ("threads", [1, 4])])
    assert [(each.rw, each.threads, each.in_flight) for each in found] == [
        ("read", 1, 1), ("read", 4, 4), ("write", 1, 1), ("write", 4, 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ratios", "agrees", "words"),
    [
        ([1 - AGREEMENT + 0.001] * 11, True, "agrees within 15%"),
        ([0.8] * 11, False, "does NOT agree within 15%: gds is slower"),
        ([0.8] * 6 + [1.0] * 5, True, "agrees within 15% and noise (gds is slower)"),
        ([1.0] * 10, None, "too few pairs to say (10 of 11)"),
    ],
)
def test_agreement_with_fio_is_that_of_the_median(ratios, agrees, words):
    found = Comparison(
        workload=Workload(),
        engine="io_uring",
        huge_bytes=0,
        gds_bytes_per_s=[2e9 * ratio for ratio in ratios],
        fio_bytes_per_s=[2e9] * len(ratios),
    )
    assert (found.agrees, found.words) == (agrees, words)


# The end


def start(directory, *arguments):
    return subprocess.Popen(
        dying(
            [sys.executable, "-m", "gds.cli", "bench", str(directory), "--allow-small", *arguments]
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(
    ("number", "rw", "when", "more"),
    [
        (signal.SIGINT, "randmixed", "requests of", ["--verify"]),
        (signal.SIGHUP, "read", "writing a scratch file", ["--verify"]),
    ],
    ids=["interrupted", "hung-up-while-filling"],
)
def test_the_scratch_file_is_removed(drive, number, rw, when, more):
    mine = drive / "mine"
    mine.write_bytes(b"stays")
    process = start(drive, "--file-size", "64M", "--rw", rw, "--seconds", "3600", *more)
    killer = threading.Timer(TIMEOUT_S, process.kill)
    killer.start()
    try:
        for line in process.stderr:
            if when in line:
                break
        assert [path.name[:11] for path in drive.iterdir() if path != mine] == [".gds-bench-"]
        process.send_signal(number)
        out, err = process.communicate()
    finally:
        killer.cancel()
        process.kill()
        process.wait()
    assert process.returncode == 128 + number, err
    assert "stopped; the scratch file is removed" in err
    assert "Traceback" not in err
    assert out == ""
    assert list(drive.iterdir()) == [mine]
    assert mine.read_bytes() == b"stays"
