"""The KvikIO backend: over a GPU made of host memory always, over a real one with ``-m gpu``."""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib.abc
import os
import random
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

import gds.backends.kvikio
import gds.buffers.cuda
from gds import ALIGNMENT, Backend, PosixBackend, ShortReadError, StorageError
from gds.backends.kvikio import KvikioBackend, RegistrationRefused
from gds.backends.kvikio_file import KvikioFile, Used
from gds.buffers.device import DeviceBuffer, PageLockRefused, tensor_buffer
from gds.errors import DeviceLostError, DeviceMemoryError, RefusedError
from gds.probe import direct_io
from gds.testing import BackendContract, TransferContract
from gds.testing._harness import FILE_BYTES, contents, filled, new_file, put
from tests.contract.conftest import wait_for_release
from tests.fake_gpu.machine import FakeGpu, installed

MIB = 1 << 20
GDS = {"read": Used("gds", ""), "write": Used("gds", "")}
NO_GDS = {"read": Used("bounce", "no nvidia-fs"), "write": Used("bounce", "no nvidia-fs")}


def _on_a_drive(path: Path) -> str:
    if not (found := direct_io(str(path))).supported:
        pytest.skip(f"no direct I/O in {path}: {found.reason}")
    return str(path)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return _on_a_drive(tmp_path)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with installed(monkeypatch) as fake:
        yield fake


Make = Callable[..., KvikioBackend]


@pytest.fixture
def make(gpu: FakeGpu) -> Iterator[Make]:
    """Make backends of the fake GPU, which are closed at the end."""
    made = []

    def make(**arguments: Any) -> KvikioBackend:
        arguments.setdefault("examine", lambda _: dict(GDS if gpu.gds else NO_GDS))
        gpu.compat_is_measured |= arguments.get("path") == "compat"
        made.append(KvikioBackend(**arguments))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
    made.clear()


class FakeGpuContract(TransferContract):
    arguments: Mapping[str, Any] = {}
    gds = False
    short = False

    @pytest.fixture
    def directory(self, tmp_path: Path) -> str:
        return _on_a_drive(tmp_path)

    @pytest.fixture
    def backend(self, make: Make, gpu: FakeGpu) -> Backend:
        gpu.gds = self.gds
        if self.short:
            draw = random.Random(1)
            gpu.shorten = lambda _direction, size: draw.choice([size, size // 2, 5000, 100, 0])
        return make(**self.arguments)

    def reopened(self, backend: Backend) -> Backend:
        return KvikioBackend(examine=lambda _: dict(GDS), **self.arguments)

    def raw(self, backend: Backend, path: str) -> bytes:
        return Path(path).read_bytes()

    def make_symlink(self, target: str, path: str) -> None:
        Path(path).symlink_to(target)

    def make_hard_link(self, backend: Backend, target: str, path: str) -> None:
        Path(path).hardlink_to(target)


class TestDirectStorage(FakeGpuContract, BackendContract):
    gds = True


class TestDirectStorageWithShortTransfers(FakeGpuContract):
    gds = True
    short = True


class TestDirectStorageOnStreams(FakeGpuContract):
    arguments: Mapping[str, Any] = {"gds_calls": "streams"}
    gds = True


class TestDirectStorageOnStreamsWithShortTransfers(TestDirectStorageOnStreams):
    short = True


class TestCompatibility(FakeGpuContract):
    arguments: Mapping[str, Any] = {"path": "compat"}


class TestBounce(FakeGpuContract):
    arguments: Mapping[str, Any] = {"path": "bounce", "request_bytes": 4 * ALIGNMENT}


class TestWithoutDirectStorage(FakeGpuContract):
    pass


class TestPinnedHostMemory(FakeGpuContract):
    arguments: Mapping[str, Any] = {"memory": "pinned"}


# Which path.


def test_whole_blocks_take_the_path_and_the_rest_is_copied_through_the_host(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
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
def test_each_direction_takes_its_own_path(
    make: Make, gpu: FakeGpu, directory: str, works: str
) -> None:
    gpu.gds = True
    found = {**NO_GDS, works: Used("gds", "")}
    backend = make(examine=lambda _: found)
    assert backend.paths_in(directory) == found
    file = backend.create(f"{directory}/file", ALIGNMENT)
    assert isinstance(file, KvikioFile)
    assert {name: file.used(name) for name in ("read", "write")} == found
    buffer = backend.allocate(ALIGNMENT)
    file.write(buffer, 0).result()
    file.read(buffer, 0).result()
    assert [(direction, mode) for direction, mode, _, _ in gpu.calls] == [(works, "gds")]
    for name, used in found.items():
        assert backend.moved()[name][used.path] == ALIGNMENT  # type: ignore[index]


def test_what_cufile_does_not_take_is_not_called_direct(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
    backend = make(examine=lambda _: dict(GDS))
    file = backend.create(f"{directory}/file", ALIGNMENT)
    file.write(filled(backend, ALIGNMENT, 1), 0).result()
    assert isinstance(file, KvikioFile)
    for direction in ("read", "write"):
        used = file.used(direction)
        assert used.path == "bounce"
        assert "cuFile error 5027" in used.reason
    assert backend.moved()["write"] == {"gds": 0, "compat": 0, "bounce": ALIGNMENT}


@pytest.mark.parametrize("told", ["by the environment", "by the driver"])
def test_what_may_be_a_copy_through_the_host_is_not_called_direct(
    make: Make, gpu: FakeGpu, directory: str, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    gpu.gds = True
    gpu.copies_untold = told == "by the driver"
    if told == "by the environment":
        monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "true")
    backend = make()
    file = backend.create(f"{directory}/file", ALIGNMENT)
    file.write(backend.allocate(ALIGNMENT), 0).result()
    assert isinstance(file, KvikioFile)
    assert file.used("write").path == "bounce"
    assert "copy through the host" in file.used("write").reason
    assert backend.moved()["write"]["gds"] == 0
    demanding = make(path="gds")
    with pytest.raises(StorageError, match="copy through the host") as caught:
        demanding.open(f"{directory}/file").read(demanding.allocate(1), 0).result()
    assert caught.value.errno == errno.EOPNOTSUPP


def test_a_demand_that_cannot_be_met_says_why(make: Make, directory: str) -> None:
    backend = make(path="gds")
    with pytest.raises(StorageError, match="no nvidia-fs") as caught:
        backend.paths_in(directory)
    assert caught.value.errno == errno.EOPNOTSUPP
    file = backend.create(f"{directory}/file", ALIGNMENT)
    with pytest.raises(StorageError, match="no nvidia-fs"):
        file.write(backend.allocate(ALIGNMENT), 0).result()


def test_a_directory_is_examined_once_and_only_for_device_memory(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
    examined = []

    def examine(path: str) -> dict[Any, Used]:
        examined.append(path)
        return dict(NO_GDS)

    backend = make(examine=examine)
    for number in range(3):
        file = backend.create(f"{directory}/{number}", ALIGNMENT)
        file.write(backend.allocate(ALIGNMENT, "host"), 0).result()
        file.write(backend.allocate(ALIGNMENT, "pinned"), 0).result()
    assert (examined, gpu.num_opened) == ([], 0)
    for number in range(3):
        file = backend.open(f"{directory}/{number}")
        for _ in range(2):
            file.read(backend.allocate(ALIGNMENT), 0).result()
    assert (examined, gpu.num_opened) == ([directory], 0)


def test_threads_of_transfers_stay_on_the_device(
    make: Make, gpu: FakeGpu, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # who goes back to the device that a thread begins with makes a context there
    monkeypatch.setattr(type(gpu.current), "number", 1)
    current = []
    launch = gpu.streams.launch

    def noted(stream: int, work: Callable[[], None]) -> None:
        if threading.current_thread() is not threading.main_thread():
            current.append(gpu.current.number)
        launch(stream, work)

    monkeypatch.setattr(gpu.streams, "launch", noted)
    backend = make(path="bounce", device=0)
    file = backend.create(f"{directory}/file", ALIGNMENT)
    file.write(backend.allocate(ALIGNMENT), 0).result()
    assert current
    assert set(current) == {0}


def test_a_file_system_is_examined_once_for_all_backends_of_a_process(
    gpu: FakeGpu, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined = []

    def examine(path: str) -> dict[Any, Used]:
        examined.append(path)
        return dict(NO_GDS)

    monkeypatch.setattr(gds.backends.kvikio, "_examinations", {})
    monkeypatch.setattr(gds.backends.kvikio, "_examine", examine)
    for _ in range(2):
        backend = KvikioBackend()
        assert backend.paths_in(directory)["read"].path == "bounce"
        backend.close()
    assert examined == [directory]


def test_a_file_whose_directory_was_renamed_is_examined_where_it_is(
    make: Make, directory: str
) -> None:
    examined: list[str] = []

    def examine(path: str) -> dict[Any, Used]:
        examined.append(path)
        return dict(NO_GDS)

    backend = make(examine=examine)
    backend.make_dir(f"{directory}/before")
    file = backend.create(f"{directory}/before/file", ALIGNMENT)
    backend.rename(f"{directory}/before", f"{directory}/after")
    file.write(backend.allocate(ALIGNMENT), 0).result()
    assert examined == [f"{directory}/after"]


@pytest.mark.parametrize("path", ["compat", "bounce"])
def test_a_path_that_was_asked_for_needs_no_examination(
    make: Make, gpu: FakeGpu, directory: str, path: str
) -> None:
    backend = make(path=path, examine=lambda _: pytest.fail("examined"))
    file = new_file(backend, f"{directory}/file", nbytes=4 * ALIGNMENT)
    assert isinstance(file, KvikioFile)
    assert file.used("write").path == backend.paths_in(directory)["write"].path == path
    assert backend.moved()["write"][path] == 4 * ALIGNMENT
    assert gpu.num_opened == (path == "compat")


def test_the_bounce_needs_no_kvikio(
    make: Make, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    backend = make(path="bounce")
    new_file(backend, f"{directory}/file").close()
    assert backend.capabilities(directory).device_memory


def test_the_examination_is_that_of_the_check(
    make: Make, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gds.check import system

    class Machine(system.System):
        def library_error(self, name: str) -> str:
            return "no such file"

    monkeypatch.setattr(system, "System", Machine)
    found = make(examine=None).paths_in(directory)
    assert {used.path for used in found.values()} == {"bounce"}
    assert "no CUDA driver: no such file" in found["read"].reason


# Libraries.


def test_without_a_driver_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds.buffers.cuda, "no_driver", lambda: "libcuda.so.1: not found")
    with pytest.raises(RefusedError, match=r"libcuda\.so\.1: not found"):
        KvikioBackend()


@pytest.mark.parametrize("module", ["cupy", "kvikio"])
def test_without_a_library_the_remedy_is_named(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RefusedError, match=r"pip install .* '\.\[gpu\]'") as caught:
        KvikioBackend(path="compat")
    assert module in str(caught.value)


@pytest.mark.parametrize("module", ["cupy", "kvikio"])
@pytest.mark.parametrize(
    "error", [RuntimeError('Failure finding "libcufile.so.0":\n  none'), OSError("librt.so.1: no")]
)
def test_a_library_whose_own_libraries_are_missing_is_refused(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, module: str, error: Exception
) -> None:
    # What KvikIO's wheel raises where no package of cuFile is installed is no ImportError.
    class Fails(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            return ModuleSpec(name, self) if name == module else None

        def exec_module(self, module: types.ModuleType) -> None:
            raise error

    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Fails(), *sys.meta_path])
    with pytest.raises(RefusedError, match=r"pip install .* '\.\[gpu\]'") as caught:
        KvikioBackend(path="gds")
    assert " ".join(str(error).split()) in str(caught.value)


@pytest.mark.parametrize(("device", "said"), [(None, "no GPU can be"), (3, "GPU 3 cannot be")])
def test_a_driver_without_such_a_device_is_refused(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, device: int | None, said: str
) -> None:
    def fails(*_: object) -> int:
        raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    cuda = sys.modules["cupy"].cuda
    monkeypatch.setattr(cuda.runtime, "getDevice", fails)
    with pytest.raises(RefusedError, match=f"{said} used: cudaErrorNoDevice"):
        KvikioBackend(device=device)


def test_one_call_makes_any_backend(gpu: FakeGpu) -> None:
    for name, expected in (("posix", PosixBackend), ("kvikio", KvikioBackend)):
        backend = gds.open_backend(name, hybrid=True, read_threads=3)  # type: ignore[arg-type]
        assert type(backend) is expected
        assert isinstance(backend, PosixBackend)
        assert (backend.read_threads, backend.hybrid is not None) == (3, True)
        backend.close()
    with pytest.raises(ValueError, match="'posix' or 'kvikio'"):
        gds.open_backend("cufile")  # type: ignore[arg-type]


def test_importing_the_backend_imports_no_library() -> None:
    code = "import sys, gds.kvikio; sys.exit(bool({'kvikio', 'cupy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_kvikio_is_set_up_and_tuned(make: Make, gpu: FakeGpu, directory: str) -> None:
    backend = make(path="compat", read_threads=3, write_threads=2)
    expected = {
        "num_threads": 5,
        "gds_threshold": 0,
        "auto_direct_io_read": True,
        "auto_direct_io_write": True,
    }
    assert expected.items() <= gpu.settings.items()
    backend.tune(read_threads=1, write_threads=1, request_bytes=4 * MIB)
    assert gpu.settings["num_threads"] == 2
    assert backend.staging.num_buffers == 2
    new_file(backend, f"{directory}/file", nbytes=ALIGNMENT).close()
    assert gpu.task_sizes == [4 * MIB]


def test_backends_of_several_drives_do_not_take_threads_from_each_other(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
    """KvikIO has one pool for the process, which only its compatibility mode uses."""
    before = dict(gpu.settings)
    for _ in range(4):
        make(read_threads=3, write_threads=3)
    assert gpu.settings == before, "transfers run on the threads of their backend"
    first = make(path="compat", read_threads=3, write_threads=3)
    second = make(path="compat", read_threads=2, write_threads=1, request_bytes=MIB)
    assert gpu.settings["num_threads"] == 9
    first.tune(read_threads=4, write_threads=3, request_bytes=None)
    assert gpu.settings["num_threads"] == 10
    for number, backend in enumerate((first, second)):
        new_file(backend, f"{directory}/{number}", nbytes=ALIGNMENT).close()
    assert gpu.task_sizes == [16 * MIB, MIB], "nor the size of tasks"
    first.close()
    assert gpu.settings["num_threads"] == 3
    first.close()
    assert gpu.settings["num_threads"] == 3


def test_cufile_is_told_before_it_is_loaded_and_only_then(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
    compat = make(path="compat")
    new_file(compat, f"{directory}/compat").close()
    assert not [name for name in os.environ if name.startswith("CUFILE_")]
    gpu.gds = True
    new_file(make(), f"{directory}/gds").close()
    assert os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "false"
    assert not os.path.samefile(os.path.dirname(os.environ["CUFILE_LOGFILE_PATH"]), ".")


@pytest.mark.parametrize("way", ["threads", "streams"])
def test_a_handle_is_of_the_file_that_was_opened(
    make: Make, gpu: FakeGpu, directory: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    gpu.gds = True
    backend = make(gds_calls=way)
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
    assert isinstance(file, KvikioFile)
    assert file.used("read").path == "bounce"
    assert "the name was replaced" in file.used("read").reason
    file.read(into, 0).result()
    assert contents(into) == contents(filled(backend, FILE_BYTES, 2))


# Errors.


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("POSIX error on pwrite: No space left on device", errno.ENOSPC),
        ("POSIX error on pread: Input/output error at: posix_io.hpp:80", errno.EIO),
        ("cuFile error at: file_handle.cpp:120: internal error", errno.EIO),
        ("CUDA error at: CUDA_ERROR_ILLEGAL_ADDRESS", errno.EIO),
    ],
)
@pytest.mark.parametrize("direction", ["read", "write"])
def test_an_error_of_kvikio_gets_its_number_back(
    make: Make, gpu: FakeGpu, directory: str, direction: str, text: str, number: int
) -> None:
    backend = make(path="compat")
    file = new_file(backend, f"{directory}/file")
    gpu.error = lambda name, offset: text if (name, offset) == (direction, ALIGNMENT) else None
    buffer = backend.allocate(2 * ALIGNMENT)
    with pytest.raises(StorageError) as caught:
        getattr(file, direction)(buffer, ALIGNMENT).result()
    error = caught.value
    assert (error.errno, error.filename, error.offset) == (
        number,
        f"{directory}/file",
        ALIGNMENT,
    )
    assert text in str(error)
    gpu.error = lambda _direction, _offset: None
    assert getattr(file, direction)(buffer, ALIGNMENT).result() == 2 * ALIGNMENT


WAYS: dict[str, dict[str, str]] = {
    "threads": {"path": "gds", "gds_calls": "threads"},
    "streams": {"path": "gds", "gds_calls": "streams"},
    "compat": {"path": "compat"},
    "bounce": {"path": "bounce"},
}


@pytest.mark.parametrize("way", [WAYS["threads"], WAYS["streams"]], ids=["threads", "streams"])
@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("POSIX error: No space left on device", errno.ENOSPC),
        ("POSIX error: Input/output error", errno.EIO),
        ("internal error", errno.EIO),
    ],
)
def test_an_error_of_cufile_keeps_its_number(
    make: Make, gpu: FakeGpu, directory: str, direction: str, text: str, number: int, way: Any
) -> None:
    gpu.gds = True
    backend = make(**way)
    file = new_file(backend, f"{directory}/file")
    gpu.error = lambda name, offset: text if (name, offset) == (direction, ALIGNMENT) else None
    buffer = backend.allocate(2 * ALIGNMENT)
    with pytest.raises(StorageError) as caught:
        getattr(file, direction)(buffer, ALIGNMENT).result()
    error = caught.value
    assert (error.errno, error.filename, error.offset) == (number, f"{directory}/file", ALIGNMENT)
    gpu.error = lambda _direction, _offset: None
    assert getattr(file, direction)(buffer, ALIGNMENT).result() == 2 * ALIGNMENT


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_file_that_became_shorter_is_a_short_read(
    make: Make, gpu: FakeGpu, directory: str, way: Any
) -> None:
    gpu.gds = True
    backend = make(**way)
    file = new_file(backend, f"{directory}/file", nbytes=8 * ALIGNMENT)
    os.truncate(f"{directory}/file", 3 * ALIGNMENT)
    with pytest.raises(ShortReadError) as caught:
        file.read(backend.allocate(8 * ALIGNMENT), 0).result()
    assert caught.value.filename == f"{directory}/file"


def test_nothing_moved_at_all_ends_with_the_hosts_reason(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
    # A count of zero forever must neither spin nor pass for success.
    gpu.gds = True
    gpu.shorten = lambda _direction, _size: 0
    backend = make()
    file = new_file(backend, f"{directory}/file", seed=4)
    into = backend.allocate(FILE_BYTES)
    file.read(into, 0).result()
    assert contents(into) == contents(filled(backend, FILE_BYTES, 4))
    assert backend.moved()["read"] == {"gds": 0, "compat": 0, "bounce": FILE_BYTES}


# Memory.


def test_device_memory_is_registered_once_and_before_it_goes(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
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


def test_memory_that_cufile_does_not_register_is_moved_all_the_same(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
    gpu.gds = gpu.refuses_registration = True
    backend = make()
    file = backend.create(f"{directory}/file", ALIGNMENT)
    assert isinstance(file, KvikioFile)
    assert file.used("write").path == "gds"
    with pytest.warns(RegistrationRefused, match="GPU memory registration failed"):
        buffer = backend.allocate(ALIGNMENT)
    file.write(buffer, 0).result()
    assert backend.moved()["write"]["gds"] == ALIGNMENT


def test_pinned_memory_stays_pinned_while_somebody_looks_at_it(make: Make, gpu: FakeGpu) -> None:
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


def test_device_memory_has_no_view_for_the_host(make: Make) -> None:
    buffer = make().allocate(10)
    assert buffer.kind == "device"
    with pytest.raises(TypeError, match="device"):
        buffer.memoryview()
    assert isinstance(buffer, DeviceBuffer)
    with pytest.raises(ValueError, match="10"):
        buffer.upload(b"longer than it is")


def test_posix_files_refuse_device_memory(make: Make, directory: str) -> None:
    posix = PosixBackend()
    file = posix.create(f"{directory}/file", 10)
    with pytest.raises(TypeError, match="device"):
        file.write(make().allocate(10), 0)
    posix.close()


# Tensors.

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint16,
    torch.int64,
    torch.bool,
    torch.complex64,
]


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", ["cpu", "device"])
def test_tensors_of_every_type_are_bytes(
    make: Make, gpu: FakeGpu, directory: str, dtype: torch.dtype, place: str
) -> None:
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


def test_a_tensor_lives_as_long_as_its_buffer(make: Make, gpu: FakeGpu) -> None:
    tensor = torch.full((1000,), 7, dtype=torch.bfloat16)
    expected = tensor.view(torch.uint8).numpy().tobytes()
    buffer = make().buffer_of(OnDevice(gpu, tensor))
    part = buffer.slice(100, 200)
    del tensor, buffer
    gc.collect()
    assert contents(part) == expected[100:300]


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(4, 4).t()[1:], id="strided"),
        pytest.param(torch.zeros(4, 4).to_sparse(), id="sparse"),
        pytest.param(torch.zeros(4, device="meta"), id="elsewhere"),
    ],
)
def test_tensors_that_are_not_one_range_of_memory_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="tensor"):
        tensor_buffer(tensor)


@pytest.mark.parametrize("shape", [(), (0,), (1,)], ids=str)
def test_scalars_and_empty_tensors_are_buffers(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    assert tensor_buffer(tensor).nbytes == tensor.nbytes
    assert bytes(tensor_buffer(tensor).memoryview()) == b"\x80\x3f" * tensor.numel()


def test_a_device_buffer_is_an_array_of_bytes_for_others(make: Make) -> None:
    buffer = make().allocate(100).slice(10, 20)
    interface = buffer.__cuda_array_interface__  # type: ignore[attr-defined]
    assert interface["data"] == (buffer.address, False)
    assert (interface["shape"], interface["typestr"]) == ((20,), "|u1")


# Order.


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_only_compatibility_mode_is_ordered_with_the_default_stream(
    make: Make, gpu: FakeGpu, directory: str, way: Any
) -> None:
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


def test_stream_calls_use_as_many_streams_as_there_are_transfers_at_once(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
    gpu.gds = True
    before = gpu.num_streams
    backend = make(path="gds", gds_calls="streams", read_threads=3, write_threads=1)
    file = new_file(backend, f"{directory}/file", nbytes=32 * ALIGNMENT)
    copies = gpu.num_streams - before - 1  # one for the write of `new_file`
    buffers = [backend.allocate(ALIGNMENT) for _ in range(32)]
    futures = [file.read(buffer, n * ALIGNMENT) for n, buffer in enumerate(buffers)]
    for future in futures:
        future.result()
    assert 1 <= gpu.num_streams - before - copies <= 4


def test_without_a_configuration_file_stream_calls_are_refused_and_not_faked(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
    gpu.gds, gpu.has_stream_calls = True, False
    backend = make(path="gds", gds_calls="streams")
    file = backend.create(f"{directory}/file", ALIGNMENT)
    with pytest.raises(StorageError, match="Missing the cuFile stream api or configuration"):
        file.write(backend.allocate(ALIGNMENT), 0).result()


def test_without_kvikio_data_is_copied_although_cufile_works(
    make: Make, gpu: FakeGpu, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.gds = True
    monkeypatch.setitem(sys.modules, "kvikio", None)
    backend = make()
    file = new_file(backend, f"{directory}/file")
    assert isinstance(file, KvikioFile)
    assert file.used("write").path == "bounce"
    assert "kvikio" in file.used("write").reason


def test_copies_of_each_direction_have_a_stream_of_their_own(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
    backend = make(path="bounce")
    file = new_file(backend, f"{directory}/file", nbytes=8 * ALIGNMENT)
    gpu.copies.clear()
    buffer = backend.allocate(8 * ALIGNMENT)
    file.write(buffer, 0).result()
    file.read(buffer, 0).result()
    (to_host, first), (to_device, second) = gpu.copies
    assert (to_host, to_device) == (2, 1)
    assert first != second
    assert 0 not in (first, second)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_no_other_device_is_touched(
    make: Make, gpu: FakeGpu, directory: str, monkeypatch: pytest.MonkeyPatch, way: Any
) -> None:
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
    assert isinstance(file, KvikioFile)
    file.used("read")
    del buffer
    gc.collect()
    assert gpu.current.number == 1
    assert gpu.contexts == {0}


@pytest.mark.parametrize("aligns_badly", [False, True])
def test_an_allocation_takes_no_spare_block_if_cuda_aligns_it(
    make: Make, gpu: FakeGpu, aligns_badly: bool
) -> None:
    gpu.aligns_badly = aligns_badly
    buffer = make().allocate(8 * MIB)
    assert buffer.address % ALIGNMENT == 0
    assert sum(gpu.live.values()) == 8 * MIB + ALIGNMENT * aligns_badly


# Failures of the device.

LOST = "cudaErrorECCUncorrectable: uncorrectable ECC error encountered"


@pytest.mark.parametrize("call", ["memcpy", "synchronize"])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_device_that_is_lost_is_named(
    make: Make, gpu: FakeGpu, directory: str, call: str, direction: str
) -> None:
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


def test_no_memory_and_a_lost_device_are_different_errors(make: Make, gpu: FakeGpu) -> None:
    backend = make()
    gpu.refuses = lambda _, __: "cudaErrorMemoryAllocation: out of memory"
    with pytest.raises(DeviceMemoryError, match=r"8388608 bytes \(0\.00781 GiB\) on cuda:0"):
        backend.allocate(8 * MIB)
    gpu.refuses = lambda _, __: LOST
    with pytest.raises(DeviceLostError, match="cuda:0"):
        backend.allocate(8 * MIB)
    with pytest.raises(DeviceLostError, match="page-lock"):
        backend.allocate(8 * MIB, "pinned")


def test_a_refused_page_lock_is_named_and_copies_go_on_without_it(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
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


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_write_waits_for_the_kernel_before_it(
    make: Make, gpu: FakeGpu, directory: str, way: Any
) -> None:
    gpu.gds = True
    backend = make(**way)
    buffer = backend.allocate(2 * ALIGNMENT)
    assert isinstance(buffer, DeviceBuffer)
    file = backend.create(f"{directory}/file", 2 * ALIGNMENT)
    stream, other = gpu.new_stream(), gpu.new_stream()

    def kernel(value: int) -> Callable[[], None]:
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


def test_a_read_waits_for_the_kernel_that_still_needs_the_memory(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
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


def test_only_the_memory_that_is_moved_is_waited_for(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
    backend = make()
    file = backend.create(f"{directory}/file", ALIGNMENT)
    buffer = backend.allocate(2 * ALIGNMENT)
    assert isinstance(buffer, DeviceBuffer)
    ran: list[bool] = []
    stream = gpu.new_stream()
    gpu.streams.launch(stream, lambda: ran.append(True))
    buffer.slice(ALIGNMENT, ALIGNMENT).after(stream)
    file.write(buffer.slice(0, ALIGNMENT), 0).result()
    assert ran == []
    file.write(buffer.slice(ALIGNMENT, 1), 0).result()
    assert ran == [True]


def test_events_of_a_stream_do_not_pile_up(make: Make, gpu: FakeGpu) -> None:
    buffer = make().allocate(100)
    assert isinstance(buffer, DeviceBuffer)
    streams = [gpu.new_stream() for _ in range(2)]
    for _ in range(50):
        for stream in streams:
            buffer.slice(10, 20).after(stream)
            buffer.after(stream)
    assert len(buffer.region.events(buffer.address, buffer.address + 1)) == 2


# A process that forks.


def test_a_forked_child_leaves_the_parents_handles_alone(
    make: Make, gpu: FakeGpu, directory: str
) -> None:
    gpu.gds = True
    backend = make()
    file = new_file(backend, f"{directory}/file")
    child = os.fork()
    if child == 0:
        try:
            file.close()
            backend.close()
            os._exit(0 if gpu.num_open == 1 and gds.backends.kvikio._abandoned else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    into = backend.allocate(FILE_BYTES)
    assert file.read(into, 0).result() == FILE_BYTES


# The real ones.


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Callable[..., KvikioBackend]:
    try:
        KvikioBackend(path="bounce").close()
    except RefusedError as error:
        pytest.skip(str(error))
    return KvikioBackend


class RealGpuContract(BackendContract):
    arguments: Mapping[str, Any] = {}

    @pytest.fixture
    def directory(self, tmp_path: Path) -> str:
        return _on_a_drive(tmp_path)

    @pytest.fixture
    def backend(self, real: Make) -> Iterator[Backend]:
        backend = real(**self.arguments)
        yield backend
        backend.close()

    def reopened(self, backend: Backend) -> Backend:
        return KvikioBackend(**self.arguments)

    def raw(self, backend: Backend, path: str) -> bytes:
        return Path(path).read_bytes()


@pytest.mark.gpu
class TestRealGpu(RealGpuContract):
    """Whatever is the best path here."""


@pytest.mark.gpu
class TestRealGpuCompatibility(RealGpuContract):
    arguments: Mapping[str, Any] = {"path": "compat"}


@pytest.mark.gpu
class TestRealGpuBounce(RealGpuContract):
    arguments: Mapping[str, Any] = {"path": "bounce", "request_bytes": 4 * ALIGNMENT}


@pytest.mark.gpu
class TestRealPinnedMemory(RealGpuContract):
    arguments: Mapping[str, Any] = {"memory": "pinned"}


@pytest.mark.gpu
@pytest.mark.parametrize("path", [None, "compat", "bounce"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_real_tensors_and_side_streams(
    real: Make, directory: str, path: Any, dtype: torch.dtype
) -> None:
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
    used = file.used("read")  # type: ignore[attr-defined]
    assert backend.moved()["read"][used.path] == 3 * buffer.nbytes
    file.close()
    backend.close()


@pytest.mark.gpu
@pytest.mark.parametrize("path", [None, "bounce", "compat"])
def test_real_transfers_do_not_wait_for_training_on_the_default_stream(
    real: Make, directory: str, path: Any
) -> None:
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


@pytest.mark.gpu
def test_real_stream_calls_move_the_same_bytes(real: Make, directory: str) -> None:
    for way in ("threads", "streams"):
        backend = real(path="gds", gds_calls=way)
        try:
            backend.paths_in(directory)
            file = new_file(backend, f"{directory}/{way}", nbytes=64 * MIB, seed=2)
        except StorageError as error:
            backend.close()
            pytest.skip(str(error))
        into = backend.allocate(64 * MIB)
        file.read(into, 0).result()
        assert contents(into) == Path(f"{directory}/{way}").read_bytes()
        file.close()
        backend.close()


@pytest.mark.gpu
def test_real_memory_is_not_taken_on_other_devices(real: Make, directory: str) -> None:
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


@pytest.mark.gpu
def test_real_tensors_of_the_caller(real: Make, directory: str) -> None:
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
