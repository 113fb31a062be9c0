"""Buffers go when whoever used them is closed, without waiting for the collector of cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import offload
from gds import Backend, Buffer, PosixBackend, WrapperBackend
from gds.contract import BufferKind
from offload import export_checkpoint, import_checkpoint
from tests.eventually import eventually


class Allocating(WrapperBackend):
    """Remembers which buffers it has given out, without keeping them."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.given: list[weakref.ref[Buffer]] = []

    def allocate(self, nbytes: int, kind: BufferKind | None = None) -> Buffer:
        buffer = super().allocate(nbytes, kind)
        self.given.append(weakref.ref(buffer))
        return buffer

    def kept(self) -> list[weakref.ref[Buffer]]:
        """Return which of them are still used; threads may need a moment to end a transfer."""
        return [given for given in self.given if given() is not None]


@pytest.fixture
def backend() -> Iterator[Allocating]:
    backend = Allocating(PosixBackend())
    yield backend
    backend.close()


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What torch imports at the first step keeps this stack in a traceback."""
    for overlap in (None, "forward"):
        backend = Allocating(PosixBackend())
        directory = tmp_path_factory.mktemp("imported")
        train(directory, backend, AFTER["a checkpoint"], overlap=overlap)
        backend.close()


@pytest.fixture(autouse=True)
def without_the_collector(imported: None) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def options(backend: Backend, **settings: object) -> offload.Options:
    return offload.Options(backend=backend, chunk_bytes=8192, ring_chunks=3, **settings)


def train(directory: Path, backend: Backend, after: Callable[..., object], **settings) -> None:
    model = torch.nn.Linear(100, 120).bfloat16()
    with offload.AdamW(
        model.parameters(),
        directory=directory / "run",
        model=model,
        options=options(backend, **settings),
    ) as optimizer:
        for _ in range(2):
            model(torch.ones(1, 100, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        optimizer.checkpoint().result()
        after(optimizer)


AFTER: dict[str, Callable[[offload.OffloadedOptimizer], object]] = {
    "a checkpoint": lambda _: None,
    "a step": lambda optimizer: optimizer.step(),
    "reading all state": lambda optimizer: optimizer.full_state_dict(),
    "a restore": lambda optimizer: optimizer.restore(),
    "loading state": lambda optimizer: optimizer.load_state_dict(optimizer.full_state_dict()),
}


@pytest.mark.parametrize(
    ("after", "overlap"),
    [*((after, None) for after in AFTER), ("a step", "forward"), ("a restore", "forward")],
)
def test_by_an_optimizer_that_is_closed(
    tmp_path: Path, backend: Allocating, after: str, overlap: str | None
) -> None:
    train(tmp_path, backend, AFTER[after], overlap=overlap)
    assert len(backend.given) >= 9, "three chunks of three arrays"
    assert eventually(lambda: backend.kept() == []), backend.kept()


@pytest.mark.parametrize("kind", ["pt", "safetensors", "dcp"])
def test_by_an_export_and_an_import(tmp_path: Path, backend: Allocating, kind: str) -> None:
    train(tmp_path, backend, AFTER["a checkpoint"])
    backend.given.clear()
    with offload.open_checkpoint(tmp_path / "run", backend=backend) as opened:
        export_checkpoint(opened, tmp_path / "theirs", kind)
    assert len(backend.given) >= 9
    assert eventually(lambda: backend.kept() == []), backend.kept()
    if kind == "safetensors":
        return  # is not imported
    backend.given.clear()
    import_checkpoint(tmp_path / "theirs", tmp_path / "again", options=options(backend))
    assert len(backend.given) >= 9
    assert eventually(lambda: backend.kept() == []), backend.kept()
