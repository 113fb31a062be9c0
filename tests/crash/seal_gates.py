"""A model whose parameters are sealed one by one, and a gate that each of them has to pass."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gds.waiting
import offload.checkpoint.sealed_slot
import offload.format.manifest
import offload.model.model_file
from gds import Buffer, IOFuture, MemoryBackend, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.contract import File
from offload import AdamW, SealHandle
from tests.eventually import eventually
from tests.stores.training import HYPER, options

STORE = "/run"
BLOCK_BYTES = 4096
NUM_ROWS = 8
TIMEOUT_S = 60.0


class Turnstile(WrapperBackend):
    """Lets writes to the files of a name through one at a time, once it has been shut."""

    file_name = "/model.safetensors"

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.is_shut = False
        self.fails = False
        self.reached = threading.Semaphore(0)
        self.turns = threading.Semaphore(0)

    def wrap_file(self, file: File) -> File:
        return _TurnstileFile(file, self)

    def open_for_all(self) -> None:
        self.is_shut = False
        self.turns.release(1000)


class _TurnstileFile(WrapperFile):
    def __init__(self, inner: File, backend: Turnstile) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, source: Buffer, offset: int) -> IOFuture:
        backend = self._backend
        if backend.is_shut and self.path.endswith(backend.file_name):
            backend.reached.release()
            assert backend.turns.acquire(timeout=TIMEOUT_S)
            if backend.fails:
                raise StorageError(5, "the drive is gone", self.path)
        return super().write(source, offset)


def make_blocks_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the parameters into many blocks, as those of a large model are."""
    for module in (
        offload.format.manifest,
        offload.model.model_file,
        offload.checkpoint.sealed_slot,
    ):
        monkeypatch.setattr(module, "MODEL_BLOCK_BYTES", BLOCK_BYTES)


@pytest.fixture(name="backend")
def turnstile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turnstile]:
    """A turnstile for blocks of one parameter each."""
    make_blocks_small(monkeypatch)
    # Who waits is told: what is not told is not to be seen a second later, either.
    monkeypatch.setattr(gds.waiting, "_LOST_S", 3600.0)
    backend = Turnstile()
    yield backend
    backend.open_for_all()


class Rows(torch.nn.Module):
    """Eight bf16 parameters, each one block of the model file and two chunks of state."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.nn.ParameterList(
            torch.randn(2048, generator=generator).to(torch.bfloat16) for _ in range(NUM_ROWS)
        )
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bfloat16))  # behind the rows

    def fill_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for row in self.rows:
            row.grad = torch.randn(row.shape, generator=generator).to(row.dtype)


class Kinds(Rows):
    """Rows behind which are a transposed, a frozen and a frozen transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        for name, trained in (("turned", True), ("frozen", False), ("frozen_turned", False)):
            table = torch.arange(2048, dtype=torch.bfloat16).reshape(32, 64).t()
            setattr(self, name, torch.nn.Parameter(table, requires_grad=trained))
        self.turned.grad = torch.zeros_like(self.turned)


def started(backend: Turnstile, kind: type[Rows] = Rows, **changes: Any) -> tuple[Rows, AdamW]:
    """Return a model and its optimizer, after a step."""
    model = kind()
    arguments = {"directory": STORE, "model": model, **HYPER, **changes}
    optimizer = AdamW(model.parameters(), options=options(backend, ring_chunks=4), **arguments)
    model.fill_gradients(1)
    optimizer.step()
    return model, optimizer


def held_checkpoint(backend: Turnstile, optimizer: AdamW, train_state: object = None) -> SealHandle:
    """Begin a checkpoint; return when its first block has been copied and waits to be written."""
    backend.is_shut = True
    handle = optimizer.checkpoint(train_state)
    assert backend.reached.acquire(timeout=TIMEOUT_S)
    return handle


def copies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_waiting(action: Callable[[], object]) -> threading.Thread:
    """Do something on another thread, and return once that waits to be told."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    assert eventually(lambda: waits(thread.ident) or not thread.is_alive())
    assert thread.is_alive(), "it does not wait"
    return thread


def waits(thread: int | None) -> bool:
    """Return whether a thread is where this library waits for another one."""
    frame = sys._current_frames().get(thread or 0)
    return frame is not None and frame.f_code.co_filename == gds.waiting.__file__


def goes_on(thread: threading.Thread) -> bool:
    thread.join(TIMEOUT_S)
    return not thread.is_alive()
