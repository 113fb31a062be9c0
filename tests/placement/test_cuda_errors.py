"""Errors of torch's CUDA by name, and memory that its driver does not lock.

`tests/device/test_cuda_training.py` shows on a device that copies and steps are in order.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import pytest
import torch

import offload.device.boundary
import offload.device.compute
from gds.errors import DeviceLostError, DeviceMemoryError
from gds.kvikio import PageLockRefused
from offload.device.boundary import Boundary
from offload.device.compute import Compute

DEVICE = torch.device("cuda", 1)


class Cuda:
    """Stands where ``torch.cuda`` is, and fails with what a test says."""

    fails = ""
    """The error of a wait for an event."""
    refuses = 0
    """The error of a lock of pages."""
    last_error = 0
    """What the next kernel that torch launches fails with."""
    num_locked = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        typed = types.SimpleNamespace(
            Stream=lambda _device, **_: types.SimpleNamespace(wait_event=lambda _: None),
            Event=lambda **_: types.SimpleNamespace(
                record=lambda _: None, synchronize=self.synchronize
            ),
            cudart=lambda: self,
        )
        for module in (offload.device.boundary, offload.device.compute):
            monkeypatch.setattr(module, "_cuda", typed)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
        for name in ("stream", "device"):
            monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())

    def synchronize(self) -> None:
        if self.fails:
            raise torch.AcceleratorError(self.fails)

    def cudaHostRegister(self, *_: int) -> int:  # noqa: N802
        self.num_locked += not self.refuses
        self.last_error = self.refuses or self.last_error
        return self.refuses

    def cudaHostUnregister(self, _: int) -> int:  # noqa: N802
        self.num_locked -= 1
        return 0

    def ones(self, *_: object, **__: object) -> None:
        error, self.last_error = self.last_error, 0
        if error:
            raise torch.AcceleratorError(f"CUDA error: {error}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    return Cuda(monkeypatch)


@pytest.fixture
def compute(cuda: Cuda) -> Compute:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: torch.zeros(0))
        patch.setattr(offload.device.compute.digest, "kernels", lambda _: None)
        return Compute(DEVICE)


LOST = "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"


def test_errors_of_a_device_are_named_by_whoever_waits_or_computes(cuda, compute):
    boundary = Boundary(DEVICE)
    cuda.fails = LOST
    for waits in (boundary, compute):
        with pytest.raises(DeviceLostError, match=r"cuda:1: .*resume in a new one") as caught:
            waits.wait(boundary.now())
        assert "illegal memory access" in str(caught.value)
        assert "TORCH_USE" not in str(caught.value)
    cuda.fails = "CUDA error: invalid argument"
    with pytest.raises(RuntimeError, match="invalid argument") as other:
        boundary.wait(boundary.now())
    assert not isinstance(other.value, DeviceLostError)
    said = r"cuda:1 has no memory left \(CUDA out of memory"
    with pytest.raises(DeviceMemoryError, match=said), compute.queue([]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")


def test_memory_that_the_driver_does_not_lock_is_taken_unlocked(cuda, monkeypatch):
    real = torch.empty

    def empty(*arguments, pin_memory=False, **named):
        if pin_memory:
            cuda.last_error = 801
            raise torch.AcceleratorError("CUDA error: operation not supported\nmore")
        return real(*arguments, **named)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "ones", cuda.ones)
    with pytest.warns(PageLockRefused, match=r"operation not supported\): copies .* are right"):
        memory = Boundary(DEVICE).allocate(100)
    assert memory.nbytes == 100
    assert cuda.last_error == 0, "the next kernel of this thread would be blamed for it"


def test_pages_are_locked_for_as_long_as_that_is_asked_for(cuda, monkeypatch):
    boundary = Boundary(DEVICE)
    memory = torch.zeros(4096, dtype=torch.uint8)
    locked = boundary.lock_pages(memory)
    assert cuda.num_locked == 1
    del locked
    assert cuda.num_locked == 0
    monkeypatch.setattr(torch, "ones", cuda.ones)
    cuda.refuses = 2
    locked = boundary.lock_pages(memory)
    assert cuda.last_error == 0
    del locked
    assert cuda.num_locked == 0, "what was not locked is not unlocked"


def test_page_locked_memory_is_counted_as_torchs_pool_takes_it(cuda):
    sizes = {0: 0, 1: 1, 64: 64, 65: 128, (16 << 20) + 64: 32 << 20}
    assert {asked: Boundary(DEVICE).held_bytes(asked) for asked in sizes} == sizes
