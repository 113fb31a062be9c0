"""State in device memory over storage that fails, a device that fails, and KvikIO's paths."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import offload
import offload.placement.choose
import offload.stream.memory
from gds import MemoryBackend, StorageError
from gds.backends.kvikio import KvikioBackend
from gds.buffers.cuda import lost_error
from gds.errors import DeviceLostError, DeviceMemoryError, RefusedError
from offload.errors import BrokenOptimizerError
from tests.crash.fault_backend import FaultBackend
from tests.crash.flipping import FlippingBackend
from tests.fake_gpu.backend import DeviceBackend
from tests.fake_gpu.device import FakeDevice, on_device, values
from tests.numerics.models import Mixed
from tests.numerics.pairs import CASES, Cut
from tests.numerics.reference import assert_same_bits
from tests.placement.pairs import ON_DEVICE, DevicePair, device_pair, give_device_gradients, train

MIB = 1 << 20
CASE, CUT = CASES["sgd-nesterov"], Cut(3 * 4096, 2)


def copies_of(pair: DevicePair) -> list[torch.Tensor]:
    return [values(p).clone() for p in pair.live.parameters()]


def assert_parameters(pair: DevicePair, expected: list[torch.Tensor]) -> None:
    for parameter, value in zip(pair.live.parameters(), expected, strict=True):
        assert_same_bits(values(parameter), value, "parameter")


# Storage.


@pytest.mark.parametrize(("kind", "nth"), [("read", 1), ("read", 9), ("write", 1), ("write", 4)])
def test_a_transfer_that_fails_breaks_the_step_and_a_restore_mends_it(kind, nth, device, compute):
    faults = FaultBackend(MemoryBackend(), "later")
    pair = device_pair(CASE, CUT, device, backend=DeviceBackend(faults, device))
    train(pair, (0, 1))
    pair.optimizer.checkpoint().result()
    sealed = copies_of(pair)
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
    assert_parameters(pair, sealed)
    train(pair, (2, 7))
    pair.assert_same_state()
    pair.optimizer.close()
    assert faults.violations == []


def test_state_that_was_read_wrong_once_is_read_again(device, compute, caplog):
    """The host says whether the drive has the right bytes; then they are read to the device."""
    flipping = FlippingBackend(MemoryBackend())
    pair = device_pair(CASE, CUT, device, backend=DeviceBackend(flipping, device))
    train(pair, (0, 1))
    pair.optimizer.checkpoint().result()
    flipping.flips, flipping.left = "/momentum_buffer.safetensors", 2
    assert pair.optimizer.restore().step == 2
    train(pair, (2, 7))
    pair.assert_same_state()
    pair.optimizer.close()
    assert flipping.num_flipped == {"read": 2}
    assert caplog.text.count("one read returned other data") == 2


@pytest.mark.parametrize(
    ("gpu", "num_drives"), [("gds", 1), ("gds", 2), ("bounce", 1)], indirect=["gpu"]
)
def test_kvikio_moves_state_between_drives_and_device(
    gpu, num_drives, directory, device, compute, monkeypatch
):
    made: list[KvikioBackend] = []
    original = KvikioBackend.__init__

    def remember(self: KvikioBackend, **arguments: object) -> None:
        original(self, **arguments)
        made.append(self)

    monkeypatch.setattr(KvikioBackend, "__init__", remember)
    drives = offload.DriveTuning(shares=(1,) * num_drives)
    cut = Cut(3 * 4096, 3, settings={**ON_DEVICE, "drives": drives})
    directories = [f"{directory}{number}" for number in range(num_drives)]
    pair = DevicePair(CASE, cut, None, directories, live=on_device(Mixed()))
    train(pair)
    pair.assert_same_state()
    stats = pair.optimizer.stats()
    assert len(made) == num_drives
    for moved in (backend.moved() for backend in made):
        assert moved["read"]["gds" if gpu.gds else "bounce"] > 0
        assert moved["write"]["compat"] == 0
        if gpu.gds:
            assert moved["write"]["gds"] > moved["write"]["bounce"], "partial blocks only"
    assert (stats.to_host_bytes, stats.to_device_bytes) == (device.num_fetched, 0)
    pair.reopen(live=on_device(Mixed(seed=99)))
    assert pair.optimizer.restore().step == 4
    pair.assert_same_parameters()
    train(pair, (9,))
    pair.optimizer.close()


def test_between_synchronize_and_the_next_step_nothing_of_ours_runs_on_the_device(
    gpu, directory, device, compute
):
    """So a CUDA graph may be captured then: work of other threads would make the capture fail."""
    is_capturing = False
    noticed: list[str] = []

    def slow(call: str, _: int) -> str:
        time.sleep(0.02)  # so that what is not waited for ends later
        if is_capturing:
            noticed.append(call)
        return ""

    cut = Cut(3 * 4096, 3, settings=ON_DEVICE)
    pair = DevicePair(CASE, cut, None, directory, live=on_device(Mixed()))
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


# Refusals before a step: no parameter has changed.


def test_a_backend_without_device_memory_is_refused_before_the_step(device, compute):
    cut = Cut(3 * 4096, 2, settings=ON_DEVICE)
    pair = DevicePair(CASES["sgd"], cut, MemoryBackend(), live=on_device(Mixed()))
    before = copies_of(pair)
    give_device_gradients(0, pair.live)
    with pytest.raises(RefusedError, match=r"the memory backend allocates host memory only"):
        pair.optimizer.step()
    assert_parameters(pair, before)


@pytest.mark.parametrize("of", ["a form", "any"])
def test_kernels_that_do_not_compile_are_found_out_before_the_step(
    of, device, compute, monkeypatch
):
    def refuse(_: object) -> None:
        raise RefusedError("the kernels cannot be compiled")

    pair = device_pair(CASES["sgd"], CUT, device)
    give_device_gradients(0, pair.live)
    with monkeypatch.context() as broken:
        if of == "any":
            broken.setattr(offload.placement.choose, "compute_on", refuse)
        else:
            broken.setattr(compute, "prepare", refuse)
        with pytest.raises(RefusedError, match="the kernels cannot be compiled"):
            pair.optimizer.step()
    train(pair)
    pair.assert_same_state()


# Memory of the device.


class CountedBackend(DeviceBackend):
    """Notes the device memory that is asked for; while it is full, there is none."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(MemoryBackend(), device)
        self.asked: list[int] = []
        self.is_full = lambda: False

    def allocate(self, nbytes: int, kind: str | None = None) -> Any:
        if kind == "device":
            if self.is_full():
                raise DeviceMemoryError(f"cannot allocate {nbytes} bytes on cuda:0: out of memory")
            self.asked.append(nbytes)
        return super().allocate(nbytes, kind)


@pytest.mark.parametrize("budget", [65536, 131_072, 200_000])
def test_residents_never_take_more_than_device_memory(budget, device, compute, monkeypatch) -> None:
    monkeypatch.setattr(offload.stream.memory, "_PAGE_BYTES", 65536)
    backend = CountedBackend(device)
    cut = Cut(3 * 4096, 2, settings={"device_memory": budget})
    pair = device_pair(CASE, cut, device, backend=backend)
    train(pair, (0, 1))
    pair.assert_same_state()
    stats = pair.optimizer.stats()
    pair.optimizer.close()
    assert len(backend.asked) == 2, "one allocation for the residents, and one for the ring"
    assert 0 < stats.resident_bytes <= budget
    assert backend.asked[0] <= stats.resident_bytes < backend.asked[0] + 65536
    assert backend.asked[1] <= stats.ring_bytes < backend.asked[1] + 65536


def test_a_full_device_is_named_and_nothing_is_lost(device, compute) -> None:
    backend = CountedBackend(device)
    pair = device_pair(CASE, CUT, device, backend=backend)
    before = copies_of(pair)
    backend.is_full = lambda: True
    give_device_gradients(0, pair.live)
    for _ in range(2):
        with pytest.raises(DeviceMemoryError, match=r"do not fit .*No state has changed"):
            pair.optimizer.step()
    assert_parameters(pair, before)
    # what torch keeps for itself is asked for, and is enough
    trimmed = compute.num_trimmed
    backend.is_full = lambda: compute.num_trimmed == trimmed
    train(pair)  # as if there had been no step
    assert (trimmed, compute.num_trimmed) == (2, 3)
    pair.assert_same_state()
    pair.optimizer.close()


# In the middle of a step.


def _lost(*_: Any, **__: Any) -> Any:
    raise lost_error(RuntimeError("CUDA error: ECC error"), "update state", "cuda:0")


def _full(*_: Any, **__: Any) -> Any:
    raise DeviceMemoryError("update state: cuda:0 has no memory left")


@pytest.mark.parametrize(
    ("call", "fails"),
    [("update", _full), ("update", _lost), ("wait", _lost)],
    ids=["a full update", "a lost update", "a lost wait"],
)
def test_a_device_that_fails_in_a_step_leaves_the_checkpoint_whole(
    call, fails, device, compute, monkeypatch
) -> None:
    pair = device_pair(CASE, CUT, device, backend=CountedBackend(device))
    train(pair, (0, 1))
    pair.optimizer.checkpoint().result()
    with monkeypatch.context() as broken:
        broken.setattr(compute, call, fails)
        give_device_gradients(7, pair.live)
        with pytest.raises(DeviceLostError if fails is _lost else DeviceMemoryError):
            pair.optimizer.step()
        with pytest.raises((BrokenOptimizerError, DeviceLostError, DeviceMemoryError)):
            pair.optimizer.step()
        pair.optimizer.close()
    # In a new process the device works again.
    pair.reopen(live=on_device(Mixed(seed=99)))
    assert pair.optimizer.restore().step == 2
    train(pair, (7, 8))
    pair.assert_same_state()
    pair.optimizer.close()
