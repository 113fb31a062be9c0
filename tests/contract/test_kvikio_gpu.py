"""The KvikIO backend over a real GPU: ``pytest -m gpu``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gds import ALIGNMENT, Backend, StorageError
from gds.errors import RefusedError
from gds.kvikio import DeviceBuffer, KvikioBackend
from gds.testing import BackendContract
from gds.testing._harness import contents, new_file, put
from tests.contract.conftest import FilesOnADrive, Make

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Callable[..., KvikioBackend]:
    try:
        KvikioBackend(path="bounce").close()
    except RefusedError as error:
        pytest.skip(str(error))
    return KvikioBackend


class RealGpuContract(FilesOnADrive, BackendContract):
    arguments: Mapping[str, Any] = {}

    @pytest.fixture
    def backend(self, real: Make) -> Iterator[Backend]:
        backend = real(**self.arguments)
        yield backend
        backend.close()

    def reopened(self, backend: Backend) -> Backend:
        return KvikioBackend(**self.arguments)


class TestRealGpu(RealGpuContract):
    """Whatever is the best path here."""


class TestRealGpuCompatibility(RealGpuContract):
    arguments: Mapping[str, Any] = {"path": "compat"}


class TestRealGpuBounce(RealGpuContract):
    arguments: Mapping[str, Any] = {"path": "bounce", "request_bytes": 4 * ALIGNMENT}


@pytest.mark.parametrize("path", [None, "compat", "bounce"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_real_tensors_and_side_streams(real, directory, path, dtype):
    backend = real(path=path)
    count = 16 * MIB
    buffer = backend.allocate(count * dtype.itemsize)
    assert isinstance(buffer, DeviceBuffer)
    tensor = torch.as_tensor(buffer, device="cuda").view(dtype)
    assert tensor.data_ptr() == buffer.address
    file = backend.create(f"{directory}/file", buffer.nbytes)
    stream = torch.cuda.Stream()
    for value in (1.0, 2.0, 4.0):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # the write would overtake this kernel
            tensor.copy_(torch.full((count,), value, dtype=dtype, device="cuda"))
        buffer.after(stream.cuda_stream)
        file.write(buffer, 0).result()
        expected = torch.full((1,), value, dtype=dtype).view(torch.uint8).numpy().tobytes()
        assert Path(f"{directory}/file").read_bytes() == expected * count
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            seen = tensor.clone()
        buffer.after(stream.cuda_stream)
        file.write_bytes(bytes(buffer.nbytes), 0)
        file.read(buffer, 0).result()
        assert not tensor.view(torch.uint8).any()
        assert seen.view(torch.uint8).cpu().numpy().tobytes() == expected * count
    used = file.used("read")
    assert backend.moved()["read"][used.path] == 3 * buffer.nbytes
    file.close()
    backend.close()


@pytest.mark.parametrize("path", [None, "bounce", "compat"])
def test_real_transfers_do_not_wait_for_training_on_the_default_stream(real, directory, path):
    backend = real(path=path)
    file = new_file(backend, f"{directory}/file", nbytes=16 * MIB)
    into = backend.allocate(16 * MIB)
    file.read(into, 0).result()  # streams and page-locked memory are made
    torch.cuda.synchronize()
    for transfer in (file.read, file.write):
        torch.cuda._sleep(20_000_000_000)  # seconds, on the default stream
        trained = torch.cuda.Event()
        trained.record()
        transfer(into, 0).result()
        assert trained.query() is (path == "compat")
        torch.cuda.synchronize()
    file.close()
    backend.close()


def test_real_direct_storage_moves_the_right_bytes(real, directory):
    backend = real(path="gds")
    try:
        backend.paths_in(directory)
        file = new_file(backend, f"{directory}/file", nbytes=64 * MIB, seed=2)
    except StorageError as error:
        backend.close()
        pytest.skip(str(error))
    into = backend.allocate(64 * MIB)
    file.read(into, 0).result()
    assert contents(into) == Path(f"{directory}/file").read_bytes()
    file.close()
    backend.close()


def test_real_memory_is_not_taken_on_other_devices(real, directory):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is only one GPU")
    code = f"""
import torch
from gds.kvikio import KvikioBackend
backend = KvikioBackend(path="bounce", device=1)
file = backend.create("{directory}/file", 1 << 20)
file.write(backend.allocate(1 << 20), 0).result()
backend.allocate(1 << 20, "pinned")
assert not torch._C._cuda_hasPrimaryContext(0)
assert torch._C._cuda_hasPrimaryContext(1)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_real_tensors_of_the_caller(real, directory):
    backend = real()
    tensor = torch.randn(1 << 20, device="cuda").to(torch.bfloat16)
    torch.cuda.synchronize()
    file = backend.create(f"{directory}/file", tensor.nbytes)
    file.write(backend.buffer_of(tensor), 0).result()
    assert (
        Path(f"{directory}/file").read_bytes() == tensor.view(torch.uint8).cpu().numpy().tobytes()
    )
    put(backend.allocate(10, "pinned"), b"0123456789")
    file.close()
    backend.close()
