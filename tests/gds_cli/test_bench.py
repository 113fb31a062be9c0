"""`gds bench`: what it does to files, what it refuses, and what it prints. No rate is judged."""

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from gds import StorageError
from gds.backends.kvikio_file import Used
from gds.bench import target as target_module
from gds.bench.run import Plan
from gds.bench.run import run as run_plan
from gds.bench.workload import Workload
from gds.check import System
from gds.errors import RefusedError
from gds.opening import open_path
from tests.fake_gpu.machine import installed

QUICK = ("--seconds", "0", "--ramp", "0", "--repeat", "1")
SMALL = ("--file-size", "1M", "--size", "64K", "--allow-small", *QUICK)
SIZE = 64 << 10
BLOCKS = 16

TARGET = {"path", "paths", "scratch_file", "file_bytes", "filesystem", "source"}
WORKLOAD = {
    "rw", "path", "size", "threads", "depth", "mix", "cache", "passes", "seconds", "ramp_s",
    "interval_s", "file_bytes", "files", "reopen", "staged",
}  # fmt: skip
LATENCY = {
    "latency_mean_s", "latency_stddev_s", "latency_min_s", "latency_p50_s", "latency_p90_s",
    "latency_p99_s", "latency_p999_s", "latency_p9999_s", "latency_max_s", "latency_histogram",
}  # fmt: skip
REQUESTS = LATENCY | {"num_requests", "num_bytes", "bytes_per_s", "iops"}
RUN = REQUESTS | {
    "bytes_read", "bytes_written", "elapsed_s", "ramp_s", "sync_s", "cpu_user_s", "cpu_system_s",
    "direct", "cached_before", "verified_bytes", "durable_bytes_per_s", "cpu_cores",
    "pcie_rx_gbps", "pcie_tx_gbps", "pcie_samples", "pcie_reason", "reads", "writes", "series",
    "lane_bytes_per_s",
}  # fmt: skip
SUMMARY = {
    "bytes_per_s", "iops", "latency_mean_s", "latency_stddev_s", "latency_p50_s", "latency_p99_s",
    "latency_p999_s", "latency_max_s",
}  # fmt: skip
MEDIAN = SUMMARY | {"durable_bytes_per_s", "cpu_cores", "sync_s"}
RESULT = {
    "workload", "median", "median_reads", "median_writes", "lowest_bytes_per_s",
    "highest_bytes_per_s", "verdict", "verdict_reasons", "steady", "num_counted_runs", "runs",
}  # fmt: skip
FIO = {
    "workload", "engine", "fio_huge_page_bytes", "gds_bytes_per_s", "fio_bytes_per_s",
    "ratio_median", "ratio_interval90", "agrees", "verdict",
}  # fmt: skip


def measured(run, *arguments):
    status, out, err = run("bench", *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


class Calls:
    """Notes every transfer that reaches the kernel, and lets it through."""

    def __init__(self, monkeypatch):
        self.seen: list[tuple[str, bool, int, int]] = []
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))

    def _noting(self, name, real):
        def call(fd, views, offset):
            link = os.readlink(f"/proc/self/fd/{fd}")
            if target_module.PREFIX in link:
                lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
                flags = next(line for line in lines if line.startswith("flags:"))
                direct = bool(int(flags.split()[1], 8) & os.O_DIRECT)
                self.seen.append((name, direct, offset, len(views[0])))
            return real(fd, views, offset)

        return call


def test_json_has_the_keys_that_scripts_rely_on(run, drive):
    found = measured(run, drive, *SMALL, "--sweep", "rw=read,write", "--repeat", "2")
    assert found.keys() == {
        "schema", "target", "machine", "verify", "took_s", "results", "fio", "notes",
    }  # fmt: skip
    assert found["schema"] == 1
    assert found["target"].keys() == TARGET
    assert found["machine"].keys() == {"kernel", "cores"}
    assert [result["workload"]["rw"] for result in found["results"]] == ["read", "write"]
    for result in found["results"]:
        assert result.keys() == RESULT
        assert result["workload"].keys() == WORKLOAD
        assert result["median"].keys() == MEDIAN
        assert len(result["runs"]) == 2
        for one in result["runs"]:
            assert one.keys() == RUN
            assert one["num_requests"] == BLOCKS
            assert one["bytes_read"] + one["bytes_written"] == 1 << 20
            names = ("min", "p50", "p90", "p99", "p999", "p9999", "max")
            steps = [one[f"latency_{name}_s"] for name in names]
            assert steps == sorted(steps)
            assert steps[0] > 0
            assert one["latency_mean_s"] <= one["latency_max_s"]
            assert one["latency_max_s"] <= one["elapsed_s"]
            assert one["bytes_per_s"] >= one["durable_bytes_per_s"] > 0
            assert one["bytes_per_s"] == pytest.approx(one["iops"] * SIZE)
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize("path", ["direct", "buffered"])
@pytest.mark.parametrize(
    ("rw", "num_reads"),
    [("read", 16), ("write", 0), ("mixed", 5), ("randread", 16), ("randmixed", 5)],
)
def test_each_block_is_moved_once_a_pass_on_the_path_that_was_asked_for(
    drive, monkeypatch, path, rw, num_reads
):
    workload = Workload(
        rw=rw, path=path, size=SIZE, file_bytes=1 << 20, threads=1, mix=30, passes=2
    )
    real = target_module.Target.drop_cache
    calls = Calls(monkeypatch)

    def begin(target):
        # After the file has been filled, and before each pass; opening it tries one direct read.
        begun.append(1)
        if len(begun) == 2:
            calls.seen.clear()
        real(target)

    begun: list[int] = []
    monkeypatch.setattr(target_module.Target, "drop_cache", begin)
    plan = Plan(place=str(drive), workloads=[workload], allow_small=True)
    (result,) = run_plan(plan).points[0].runs
    assert len(begun) == 3, "once after the filling, once before each pass"
    moves = calls.seen
    assert {(direct, nbytes) for _, direct, _, nbytes in moves} == {(path == "direct", SIZE)}
    assert Counter(offset for _, _, offset, _ in moves) == dict.fromkeys(range(0, 1 << 20, SIZE), 2)
    for number in (0, 1):
        one = moves[number * BLOCKS : (number + 1) * BLOCKS]
        assert sum(name == "preadv" for name, *_ in one) == num_reads
        offsets = [offset for _, _, offset, _ in one]
        if rw.startswith("rand"):
            assert offsets != sorted(offsets)
        elif rw != "mixed":  # reads and writes have a thread each
            assert offsets == sorted(offsets)
    assert result.bytes_read == 2 * num_reads * SIZE


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_the_state_of_the_page_cache_is_said(run, drive, cache):
    for _ in range(5):  # the kernel may keep a page that it is looking at, or need the memory
        found = measured(run, drive, *SMALL, "--path", "buffered", "--cache", cache)
        held = found["results"][0]["runs"][0]["cached_before"]
        if held is None:
            pytest.skip("the kernel does not tell")
        _, out, _ = run("bench", drive, *SMALL, "--path", "buffered", "--cache", cache)
        expected = {"cold": 0, "warm": 1}[cache]
        if held == expected and f"page cache {cache}, held {held:.0%}" in out:
            break
    assert held == expected
    assert f"page cache {cache}, held {held:.0%}" in out
    assert ("came from the page cache" in out) is (cache == "warm")


def test_a_users_file_is_read_and_stays_as_it_is(run, drive):
    file = drive / "mine:1"
    file.write_bytes(os.urandom((1 << 20) + 12345))
    before, data = file.stat(), file.read_bytes()
    for rw in ("read", "randread"):
        found = measured(run, file, "--allow-small", "--size", "64K", *QUICK, "--rw", rw)
        assert found["target"]["scratch_file"] is False
        assert found["results"][0]["runs"][0]["bytes_read"] == 1 << 20
    for more in (["--rw", "write"], ["--rw", "mixed"], ["--verify"]):
        status, _, err = run("bench", file, "--allow-small", "--size", "64K", *QUICK, *more)
        assert status == 1
        assert str(file) in err.splitlines()[-1]
    after = file.stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    assert file.read_bytes() == data
    assert list(drive.iterdir()) == [file]


def test_files_that_are_there_are_not_touched(run, drive):
    (drive / "data.bin").write_bytes(b"precious")
    measured(run, drive, *SMALL, "--rw", "write")
    assert [path.name for path in drive.iterdir()] == ["data.bin"]
    assert (drive / "data.bin").read_bytes() == b"precious"


def test_a_name_that_is_taken_is_not_taken_away(drive, monkeypatch):
    monkeypatch.setattr(target_module.secrets, "token_hex", lambda _: "same")
    taken = drive / f"{target_module.PREFIX}{os.getpid()}-same"
    taken.write_bytes(b"of another")
    workload = Workload(size=SIZE, file_bytes=1 << 20)
    with pytest.raises(OSError, match="File exists"):
        run_plan(Plan(place=str(drive), workloads=[workload], allow_small=True))
    assert taken.read_bytes() == b"of another"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--file-size", "1M"], "--allow-small"),
        (["--file-size", "1M", "--size", "1000", "--allow-small"], "not a multiple of 4096"),
        (["--file-size", "1M", "--size", "2M", "--allow-small"], "more than the file has"),
        (["--file-size", "1000001", "--size", "4K", "--allow-small"], "not a multiple of 4096"),
        (["--file-size", "4096T"], "are free"),
        (["--size", "many"], "is not a size"),
        (["--seconds", "nan"], "seconds a number of 0 or more"),
        (["--ramp", "inf"], "must be a number of 0 or more"),
        (["--threads", "0"], "threads is 0"),
        (["--depth", "257"], "depth is 257"),
        (["--size", "1G", "--threads", "8"], "buffers of more than"),
        (["--mix", "0"], "per cent of reads"),
        (["--passes", "0"], "passes must be at least 1"),
        (["--ramp", "-1"], "ramp is -1 seconds"),
        (["--interval", "0"], "interval is 0 seconds"),
        (["--json", "--csv"], "choose one"),
        (["--series", "/nowhere/s.csv"], "/nowhere/s.csv: No such file or directory"),
        (["--sweep", "colour=red"], "write one of"),
        (["--sweep", "rw=read..write"], "list its values"),
        (["--sweep", "rw=sideways"], "not one of read"),
        (["--sweep", "size=1M..64K"], "the range is empty"),
        (["--sweep", "size=4K..64M", "--sweep", "size=1M"], "twice"),
        (["--plot", "x.svg"], "--plot needs --sweep"),
        (["--path", "gds"], "'gds' transfers GPU memory"),
        (["--path", "compat"], "'compat' transfers GPU memory"),
        (["--sweep", "path=direct,bounce"], "'bounce' transfers GPU memory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_one_line_and_status_1(run, drive, arguments, words):
    status, out, err = run("bench", drive, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert list(drive.iterdir()) == []


def test_paths_of_a_gpu_are_refused_for_want_of_a_driver_or_of_a_library(monkeypatch):
    with pytest.raises(RefusedError, match="the CUDA driver cannot be used: libcuda"):
        open_path("gds", 1, no_driver="libcuda.so.1 is missing")
    monkeypatch.setattr("gds.buffers.cuda.no_driver", lambda: "")
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name in ("gds", "compat", "bounce"):
        with pytest.raises(RefusedError, match=r"pip install .* '\.\[gpu\]'"):
            open_path(name, 1)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="there is no /dev/shm")
def test_memory_is_refused_unless_asked_for(run, tmp_path):
    place = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="gds-bench-test-"))
    try:
        status, _, err = run("bench", place, *SMALL)
        assert status == 1
        assert "in memory (tmpfs)" in err
        status, _, err = run("bench", place, *SMALL, "--allow-volatile")
        assert status == 1
        assert "--path buffered" in err
        found = measured(run, place, *SMALL, "--allow-volatile", "--path", "buffered")
        assert found["target"]["filesystem"] == "tmpfs"
        assert list(place.iterdir()) == []
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("kind", ["missing", "pipe", "link"])
def test_a_place_that_is_neither_directory_nor_file_is_refused(run, drive, kind):
    path = drive / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (drive / "file").write_bytes(bytes(1 << 20))
        path.symlink_to("file")
    status, _, err = run("bench", path, "--allow-small", "--size", "64K")
    assert status == 1
    assert str(path) in err


def test_a_figure_is_drawn(run, drive):
    pytest.importorskip("matplotlib")
    arguments = ["--sweep", "size=64K..128K", "--sweep", "rw=read,write"]
    status, _, _ = run("bench", drive, *SMALL, *arguments, "--plot", drive / "f.svg")
    assert status == 0
    assert [path.name for path in drive.iterdir()] == ["f.svg"]
    assert "<svg" in (drive / "f.svg").read_text()


def test_without_matplotlib_a_figure_is_refused_before_anything_is_measured(
    run, drive, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["--sweep", "size=64K..128K", "--plot", drive / "f.svg"]
    status, _, err = run("bench", drive, *SMALL, *arguments)
    assert status == 1
    assert (
        err
        == "error: --plot needs matplotlib: pip install matplotlib (or '.[bench]' in a checkout)\n"
    )


def test_without_fio_the_comparison_is_left_out_and_said(run, drive, monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = measured(run, drive, *SMALL, "--compare-fio")
    assert found["fio"] == []
    assert any("fio is not installed" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("path", "rw"), [("direct", "read"), ("direct", "mixed"), ("buffered", "randwrite")]
)
def test_fio_moves_the_same_bytes_in_turns(run, drive, path, rw):
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    found = measured(
        run, drive, *SMALL, "--path", path, "--rw", rw, "--compare-fio", "--pairs", "2"
    )
    assert found["notes"] == [] or "not compared" not in found["notes"][0], found["notes"]
    (compared,) = found["fio"]
    assert compared.keys() == FIO
    assert len(compared["gds_bytes_per_s"]) == len(compared["fio_bytes_per_s"]) == 2
    assert compared["agrees"] is None, "two pairs are no verdict"
    assert min(compared["fio_bytes_per_s"]) > 0
    assert list(drive.iterdir()) == []


def test_fio_reads_a_users_file_and_nothing_else(run, drive):
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    file = drive / "mine:1"
    file.write_bytes(os.urandom(1 << 20))
    data = file.read_bytes()
    arguments = ("--size", "64K", "--allow-small", *QUICK, "--compare-fio", "--pairs", "1")
    found = measured(run, file, *arguments)
    assert len(found["fio"]) == 1, found["notes"]
    assert file.read_bytes() == data
    assert list(drive.iterdir()) == [file]


class WithDriver(System):
    def library_error(self, name):
        return ""


@pytest.fixture
def gpu(monkeypatch):
    """A GPU made of host memory."""
    with installed(monkeypatch) as fake:
        yield fake


@pytest.mark.parametrize("path", ["gds", "compat", "bounce"])
def test_device_memory_is_measured_and_verified(drive, gpu, monkeypatch, path):
    monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "false")
    monkeypatch.setattr(
        "gds.backends.kvikio._examined", lambda _: dict.fromkeys(("read", "write"), Used("gds", ""))
    )
    gpu.gds = path == "gds"
    gpu.compat_is_measured = path == "compat"
    workload = Workload(path=path, rw="randmixed", size=1 << 16, file_bytes=1 << 20)
    plan = Plan(place=str(drive), workloads=[workload], verify=True, allow_small=True)
    (point,) = run_plan(plan, system=WithDriver()).points
    assert point.runs[0].num_bytes == 1 << 20
    assert point.runs[0].verified_bytes > 1 << 20
    modes = {mode for _, mode, _, _ in gpu.calls}
    assert modes == ({path} if path != "bounce" else set())


def test_demanded_direct_storage_that_is_not_there_is_refused_before_anything_is_written(
    drive, gpu, monkeypatch
):
    monkeypatch.setattr(
        "gds.backends.kvikio._examined",
        lambda _: dict.fromkeys(("read", "write"), Used("bounce", "why")),
    )
    plan = Plan(place=str(drive), workloads=[Workload(path="gds", file_bytes=1 << 30)])
    with pytest.raises(StorageError, match="copied through the host: why"):
        run_plan(plan, system=WithDriver())
    assert list(drive.iterdir()) == []


def test_a_run_with_a_driver_but_no_library_is_refused_too(drive, monkeypatch):
    monkeypatch.setattr("gds.buffers.cuda.no_driver", lambda: "")
    monkeypatch.setitem(sys.modules, "cupy", None)
    plan = Plan(place=str(drive), workloads=[Workload(path="compat", file_bytes=1 << 30)])
    with pytest.raises(RefusedError, match="pip install"):
        run_plan(plan, system=WithDriver())
