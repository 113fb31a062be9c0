"""Calibration: what is measured, where it is refused, and which files are believed."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gds import ALIGNMENT, PosixBackend, StorageError, probe
from gds.calibration import calibration
from gds.calibration.calibration import (
    Calibration,
    calibrate,
    load_calibration,
    main,
    save_calibration,
)
from gds.calibration.tuning import DEFAULT, MIB, Setting, candidates
from tests.contract.conftest import open_below

FILE_BYTES = 16 * MIB
ROOT = Path(__file__).parents[2]


# Measuring


def test_a_directory_is_measured_and_nothing_is_left_behind(directory):
    Path(directory, "of-the-user").write_text("untouched")
    found = calibrate(directory, budget_s=1.0, file_bytes=FILE_BYTES)
    assert os.listdir(directory) == ["of-the-user"]
    assert Path(directory, "of-the-user").read_text() == "untouched"
    assert open_below(directory) == []
    if found.reason:
        pytest.skip(f"this drive is too busy: {found.reason}")
    assert found.read_threads == found.write_threads
    assert Setting(found.read_threads, found.request_bytes) in [DEFAULT, *candidates(8 * MIB)]
    assert min(found.read_gbps, found.write_gbps, found.mixed_gbps) > 0
    assert found.filesystem == probe.mount_of(directory).filesystem
    backend = PosixBackend()
    backend.tune(**found.settings)
    assert backend.request_bytes == found.request_bytes
    backend.close()


def test_a_file_system_without_nameless_files_is_measured_too(directory, monkeypatch):
    real_open = os.open
    names = []

    def without_tmpfile(path, flags, mode=0o777):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        if flags & os.O_CREAT:
            names.append(path)
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", without_tmpfile)
    calibrate(directory, budget_s=0.3, file_bytes=FILE_BYTES)
    assert names
    assert os.listdir(directory) == []


def slow(kernel, seconds):
    """Let time pass only with transfers, and that much with each."""
    now = [0.0]

    def answer(name, real, fd, view, offset):
        now[0] += seconds(len(view))
        return real(fd, [view], offset)

    kernel.start(answer)
    return lambda: now[0]


def test_a_very_slow_drive_is_given_up_after_a_request(directory, kernel, monkeypatch):
    clock = slow(kernel, lambda _: 10.0)
    monkeypatch.setattr("time.perf_counter", clock)
    found = calibrate(directory, file_bytes=FILE_BYTES)
    assert "too slow" in found.reason
    assert Setting(found.read_threads, found.request_bytes) == DEFAULT
    # The first two calls try whether there is direct I/O.
    assert [nbytes for _, _, _, nbytes in kernel.calls[2:]] == [MIB]


def test_a_slow_drive_gets_a_smaller_file_and_no_comparison(directory, kernel, monkeypatch):
    clock = slow(kernel, lambda nbytes: nbytes / 40e6)
    monkeypatch.setattr("time.perf_counter", clock)
    found = calibrate(directory, file_bytes=256 * MIB)
    assert found.reason == ""
    assert Setting(found.read_threads, found.request_bytes) == DEFAULT
    assert 0 < found.mixed_gbps < 0.1
    assert sum(nbytes for _, _, _, nbytes in kernel.calls) < 256 * MIB
    assert clock() < 5


def test_a_failing_drive_is_an_error_and_nothing_is_left_behind(directory, kernel):
    def fail(name, real, fd, view, offset):
        if len(view) > MIB:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, [view], offset)

    kernel.start(fail)
    with pytest.raises(StorageError) as caught:
        calibrate(directory, file_bytes=FILE_BYTES)
    assert caught.value.errno == errno.EIO
    assert directory in caught.value.filename
    assert os.listdir(directory) == []


# Refusing


def check_refused(found, words):
    assert words in found.reason
    assert Setting(found.read_threads, found.request_bytes) == DEFAULT
    assert (found.read_gbps, found.write_gbps, found.mixed_gbps) == (0, 0, 0)


def test_memory_is_not_measured(memory_directory):
    check_refused(calibrate(memory_directory), "memory")


def test_a_directory_without_direct_io_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "direct_io", lambda _: probe.no_direct_io("not here"))
    check_refused(calibrate(str(tmp_path)), "not here")


def test_a_nearly_full_disk_is_not_measured(directory, monkeypatch):
    free = os.statvfs(directory)
    file_bytes = free.f_bavail * free.f_frsize // 3
    check_refused(calibrate(directory, file_bytes=file_bytes), "four times")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_space_that_cannot_be_reserved_after_all_is_a_refusal(directory, monkeypatch, number):
    def full(fd, offset, nbytes):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    check_refused(calibrate(directory, file_bytes=FILE_BYTES), os.strerror(number))
    assert os.listdir(directory) == []


def test_wrong_arguments_are_refused(tmp_path):
    for budget_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="budget_s"):
            calibrate(str(tmp_path), budget_s=budget_s)
    with pytest.raises(ValueError, match="file_bytes"):
        calibrate(str(tmp_path), file_bytes=MIB)
    with pytest.raises(StorageError, match="missing") as caught:
        calibrate(f"{tmp_path}/missing")
    assert caught.value.errno == errno.ENOENT


# The file beside the data


@pytest.fixture
def good(tmp_path):
    device, source, filesystem = calibration._identity(str(tmp_path))
    return Calibration(
        read_threads=4,
        write_threads=2,
        request_bytes=16 * MIB,
        read_gbps=6.5,
        write_gbps=5.0,
        mixed_gbps=5.25,
        filesystem=filesystem,
        device=device,
        source=source,
        measured="2026-01-31T12:00:00+00:00",
    )


def test_what_is_saved_is_loaded(tmp_path, good, monkeypatch):
    path = str(tmp_path / "calibration.json")
    assert load_calibration(path) is None
    for threads in (4, 8):
        found = dataclasses.replace(good, read_threads=threads)
        save_calibration(path, found)
        assert load_calibration(path) == found
    assert os.listdir(tmp_path) == ["calibration.json"]
    monkeypatch.chdir(tmp_path)
    assert load_calibration("calibration.json") == found


def test_a_refusal_is_not_kept(tmp_path, good):
    rates = dict.fromkeys(("read_gbps", "write_gbps", "mixed_gbps"), 0.0)
    save_calibration(f"{tmp_path}/c.json", dataclasses.replace(good, reason="full", **rates))
    assert os.listdir(tmp_path) == []


def test_saving_replaces_a_link_and_what_a_dead_process_left(tmp_path, good):
    (tmp_path / "elsewhere").write_text("untouched")
    for name in ("c.json", "c.json.new"):
        (tmp_path / name).symlink_to("elsewhere")
    save_calibration(f"{tmp_path}/c.json", good)
    assert load_calibration(f"{tmp_path}/c.json") == good
    assert (tmp_path / "elsewhere").read_text() == "untouched"
    assert sorted(os.listdir(tmp_path)) == ["c.json", "elsewhere"]


def test_a_save_that_fails_keeps_the_old_one(tmp_path, good, monkeypatch):
    path = f"{tmp_path}/c.json"
    save_calibration(path, good)

    def fail(source, target):
        raise OSError(errno.EIO, os.strerror(errno.EIO), source)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(StorageError) as caught:
        save_calibration(path, dataclasses.replace(good, read_threads=1))
    assert caught.value.filename == path
    assert load_calibration(path) == good
    assert os.listdir(tmp_path) == ["c.json"]


DAMAGED = {
    "empty": b"",
    "zeros": bytes(300),
    "cut-short": b'{"read_threads": 4, "wri',
    "not-text": b"\xff\xfe{}",
    "not-an-object": b"[1, 2]",
    "null": b"null",
    "nothing-in-it": b"{}",
    "deeply-nested": b"[" * 50_000,
    "enormous-number": b'{"read_threads": ' + b"9" * 6000 + b"}",
    "enormous-file": b" " * (1 << 20),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_ignored(tmp_path, data):
    path = tmp_path / "calibration.json"
    path.write_bytes(data)
    assert load_calibration(str(path)) is None


HOSTILE = [
    ("format_version", [0, 2, "1", None, True, 1.0]),
    ("read_threads", [0, -1, 65, 10**9, 10**400, 2.0, "2", None, True, [2]]),
    ("write_threads", [0, 65, 1.5]),
    ("request_bytes", [0, -ALIGNMENT, ALIGNMENT + 1, 2 << 30, None, 1e7]),
    ("read_gbps", [0.0, -1.0, 1e9, float("inf"), float("nan"), "1", 5, None]),
    ("write_gbps", [0.0, float("nan")]),
    ("mixed_gbps", [0.0, float("-inf")]),
    ("filesystem", ["", "other", 5, None]),
    ("device", ["0:0", "", 5]),
    ("source", ["/dev/other", "x" * 10_000, None]),
    ("measured", ["", "yesterday", 0, None, "2026-13-01"]),
    ("reason", ["because", 0, None]),
    ("surprise", [1]),
]


@pytest.mark.parametrize(("field", "values"), HOSTILE, ids=[field for field, _ in HOSTILE])
def test_a_value_that_cannot_be_is_ignored(tmp_path, good, field, values):
    path = tmp_path / "calibration.json"
    content = dataclasses.asdict(good)
    path.write_text(json.dumps(content))
    assert load_calibration(str(path)) == good
    for value in values:
        path.write_text(json.dumps({**content, field: value}))
        assert load_calibration(str(path)) is None, value
    if field in content and field not in ("reason", "format_version"):
        del content[field]
        path.write_text(json.dumps(content))
        assert load_calibration(str(path)) is None


def test_a_file_of_another_device_is_ignored(tmp_path, memory_directory, good):
    path = f"{memory_directory}/calibration.json"
    save_calibration(path, good)
    assert load_calibration(path) is None


def test_what_is_not_a_file_is_ignored(tmp_path, good):
    save_calibration(f"{tmp_path}/real", good)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "directory", "pipe", "missing", "missing/below", "real/below", "a\0b"):
        assert load_calibration(f"{tmp_path}/{name}") is None
    assert open_below(str(tmp_path)) == []


# What it says


def test_a_ring_has_room_for_what_is_in_flight_in_both_directions(good):
    assert good.depth_bytes == 64 * MIB
    assert good.ring_chunks(96 * MIB) == 4
    assert good.ring_chunks(32 * MIB) == 6
    assert good.ring_chunks(8 * MIB) == 18
    assert good.ring_chunks(1) == 64
    with pytest.raises(ValueError, match="chunk_bytes"):
        good.ring_chunks(0)


def test_the_command_prints_for_people_and_as_json(memory_directory, good, monkeypatch, capsys):
    monkeypatch.setattr(calibration, "calibrate", lambda _: good)
    assert main(["anywhere"]) == 0
    assert "4 for reads, 2 for writes" in (shown := capsys.readouterr().out)
    assert "mixed      5.25 GB/s" in shown
    assert main(["anywhere", "--json"]) == 0
    expected = {**dataclasses.asdict(good), "depth_bytes": good.depth_bytes}
    assert json.loads(capsys.readouterr().out) == expected


def test_the_command_runs_as_a_module(memory_directory, tmp_path):
    for directory, status in ((memory_directory, 0), (f"{tmp_path}/missing", 1)):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "gds.calibration", directory],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == status
        assert ("nothing was measured" in done.stdout) == (status == 0)
        assert ("missing" in done.stderr) == (status == 1)
