"""`gds bench`: its figures, what it does to files, and what it refuses. No rate is judged."""

import csv
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from gds import StorageError
from gds.bench.run import Plan
from gds.bench.run import run as run_plan
from gds.bench.workload import Workload
from gds.check import System
from gds.errors import RefusedError
from gds.kvikio import Used
from tests.fake_gpu.machine import installed

QUICK = ("--seconds", "0", "--ramp", "0", "--repeat", "1", "--allow-small")
SMALL = ("--file-size", "1M", "--size", "64K", *QUICK)
SIZE = 64 << 10
BLOCKS = 16

RUN = {
    "num_requests", "num_bytes", "bytes_per_s", "iops", "latency_mean_s", "latency_p50_s",
    "latency_p99_s", "latency_max_s", "bytes_read", "bytes_written", "elapsed_s",
    "durable_bytes_per_s", "cpu_cores", "verified_bytes", "direct", "reads", "writes", "series",
}  # fmt: skip
"""Of each run; what else there is may change."""


def measured(run, *arguments):
    status, out, err = run("bench", *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def test_json_has_the_keys_that_scripts_rely_on_and_figures_that_fit_each_other(run, drive):
    found = measured(run, drive, *SMALL, "--sweep", "rw=read,mixed", "--repeat", "2")
    assert found["schema"] == 1
    assert found.keys() >= {"target", "machine", "results", "fio", "notes"}
    assert [result["workload"]["rw"] for result in found["results"]] == ["read", "mixed"]
    for result in found["results"]:
        assert result["median"].keys() >= {"bytes_per_s", "durable_bytes_per_s", "iops"}
        assert result["verdict"] in ("too short", "unstable")
        assert len(result["runs"]) == 2
        for one in result["runs"]:
            assert one.keys() >= RUN
            assert one["num_requests"] == BLOCKS
            assert one["bytes_read"] + one["bytes_written"] == 1 << 20
            names = ("min", "p50", "p90", "p99", "p999", "p9999", "max")
            steps = [one[f"latency_{name}_s"] for name in names]
            assert steps == sorted(steps)
            assert 0 < steps[0] <= one["latency_mean_s"] <= steps[-1] <= one["elapsed_s"]
            assert one["bytes_per_s"] >= one["durable_bytes_per_s"] > 0
            assert one["bytes_per_s"] == pytest.approx(one["iops"] * SIZE)
    assert list(drive.iterdir()) == []
    for one in found["results"][1]["runs"]:
        reads, writes = one["reads"], one["writes"]
        for name in ("num_requests", "num_bytes", "bytes_per_s", "iops"):
            assert reads[name] + writes[name] == pytest.approx(one[name])
        assert reads["num_bytes"] == one["bytes_read"] == 1 << 19
        assert max(reads["latency_max_s"], writes["latency_max_s"]) == one["latency_max_s"]
        for part in (one, reads, writes):
            assert sum(count for _, count in part["latency_histogram"]) == part["num_requests"]
        assert sum(each["num_reads"] + each["num_writes"] for each in one["series"]) == BLOCKS


def test_results_as_csv_and_a_row_of_three_runs_unless_told_otherwise(run, drive):
    arguments = ("--file-size", "1M", "--size", "64K", "--allow-small", "--seconds", "0.01")
    status, out, err = run("bench", drive, *arguments, "--sweep", "rw=read,mixed", "--csv")
    assert status == 0, err
    assert "2 rows of 3 runs: about " in err
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["rw"], row["requests"]) for row in rows] == [
        ("read", "total"), ("mixed", "total"), ("mixed", "reads"), ("mixed", "writes"),
    ]  # fmt: skip
    for row in rows:
        assert float(row["lowest_bytes_per_s"]) <= float(row["bytes_per_s"])
        assert float(row["bytes_per_s"]) <= float(row["highest_bytes_per_s"])
        assert row["num_runs"] == "3"
        assert row["verdict_reasons"].startswith(f"{row['verdict']}: ")


def test_nothing_is_cut_on_a_narrow_screen(run, drive, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(drive)
    sweep = ("--sweep", "rw=randread,randmixed", "--sweep", "cache=cold,as-is")
    status, out, err = run("bench", ".", *SMALL, *sweep, "--histogram")
    assert status == 0, err
    assert "…" not in out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert all(title in out for title in ("GB/s", "IOPS", "p50", "p99.9", "max", "CPU"))


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_the_state_of_the_page_cache_is_said(run, drive, cache):
    expected = {"cold": 0, "warm": 1}[cache]
    for _ in range(5):  # the kernel may keep a page that it is looking at, or need the memory
        found = measured(run, drive, *SMALL, "--path", "buffered", "--cache", cache)
        held = found["results"][0]["runs"][0]["cached_before"]
        if held is None:
            pytest.skip("the kernel does not tell")
        if held == expected:
            break
    assert held == expected


# Files


def test_a_users_files_stay_as_they_are(run, drive):
    file = drive / "mine:1"
    file.write_bytes(os.urandom((1 << 20) + 12345))
    before, data = file.stat(), file.read_bytes()
    for rw in ("read", "randread"):
        found = measured(run, file, *QUICK, "--size", "64K", "--rw", rw)
        assert found["target"]["scratch_file"] is False
        assert found["results"][0]["runs"][0]["bytes_read"] == 1 << 20
    for more in (["--rw", "write"], ["--rw", "mixed"], ["--verify"], ["--files", "3"]):
        status, _, err = run("bench", file, *QUICK, "--size", "64K", *more)
        assert status == 1
        assert str(file) in err.splitlines()[-1]
    measured(run, drive, *SMALL, "--rw", "write")
    after = file.stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    assert file.read_bytes() == data
    assert list(drive.iterdir()) == [file]


def test_files_with_holes_or_of_different_sizes_are_refused(run, drive):
    sparse, padded, short = drive / "sparse", drive / "padded", drive / "short"
    sparse.write_bytes(os.urandom(512 << 10))
    padded.write_bytes(os.urandom((1 << 20) - 4096))
    for file in (sparse, padded):
        os.truncate(file, 1 << 20)
    short.write_bytes(os.urandom(2 << 20))
    status, _, err = run("bench", sparse, *QUICK, "--size", "64K")
    assert (status, f"{sparse}: 50% of it was never written" in err) == (1, True)
    assert run("bench", padded, *QUICK, "--size", "64K")[0] == 0
    status, _, err = run("bench", padded, short, *QUICK)
    assert status == 1
    assert "the files have different sizes (1048576 and 2097152 bytes)" in err


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="there is no /dev/shm")
def test_memory_is_refused_unless_asked_for(run):
    place = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="gds-bench-test-"))
    try:
        status, _, err = run("bench", place, *SMALL)
        assert (status, "in memory (tmpfs)" in err) == (1, True)
        status, _, err = run("bench", place, *SMALL, "--allow-volatile")
        assert (status, "--path buffered" in err) == (1, True)
        found = measured(run, place, *SMALL, "--allow-volatile", "--path", "buffered")
        assert found["target"]["filesystem"] == "tmpfs"
        assert list(place.iterdir()) == []
    finally:
        shutil.rmtree(place)


# Refusals

REFUSED = [
    (["--file-size", "1M"], "--allow-small"),
    (["--file-size", "1M", "--size", "1000", "--allow-small"], "not a multiple of 4096"),
    (["--file-size", "4096T"], "are free"),
    (["--size", "many"], "is not a size"),
    (["--seconds", "nan"], "seconds a number of 0 or more"),
    (["--depth", "257"], "depth is 257"),
    (["--size", "1G", "--threads", "8"], "buffers of more than"),
    (["--mix", "0"], "per cent of reads"),
    (["--files", "300", *SMALL], "files is 300, not 1 to 64, or up to 20000 with --reopen"),
    (["--json", "--csv"], "choose one"),
    (["--series", "/nowhere/s.csv"], "/nowhere/s.csv: No such file or directory"),
    (["--sweep", "colour=red"], "write one of"),
    (["--sweep", "rw=sideways"], "not one of read"),
    (["--sweep", "size=4K..64M", "--sweep", "size=1M"], "twice"),
    (["--plot", "x.svg"], "--plot needs --sweep"),
    (["--path", "gds"], "'gds' transfers GPU memory"),
    (["--sweep", "path=direct,bounce"], "'bounce' transfers GPU memory"),
    (["--staged", "--rw", "mixed", *SMALL], "--staged measures read or write, not mixed"),
    (["--staged", "--threads", "1", *SMALL], "needs two buffers"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_what_cannot_be_measured_is_one_line_and_status_1(run, drive, arguments, words):
    status, out, err = run("bench", drive, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert list(drive.iterdir()) == []


# Figures and fio


def test_a_figure_is_drawn_or_refused_before_anything_is_measured(run, drive, monkeypatch):
    arguments = ["--sweep", "size=64K..128K", "--sweep", "rw=read,write", "--plot", drive / "f.svg"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        status, _, err = run("bench", drive, *SMALL, *arguments)
    assert (status, "--plot needs matplotlib: pip install" in err) == (1, True)
    pytest.importorskip("matplotlib")
    assert run("bench", drive, *SMALL, *arguments)[0] == 0
    assert [path.name for path in drive.iterdir()] == ["f.svg"]
    assert "<svg" in (drive / "f.svg").read_text()


def test_what_cannot_be_compared_with_fio_is_said(run, drive, monkeypatch):
    found = measured(run, drive, *SMALL, "--files", "2", "--compare-fio")
    note = "not compared with fio: only a single file, opened once, can be compared"
    assert found["notes"] == [note]
    monkeypatch.setenv("PATH", "")
    found = measured(run, drive, *SMALL, "--compare-fio")
    assert found["fio"] == []
    assert any("fio is not installed" in note for note in found["notes"])


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_moves_the_same_bytes_in_turns_and_only_reads_a_users_file(run, drive):
    arguments = ("--rw", "mixed", "--compare-fio", "--pairs", "2")
    found = measured(run, drive, *SMALL, *arguments)
    assert found["notes"] == [] or "not compared" not in found["notes"][0], found["notes"]
    (compared,) = found["fio"]
    assert len(compared["gds_bytes_per_s"]) == len(compared["fio_bytes_per_s"]) == 2
    assert compared["agrees"] is None, "two pairs are no verdict"
    assert min(compared["fio_bytes_per_s"]) > 0
    file = drive / "mine:1"
    file.write_bytes(data := os.urandom(1 << 20))
    found = measured(run, file, "--size", "64K", *QUICK, "--compare-fio", "--pairs", "1")
    assert len(found["fio"]) == 1, found["notes"]
    assert file.read_bytes() == data
    assert list(drive.iterdir()) == [file]


# Device memory


class WithDriver(System):
    def library_error(self, name):
        return ""


def device_plan(drive, path, **settings):
    workload = Workload(path=path, rw="randmixed", size=SIZE, file_bytes=1 << 20)
    return Plan(places=[str(drive)], workloads=[workload], allow_small=True, **settings)


@pytest.mark.parametrize("path", ["gds", "compat", "bounce"])
def test_device_memory_is_measured_and_verified(drive, monkeypatch, path):
    monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "false")
    found = dict.fromkeys(("read", "write"), Used("gds", ""))
    monkeypatch.setattr("gds.backends.kvikio._examined", lambda _: found)
    with installed(monkeypatch) as gpu:
        gpu.gds = path == "gds"
        gpu.compat_is_measured = path == "compat"
        (point,) = run_plan(device_plan(drive, path, verify=True), system=WithDriver()).points
        assert point.runs[0].total.num_bytes == 1 << 20
        assert point.runs[0].verified_bytes > 1 << 20
        modes = {mode for _, mode, _, _ in gpu.calls}
        assert modes == ({path} if path != "bounce" else set())


def test_device_memory_that_cannot_be_measured_is_refused_before_anything_is_written(
    drive, monkeypatch
):
    found = dict.fromkeys(("read", "write"), Used("bounce", "why"))
    monkeypatch.setattr("gds.backends.kvikio._examined", lambda _: found)
    with (
        installed(monkeypatch),
        pytest.raises(StorageError, match="copied through the host: why"),
    ):
        run_plan(device_plan(drive, "gds"), system=WithDriver())
    monkeypatch.setattr("gds.buffers.cuda.no_driver", lambda: "")
    monkeypatch.setitem(sys.modules, "cupy", None)
    for path in ("gds", "compat", "bounce"):
        with pytest.raises(RefusedError, match=r"pip install .* '\.\[gpu\]'"):
            run_plan(device_plan(drive, path), system=WithDriver())
    assert list(drive.iterdir()) == []
