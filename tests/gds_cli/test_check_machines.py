"""What `gds check` makes of machines that are not here: which path, and why not a better one."""

from pathlib import Path

import pytest

from gds import probe
from gds.check import examine
from gds.check.system import Child, Direct
from tests.gds_cli.machines import CLOSED_MODULE, Machine, cufile

NO_CUDA = "libcuda.so.1: cannot open shared object file: No such file or directory"
NAMES = ("gds", "bounce", "direct", "any")


def check(machine, directory):
    found = examine(str(directory), system=machine)
    for finding in found.findings:
        assert finding.value, finding
        assert finding.why or finding.verdict == "ok", finding
        assert not finding.do or finding.verdict != "ok", finding
    return found


def verdict(found, what):
    (finding,) = (finding for finding in found.findings if finding.what == what)
    return finding.verdict, finding.value, finding.why


def paths(found):
    return found.reads.path, found.writes.path


def test_a_server_with_everything_uses_gds(machine, tmp_path):
    found = check(machine, tmp_path)
    assert paths(found) == ("gds", "gds")
    assert [found.exit_status(name) for name in (None, *NAMES)] == [0] * 5
    assert [finding for finding in found.findings if finding.verdict == "missing"] == []
    assert verdict(found, "devices")[1] == "NVIDIA H200 (140 GiB)"
    assert verdict(found, "driver")[1] == "kernel module 580.159.04 (open), CUDA 13.0"
    assert verdict(found, "nvidia-fs")[1] == "2.25.7"
    assert found.reads.why_not == found.writes.why_not == {}
    (_, (arguments, environment)) = machine.tried
    assert arguments[0] == "cufile"
    assert Path(arguments[1]).parent == tmp_path
    assert not Path(arguments[1]).exists()
    assert environment["CUFILE_ALLOW_COMPAT_MODE"] == "false"


# What stands in the way of a path: a change of that server, the path that is left for reads, the
# path that it denies, and words of the reason


def without_nvidia_fs(machine):
    machine.remove("/proc/driver/nvidia-fs/version")
    (machine.root / "proc/driver/nvidia-fs").rmdir()


def on_a_virtual_disk(machine):
    machine.mount("ext4", "/dev/vda")
    machine.disk("vda", number="254:0", rotational=1)
    machine.number, machine.cufile = (254, 0), None
    without_nvidia_fs(machine)


def on(filesystem, number=None, **options):
    def change(machine):
        machine.mount(filesystem, "/dev/nvme0n1p1", **options)
        machine.number = number or machine.number
        machine.cufile = None

    return change


def on_a_raid(machine):
    machine.disk("nvme1n1", number="259:4")
    machine.disk("md0", number="9:0", slaves=["nvme0n1p1", "nvme1n1"])
    machine.mount("xfs", "/dev/md0")
    machine.number = (9, 0)


def without_driver(machine):
    machine.missing_libraries["libcuda.so.1"] = NO_CUDA
    machine.remove("/proc/driver/nvidia/version")


def without_direct_io(machine):
    without_driver(machine)
    machine.mount("tmpfs", "tmpfs")
    machine.number = (0, 30)
    found = probe.no_direct_io("tmpfs keeps files in memory")
    machine.direct_io = Direct(None, found, "write and read")


def without_udev_where_cufile_spins(machine):
    (machine.root / "run/udev/control").unlink()
    (machine.root / "run/udev").rmdir()
    machine.remove("/proc/modules")
    machine.cufile = Child(None, '{"stage": "cuFileDriverOpen"}\n{"stage": "cuFileHandleRegister"}')


def devices(child):
    return lambda machine: setattr(machine, "devices", child)


def tried(child):
    return lambda machine: setattr(machine, "cufile", child)


def versions(**found):
    names = {"kvikio": "kvikio-cu13", "cupy": "cupy-cuda13x"}
    return lambda machine: setattr(machine, "versions", {names[k]: v for k, v in found.items()})


NO_DEVICE = Child(0, '{"version": 13000, "devices": []}\n{"done": true}\n')
FAILS = Child(1, '{"stage": "cuInit"}\n{"error": "unknown error (CUDA error 999)"}\n')
REFUSED = Child(1, '{"stage": "cuFileHandleRegister"}\n{"error": "cuFile error 5027"}')
CRASHED = Child(-11, '{"stage": "cuFileDriverOpen"}\n')

OBSTACLES = {
    "virtual-disk": (on_a_virtual_disk, "bounce", "gds", "vda is not an NVMe drive"),
    "btrfs": (on("btrfs", (0, 45)), "bounce", "gds", "btrfs is not a file system that it supports"),
    "journal": (on("ext4", more="rw,data=journal"), "bounce", "gds", "data=journal"),
    "no-driver": (without_driver, "direct", "bounce", NO_CUDA),
    "no-device": (devices(NO_DEVICE), "direct", "bounce", "sees no device"),
    "driver-fails": (devices(FAILS), "direct", "gds", "cuInit: unknown error (CUDA error 999)"),
    "no-direct-io": (without_direct_io, "buffered", "direct", "tmpfs keeps files in memory"),
    "cufile-spins": (
        without_udev_where_cufile_spins,
        "bounce",
        "gds",
        "no answer within 10 s of cuFileHandleRegister",
    ),
    "cufile-refuses": (tried(REFUSED), "bounce", "gds", "5027"),
    "cufile-crashes": (tried(CRASHED), "bounce", "gds", "killed by signal 11 in cuFileDriverOpen"),
    "no-kvikio": (versions(cupy="14.2.0"), "bounce", "gds", "cuFile works, but kvikio is not inst"),
    "no-cupy": (versions(kvikio="26.10.0"), "direct", "bounce", "cupy is not installed"),
}


@pytest.mark.parametrize(("change", "left", "denied", "why"), OBSTACLES.values(), ids=OBSTACLES)
def test_what_stands_in_the_way_of_a_path_is_said(machine, tmp_path, change, left, denied, why):
    change(machine)
    found = check(machine, tmp_path)
    assert paths(found) == (left, left)
    assert why in found.reads.why_not[denied]
    assert why in found.writes.why_not[denied]
    assert found.exit_status() == {"bounce": 3, "direct": 4, "buffered": 5}[left]
    meets = {"bounce": (3, 0, 0, 0), "direct": (4, 4, 0, 0), "buffered": (5, 5, 5, 0)}[left]
    assert tuple(found.exit_status(name) for name in NAMES) == meets


def test_without_a_driver_no_child_is_started(machine, tmp_path):
    without_driver(machine)
    machine.locked = 8 << 20
    assert verdict(check(machine, tmp_path), "memlock limit")[0] == "ok"
    assert machine.tried == []


def test_reads_and_writes_are_judged_apart(machine, tmp_path):
    machine.cufile = cufile(writes=False)
    found = check(machine, tmp_path)
    assert paths(found) == ("gds", "bounce")
    assert found.exit_status() == 3
    assert found.exit_status(directions="read") == 0
    assert found.exit_status("gds", "write") == 3
    assert "wrong data" in found.writes.why_not["gds"]
    on("xfs", options="ro,relatime", more="ro")(machine)
    machine.may_write = False
    found = check(machine, tmp_path)
    assert paths(found) == ("bounce", None)
    assert found.exit_status() == 1
    assert found.exit_status("bounce", "read") == 0
    assert set(found.writes.why_not.values()) == {"mounted read-only"}


def test_peer_to_peer_stands_in_for_nvidia_fs(machine, tmp_path):
    without_nvidia_fs(machine)
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
        ('{/* "x" */ "logging": {"dir": "/a//b"}, "properties": {}, }', "ok", ""),
        ('{"properties": {"force_compat_mode": true}}', "limits", "copy through the host"),
        ('{"properties": ', "limits", "not JSON"),
    ],
    ids=["slashes", "forced", "cut"],
)
def test_the_configuration_of_cufile_is_read_as_cufile_reads_it(
    machine, tmp_path, text, state, words
):
    machine.add("/etc/cufile.json", text)
    found = verdict(check(machine, tmp_path), "cuFile configuration")
    assert (found[0], words in found[2]) == (state, True)
    machine.variables["CUFILE_ENV_PATH_JSON"] = "/opt/cufile.json"
    assert "cannot be read" in verdict(check(machine, tmp_path), "cuFile configuration")[2]
    machine.add("/opt/cufile.json", '{"properties": {}}')
    found = verdict(check(machine, tmp_path), "cuFile configuration")
    assert found[:2] == ("ok", "/opt/cufile.json")


def test_network_file_systems_and_raids_of_nvme_are_left_to_cufile(machine, tmp_path):
    machine.mount("lustre", "10.0.0.1@tcp:/fs")
    machine.number = (0, 77)
    found = check(machine, tmp_path)
    assert found.reads.path == "gds"
    state, value, why = verdict(found, "file system")
    assert (state, value) == ("limits", "lustre on 10.0.0.1@tcp:/fs")
    assert "served by another machine" in why
    on_a_raid(machine)
    found = check(machine, tmp_path)
    assert found.reads.path == "gds"
    assert "md0 on nvme0n1+nvme1n1" in verdict(found, "device")[1]


def test_a_machine_of_which_nothing_can_be_read_is_still_checked(tmp_path):
    machine = Machine(tmp_path / "nothing")
    for file in [path for path in machine.root.rglob("*") if path.is_file()]:
        file.unlink()
    machine.missing_libraries["libcuda.so.1"] = NO_CUDA
    found = check(machine, tmp_path)
    assert found.reads.path == "direct"
    assert verdict(found, "file system")[:2] == ("limits", "unknown on an unknown source")
    assert verdict(found, "memory")[0] == "limits"
