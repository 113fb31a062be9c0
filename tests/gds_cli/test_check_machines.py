"""What `gds check` makes of machines that are not here: which path, and why not a better one."""

from pathlib import Path

import pytest

from gds import probe
from gds.check import Examination, examine
from gds.check.system import Child, Direct
from tests.gds_cli.machines import CLOSED_MODULE, Machine, cufile

NO_CUDA = "libcuda.so.1: cannot open shared object file: No such file or directory"


def check(machine: Machine, directory: Path) -> Examination:
    found = examine(str(directory), system=machine)
    for finding in found.findings:
        assert finding.value, finding
        assert finding.why or finding.verdict == "ok", finding
        assert not finding.do or finding.verdict != "ok", finding
    return found


def verdict(found: Examination, what: str) -> tuple[str, str, str]:
    (finding,) = (finding for finding in found.findings if finding.what == what)
    return finding.verdict, finding.value, finding.why


def paths(found: Examination) -> tuple[str | None, str | None]:
    return found.reads.path, found.writes.path


def test_a_server_with_everything_uses_gds(machine, tmp_path):
    found = check(machine, tmp_path)
    assert paths(found) == ("gds", "gds")
    assert found.exit_status() == 0
    assert [finding for finding in found.findings if finding.verdict == "missing"] == []
    assert verdict(found, "devices")[1] == "NVIDIA H200 (140 GiB)"
    assert verdict(found, "driver")[1] == "kernel module 580.159.04 (open), CUDA 13.0"
    assert verdict(found, "nvidia-fs")[1] == "2.25.7"
    assert found.reads.why_not == found.writes.why_not == {}
    assert [found.exit_status(name) for name in ("gds", "bounce", "direct", "any")] == [0] * 4


def test_cufile_is_tried_with_its_own_fallback_off_and_its_file_is_gone(machine, tmp_path):
    check(machine, tmp_path)
    (_, (arguments, environment)) = machine.tried
    assert arguments[0] == "cufile"
    assert Path(arguments[1]).parent == tmp_path
    assert not Path(arguments[1]).exists()
    assert environment["CUFILE_ALLOW_COMPAT_MODE"] == "false"


def test_an_h200_whose_disk_is_virtual_copies_through_the_host(machine, tmp_path):
    machine.mount("ext4", "/dev/vda")
    machine.disk("vda", number="254:0", rotational=1)
    machine.number = (254, 0)
    machine.remove("/proc/driver/nvidia-fs/version")
    (machine.root / "proc/driver/nvidia-fs").rmdir()
    machine.cufile = None
    found = check(machine, tmp_path)
    assert paths(found) == ("bounce", "bounce")
    assert found.exit_status() == 3
    assert "vda is not an NVMe drive" in found.reads.why_not["gds"]
    assert "nvidia-fs is not loaded" in found.reads.why_not["gds"]
    assert verdict(found, "nvidia-fs")[0] == "missing"
    assert verdict(found, "device")[0] == "ok", "a virtual disk always says that it rotates"


def test_without_a_driver_posix_is_used_and_no_child_is_started(machine, tmp_path):
    machine.missing_libraries["libcuda.so.1"] = NO_CUDA
    machine.remove("/proc/driver/nvidia/version")
    machine.locked = 8 << 20
    found = check(machine, tmp_path)
    assert paths(found) == ("direct", "direct")
    assert found.exit_status() == 4
    names = ("gds", "bounce", "direct", "any")
    assert [found.exit_status(name) for name in names] == [4, 4, 0, 0]
    for path in ("gds", "bounce"):
        assert NO_CUDA in found.writes.why_not[path]
    assert machine.tried == []
    assert verdict(found, "driver")[0] == "missing"
    assert verdict(found, "memlock limit")[0] == "ok"


@pytest.mark.parametrize(
    ("child", "words"),
    [
        (Child(0, '{"version": 13000, "devices": []}\n{"done": true}\n'), "sees no device"),
        (
            Child(1, '{"stage": "cuInit"}\n{"error": "unknown error (CUDA error 999)"}\n'),
            "cuInit: unknown error (CUDA error 999)",
        ),
    ],
    ids=["no-device", "fails"],
)
def test_a_driver_without_a_device_or_that_fails_is_no_driver(machine, tmp_path, child, words):
    machine.devices = child
    found = check(machine, tmp_path)
    assert paths(found) == ("direct", "direct")
    assert words in found.reads.why_not["bounce"]
    assert words in found.reads.why_not["gds"]


def test_a_container_without_udev_and_modules_where_cufile_spins(machine, tmp_path):
    (machine.root / "run/udev/control").unlink()
    (machine.root / "run/udev").rmdir()
    machine.remove("/proc/modules")
    machine.cufile = Child(None, '{"stage": "cuFileDriverOpen"}\n{"stage": "cuFileHandleRegister"}')
    found = check(machine, tmp_path)
    assert paths(found) == ("bounce", "bounce")
    assert "no answer within 10 s of cuFileHandleRegister" in found.reads.why_not["gds"]
    state, value, why = verdict(found, "surroundings")
    assert state == "limits"
    assert "/run/udev" in value
    assert "loop forever" in why


@pytest.mark.parametrize(
    ("child", "words"),
    [
        (Child(1, '{"stage": "cuFileHandleRegister"}\n{"error": "cuFile error 5027"}'), "5027"),
        (
            Child(-11, '{"stage": "cuFileDriverOpen"}\n'),
            "was killed by signal 11 in cuFileDriverOpen",
        ),
        (Child(1, '{"stage": "cuInit"}\n', "Traceback\nOSError: no space\n"), "OSError: no space"),
        (Child(0, ""), "status 0"),
        (Child(1, "[]\nnot JSON\n"), "status 1"),
    ],
    ids=["refused", "crashed", "raised", "silent", "garbage"],
)
def test_whatever_becomes_of_cufile_is_a_reason_and_not_an_error(machine, tmp_path, child, words):
    machine.cufile = child
    found = check(machine, tmp_path)
    assert found.exit_status() == 3
    assert words in found.reads.why_not["gds"]
    assert verdict(found, "cuFile tried")[0] == "missing"


def test_reads_and_writes_are_judged_apart(machine, tmp_path):
    machine.cufile = cufile(writes=False)
    found = check(machine, tmp_path)
    assert paths(found) == ("gds", "bounce")
    assert found.exit_status() == 3
    assert found.exit_status(directions="read") == 0
    assert found.exit_status("gds", "write") == 3
    assert "wrong data" in found.writes.why_not["gds"]


def test_without_kvikio_data_is_copied_through_the_host(machine, tmp_path):
    del machine.versions["kvikio-cu13"]
    found = check(machine, tmp_path)
    assert paths(found) == ("bounce", "bounce")
    assert found.reads.why_not["gds"] == "cuFile works, but kvikio is not installed"
    state, value, why = verdict(found, "kvikio")
    assert (state, value) == ("missing", "not installed, CuPy 14.2.0, cuFile 1.19.0")
    assert "copied by the host" in why


def test_without_cupy_nothing_moves_device_memory(machine, tmp_path):
    machine.versions = {"kvikio-cu13": "26.10.0"}
    found = check(machine, tmp_path)
    assert paths(found) == ("direct", "direct")
    assert found.reads.why_not["gds"] == "cuFile works, but cupy is not installed"
    assert found.reads.why_not["bounce"] == "cupy is not installed"
    assert verdict(found, "kvikio")[:2] == ("missing", "26.10.0, no CuPy")


def test_peer_to_peer_stands_in_for_nvidia_fs(machine, tmp_path):
    machine.remove("/proc/driver/nvidia-fs/version")
    (machine.root / "proc/driver/nvidia-fs").rmdir()
    machine.add("/etc/cufile.json", '{"properties": {"use_pci_p2pdma": true,}}')
    found = check(machine, tmp_path)
    assert found.reads.path == "gds"
    assert verdict(found, "nvidia-fs")[0] == "ok"
    assert verdict(found, "PCI peer-to-peer")[1] == "switched on"
    machine.variables["CUFILE_USE_PCIP2PDMA"] = "false"
    assert verdict(check(machine, tmp_path), "PCI peer-to-peer")[0] == "limits"
    machine.variables["CUFILE_USE_PCIP2PDMA"] = "true"
    machine.add("/proc/driver/nvidia/version", CLOSED_MODULE)
    assert "open kernel module" in verdict(check(machine, tmp_path), "PCI peer-to-peer")[2]
    machine.release = "5.15.0"
    assert "6.2" in verdict(check(machine, tmp_path), "PCI peer-to-peer")[2]


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        ('// a comment\n{"properties": {"allow_compat_mode": true}}', "ok", ""),
        ('{/* "x" */ "logging": {"dir": "/a//b"}, "properties": {}, }', "ok", ""),
        ('{"properties": {"force_compat_mode": true}}', "limits", "copy through the host"),
        ('{"properties": ', "limits", "not JSON"),
        ("[]", "limits", "no object 'properties'"),
        ('{"properties": []}', "limits", "no object 'properties'"),
    ],
    ids=["comment", "slashes", "forced", "cut", "list", "no-object"],
)
def test_the_configuration_of_cufile_is_read_as_cufile_reads_it(
    machine, tmp_path, text, state, words
):
    machine.add("/etc/cufile.json", text)
    found = verdict(check(machine, tmp_path), "cuFile configuration")
    assert found[0] == state
    assert words in found[2]


def test_the_configuration_that_the_environment_names_is_the_one(machine, tmp_path):
    machine.add("/etc/cufile.json", '{"properties": {"force_compat_mode": true}}')
    machine.variables["CUFILE_ENV_PATH_JSON"] = "/opt/cufile.json"
    assert "cannot be read" in verdict(check(machine, tmp_path), "cuFile configuration")[2]
    machine.add("/opt/cufile.json", '{"properties": {}}')
    found = verdict(check(machine, tmp_path), "cuFile configuration")
    assert found[:2] == ("ok", "/opt/cufile.json")


@pytest.mark.parametrize(
    ("filesystem", "options", "words"),
    [
        ("btrfs", "rw", "btrfs is not a file system that it supports"),
        ("overlay", "rw", "overlay is not a file system that it supports"),
        ("ext4", "rw,data=journal", "data=journal"),
    ],
)
def test_a_file_system_that_gds_cannot_use_is_named(machine, tmp_path, filesystem, options, words):
    machine.mount(filesystem, "/dev/nvme0n1p1", more=options)
    machine.number = (0, 45) if filesystem == "btrfs" else machine.number  # numbers of its own
    machine.cufile = None
    found = check(machine, tmp_path)
    assert found.reads.path == "bounce"
    assert words in found.reads.why_not["gds"]
    state, _, why = verdict(found, "GDS here")
    assert (state, words in why) == ("limits", True)
    assert verdict(found, "device")[1].startswith("nvme0n1p1 on nvme0n1, blocks of 512 bytes")


def test_network_file_systems_are_left_to_cufile(machine, tmp_path):
    machine.mount("lustre", "10.0.0.1@tcp:/fs")
    machine.number = (0, 77)
    found = check(machine, tmp_path)
    assert found.reads.path == "gds"
    state, value, why = verdict(found, "file system")
    assert (state, value) == ("limits", "lustre on 10.0.0.1@tcp:/fs")
    assert "served by another machine" in why


@pytest.mark.parametrize(("rotational", "state"), [(0, "ok"), (1, "limits")])
def test_a_raid_is_as_good_as_its_drives(machine, tmp_path, rotational, state):
    machine.disk("nvme1n1", number="259:4")
    machine.disk("sda", number="8:0", rotational=rotational)
    machine.disk("md0", number="9:0", slaves=["nvme0n1p1", "nvme1n1"])
    machine.mount("xfs", "/dev/md0")
    machine.number = (9, 0)
    found = check(machine, tmp_path)
    assert found.reads.path == "gds"
    assert "md0 on nvme0n1+nvme1n1" in verdict(found, "device")[1]
    machine.disk("md0", number="9:0", slaves=["sda"])
    machine.cufile = None
    found = check(machine, tmp_path)
    assert "sda is not an NVMe drive" in found.reads.why_not["gds"]
    assert found.reads.path == "bounce"
    assert verdict(found, "device")[0] == state
    machine.disk("dm-0", number="253:0", slaves=["nvme0n1p1"])
    machine.mount("xfs", "/dev/mapper/vg-data")
    machine.number = (253, 0)
    found = check(machine, tmp_path)
    assert "device-mapper" in found.reads.why_not["gds"]
    assert "dm-0 on nvme0n1" in verdict(found, "device")[1]


def test_without_direct_io_the_page_cache_is_used(machine, tmp_path):
    machine.missing_libraries["libcuda.so.1"] = NO_CUDA
    machine.mount("tmpfs", "tmpfs")
    machine.number = (0, 30)
    reason = "tmpfs keeps files in memory"
    machine.direct_io = Direct(None, probe.no_direct_io(reason), "write and read")
    found = check(machine, tmp_path)
    assert paths(found) == ("buffered", "buffered")
    assert found.exit_status() == 5
    assert found.exit_status("direct") == 5
    assert found.exit_status("any") == 0
    assert found.reads.why_not["direct"] == reason
    assert verdict(found, "file system")[0] == "limits"


def test_copies_without_direct_io_are_not_direct(machine, tmp_path):
    machine.direct_io = Direct((0, 0), probe.no_direct_io("the kernel says so"), "write and read")
    machine.cufile = None
    found = check(machine, tmp_path)
    assert found.reads.path == "bounce"
    assert found.exit_status("bounce") == 0
    assert found.exit_status("direct") == 3


def test_a_read_only_mount_can_be_read(machine, tmp_path):
    machine.mount("xfs", "/dev/nvme0n1p1", options="ro,relatime", more="ro")
    machine.may_write = False
    machine.cufile = None
    found = check(machine, tmp_path)
    assert paths(found) == ("bounce", None)
    assert found.exit_status() == 1
    assert found.exit_status("bounce", "read") == 0
    assert set(found.writes.why_not.values()) == {"mounted read-only"}


def test_limits_of_the_machine_are_named(machine, tmp_path):
    machine.release = "5.10.0"
    machine.page = 65536
    machine.locked = 8 << 20
    machine.add("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    machine.direct_io = Direct(None, probe.DirectIO(True, 4096, 4096), "write and read")
    found = check(machine, tmp_path)
    for what in ("kernel", "page size", "memlock limit", "huge pages", "I/O alignment"):
        assert verdict(found, what)[0] == "limits", what


def test_a_machine_of_which_nothing_can_be_read_is_still_checked(tmp_path):
    machine = Machine(tmp_path / "nothing")
    for file in [path for path in machine.root.rglob("*") if path.is_file()]:
        file.unlink()
    machine.missing_libraries["libcuda.so.1"] = NO_CUDA
    found = check(machine, tmp_path)
    assert found.reads.path == "direct"
    assert verdict(found, "file system")[:2] == ("limits", "unknown on an unknown source")
    assert verdict(found, "memory")[0] == "limits"


def test_direct_io_that_could_not_be_tried_is_not_known(machine, tmp_path):
    machine.direct_io = Direct(None, probe.no_direct_io("no file can be made here"), "nothing")
    (found,) = [
        each
        for each in examine(str(tmp_path), system=machine).findings
        if each.what == "direct I/O"
    ]
    assert (found.value, found.verdict) == ("not known (nothing tried)", "limits")
    assert "ext4" not in found.do
