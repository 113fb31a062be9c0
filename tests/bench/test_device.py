"""The measurement of state in device memory: on a device with ``-m gpu``, its parts without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gds.backends.kvikio
import offload.device.boundary
from bench import device
from bench._harness import BenchError, Result
from gds import probe
from gds.kvikio import Used
from tests.fake_gpu import device as fake_device
from tests.fake_gpu.device import FakeDevice
from tests.fake_gpu.machine import FakeGpu, installed

PARAMETERS = 128 << 10
STATE_BYTES = 12 * PARAMETERS


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    if not probe.direct_io(str(tmp_path)).supported:
        pytest.skip("the temporary directory is not on a drive")
    return tmp_path


@pytest.fixture(params=["gds", "bounce"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """CuPy and KvikIO of a machine that is not there."""
    with installed(monkeypatch) as fake:
        fake.gds = request.param == "gds"
        used = Used("gds", "") if fake.gds else Used("bounce", "no nvidia-fs")
        monkeypatch.setattr(
            gds.backends.kvikio, "_examined", lambda _: {"read": used, "write": used}
        )
        yield fake


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parameters on a device whose every transfer is counted."""
    made = FakeDevice(late=False)
    fake_device.use(made)
    monkeypatch.setitem(offload.device.boundary.BOUNDARIES, "meta", lambda _: made)
    monkeypatch.setattr(offload.device.boundary, "_made", {})
    return fake_device.upload


def test_all_is_measured_but_for_the_device(drive: Path, gpu: FakeGpu, put: Any) -> None:
    """With the step on the CPU in the place of the one that is to be measured."""
    settled = []
    place = device.Place(put=put, placement="host", settle=partial(settled.append, 1))
    args = device._arguments(["--quick", "--output", str(drive / "results")])
    directory = drive / "scratch"
    directory.mkdir()
    result = Result("device", args, str(directory))
    device.measure(args, result, str(directory), place)
    found = json.loads(result.write().read_text())

    step, on_cpu, crossing, checkpoint = found["claims"]
    assert (step["limit"], on_cpu["limit"], checkpoint["limit"]) == (1.10, None, 1.0)
    assert all(len(claim["ratios"]) == 3 for claim in found["claims"])
    for name in ("raw_s", "device_s", "host_s"):
        assert len(found["samples"][name]) == 3
    assert settled, "the device may still be at work when a sample ends"
    # On the CPU, gradients and parameters cross to the host, and parameters back.
    assert crossing["ratios"] == [6 * PARAMETERS / STATE_BYTES] * 3
    assert checkpoint["ratios"] == [1.0] * 3
    facts = found["facts"]
    assert facts["state_bytes"] == STATE_BYTES
    assert facts["step_read_bytes"] == facts["step_written_bytes"] == STATE_BYTES
    assert facts["step_to_host_bytes"] == 4 * PARAMETERS
    assert facts["step_to_device_bytes"] == 2 * PARAMETERS
    assert facts["checkpoint_to_host_bytes"] == 2 * PARAMETERS
    assert facts["checkpoint_to_device_bytes"] == 0
    assert facts["read_path"] == facts["write_path"] == ("gds" if gpu.gds else "bounce")
    assert len(found["skipped"]) == (0 if gpu.gds else 2)
    assert all("no nvidia-fs" in reason for reason in found["skipped"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_refuses_before_anything_is_made(drive: Path) -> None:
    with pytest.raises(BenchError, match="no CUDA device"):
        device.main(["--quick", "--directory", str(drive), "--output", str(drive)])
    assert list(drive.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_it_runs_on_a_device(drive: Path) -> None:
    pytest.importorskip("cupy")
    output = drive / "results"
    device.main(["--quick", "--directory", str(drive), "--output", str(output)])
    (path,) = output.iterdir()
    found = json.loads(path.read_text())
    assert len(found["claims"]) == 4
    _, _, crossing, checkpoint = found["claims"]
    assert max(crossing["ratios"]) <= 1e-4
    assert checkpoint["ratios"] == [1.0] * 3
    facts = found["facts"]
    for direction in ("read", "write"):
        moved = sum(facts[f"step_{direction}_{path}_bytes"] for path in ("gds", "bounce"))
        assert moved == STATE_BYTES
        assert facts[f"step_{direction}_compat_bytes"] == 0
