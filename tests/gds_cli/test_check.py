"""`gds check` on this machine: what it prints, its exit status, and that it leaves nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gds import libc, probe
from gds.check import System, examine

EXAMINATION = {
    "schema", "directory", "reads", "writes", "backends", "findings", "required", "for",
    "exit_status",
}  # fmt: skip
FINDING = {"section", "what", "value", "verdict", "why", "do"}
WHAT = [
    "kernel", "page size", "huge pages", "memory", "memlock limit",
    "file system", "mount", "device", "I/O alignment", "direct I/O", "GDS here", "access",
    "driver", "devices", "nvidia-fs", "PCI peer-to-peer", "cuFile configuration", "kvikio",
    "surroundings", "cuFile tried",
]  # fmt: skip


def test_json_has_the_keys_that_scripts_rely_on(run, tmp_path):
    status, out, err = run("check", tmp_path, "--json")
    found = json.loads(out)
    assert found.keys() == EXAMINATION
    assert found["schema"] == 1
    assert found["exit_status"] == status
    assert found["directory"] == str(tmp_path)
    assert err == ""
    for direction in ("reads", "writes"):
        assert found[direction].keys() == {"path", "direct", "why_not"}
        assert list(found[direction]["why_not"]) == ["gds", "bounce", "direct", "buffered"]
    for finding in found["findings"]:
        assert finding.keys() == FINDING
        assert finding["verdict"] in ("ok", "limits", "missing")
    named = [finding["what"] for finding in found["findings"]]
    assert [what for what in WHAT if what in named or what != "device"] == named


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


def test_what_statx_tells_is_shown(run, drive):
    with probe.scratch_file(str(drive)) as fd:
        told = libc.direct_alignment(fd)
    if told is None:
        pytest.skip("the kernel does not tell")
    _, out, _ = run("check", drive)
    assert f"memory {told[0]} bytes, offset and length {told[1]} bytes" in out


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="there is no /dev/shm")
def test_memory_is_no_drive(run):
    status, out, _ = run("check", "/dev/shm", "--for", "write")
    if not System().library_error("libcuda.so.1"):
        pytest.skip("there is a CUDA driver")
    assert status == 5
    assert "lost at power-off" in out


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_what_is_no_directory_is_one_line_and_status_1(run, tmp_path, kind):
    path = tmp_path / kind
    if kind == "file":
        path.touch()
    status, out, err = run("check", path)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert str(path) in err


@pytest.mark.parametrize("arguments", [["check"], ["check", "/", "--require", "x"], ["nothing"]])
def test_wrong_usage_is_status_2(run, arguments):
    assert run(*arguments)[0] == 2


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


@pytest.mark.parametrize("command", [["--help"], ["check", "."], ["bench", "--help"]])
def test_commands_start_without_torch_and_numpy(tmp_path: Path, command: list[str]) -> None:
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


def test_version_is_printed(run):
    status, out, _ = run("--version")
    assert status == 0
    assert out.startswith("gds ")
