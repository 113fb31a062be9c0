"""The command line in this process, and directories and machines for it."""

from pathlib import Path

import pytest

from gds import cli, probe
from tests.command_line import Run, runner
from tests.gds_cli.machines import OPEN_MODULE, Machine, cufile


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A server with an H200, nvidia-fs and XFS on an NVMe drive, as NVIDIA documents it."""
    found = Machine(tmp_path / "root")
    found.mount("xfs", "/dev/nvme0n1p1")
    found.disk("nvme0n1", partition="nvme0n1p1")
    found.add("/proc/driver/nvidia/version", OPEN_MODULE)
    found.add("/proc/driver/nvidia-fs/version", "version: 2.25.7\n")
    found.versions = {"kvikio-cu13": "26.10.0", "cupy-cuda13x": "14.2.0", "nvidia-cufile": "1.19.0"}
    found.cufile = cufile()
    return found


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; gives its status, standard output and error."""
    return runner("gds", cli.main, monkeypatch, capsys)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """A directory that takes direct I/O."""
    if not (found := probe.direct_io(str(tmp_path))).supported:
        pytest.skip(f"no direct I/O in {tmp_path}: {found.reason}")
    return tmp_path
