"""Calibration: what is measured and chosen, where it is refused, and which files are believed."""

import dataclasses
import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from gds import ALIGNMENT, PosixBackend, StorageError, probe
from gds.calibration import Calibration, calibrate, load_calibration, save_calibration
from gds.calibration.trials import (
    DEFAULT,
    MIB,
    MOST_IN_FLIGHT_BYTES,
    Setting,
    candidates,
    choose,
    survivors,
)
from tests.contract.conftest import open_below

FILE_BYTES = 16 * MIB


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


def slow(kernel, seconds):
    """Let time pass only with transfers, and that much with each."""
    now = [0.0]

    def answer(name, real, fd, view, offset):
        now[0] += seconds(len(view))
        return real(fd, [view], offset)

    kernel.start(answer)
    return lambda: now[0]


def test_a_slow_drive_is_measured_with_a_smaller_file_or_given_up(directory, kernel, monkeypatch):
    seconds_of = [lambda _: 10.0, lambda nbytes: nbytes / 40e6]
    clock = slow(kernel, lambda nbytes: seconds_of[0](nbytes))
    monkeypatch.setattr("time.perf_counter", clock)
    check_refused(calibrate(directory, file_bytes=FILE_BYTES), "too slow")
    # The first two calls try whether there is direct I/O.
    assert [nbytes for _, _, _, nbytes in kernel.calls[2:]] == [MIB]
    del seconds_of[0], kernel.calls[:]
    started_s = clock()
    found = calibrate(directory, file_bytes=256 * MIB)
    assert found.reason == ""
    assert Setting(found.read_threads, found.request_bytes) == DEFAULT
    assert 0 < found.mixed_gbps < 0.1
    assert sum(nbytes for _, _, _, nbytes in kernel.calls) < 256 * MIB
    assert clock() - started_s < 5


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


def check_refused(found, words):
    assert words in found.reason
    assert Setting(found.read_threads, found.request_bytes) == DEFAULT
    assert (found.read_gbps, found.write_gbps, found.mixed_gbps) == (0, 0, 0)


def test_memory_and_a_nearly_full_disk_are_not_measured(memory_directory, directory):
    check_refused(calibrate(memory_directory), "memory")
    free = os.statvfs(directory)
    file_bytes = free.f_bavail * free.f_frsize // 3
    check_refused(calibrate(directory, file_bytes=file_bytes), "four times")


def test_space_that_cannot_be_reserved_after_all_is_a_refusal(directory, monkeypatch):
    def full(fd, offset, nbytes):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", full)
    check_refused(calibrate(directory, file_bytes=FILE_BYTES), os.strerror(errno.EDQUOT))
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
    number, mount = os.stat(tmp_path).st_dev, probe.mount_of(str(tmp_path))
    return Calibration(
        read_threads=4,
        write_threads=2,
        request_bytes=16 * MIB,
        read_gbps=6.5,
        write_gbps=5.0,
        mixed_gbps=5.25,
        filesystem=mount.filesystem,
        device=f"{os.major(number)}:{os.minor(number)}",
        source=mount.source,
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


def test_a_save_replaces_a_link_keeps_no_refusal_and_fails_as_a_whole(tmp_path, good, monkeypatch):
    (tmp_path / "elsewhere").write_text("untouched")
    for name in ("c.json", "c.json.new"):
        (tmp_path / name).symlink_to("elsewhere")
    save_calibration(path := f"{tmp_path}/c.json", good)
    assert load_calibration(path) == good
    rates = dict.fromkeys(("read_gbps", "write_gbps", "mixed_gbps"), 0.0)
    save_calibration(path, dataclasses.replace(good, reason="full", **rates))

    def fail(source, target):
        raise OSError(errno.EIO, os.strerror(errno.EIO), source)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(StorageError) as caught:
        save_calibration(path, dataclasses.replace(good, read_threads=1))
    assert caught.value.filename == path
    assert load_calibration(path) == good
    assert (tmp_path / "elsewhere").read_text() == "untouched"
    assert sorted(os.listdir(tmp_path)) == ["c.json", "elsewhere"]


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


@pytest.mark.parametrize(
    "text",
    [b"", b"[" * 60_000, b"[1,2]", b" " * 70_000, b'{"reason":"\xff"}', b"1e999"],
    ids=["empty", "deep", "list", "long", "not-utf-8", "overflow"],
)
def test_what_is_no_calibration_is_ignored(tmp_path, good, text):
    path = tmp_path / "calibration.json"
    path.write_bytes(text)
    assert load_calibration(str(path)) is None
    rate = json.dumps(dataclasses.asdict(good)).replace("6.5", text.decode(errors="replace"))
    path.write_text(rate)
    assert load_calibration(str(path)) is None


def test_what_is_of_another_device_or_not_a_file_is_ignored(tmp_path, memory_directory, good):
    save_calibration(path := f"{memory_directory}/calibration.json", good)
    assert load_calibration(path) is None
    save_calibration(f"{tmp_path}/real", good)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "directory", "pipe", "missing", "missing/below", "real/below", "a\0b"):
        assert load_calibration(f"{tmp_path}/{name}") is None
    assert open_below(str(tmp_path)) == []


def test_the_command_runs_as_a_module(memory_directory, tmp_path):
    def run(*arguments):
        command = [sys.executable, "-W", "error", "-m", "gds.calibration", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "nothing was measured" in run(memory_directory).stdout
    done = run(memory_directory, "--json")
    found = json.loads(done.stdout)
    depth_bytes = found.pop("depth_bytes")
    assert "memory" in Calibration(**found).reason
    assert depth_bytes == Calibration(**found).depth_bytes
    done = run(f"{tmp_path}/missing")
    assert (done.returncode, done.stdout) == (1, "")
    assert "missing" in done.stderr


# Which setting is chosen from which rates: a real drive has only one of these curves, and noise


def four_drives(setting):
    in_flight_bytes = setting.threads * setting.request_bytes
    return min(13.0, 4.0 * setting.threads, 13.0 * in_flight_bytes / (60 * MIB))


DRIVES = {
    "sata-is-flat": (lambda _: 0.5, Setting(1, 32 * MIB)),
    "nvme-needs-two": (lambda s: 3.3 if s.threads == 1 else 4.0, Setting(2, 32 * MIB)),
    "four-drives-need-more-in-flight": (four_drives, Setting(4, 16 * MIB)),
    "smaller-requests-if-they-help": (
        lambda setting: 2.0 if setting.request_bytes <= 8 * MIB else 1.0,
        Setting(1, 8 * MIB),
    ),
}


def measured(drive, *, noise=0.0, drift=0.0, seed=0, num_rounds=4):
    """Return the rounds that a drive of these rates gives, each rate off by `noise` or so."""
    draw = random.Random(seed)
    settings, rounds = candidates(MOST_IN_FLIGHT_BYTES), []
    for _ in range(num_rounds):
        level = 1 + draw.uniform(-drift, drift)
        rounds.append({s: drive(s) * level * (1 + draw.gauss(0, noise)) for s in settings})
        settings = survivors(rounds)
    return rounds


@pytest.mark.parametrize(("drive", "expected"), DRIVES.values(), ids=DRIVES)
def test_the_simplest_setting_that_is_fastest_is_chosen(drive, expected):
    assert choose(measured(drive)) == expected
    noisy = [choose(measured(drive, noise=0.02, drift=0.3, seed=seed)) for seed in range(40)]
    assert noisy.count(expected) >= 38
    best = max(map(drive, candidates(MOST_IN_FLIGHT_BYTES)))
    noisier = [choose(measured(drive, noise=0.1, drift=0.3, seed=seed)) for seed in range(40)]
    assert sum(map(drive, noisier)) / len(noisier) > 0.95 * best
