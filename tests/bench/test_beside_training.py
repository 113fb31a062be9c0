"""`bench.beside_training` over a GPU made of host memory: all but the time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gds.backends.kvikio
from bench import beside_training
from bench._harness import Result
from gds import StorageError, probe
from gds.kvikio import Used
from tests.fake_gpu.machine import FakeGpu, installed

STATE_BYTES = 12 << 20


@pytest.fixture(params=[True, False], ids=["gds", "no gds"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with installed(monkeypatch) as fake:
        fake.gds = request.param
        fake.compat_is_measured = True
        used = Used("gds", "") if fake.gds else Used("bounce", "no nvidia-fs")
        monkeypatch.setattr(
            gds.backends.kvikio, "_examined", lambda _: {"read": used, "write": used}
        )
        yield fake


def measured(tmp_path: Path, work: beside_training.Work) -> dict[str, Any]:
    if not probe.direct_io(str(tmp_path)).supported:
        pytest.skip("the temporary directory is not on a drive")
    directory = tmp_path / "scratch"
    directory.mkdir()
    args = beside_training._arguments(["--quick", "--output", str(tmp_path / "results")])
    result = Result("beside_training", args, str(directory))
    beside_training.measure(args, result, str(directory), work)
    assert not [path for path in directory.rglob("*") if path.is_file()]
    found: dict[str, Any] = json.loads(result.write().read_text())
    return found


def test_work_is_measured_alone_and_beside_the_transfers_of_each_path(
    tmp_path: Path, gpu: FakeGpu
) -> None:
    pieces: list[int] = []
    found = measured(tmp_path, pieces.append)
    paths = ["gds", "bounce", "compat"] if gpu.gds else ["bounce", "compat"]
    assert pieces == [20] * (2 + 6 * len(paths))
    assert [claim["limit"] for claim in found["claims"]] == [1.10] * (len(paths) - 1) + [None]
    for path in paths:
        for name in ("work", "work_beside", "transfers"):
            assert len(found["samples"][f"{path}_{name}_s"]) == 3
        beside = len(found["samples"][f"{path}_transfers_beside_s"])
        assert beside >= 3
        # all reads and writes of state took the path that was asked for, and no other
        written = found["facts"][f"{path}_write_bytes"]
        assert written >= (3 + beside) * STATE_BYTES
        assert found["facts"][f"{path}_read_bytes"] >= (3 + beside) * STATE_BYTES
    assert len(found["skipped"]) == (not gpu.gds)
    assert all("no nvidia-fs" in reason for reason in found["skipped"])
    assert gpu.default_stream, "compatibility mode is there to be compared with"


def test_a_failing_transfer_is_raised_when_the_work_has_ended() -> None:
    class Failing:
        def run(self, _: int) -> float:
            raise StorageError(5, "read", "a")

    ended: list[int] = []
    with pytest.raises(StorageError):
        beside_training.Beside(Failing())(lambda: ended.append(1))  # type: ignore[arg-type]
    assert ended == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_it_runs_on_a_device(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    if not probe.direct_io(str(tmp_path)).supported:
        pytest.skip("the temporary directory is not on a drive")
    output = str(tmp_path / "results")
    beside_training.main(["--quick", "--directory", str(tmp_path), "--output", output])
    (path,) = (tmp_path / "results").iterdir()
    assert len(json.loads(path.read_text())["claims"]) >= 1
