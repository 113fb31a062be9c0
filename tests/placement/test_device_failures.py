"""A device that is full, or lost: the error has a name, and a checkpoint that was made is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import offload
import offload.stream.device_frames
from gds import MemoryBackend, StorageError
from gds.buffers.cuda import lost_error
from gds.errors import DeviceLostError, DeviceMemoryError
from offload.device.staging import Traffic
from offload.errors import BrokenOptimizerError
from offload.stream.device_frames import DeviceFrames
from tests.fake_gpu.backend import DeviceBackend
from tests.fake_gpu.compute import FakeCompute
from tests.fake_gpu.device import FakeDevice, on_device, values
from tests.numerics.models import Mixed
from tests.numerics.pairs import CASES, Cut
from tests.numerics.reference import assert_same_bits
from tests.placement.test_device_placement import ON_DEVICE
from tests.placement.test_host_placement import DevicePair, give_device_gradients, train

MIB = 1 << 20


class CountedBackend(DeviceBackend):
    """Notes the device memory that is asked for; while it is full, there is none."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(MemoryBackend(), device)
        self.asked: list[int] = []
        self.is_full = False

    def allocate(self, nbytes: int, kind: str | None = None) -> Any:
        if kind == "device":
            if self.is_full:
                raise DeviceMemoryError(f"cannot allocate {nbytes} bytes on cuda:0: out of memory")
            self.asked.append(nbytes)
        return super().allocate(nbytes, kind)


def pair_on(backend: CountedBackend, **settings: Any) -> DevicePair:
    cut = Cut(3 * 4096, 2, settings={**ON_DEVICE, **settings})
    return DevicePair(CASES["sgd-nesterov"], cut, backend, live=on_device(Mixed()))


# Memory.


def test_frames_of_a_device_are_parts_of_one_allocation(
    device: FakeDevice, compute: FakeCompute
) -> None:
    backend = CountedBackend(device)
    frames = DeviceFrames(backend, compute, Traffic())
    sizes = [3 * MIB + 100, 5000, 4096, 1]
    parts = frames.allocate(sizes)
    assert backend.asked == [3 * MIB + 4096 + 8192 + 4096 + 4096]
    assert [buffer.nbytes for buffer, _ in parts] == sizes
    assert [tensor.nbytes for _, tensor in parts] == sizes
    end = 0
    for buffer, tensor in parts:
        assert buffer.address == tensor.data_ptr()
        assert buffer.address % 4096 == 0, "direct transfers need it"
        assert buffer.address >= end, "they do not overlap"
        end = buffer.address + buffer.nbytes
    assert frames.allocate([]) == []
    assert len(backend.asked) == 1


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ([], 0),
        ([100], 4096),
        ([4096] * 511, 511 * 4096),
        ([4096] * 512, 2 * MIB),
        ([2 * MIB + 1], 4 * MIB),
        ([32 * MIB + 4096] * 24, 770 * MIB),
    ],
    ids=["none", "a byte", "small", "a page", "two pages", "a ring"],
)
def test_what_frames_take_is_counted_in_pages_of_the_device(
    sizes, taken, device: FakeDevice, compute: FakeCompute
) -> None:
    frames = DeviceFrames(CountedBackend(device), compute, Traffic())
    assert frames.footprint_bytes(sizes) == taken


@pytest.mark.parametrize("budget", [65536, 100_000, 131_072, 200_000])
def test_residents_never_take_more_than_device_memory(budget, device, compute, monkeypatch) -> None:
    monkeypatch.setattr(offload.stream.device_frames, "_PAGE_BYTES", 65536)
    backend = CountedBackend(device)
    pair = pair_on(backend, device_memory=budget)
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
    pair = pair_on(backend)
    before = [values(p).clone() for p in pair.live.parameters()]
    backend.is_full = True
    give_device_gradients(0, pair.live)
    for _ in range(2):
        with pytest.raises(DeviceMemoryError, match=r"do not fit .*No state has changed"):
            pair.optimizer.step()
    assert compute.num_trimmed == 2, "what torch keeps for itself has been asked for"
    for parameter, expected in zip(pair.live.parameters(), before, strict=True):
        assert_same_bits(values(parameter), expected, "parameter")
    backend.is_full = False
    train(pair)  # as if there had been no step
    pair.assert_same_state()
    pair.optimizer.close()


# In the middle of a step.


def _lost(*_: Any, **__: Any) -> Any:
    raise lost_error(RuntimeError("CUDA error: ECC error"), "update state", "cuda:0")


def _full(*_: Any, **__: Any) -> Any:
    raise DeviceMemoryError("update state: cuda:0 has no memory left")


@pytest.mark.parametrize("call", ["update", "wait"])
@pytest.mark.parametrize("fails", [_lost, _full], ids=["lost", "full"])
def test_a_device_that_fails_in_a_step_leaves_the_checkpoint_whole(
    call: str, fails: Callable[..., Any], device, compute, monkeypatch
) -> None:
    backend = CountedBackend(device)
    pair = pair_on(backend)
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


def test_a_lost_device_is_a_failure_of_storage_for_those_who_ask_no_further() -> None:
    error = lost_error(RuntimeError("CUDA error: unspecified launch failure\nmore"), "x", "cuda:0")
    assert isinstance(error, StorageError)
    assert isinstance(error, RuntimeError)
    assert "unspecified launch failure" in str(error)
    assert "more" not in str(error)
    assert lost_error(error, "y", "elsewhere") is error
    assert offload.errors.message_of(error).startswith("cuda:0: x: the GPU is lost")
