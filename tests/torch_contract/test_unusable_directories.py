"""Directories that cannot hold a store: no directory, read-only, volatile, in use, too small."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gds import MemoryBackend, StorageError
from offload import AdamW, Options, load_parameters
from offload.errors import StoreError, StoreFullError, StoreLockedError, VolatileStoreError
from offload.units import size
from tests.mounts import mounted
from tests.stores.files import everything
from tests.stores.small import CHUNK_BYTES, STORE, make_model, make_optimizer, memory_store, step
from tests.threads import one_thread
from tests.torch_contract.refusing import bits, nothing_changes

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


class TestDirectories:
    def test_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="cannot keep a store here") as error:
            AdamW(make_model().parameters(), directory=tmp_path / "file" / "run")
        assert "choose a directory that you can create files in" in str(error.value)
        assert error.value.errno == errno.ENOTDIR
        assert error.value.filename == str(tmp_path / "file" / "run")
        assert os.listdir(tmp_path) == ["file"]

    def test_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("mine")
        with pytest.raises(StoreError, match="cannot keep a store here"):
            AdamW(make_model().parameters(), directory=tmp_path / "run")
        assert (tmp_path / "run").read_text() == "mine"

    @pytest.mark.parametrize("nbytes", [3967, 3968, 4060, 4095, 4096, 5000])
    def test_whose_path_leaves_no_room_for_the_names_in_it(
        self, tmp_path: Path, nbytes: int
    ) -> None:
        """The kernel takes 4095 bytes. Some file is only made by a pin, or by a seal."""
        path = str(tmp_path)
        while len(path) < nbytes - 1:
            path += "/" + "d" * min(200, nbytes - len(path) - 1)
        path += "d" * (nbytes - len(path))
        model = make_model()
        if nbytes > 3967:
            with pytest.raises(StoreError, match="shorter") as error:
                make_optimizer(model, directory=path)
            assert error.value.errno == errno.ENAMETOOLONG
            assert os.listdir(tmp_path) == []
            return
        with make_optimizer(model, directory=path) as optimizer:
            step(optimizer)
            optimizer.checkpoint().result()
            optimizer.pin("p" * 64)

    def test_where_the_kernel_makes_no_files(self) -> None:
        with pytest.raises(StoreError, match="cannot keep a store here"):
            AdamW(make_model().parameters(), directory="/proc/run")

    @pytest.mark.parametrize("exists", [True, False], ids=["a-store", "nothing-there"])
    def test_that_is_mounted_read_only(self, tmp_path: Path, exists: bool) -> None:
        (tmp_path / "disk").mkdir()
        directory = tmp_path / "disk" / "run"
        model = make_model()
        if exists:
            with AdamW(model.parameters(), directory=directory, model=model) as optimizer:
                step(optimizer)
                optimizer.checkpoint().result()
        with mounted(tmp_path / "disk", "--bind", tmp_path / "disk", read_only=True):
            before = bits(model)
            names = sorted(str(p) for p in tmp_path.rglob("*"))
            with pytest.raises((StoreError, StorageError)) as error:  # noqa: PT012
                optimizer = AdamW(model.parameters(), directory=directory, model=model)
                try:
                    optimizer.restore()
                    step(optimizer)
                finally:
                    optimizer.close()
            assert error.value.errno == errno.EROFS
            assert bits(model) == before
            assert sorted(str(p) for p in tmp_path.rglob("*")) == names
            if exists:
                assert load_parameters(make_model(), directory) == 1

    def test_in_memory(self, memory_directory: Path) -> None:
        with pytest.raises(VolatileStoreError, match="loses its content at power-off") as error:
            AdamW(make_model().parameters(), directory=memory_directory / "a" / "run")
        assert "Options(allow_volatile=True)" in str(error.value)
        assert "tmpfs" in str(error.value)
        assert list(memory_directory.iterdir()) == []
        allowed = Options(allow_volatile=True)
        AdamW(
            make_model().parameters(), directory=memory_directory / "a" / "run", options=allowed
        ).close()

    def test_that_another_optimizer_writes_to(self) -> None:
        model, backend = make_model(), MemoryBackend()
        first = make_optimizer(model, backend)
        step(first)
        with (
            nothing_changes(backend, model, first),
            pytest.raises(StoreLockedError, match=r"call close\(\) of that optimizer first"),
        ):
            make_optimizer(model, backend)
        step(first)
        first.close()

    @pytest.fixture
    def memory_directory(self) -> Iterator[Path]:
        path = Path(f"/dev/shm/offload-test-{os.getpid()}")
        try:
            path.mkdir()
        except OSError as error:
            pytest.skip(f"no writable /dev/shm: {error}")
        yield path
        for directory, names, files in os.walk(path, topdown=False):
            for name in files:
                os.unlink(f"{directory}/{name}")
            for name in names:
                os.rmdir(f"{directory}/{name}")
        path.rmdir()


class TestSpace:
    def slot_bytes(self) -> int:
        return sum(len(d) for p, d in everything(memory_store(1)).items() if d and "/step-" in p)

    @pytest.mark.parametrize("keep", [1, 3])
    def test_too_little_for_what_is_to_be_kept(self, keep: int) -> None:
        needed = (keep + 1) * self.slot_bytes()
        model = make_model()
        small = MemoryBackend(capacity_bytes=needed - 1)
        with pytest.raises(StoreFullError, match=f"{re.escape(size(needed))} in all") as error:
            make_optimizer(model, small, keep=keep)
        for advice in ("make room", "another directory", "smaller keep="):
            assert advice in str(error.value)
        assert error.value.errno == errno.ENOSPC
        assert set(everything(small)) <= {STORE, f"{STORE}/LOCK"}
        make_optimizer(model, MemoryBackend(capacity_bytes=needed), keep=keep).close()

    def test_a_small_disk(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        size = 2 * self.slot_bytes()
        with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
            model = make_model()
            settings = Options(allow_volatile=True, chunk_bytes=CHUNK_BYTES)
            with pytest.raises(StoreFullError, match="make room"):
                AdamW(model.parameters(), directory=tmp_path / "disk" / "run", options=settings)
            assert {p.name for p in (tmp_path / "disk").rglob("*")} <= {"run", "LOCK"}

    def test_taken_by_someone_else_before_the_first_step(self) -> None:
        backend = MemoryBackend(capacity_bytes=3 * self.slot_bytes())
        model, reference = make_model(), make_model()
        optimizer = make_optimizer(model, backend, keep=2)
        backend.create("/other", 3 * self.slot_bytes() - 10_000).close()
        with (
            nothing_changes(backend, model, optimizer),
            pytest.raises(StorageError, match="the slot that the next step writes to") as error,
        ):
            step(optimizer)
        assert error.value.errno == errno.ENOSPC
        assert optimizer.num_steps == 0
        backend.remove("/other")
        optimizer.step()
        other = make_optimizer(reference, MemoryBackend())
        step(other)
        assert bits(model) == bits(reference)
        for one in (optimizer, other):
            one.close()

    def test_too_little_for_an_added_group(self) -> None:
        backend = MemoryBackend(capacity_bytes=2 * self.slot_bytes() + 1000)
        model, twin = (
            torch.nn.ModuleDict({"body": make_model(), "head": torch.nn.Linear(90, 90)})
            for _ in range(2)
        )
        roomy = MemoryBackend()
        optimizer, other = (
            make_optimizer(m["body"], b, keep=1, model=None)
            for m, b in ((model, backend), (twin, roomy))
        )
        for its in (optimizer, other):
            step(its)
            its.checkpoint().result()
        for _ in range(2):
            with (
                nothing_changes(backend, model, optimizer),
                pytest.raises(StorageError, match="the slot that the next step writes to"),
            ):
                optimizer.add_param_group({"params": list(model["head"].parameters())})
            assert len(optimizer.param_groups) == 1
        for its in (optimizer, other):
            for _ in range(2):
                step(its)
            assert its.checkpoint().result().verify().ok
            its.close()
        assert bits(model["body"]) == bits(twin["body"])
