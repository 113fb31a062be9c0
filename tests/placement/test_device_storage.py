"""State in device memory over storage that fails, and over KvikIO at the boundary of a fake GPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gds.backends.kvikio
import gds.buffers.cuda
import offload
import offload.placement.choose
from gds import MemoryBackend, StorageError
from gds.backends.kvikio import KvikioBackend
from gds.backends.kvikio_file import Used
from gds.errors import RefusedError
from gds.probe import direct_io
from offload.errors import BrokenOptimizerError
from offload.placement.model import Rates
from offload.placement.rates import MeasurementSetup
from tests.crash.fault_backend import FaultBackend
from tests.crash.flipping import FlippingBackend
from tests.fake_gpu.backend import DeviceBackend
from tests.fake_gpu.device import on_device, values
from tests.fake_gpu.machine import FakeGpu, installed
from tests.numerics.models import Mixed
from tests.numerics.pairs import CASES, Cut
from tests.numerics.reference import assert_same_bits
from tests.placement.test_device_placement import ON_DEVICE, device_pair
from tests.placement.test_host_placement import DevicePair, give_device_gradients, train


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("nth", [1, 4, 9])
def test_a_transfer_that_fails_breaks_the_step_and_a_restore_mends_it(kind, nth, device, compute):
    faults = FaultBackend(MemoryBackend(), "later")
    case = CASES["sgd-nesterov"]
    pair = DevicePair(
        case,
        Cut(3 * 4096, 2, settings=ON_DEVICE),
        DeviceBackend(faults, device),
        live=on_device(Mixed()),
    )
    train(pair, (0, 1))
    pair.optimizer.checkpoint().result()
    sealed = [values(p).clone() for p in pair.live.parameters()]
    # Of the next step the first reads have been done ahead.
    faults.fail(kind, nth, forever=False)

    def go_on() -> None:
        for step in (2, 3):
            give_device_gradients(step, pair.live)
            pair.optimizer.step()
        pair.optimizer.synchronize()

    with pytest.raises(StorageError):
        go_on()
    assert faults.num_failed == 1
    faults.repair()
    with pytest.raises((BrokenOptimizerError, StorageError)):
        pair.optimizer.step()
    assert pair.optimizer.restore().step == 2
    for parameter, expected in zip(pair.live.parameters(), sealed, strict=True):
        assert_same_bits(values(parameter), expected, "restored")
    train(pair, (2, 7))
    pair.assert_same_state()
    pair.optimizer.close()
    assert faults.violations == []


def test_state_that_was_read_wrong_once_is_read_again(device, compute, caplog):
    """The host says whether the drive has the right bytes; then they are read to the device."""
    flipping = FlippingBackend(MemoryBackend())
    pair = DevicePair(
        CASES["sgd-nesterov"],
        Cut(3 * 4096, 2, settings=ON_DEVICE),
        DeviceBackend(flipping, device),
        live=on_device(Mixed()),
    )
    train(pair, (0, 1))
    pair.optimizer.checkpoint().result()
    flipping.flips, flipping.left = "/momentum_buffer.safetensors", 2
    assert pair.optimizer.restore().step == 2
    train(pair, (2, 7))
    pair.assert_same_state()
    pair.optimizer.close()
    assert flipping.num_flipped == {"read": 2}
    assert caplog.text.count("one read returned other data") == 2


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with installed(monkeypatch) as fake:
        yield fake


@pytest.fixture
def directory(tmp_path: Path) -> str:
    if not (found := direct_io(str(tmp_path))).supported:
        pytest.skip(f"no direct I/O in {tmp_path}: {found.reason}")
    return str(tmp_path / "store")


@pytest.mark.parametrize("num_drives", [1, 2])
@pytest.mark.parametrize("path", ["gds", "bounce"])
def test_kvikio_moves_state_between_drives_and_device(
    path, num_drives, gpu, directory, device, compute, monkeypatch
):
    gpu.gds = path == "gds"
    used = Used(path, "" if gpu.gds else "there is no nvidia-fs")
    monkeypatch.setattr(gds.backends.kvikio, "_examined", lambda _: {"read": used, "write": used})
    made: list[KvikioBackend] = []
    original = KvikioBackend.__init__

    def remember(self: KvikioBackend, **arguments: object) -> None:
        original(self, **arguments)
        made.append(self)

    monkeypatch.setattr(KvikioBackend, "__init__", remember)
    pair = DevicePair(
        CASES["sgd-nesterov"],
        Cut(
            3 * 4096,
            3,
            settings={**ON_DEVICE, "drives": offload.DriveTuning(shares=(1,) * num_drives)},
        ),
        None,
        [f"{directory}{number}" for number in range(num_drives)],
        live=on_device(Mixed()),
    )
    train(pair)
    pair.assert_same_state()
    stats = pair.optimizer.stats()
    assert len(made) == num_drives
    for moved in (backend.moved() for backend in made):
        assert moved["read"][path] > 0
        assert moved["write"]["compat"] == 0
        if path == "gds":
            assert moved["write"]["gds"] > moved["write"]["bounce"], "partial blocks only"
    assert (stats.to_host_bytes, stats.to_device_bytes) == (device.num_fetched, 0)
    pair.reopen(live=on_device(Mixed(seed=99)))
    assert pair.optimizer.restore().step == 4
    pair.assert_same_parameters()
    train(pair, (9,))
    pair.optimizer.close()


def test_between_synchronize_and_the_next_step_nothing_of_ours_runs_on_the_device(
    gpu, directory, device, compute, monkeypatch
):
    """So a CUDA graph may be captured then: work of other threads would make the capture fail."""
    used = Used("bounce", "there is no nvidia-fs")
    monkeypatch.setattr(gds.backends.kvikio, "_examined", lambda _: {"read": used, "write": used})
    is_capturing = False
    noticed: list[str] = []

    def slow(call: str, _: int) -> str:
        time.sleep(0.02)  # so that what is not waited for ends later
        if is_capturing:
            noticed.append(call)
        return ""

    cut = Cut(3 * 4096, 3, settings=ON_DEVICE)
    pair = DevicePair(CASES["sgd-nesterov"], cut, None, directory, live=on_device(Mixed()))
    train(pair, (0,))
    gpu.refuses = slow
    train(pair, (1,))
    assert len(gpu.copies) > 0
    pair.optimizer.synchronize()
    is_capturing = True
    num_computed, num_copies = device.num_computed, len(gpu.copies)
    give_device_gradients(7, pair.live)  # what a capture records
    time.sleep(0.1)
    assert (device.num_computed, len(gpu.copies), noticed) == (num_computed, num_copies, [])
    is_capturing = False
    gpu.refuses = lambda _call, _nbytes: ""
    train(pair, (7,))
    pair.assert_same_state()
    pair.optimizer.close()


def test_without_the_libraries_the_remedy_is_named_before_anything_is_made(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(30))
    options = offload.Options(placement="device")
    with pytest.raises(RefusedError, match=r"no CUDA driver|cannot be imported"):
        offload.AdamW([parameter], directory=tmp_path / "store", options=options)
    assert not (tmp_path / "store").exists()


def test_a_backend_without_device_memory_is_refused_before_the_step(device, compute):
    pair = device_pair(CASES["sgd"], Cut(3 * 4096, 2), device)
    pair.optimizer.close()
    options = Cut(3 * 4096, 2, settings=ON_DEVICE).options(MemoryBackend())
    model = on_device(Mixed())
    optimizer = offload.SGD(model.parameters(), directory="/s", lr=0.1, options=options)
    before = [values(p).clone() for p in model.parameters()]
    give_device_gradients(0, model)
    with pytest.raises(RefusedError, match=r"the memory backend allocates host memory only"):
        optimizer.step()
    for parameter, expected in zip(model.parameters(), before, strict=True):
        assert_same_bits(values(parameter), expected, "parameter")


QUICK = Rates(
    drive_gbps=6.0,
    update_gbps=2.0,
    to_host_gbps=50.0,
    to_device_gbps=50.0,
    memory_gbps=60.0,
    direct=False,
)
"""Of a machine whose CPU is slower than its drive."""


@pytest.mark.parametrize(
    ("rates", "place"),
    [
        (QUICK, "device"),
        (dataclasses.replace(QUICK, update_gbps=20.0), "host"),
        ("the drives have not been measured", "host"),
    ],
    ids=["slow-cpu", "fast-cpu", "not-measured"],
)
def test_auto_goes_where_a_step_is_expected_to_take_less(
    rates, place, gpu, directory, device, compute, monkeypatch, caplog
):
    asked = []

    def find(setup: MeasurementSetup) -> Rates | str:
        asked.append(setup)
        return rates

    monkeypatch.setattr(offload.placement.choose, "find_rates", find)
    used = Used("bounce", "there is no nvidia-fs")
    monkeypatch.setattr(gds.backends.kvikio, "_examined", lambda _: {"read": used, "write": used})
    cut = Cut(3 * 4096, 3, settings={"placement": "auto"})
    pair = DevicePair(CASES["sgd-nesterov"], cut, None, directory, live=on_device(Mixed()))
    with caplog.at_level("INFO", "offload"):
        train(pair)
    pair.assert_same_state()
    pair.optimizer.close()
    assert (compute.num_updates > 0) == (place == "device")
    assert len(asked) == 1, "it is decided once"
    assert isinstance(asked[0].backends[0], KvikioBackend)
    assert "steps are taken on the" in caplog.text


def test_auto_stays_on_the_host_where_no_kernel_can_be_compiled(
    gpu, directory, device, compute, monkeypatch, caplog
):
    """As on a GPU that is too old for the compiler: training goes on, and the log says why."""
    asked = []

    def refuse(device: torch.device) -> None:
        asked.append(device)
        raise RefusedError("the kernels cannot be compiled")

    monkeypatch.setattr(offload.placement.choose, "find_rates", lambda _: QUICK)
    monkeypatch.setattr(offload.placement.choose, "compute_on", refuse)
    used = Used("bounce", "there is no nvidia-fs")
    monkeypatch.setattr(gds.backends.kvikio, "_examined", lambda _: {"read": used, "write": used})
    cut = Cut(3 * 4096, 3, settings={"placement": "auto"})
    pair = DevicePair(CASES["sgd-nesterov"], cut, None, directory, live=on_device(Mixed()))
    with caplog.at_level("INFO", "offload"):
        train(pair)
    pair.assert_same_state()
    pair.optimizer.close()
    assert compute.num_updates == 0
    assert len(asked) == 1, "it is tried once"
    assert caplog.text.count("the kernels cannot be compiled") == 1


def test_a_demand_for_the_device_fails_where_no_kernel_can_be_compiled(
    device, compute, monkeypatch
):
    def refuse(device: torch.device) -> None:
        raise RefusedError("the kernels cannot be compiled")

    monkeypatch.setattr(offload.placement.choose, "compute_on", refuse)
    pair = device_pair(CASES["sgd"], Cut(3 * 4096, 2), device)
    give_device_gradients(0, pair.live)
    with pytest.raises(RefusedError, match="the kernels cannot be compiled"):
        pair.optimizer.step()


def test_auto_needs_neither_libraries_nor_a_driver(directory, device, compute):
    cut = Cut(3 * 4096, 3, settings={"placement": "auto"})
    pair = DevicePair(CASES["adamw"], cut, None, directory, live=on_device(Mixed()))
    train(pair)
    pair.assert_same_state()
    pair.optimizer.close()
    assert compute.num_updates == 0


def test_auto_does_without_a_driver_where_the_libraries_are(
    gpu, directory, device, compute, monkeypatch, caplog
):
    monkeypatch.setattr(gds.buffers.cuda, "no_driver", lambda: "libcuda.so.1: cannot open")
    cut = Cut(3 * 4096, 3, settings={"placement": "auto"})
    with caplog.at_level("INFO", "offload"):
        pair = DevicePair(CASES["adamw"], cut, None, directory, live=on_device(Mixed()))
    train(pair, (0,))
    pair.optimizer.close()
    assert "state is updated on the CPU" in caplog.text
    assert "no CUDA driver" in caplog.text
