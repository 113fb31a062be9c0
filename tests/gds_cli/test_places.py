"""What `gds bench` and `gds check` say of places that cannot be used."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from gds import probe
from tests.command_line import Run

BOTH = ("bench", "check")


def block_devices() -> list[Path]:
    found = sorted(Path("/dev").iterdir())
    return [path for path in found if stat.S_ISBLK(path.stat(follow_symlinks=False).st_mode)]


@pytest.mark.parametrize("command", BOTH)
def test_a_place_that_is_not_there(command: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").touch()
    status, _, err = run(command, tmp_path / "none")
    assert status == 1
    assert f"{tmp_path}/none: no such file or directory: create it" in err
    _, _, err = run(command, tmp_path / "file/below")
    assert "below: no such file or directory: a parent in this path is a file" in err


@pytest.mark.parametrize("command", BOTH)
def test_a_block_device(command: str, run: Run) -> None:
    devices = block_devices()
    if not devices:
        pytest.skip("there is no block device in /dev")
    for device in devices[:3]:
        status, _, err = run(command, device)
        assert status == 1
        assert f"{device} is a block device, but only files can be used" in err
        assert "in memory" not in err


def test_a_block_device_that_is_mounted_is_said_where(run: Run) -> None:
    devices = {path: path.stat().st_rdev for path in block_devices()}
    points = {p: probe.mount_points(os.major(n), os.minor(n)) for p, n in devices.items()}
    mounted = {path: found for path, found in points.items() if found}
    if not mounted:
        pytest.skip("no block device of /dev is mounted here")
    for device, found in mounted.items():
        assert all(os.path.exists(point) for point in found)
        _, _, err = run("bench", device)
        assert f"name a directory in {found[0]}, where it is mounted" in err


@pytest.mark.parametrize("command", BOTH)
def test_other_things_that_are_no_files(command: str, tmp_path: Path, run: Run) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for place in (tmp_path / "pipe", tmp_path / "socket", Path("/dev/null")):
            status, _, err = run(command, place)
            assert status == 1
            assert f"{place} is neither a directory nor a regular file" in err


def test_a_file_for_a_check(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").touch()
    _, _, err = run("check", tmp_path / "file")
    assert f"{tmp_path}/file: this is a file: name the directory that it is in" in err


def test_a_file_system_of_the_kernels_own(run: Run) -> None:
    for path in ("direct", "buffered"):
        status, _, err = run("bench", "/proc", "--path", path)
        assert status == 1
        assert err == (
            "error: /proc is proc, a view of the kernel without files on a drive: name a directory "
            "on a drive\n"
        )


def test_a_file_system_of_the_kernels_own_is_not_checked(run: Run) -> None:
    for place, kind in (("/proc", "proc"), ("/sys", "sysfs")):
        status, out, err = run("check", place)
        assert (status, out) == (1, "")
        assert f"{place} is {kind}, a view of the kernel without files on a drive" in err


def test_a_directory_that_may_not_be_written_to(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere, so the refusal is made."""
    real = os.open

    def refusing(path: str, flags: int, *more: int, **named: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    _, _, err = run("bench", tmp_path)
    assert f"error: no file can be made in {tmp_path} (Permission denied): give a" in err
    assert "page cache" not in err
