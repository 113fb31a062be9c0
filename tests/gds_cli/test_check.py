"""`gds check` on this machine: its exit status, what it leaves, and what it says of places."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gds import probe
from gds.check import System, examine


def test_json_has_the_keys_that_scripts_rely_on(run, tmp_path):
    status, out, err = run("check", tmp_path, "--json")
    found = json.loads(out)
    assert (found["schema"], found["exit_status"], found["directory"]) == (1, status, str(tmp_path))
    assert err == ""
    for direction in ("reads", "writes"):
        assert found[direction].keys() == {"path", "direct", "why_not"}
        assert list(found[direction]["why_not"]) == ["gds", "bounce", "direct", "buffered"]
    for finding in found["findings"]:
        assert finding.keys() == {"section", "what", "value", "verdict", "why", "do"}
        assert finding["verdict"] in ("ok", "limits", "missing")
    assert {"kernel", "file system", "direct I/O", "driver"} <= {
        finding["what"] for finding in found["findings"]
    }


def test_the_path_is_the_one_that_a_transfer_can_take(run, tmp_path):
    if not System().library_error("libcuda.so.1"):
        pytest.skip("there is a CUDA driver")
    works = probe.direct_io(str(tmp_path)).supported
    status, out, _ = run("check", tmp_path)
    assert status == (4 if works else 5)
    assert ("reads   direct" in out) is works
    assert "not gds: no CUDA driver: libcuda.so.1" in out
    assert run("check", tmp_path, "--require", "direct")[0] == (0 if works else 5)
    assert run("check", tmp_path, "--require", "gds")[0] == status
    assert run("check", tmp_path, "--require", "any")[0] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="there is no /dev/shm")
def test_memory_is_no_drive(run):
    status, out, _ = run("check", "/dev/shm", "--for", "write")
    if not System().library_error("libcuda.so.1"):
        pytest.skip("there is a CUDA driver")
    assert status == 5
    assert "lost at power-off" in out


def test_wrong_usage_is_status_2(run):
    for arguments in (["check"], ["check", "/", "--require", "x"], ["nothing"]):
        assert run(*arguments)[0] == 2
    assert run("--version")[1].startswith("gds ")


class Unprivileged(System):
    """This machine, for a user who may only read."""

    def writable(self, directory: str) -> bool:
        return False


def test_where_no_file_can_be_made_one_that_is_there_is_read(drive):
    empty = Unprivileged().direct(str(drive))
    assert (empty.tried, empty.found.supported) == ("nothing", False)
    (drive / "link").symlink_to("/etc/passwd")
    (drive / "empty").touch()
    (drive / "folder").mkdir()
    assert Unprivileged().direct(str(drive)).tried == "nothing"
    (drive / "file").write_bytes(b"x" * 10_000)
    found = Unprivileged().direct(str(drive))
    assert (found.tried, found.found.supported) == ("read", True)
    assert examine(str(drive), system=Unprivileged()).writes.path is None
    assert (drive / "file").read_bytes() == b"x" * 10_000


@pytest.mark.parametrize("command", [["check", "."], ["bench", "--help"]])
def test_commands_start_without_torch_and_numpy(tmp_path, command):
    program = f"""
import sys
from gds.cli import main
sys.argv = ["gds", *{command!r}]
try:
    main()
finally:
    print("heavy:", sorted({{"torch", "numpy", "kvikio", "cupy"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
    )
    assert "heavy: []" in done.stdout, done.stderr


# Places that cannot be used, by `bench` either

BOTH = ("bench", "check")


def block_devices() -> list[Path]:
    found = sorted(Path("/dev").iterdir())
    return [path for path in found if stat.S_ISBLK(path.stat(follow_symlinks=False).st_mode)]


@pytest.mark.parametrize("command", BOTH)
def test_a_place_that_is_not_there(command, tmp_path, run):
    (tmp_path / "file").touch()
    status, _, err = run(command, tmp_path / "none")
    assert status == 1
    assert f"{tmp_path}/none: no such file or directory: create it" in err
    _, _, err = run(command, tmp_path / "file/below")
    assert "below: no such file or directory: a parent in this path is a file" in err
    if command == "check":
        _, _, err = run(command, tmp_path / "file")
        assert f"{tmp_path}/file: this is a file: name the directory that it is in" in err


@pytest.mark.parametrize("command", BOTH)
def test_a_block_device(command, run):
    devices = block_devices()
    if not devices:
        pytest.skip("there is no block device in /dev")
    for device in devices[:3]:
        status, _, err = run(command, device)
        assert status == 1
        number = device.stat().st_rdev
        for point in probe.mount_points(os.major(number), os.minor(number))[:1]:
            assert f"name a directory in {point}, where it is mounted" in err
        assert f"{device} is a block device, but only files can be used" in err
        assert "in memory" not in err


@pytest.mark.parametrize("command", BOTH)
def test_what_is_no_file_on_a_drive(command, tmp_path, run):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/null")):
        status, _, err = run(command, place)
        assert status == 1
        assert f"{place} is neither a directory nor a regular file" in err
    status, out, err = run(command, "/proc")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "/proc is proc, a view of the kernel without files on a drive" in err


def test_a_directory_that_may_not_be_written_to(tmp_path, run, monkeypatch):
    """Root may write anywhere, so the refusal is made."""
    real = os.open

    def refusing(path, flags, *more, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    _, _, err = run("bench", tmp_path)
    assert f"error: no file can be made in {tmp_path} (Permission denied): give a" in err
    assert "page cache" not in err
