"""`bench.device` over the substitute for a device: what it counts with state in its memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import gds.backends.kvikio
from bench import device as bench_device
from bench._harness import Result
from gds import probe
from gds.backends.kvikio_file import Used
from tests.fake_gpu import device as fake_device
from tests.fake_gpu.machine import FakeGpu, installed

STATE_BYTES = 12 * (128 << 10)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    used = Used("gds", "")
    monkeypatch.setattr(gds.backends.kvikio, "_examined", lambda _: {"read": used, "write": used})
    with installed(monkeypatch) as fake:
        fake.gds = True
        yield fake


def test_state_crosses_to_the_host_as_digests_alone(tmp_path: Path, gpu, device, compute):
    if not probe.direct_io(str(tmp_path)).supported:
        pytest.skip("the temporary directory is not on a drive")
    directory = tmp_path / "scratch"
    directory.mkdir()
    args = bench_device._arguments(["--quick", "--output", str(tmp_path / "results")])
    place = bench_device.Place(put=fake_device.upload, placement="device", settle=lambda: None)
    result = Result("device", args, str(directory))
    bench_device.measure(args, result, str(directory), place)
    found = json.loads(result.write().read_text())
    _, _, crossing, checkpoint = found["claims"]
    assert max(crossing["ratios"]) <= 1e-4
    assert checkpoint["ratios"] == [1.0] * 3
    facts = found["facts"]
    for direction in ("read", "write"):
        assert facts[f"step_{direction}_gds_bytes"] == STATE_BYTES
        assert facts[f"step_{direction}_bounce_bytes"] == 0
