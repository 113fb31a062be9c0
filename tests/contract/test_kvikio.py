"""The KvikIO backend: which path bytes take, what it needs, and its errors.

The GPU is made of host memory; `test_kvikio_gpu.py` has a real one.
"""

from __future__ import annotations

import errno
import importlib.abc
import os
import random
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

import gds.backends.kvikio_file
import gds.buffers.cuda
from gds import ALIGNMENT, Backend, PosixBackend, ShortReadError, StorageError
from gds.errors import RefusedError
from gds.kvikio import KvikioBackend, Used
from gds.testing import BackendContract, TransferContract
from gds.testing._harness import FILE_BYTES, contents, filled, new_file
from tests.contract.conftest import GDS, NO_GDS, WAYS, FilesOnADrive, Make
from tests.fake_gpu.machine import FakeGpu

MIB = 1 << 20


def shorten(gpu: FakeGpu) -> None:
    """Let cuFile move less than it is asked for, or nothing."""
    draw = random.Random(1)
    gpu.shorten = lambda _direction, size: draw.choice([size, size // 2, 5000, 100, 0])


class FakeGpuContract(FilesOnADrive):
    arguments: Mapping[str, Any] = {}

    @pytest.fixture
    def backend(self, make: Make, gpu: FakeGpu) -> Backend:
        gpu.gds = True
        return make(**self.arguments)

    def reopened(self, backend: Backend) -> Backend:
        return KvikioBackend(examine=lambda _: dict(GDS), **self.arguments)


class TestDirectStorage(FakeGpuContract, BackendContract):
    @pytest.fixture
    def backend(self, make: Make, gpu: FakeGpu) -> Backend:
        gpu.gds = True
        shorten(gpu)
        return make()


class TestBounce(FakeGpuContract, TransferContract):
    arguments: Mapping[str, Any] = {"path": "bounce", "request_bytes": 4 * ALIGNMENT}


@pytest.mark.parametrize("memory", ["device", "pinned"])
def test_compatibility_mode_moves_the_right_bytes_too(make, gpu, directory, memory):
    gpu.gds = True
    shorten(gpu)
    backend = make(memory=memory, **WAYS["compat"])
    contract = TestBounce()
    contract.test_any_mix_of_offsets_lengths_and_memory_moves_the_right_bytes(backend, directory, 1)
    contract.test_a_read_leaves_the_memory_around_it_alone(backend, directory)
    contract.test_concurrent_requests_from_several_threads_do_not_mix(backend, directory)


# Which path


def test_whole_blocks_take_the_path_and_the_rest_is_copied_through_the_host(make, gpu, directory):
    gpu.gds = True
    backend = make()
    file = backend.create(f"{directory}/file", 20 * ALIGNMENT)
    source = filled(backend, 10 * ALIGNMENT, 1)
    file.write(source, 100).result()  # the memory suits no block of the file
    assert gpu.calls == []
    file.write(source.slice(100, 5 * ALIGNMENT), 100).result()
    assert gpu.calls == [("write", "gds", ALIGNMENT, 4 * ALIGNMENT)]
    file.read(source, 2 * ALIGNMENT).result()
    assert gpu.calls[1:] == [("read", "gds", 2 * ALIGNMENT, 10 * ALIGNMENT)]
    assert backend.moved() == {
        "read": {"gds": 10 * ALIGNMENT, "compat": 0, "bounce": 0},
        "write": {"gds": 4 * ALIGNMENT, "compat": 0, "bounce": 11 * ALIGNMENT},
    }
    total = backend.counters()
    assert (total.bytes_read, total.num_reads) == (10 * ALIGNMENT, 1)
    assert (total.bytes_written, total.num_writes) == (15 * ALIGNMENT, 2)


@pytest.mark.parametrize("works", ["read", "write"])
def test_each_direction_takes_its_own_path(make, gpu, directory, works):
    gpu.gds = True
    found = {**NO_GDS, works: Used("gds", "")}
    backend = make(examine=lambda _: found)
    assert backend.paths_in(directory) == found
    file = backend.create(f"{directory}/file", ALIGNMENT)
    assert {name: file.used(name) for name in ("read", "write")} == found
    buffer = backend.allocate(ALIGNMENT)
    file.write(buffer, 0).result()
    file.read(buffer, 0).result()
    assert [(direction, mode) for direction, mode, _, _ in gpu.calls] == [(works, "gds")]
    for name, used in found.items():
        assert backend.moved()[name][used.path] == ALIGNMENT


NOT_DIRECT = {
    "cufile-refuses-the-file": "cuFile error 5027",
    "told-by-the-environment": "copy through the host",
    "told-by-the-driver": "copy through the host",
    "no-kvikio": "kvikio",
}


@pytest.mark.parametrize("case", NOT_DIRECT)
def test_what_may_be_a_copy_through_the_host_is_not_called_direct(
    make, gpu, directory, monkeypatch, case
):
    gpu.gds = case != "cufile-refuses-the-file"
    gpu.copies_untold = case == "told-by-the-driver"
    if case == "told-by-the-environment":
        monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "true")
    if case == "no-kvikio":
        monkeypatch.setitem(sys.modules, "kvikio", None)
    backend = make(examine=lambda _: dict(GDS))
    file = backend.create(f"{directory}/file", ALIGNMENT)
    file.write(filled(backend, ALIGNMENT, 1), 0).result()
    for direction in ("read", "write"):
        used = file.used(direction)
        assert used.path == "bounce"
        assert NOT_DIRECT[case] in used.reason
    assert backend.moved()["write"] == {"gds": 0, "compat": 0, "bounce": ALIGNMENT}
    if case == "no-kvikio":
        return
    demanding = make(path="gds", examine=lambda _: dict(GDS))
    with pytest.raises(StorageError, match=NOT_DIRECT[case]) as caught:
        demanding.open(f"{directory}/file").read(demanding.allocate(1), 0).result()
    assert caught.value.errno == errno.EOPNOTSUPP


def test_a_demand_that_cannot_be_met_says_why(make, gpu, directory):
    backend = make(path="gds")
    with pytest.raises(StorageError, match="no nvidia-fs") as caught:
        backend.paths_in(directory)
    assert caught.value.errno == errno.EOPNOTSUPP
    file = backend.create(f"{directory}/file", ALIGNMENT)
    with pytest.raises(StorageError, match="no nvidia-fs"):
        file.write(backend.allocate(ALIGNMENT), 0).result()


def test_a_directory_is_examined_once_where_it_is_and_only_for_device_memory(make, gpu, directory):
    examined = []

    def examine(path):
        examined.append(path)
        return dict(NO_GDS)

    backend = make(examine=examine)
    backend.make_dir(f"{directory}/before")
    files = [backend.create(f"{directory}/before/{number}", ALIGNMENT) for number in range(3)]
    for file in files:
        file.write(backend.allocate(ALIGNMENT, "host"), 0).result()
        file.write(backend.allocate(ALIGNMENT, "pinned"), 0).result()
    assert (examined, gpu.num_opened) == ([], 0)
    backend.rename(f"{directory}/before", f"{directory}/after")
    for file in files * 2:
        file.read(backend.allocate(ALIGNMENT), 0).result()
    assert (examined, gpu.num_opened) == ([f"{directory}/after"], 0)


# Libraries


def test_without_a_driver_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(gds.buffers.cuda, "no_driver", lambda: "libcuda.so.1: not found")
    with pytest.raises(RefusedError, match=r"libcuda\.so\.1: not found"):
        KvikioBackend()


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("cupy", ImportError("no module cupy")),
        ("cupy", OSError("librt.so.1: no")),
        ("kvikio", RuntimeError('Failure finding "libcufile.so.0":\n  none')),
    ],
)
def test_without_a_library_or_its_own_libraries_the_remedy_is_named(
    gpu, monkeypatch, module, error
):
    # What KvikIO's wheel raises where no package of cuFile is installed is no ImportError.
    class Fails(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, *_):
            return ModuleSpec(name, self) if name == module else None

        def exec_module(self, module):
            raise error

    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Fails(), *sys.meta_path])
    with pytest.raises(RefusedError, match=r"pip install .* '\.\[gpu\]'") as caught:
        KvikioBackend(path="gds")
    assert " ".join(str(error).split()) in str(caught.value)


@pytest.mark.parametrize(("device", "said"), [(None, "no GPU can be"), (3, "GPU 3 cannot be")])
def test_a_driver_without_such_a_device_is_refused(gpu, monkeypatch, device, said):
    def fails(*_):
        raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    cuda = sys.modules["cupy"].cuda
    monkeypatch.setattr(cuda.runtime, "getDevice", fails)
    with pytest.raises(RefusedError, match=f"{said} used: cudaErrorNoDevice"):
        KvikioBackend(device=device)


def test_one_call_makes_any_backend(gpu):
    for name, expected in (("posix", PosixBackend), ("kvikio", KvikioBackend)):
        backend = gds.open_backend(name, hybrid=True, read_threads=3)
        assert type(backend) is expected
        assert isinstance(backend, PosixBackend)
        assert (backend.read_threads, backend.hybrid is not None) == (3, True)
        backend.close()
    with pytest.raises(ValueError, match="'posix' or 'kvikio'"):
        gds.open_backend("cufile")


def test_cufile_is_told_before_it_is_loaded_and_only_then(make, gpu, directory):
    compat = make(path="compat")
    new_file(compat, f"{directory}/compat").close()
    assert not [name for name in os.environ if name.startswith("CUFILE_")]
    gpu.gds = True
    new_file(make(), f"{directory}/gds").close()
    assert os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "false"
    assert not os.path.samefile(os.path.dirname(os.environ["CUFILE_LOGFILE_PATH"]), ".")


def test_a_handle_is_of_the_file_that_was_opened(make, gpu, directory, monkeypatch):
    gpu.gds = True
    backend = make()
    file = new_file(backend, f"{directory}/first", seed=1)
    file.close()
    file = backend.open(f"{directory}/first")
    new_file(backend, f"{directory}/second", seed=2).close()
    backend.rename(f"{directory}/second", f"{directory}/first")
    into = backend.allocate(FILE_BYTES)
    file.read(into, 0).result()  # opens it for KvikIO only now
    assert contents(into) == contents(filled(backend, FILE_BYTES, 1))
    file.close()
    # Without /proc it is opened by its name, and what has replaced it is refused.
    file = backend.open(f"{directory}/first")
    new_file(backend, f"{directory}/third", seed=3).close()
    backend.rename(f"{directory}/third", f"{directory}/first")
    monkeypatch.setattr(os.path, "exists", lambda _: False)
    assert file.used("read").path == "bounce"
    assert "the name was replaced" in file.used("read").reason
    file.read(into, 0).result()
    assert contents(into) == contents(filled(backend, FILE_BYTES, 2))


# Errors


@pytest.mark.parametrize(
    ("way", "direction", "text", "number"),
    [
        ("compat", "write", "POSIX error on pwrite: No space left on device", errno.ENOSPC),
        ("compat", "read", "POSIX error on pread: Input/output error at: io.hpp:80", errno.EIO),
        ("compat", "read", "CUDA error at: CUDA_ERROR_ILLEGAL_ADDRESS", errno.EIO),
        ("gds", "write", "POSIX error: No space left on device", errno.ENOSPC),
        ("gds", "read", "POSIX error: Input/output error", errno.EIO),
    ],
)
def test_an_error_keeps_its_number_or_gets_one(make, gpu, directory, way, direction, text, number):
    gpu.gds = True
    backend = make(**WAYS[way])
    file = new_file(backend, f"{directory}/file")
    gpu.error = lambda name, offset: text if (name, offset) == (direction, ALIGNMENT) else None
    buffer = backend.allocate(2 * ALIGNMENT)
    with pytest.raises(StorageError) as caught:
        getattr(file, direction)(buffer, ALIGNMENT).result()
    error = caught.value
    assert (error.errno, error.filename, error.offset) == (number, f"{directory}/file", ALIGNMENT)
    assert text in str(error) or way != "compat"
    gpu.error = lambda _direction, _offset: None
    assert getattr(file, direction)(buffer, ALIGNMENT).result() == 2 * ALIGNMENT


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_file_that_became_shorter_is_a_short_read(make, gpu, directory, way):
    gpu.gds = True
    backend = make(**way)
    file = new_file(backend, f"{directory}/file", nbytes=8 * ALIGNMENT)
    os.truncate(f"{directory}/file", 3 * ALIGNMENT)
    with pytest.raises(ShortReadError) as caught:
        file.read(backend.allocate(8 * ALIGNMENT), 0).result()
    assert caught.value.filename == f"{directory}/file"


def test_nothing_moved_at_all_ends_with_the_hosts_reason(make, gpu, directory):
    # A count of zero forever must neither spin nor pass for success.
    gpu.gds = True
    gpu.shorten = lambda _direction, _size: 0
    backend = make()
    file = new_file(backend, f"{directory}/file", seed=4)
    into = backend.allocate(FILE_BYTES)
    file.read(into, 0).result()
    assert contents(into) == contents(filled(backend, FILE_BYTES, 4))
    assert backend.moved()["read"] == {"gds": 0, "compat": 0, "bounce": FILE_BYTES}


def test_a_forked_child_leaves_the_parents_handles_alone(make, gpu, directory):
    gpu.gds = True
    backend = make()
    file = new_file(backend, f"{directory}/file")
    child = os.fork()
    if child == 0:
        try:
            file.close()
            backend.close()
            os._exit(0 if gpu.num_open == 1 and gds.backends.kvikio_file._abandoned else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    into = backend.allocate(FILE_BYTES)
    assert file.read(into, 0).result() == FILE_BYTES
