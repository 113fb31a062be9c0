"""Directories that cannot hold a store: no directory, read-only, volatile, in use, too small."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gds import MemoryBackend, StorageError
from offload import AdamW, Options, load_parameters
from offload.errors import StoreError, StoreFullError, VolatileStoreError
from offload.units import size
from tests.mounts import mounted
from tests.stores.files import everything
from tests.stores.small import STORE, make_model, make_optimizer, memory_store, step
from tests.threads import one_thread
from tests.torch_contract.refusing import bits, nothing_changes

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


def test_where_no_directory_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(StoreError, match=r"cannot keep a store here.*choose a directory that"):
            AdamW(make_model().parameters(), directory=path)
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("nbytes", [3967, 3968, 4095, 5000])
def test_whose_path_leaves_no_room_for_the_names_in_it(tmp_path: Path, nbytes: int) -> None:
    """The kernel takes 4095 bytes. Some file is only made by a pin, or by a seal."""
    path = str(tmp_path)
    while len(path) < nbytes - 1:
        path += "/" + "d" * min(200, nbytes - len(path) - 1)
    path += "d" * (nbytes - len(path))
    if nbytes > 3967:
        with pytest.raises(StoreError, match="shorter") as error:
            make_optimizer(make_model(), directory=path)
        assert error.value.errno == errno.ENAMETOOLONG
        assert os.listdir(tmp_path) == []
        return
    with make_optimizer(make_model(), directory=path) as optimizer:
        step(optimizer)
        optimizer.checkpoint().result()
        optimizer.pin("p" * 64)


@pytest.mark.parametrize("exists", [True, False], ids=["a-store", "nothing-there"])
def test_that_is_mounted_read_only(tmp_path: Path, exists: bool) -> None:
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


@pytest.fixture
def in_memory() -> Iterator[Path]:
    try:
        path = tempfile.TemporaryDirectory(dir="/dev/shm")
    except OSError as error:
        pytest.skip(f"no writable /dev/shm: {error}")
    with path:
        yield Path(path.name)


def test_that_loses_its_content_at_power_off(in_memory: Path) -> None:
    model, directory = make_model(), in_memory / "a" / "run"
    says = r"^/dev/shm.*tmpfs.*loses its content at power-off.*Options\(allow_volatile=True\)"
    with pytest.raises(VolatileStoreError, match=says):
        AdamW(model.parameters(), directory=directory)
    assert list(in_memory.iterdir()) == []
    allowed = Options(allow_volatile=True)
    AdamW(model.parameters(), directory=directory, options=allowed).close()


def slot_bytes() -> int:
    return sum(len(d) for p, d in everything(memory_store(1)).items() if d and "/step-" in p)


@pytest.mark.parametrize("keep", [1, 3])
def test_too_little_for_what_is_to_be_kept(keep: int) -> None:
    needed = (keep + 1) * slot_bytes()
    model = make_model()
    small = MemoryBackend(capacity_bytes=needed - 1)
    with pytest.raises(StoreFullError, match=f"{re.escape(size(needed))} in all") as error:
        make_optimizer(model, small, keep=keep)
    for advice in ("make room", "another directory", "smaller keep="):
        assert advice in str(error.value)
    assert error.value.errno == errno.ENOSPC
    assert set(everything(small)) <= {STORE, f"{STORE}/LOCK"}
    make_optimizer(model, MemoryBackend(capacity_bytes=needed), keep=keep).close()


def test_too_little_for_an_added_group() -> None:
    backend = MemoryBackend(capacity_bytes=2 * slot_bytes() + 1000)
    model, twin = (
        torch.nn.ModuleDict({"body": make_model(), "head": torch.nn.Linear(90, 90)})
        for _ in range(2)
    )
    both = [
        make_optimizer(m["body"], b, keep=1, model=None)
        for m, b in ((model, backend), (twin, MemoryBackend()))
    ]
    for its in both:
        step(its)
        its.checkpoint().result()
    for _ in range(2):
        with (
            nothing_changes(backend, model, both[0]),
            pytest.raises(StorageError, match="the slot that the next step writes to"),
        ):
            both[0].add_param_group({"params": list(model["head"].parameters())})
        assert len(both[0].param_groups) == 1
    for its in both:
        for _ in range(2):
            step(its)
        assert its.checkpoint().result().verify().ok
        its.close()
    assert bits(model["body"]) == bits(twin["body"])
