"""What is found out about a directory, against what the kernel says."""

import os
import subprocess
from pathlib import Path

import pytest

from gds import ALIGNMENT, PosixBackend, libc, probe
from gds.buffers import HostBuffer

TABLE = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:30 / /data rw - xfs /dev/vdb rw
31 22 0:31 / /data/with\040space rw - btrfs /dev/vdc rw
32 22 0:32 / /dev/shm rw - tmpfs tmpfs rw
33 22 0:33 / /dev/shm rw master:2 propagate_from:1 - ext4 /dev/vdd rw
34 22 0:34 / /back\134slash rw - ramfs none rw
35 22 0:35 / /box rw - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w
36 22 0:36 / /lazy rw - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w,volatile
not a line
"""


@pytest.mark.parametrize(
    ("path", "filesystem", "volatile"),
    [
        ("/", "ext4", False),
        ("/home/user", "ext4", False),
        ("/data", "xfs", False),
        ("/data/run", "xfs", False),
        ("/database", "ext4", False),
        ("/data/with space/run", "btrfs", False),
        ("/dev/shm/x", "ext4", False),
        ("/back\\slash/x", "ramfs", True),
        ("/box/x", "overlay", False),
        ("/lazy/x", "overlay", True),
    ],
)
def test_the_longest_and_last_mount_point_holds_a_path(path, filesystem, volatile):
    found = probe.find_mount(TABLE, path)
    assert (found.filesystem, found.volatile) == (filesystem, volatile)


def test_the_mount_that_the_kernel_names_decides_and_a_table_that_is_no_use_is_unknown():
    assert probe.find_mount(TABLE, "/dev/shm/x", mount_id=32).filesystem == "tmpfs"
    assert probe.find_mount(TABLE, "/dev/shm/x", mount_id=999).filesystem == "ext4"
    assert probe.find_mount("", "/").filesystem == "unknown"
    table = "30 1 0:30 / /data ro,noatime shared:1 - ext4 /dev/vdb rw,data=journal"
    assert probe.find_mount(table, "/data/x").options == ("ro", "noatime", "rw", "data=journal")
    assert probe.find_mount("30 1 0:30 / /data - ext4 /dev/vdb", "/data").options == ()


REMOTE = ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "fuseblk", "fuse.sshfs", "ceph", "virtiofs"]
REMOTE += ["fuse.bindfs", "afs", "lustre", "gpfs", "beegfs", "glusterfs", "vboxsf"]
LOCAL = ["ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs"]


def test_what_another_machine_or_a_program_serves_is_remote():
    for filesystem in REMOTE + LOCAL:
        table = f"22 1 254:0 / / rw - ext4 /dev/vda rw\n30 22 0:30 / /data rw - {filesystem} src rw"
        found = probe.find_mount(table, "/data/run")
        assert (found.filesystem, found.remote) == (filesystem, filesystem in REMOTE)
        assert not probe.find_mount(table, "/home").remote
        said = probe.describe_remote(filesystem)
        assert said.startswith(f"files on {filesystem} are served by ") or filesystem in LOCAL


def test_the_mount_of_a_directory_is_what_the_system_says(tmp_path):
    said = subprocess.run(
        ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True
    ).stdout.strip()
    found = probe.mount_of(str(tmp_path)).filesystem
    assert {"ext2/ext3": "ext4", "overlayfs": "overlay"}.get(said, said) == found
    (tmp_path / "link").symlink_to("/proc")
    assert probe.mount_of(f"{tmp_path}/link").filesystem == "proc"


def test_the_kernel_takes_the_alignment_that_it_told_and_no_less(directory):
    path = Path(directory, "file")
    path.write_bytes(bytes(2 * ALIGNMENT))
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        if libc.direct_alignment(fd) is None:
            pytest.skip("the kernel does not tell")
        required = probe.required_alignment(fd)
        assert required is not None
        memory, offset = required
        view = HostBuffer(2 * ALIGNMENT).memoryview()
        assert os.preadv(fd, [view[memory : memory + offset]], offset) == offset
        with pytest.raises(OSError, match="Invalid argument"):
            os.preadv(fd, [view[:offset]], offset // 2)
        with pytest.raises(OSError, match="Invalid argument"):
            os.preadv(fd, [view[: offset // 2]], 0)
    finally:
        os.close(fd)


def test_an_alignment_above_the_layouts_is_refused_with_its_number(directory, monkeypatch):
    monkeypatch.setattr(libc, "direct_alignment", lambda _: (0, 0))
    assert "do not support direct I/O" in probe.direct_io(directory).reason
    monkeypatch.setattr(libc, "direct_alignment", lambda _: (512, 16384))
    assert "16384" in probe.direct_io(directory).reason
    with PosixBackend() as backend:
        with pytest.warns(probe.DirectIOUnavailable, match="16384"):
            file = backend.create(f"{directory}/file", ALIGNMENT)
        assert not file.direct
        assert not backend.capabilities(directory).direct


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="there is no /dev/shm")
def test_memory_is_not_direct_although_the_kernel_accepts_the_flag():
    found = probe.direct_io("/dev/shm")
    assert not found.supported
    assert "memory" in found.reason
    assert probe.mount_of("/dev/shm").volatile


@pytest.mark.parametrize("named", [False, True], ids=["unnamed-file", "named-file"])
def test_the_probe_leaves_nothing_behind(tmp_path, monkeypatch, named):
    if named:  # what file systems without O_TMPFILE answer
        real_open = os.open

        def without_tmpfile(path, flags, mode=0o777):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(95, os.strerror(95), path)
            return real_open(path, flags, mode)

        monkeypatch.setattr(os, "open", without_tmpfile)
    found = probe.direct_io(str(tmp_path))
    assert found.supported is (found.reason == "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "answer", "words"),
    [
        ("pwritev", OSError(22, "Invalid argument"), "refuses the transfer"),
        ("preadv", OSError(22, "Invalid argument"), "refuses the transfer"),
        ("pwritev", 100, "100"),
        ("preadv", 2 * ALIGNMENT, "did not return"),
        ("pwritev", OSError(28, "a full disk denies nothing"), ""),
    ],
    ids=["write-refused", "read-refused", "short-write", "read-lies", "disk-full"],
)
def test_a_file_system_that_lies_is_found_out(directory, monkeypatch, call, answer, words):
    def lie(fd, buffers, offset):
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(os, call, lie)
    found = probe.direct_io(directory)
    assert found.supported is (words == "")
    assert words in found.reason
