"""Memory of the KvikIO backend: device and page-locked buffers, tensors, and the order of work.

The GPU is made of host memory; `test_kvikio_gpu.py` has a real one.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from gds import ALIGNMENT, PosixBackend
from gds.errors import DeviceLostError, DeviceMemoryError, RefusedError
from gds.kvikio import DeviceBuffer, PageLockRefused, RegistrationRefused, tensor_buffer
from gds.testing._harness import contents, filled, new_file, put
from tests.contract.conftest import WAYS, wait_for_release
from tests.fake_gpu.machine import FakeGpu

MIB = 1 << 20


def test_device_memory_is_registered_once_and_before_it_goes(make, gpu, directory):
    gpu.gds = True
    backend = make()
    early = backend.allocate(3 * ALIGNMENT)
    assert gpu.registered == {}, "this would have loaded cuFile for nothing"
    file = new_file(backend, f"{directory}/file")
    late = backend.allocate(ALIGNMENT).slice(0, 100)
    file.write(late, 0).result()
    file.write(early.slice(ALIGNMENT, ALIGNMENT), 0).result()
    assert gpu.num_registrations == 3
    wait_for_release(lambda: len(gpu.registered) == 2)  # one was that of new_file
    del early
    wait_for_release(lambda: len(gpu.registered) == 1)
    file.close()
    backend.close()
    assert contents(late) == bytes(100)


def test_memory_that_cufile_does_not_register_is_moved_all_the_same(make, gpu, directory):
    gpu.gds = gpu.refuses_registration = True
    backend = make()
    file = backend.create(f"{directory}/file", ALIGNMENT)
    assert file.used("write").path == "gds"
    with pytest.warns(RegistrationRefused, match="GPU memory registration failed"):
        buffer = backend.allocate(ALIGNMENT)
    file.write(buffer, 0).result()
    assert backend.moved()["write"]["gds"] == ALIGNMENT


def test_pinned_memory_stays_pinned_while_somebody_looks_at_it(make, gpu):
    backend = make(memory="pinned")
    buffer = backend.allocate(3 * MIB)
    assert buffer.kind == "pinned"
    assert gpu.pinned == {buffer.address: 3 * MIB}
    tensor = torch.frombuffer(buffer.slice(MIB, MIB).memoryview(), dtype=torch.bfloat16)
    del buffer
    gc.collect()
    assert len(gpu.pinned) == 1
    tensor.fill_(1.5)
    del tensor
    gc.collect()
    assert gpu.pinned == {}


def test_device_memory_has_no_view_for_the_host(make, directory):
    buffer = make().allocate(10)
    assert buffer.kind == "device"
    with pytest.raises(TypeError, match="device"):
        buffer.memoryview()
    assert isinstance(buffer, DeviceBuffer)
    with pytest.raises(ValueError, match="10"):
        buffer.upload(b"longer than it is")
    interface = buffer.slice(2, 5).__cuda_array_interface__
    assert interface["data"] == (buffer.address + 2, False)
    assert (interface["shape"], interface["typestr"]) == ((5,), "|u1")
    with PosixBackend() as posix:
        file = posix.create(f"{directory}/file", 10)
        with pytest.raises(TypeError, match="device"):
            file.write(buffer, 0)


# Tensors


class OnDevice:
    """A tensor of the fake GPU: torch without CUDA cannot make one."""

    def __init__(self, gpu: FakeGpu, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.device = types.SimpleNamespace(type="cuda", index=0)
        gpu.adopted[tensor.data_ptr()] = tensor.nbytes

    def detach(self) -> OnDevice:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


@pytest.mark.parametrize(
    ("dtype", "place"),
    [
        (torch.bfloat16, "device"),
        (torch.float8_e4m3fn, "cpu"),
        (torch.uint16, "device"),
        (torch.bool, "cpu"),
        (torch.complex64, "device"),
    ],
    ids=str,
)
def test_tensors_of_every_type_are_bytes(make, gpu, directory, dtype, place):
    backend = make()
    raw = torch.randint(0, 2, (4096, 3, 8), dtype=torch.uint8)
    expected = raw.clone()
    tensor = raw.view(dtype)
    given: Any = OnDevice(gpu, tensor) if place == "device" else tensor
    buffer = backend.buffer_of(given)
    assert buffer.kind == ("device" if place == "device" else "host")
    assert (buffer.address, buffer.nbytes) == (tensor.data_ptr(), tensor.nbytes)
    file = backend.create(f"{directory}/file", buffer.nbytes)
    file.write(buffer, 0).result()
    assert Path(f"{directory}/file").read_bytes() == raw.numpy().tobytes()
    raw.zero_()
    file.read(buffer, 0).result()
    assert torch.equal(raw, expected)
    file.close()


def test_a_tensor_lives_as_long_as_its_buffer(make, gpu):
    tensor = torch.full((1000,), 7, dtype=torch.bfloat16)
    expected = tensor.view(torch.uint8).numpy().tobytes()
    buffer = make().buffer_of(OnDevice(gpu, tensor))
    part = buffer.slice(100, 200)
    del tensor, buffer
    gc.collect()
    assert contents(part) == expected[100:300]


def test_only_tensors_that_are_one_range_of_memory_are_buffers():
    for shape in ((), (0,), (1,)):
        tensor = torch.ones(shape, dtype=torch.bfloat16)
        assert bytes(tensor_buffer(tensor).memoryview()) == b"\x80\x3f" * tensor.numel()
    strided, sparse = torch.zeros(4, 4).t()[1:], torch.zeros(4, 4).to_sparse()
    for tensor in (strided, sparse, torch.zeros(4, device="meta")):
        with pytest.raises(ValueError, match="tensor"):
            tensor_buffer(tensor)


# Order


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_only_compatibility_mode_is_ordered_with_the_default_stream(make, gpu, directory, way):
    """Training runs on the default stream: a transfer must neither wait for it nor delay it."""
    gpu.gds = True
    backend = make(**way)
    file = backend.create(f"{directory}/file", 4 * ALIGNMENT)
    buffer = filled(backend, 4 * ALIGNMENT, 3)
    trained: list[bool] = []
    gpu.streams.launch(0, lambda: trained.append(True))
    futures = [file.write(buffer.slice(n * ALIGNMENT, ALIGNMENT), n * ALIGNMENT) for n in range(4)]
    futures.append(file.read(backend.allocate(ALIGNMENT), 0))
    for future in futures:
        future.result()
    assert trained == ([True] if way["path"] == "compat" else [])
    assert bool(gpu.default_stream) == (way["path"] == "compat")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_no_other_device_is_touched(make, gpu, directory, monkeypatch, way):
    """A thread whose current device is another one gets no context there, and keeps its device."""
    monkeypatch.setattr(type(gpu.current), "number", 1)
    gpu.gds = True
    backend = make(device=0, **way)
    file = new_file(backend, f"{directory}/file")
    buffer = backend.allocate(4 * ALIGNMENT)
    assert isinstance(buffer, DeviceBuffer)
    buffer.upload(b"abc")
    buffer.after(gpu.new_stream())
    put(backend.allocate(10, "pinned"), b"0123456789")
    file.write(buffer, 0).result()
    file.used("read")
    del buffer
    gc.collect()
    assert gpu.current.number == 1
    assert gpu.contexts == {0}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_write_waits_for_the_kernel_before_it(make, gpu, directory, way):
    gpu.gds = True
    backend = make(**way)
    buffer = backend.allocate(2 * ALIGNMENT)
    assert isinstance(buffer, DeviceBuffer)
    file = backend.create(f"{directory}/file", 2 * ALIGNMENT)
    stream, other = gpu.new_stream(), gpu.new_stream()

    def kernel(value):
        return lambda: ctypes.memset(buffer.address + ALIGNMENT, value, 100) and None

    gpu.streams.launch(stream, kernel(1))
    buffer.slice(ALIGNMENT, 100).after(stream)
    gpu.streams.launch(stream, kernel(2))  # not waited for: it was queued afterwards
    gpu.streams.launch(other, kernel(3))  # nor this, of which nobody spoke
    file.write(buffer, 0).result()
    expected = bytes(ALIGNMENT) + b"\1" * 100 + bytes(ALIGNMENT - 100)
    assert Path(f"{directory}/file").read_bytes() == expected
    buffer.after(stream)
    buffer.after(other)
    file.write(buffer, 0).result()
    assert Path(f"{directory}/file").read_bytes()[ALIGNMENT] == 3
    assert buffer.region.events(0, sys.maxsize) == []


def test_a_read_waits_for_the_kernel_that_still_needs_the_memory(make, gpu, directory):
    backend = make()
    file = new_file(backend, f"{directory}/file", seed=1, nbytes=ALIGNMENT)
    buffer = filled(backend, ALIGNMENT, 2)
    assert isinstance(buffer, DeviceBuffer)
    seen: list[bytes] = []
    stream = gpu.new_stream()
    gpu.streams.launch(stream, lambda: seen.append(ctypes.string_at(buffer.address, ALIGNMENT)))
    buffer.after(stream)
    file.read(buffer, 0).result()
    assert seen == [contents(filled(backend, ALIGNMENT, 2))]
    assert contents(buffer) == contents(filled(backend, ALIGNMENT, 1))


# Failures of the device

LOST = "cudaErrorECCUncorrectable: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("call", "direction"), [("memcpy", "read"), ("memcpy", "write"), ("synchronize", "write")]
)
def test_a_device_that_is_lost_is_named(make, gpu, directory, call, direction):
    backend = make(path="bounce")
    file = new_file(backend, f"{directory}/file")
    before = Path(f"{directory}/file").read_bytes()
    buffer = backend.allocate(ALIGNMENT)
    gpu.refuses = lambda name, _: LOST if name == call else ""
    with pytest.raises(DeviceLostError, match=r"the GPU is lost .*resume in a new one") as caught:
        getattr(file, direction)(buffer, 0).result()
    assert (caught.value.filename, caught.value.errno) == (f"{directory}/file", errno.ENODEV)
    assert Path(f"{directory}/file").read_bytes() == before
    file.close()
    backend.close()
    gpu.refuses = lambda _name, _: ""


def test_no_memory_and_a_lost_device_are_different_errors(make, gpu):
    backend = make()
    gpu.refuses = lambda _, __: "cudaErrorMemoryAllocation: out of memory"
    with pytest.raises(DeviceMemoryError, match=r"8388608 bytes \(0\.00781 GiB\) on cuda:0"):
        backend.allocate(8 * MIB)
    gpu.refuses = lambda _, __: LOST
    with pytest.raises(DeviceLostError, match="cuda:0"):
        backend.allocate(8 * MIB)
    with pytest.raises(DeviceLostError, match="page-lock"):
        backend.allocate(8 * MIB, "pinned")


def test_a_refused_page_lock_is_named_and_copies_go_on_without_it(make, gpu, directory):
    backend = make(path="bounce")
    gpu.refuses = lambda name, _: "cudaErrorNotSupported" if name == "hostRegister" else ""
    with pytest.raises(RefusedError, match="does not page-lock 10 bytes"):
        backend.allocate(10, "pinned")
    source = filled(backend, 3 * ALIGNMENT, 5)
    file = backend.create(f"{directory}/file", 3 * ALIGNMENT)
    future = file.write(source, 0)
    with pytest.warns(PageLockRefused, match="right, but slower") as warned:
        future.result()
    file.read(source, 0).result()
    assert len([w for w in warned if w.category is PageLockRefused]) == 1
    assert Path(f"{directory}/file").read_bytes() == contents(source)
