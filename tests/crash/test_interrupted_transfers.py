"""Ctrl-C at each moment at which a call waits for, begins or takes note of a transfer of state.

The interrupt is raised at once, by the call that it hits. It is not kept for a later call, which
would blame a drive that has done nothing wrong, and it leaves nothing that waits for ever.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gds import Buffer, File, IOFuture, MemoryBackend, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload.errors import BrokenOptimizerError
from tests.stores.training import (
    Model,
    Reference,
    backward,
    differences,
    optimizer_for,
    options,
    train,
)

LAST = 6


class Interrupting(WrapperBackend):
    """Is interrupted at a chosen one of the calls of the main thread, once."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.left = -1
        """Calls to go; negative if none is to be interrupted any more."""
        self.where: set[str] = set()

    def wrap_file(self, file: File) -> File:
        return InterruptingFile(file, self)

    def passes(self, where: str) -> None:
        if threading.current_thread() is threading.main_thread() and where in self.where:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


class InterruptingFile(WrapperFile):
    def __init__(self, inner: File, backend: Interrupting) -> None:
        super().__init__(inner)
        self.backend = backend

    def read(self, into: Buffer, offset: int) -> IOFuture:
        self.backend.passes("begins")
        return Future(self.inner.read(into, offset), self.backend)

    def write(self, source: Buffer, offset: int) -> IOFuture:
        self.backend.passes("begins")
        return Future(self.inner.write(source, offset), self.backend)


class Future:
    def __init__(self, inner: IOFuture, backend: Interrupting) -> None:
        self.inner, self.backend = inner, backend

    def done(self) -> bool:
        return self.inner.done()

    def result(self, timeout: float | None = None) -> int:
        self.backend.passes("waits")
        return self.inner.result(timeout)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        self.backend.passes("asks to be told")
        self.inner.add_done_callback(lambda _: fn(self))


@pytest.mark.parametrize("overlap", [None, "forward"])
@pytest.mark.parametrize("where", ["begins", "waits", "asks to be told"])
@pytest.mark.parametrize("resident", [0, 20_000], ids=["", "resident"])
def test_an_interrupt_is_raised_where_it_comes_and_never_later(
    overlap: Any, where: str, resident: int
) -> None:
    interrupted = 0
    for number in itertools.count(1):
        backend = Interrupting()
        model = Model()
        settings = options(backend, overlap=overlap, host_memory=resident)
        optimizer = optimizer_for(model, "/run", settings)
        for step in (1, 2):
            backward(model, step)
            optimizer.step()
            if step == 1:
                optimizer.checkpoint().result()
        backward(model, 3)
        backend.where, backend.left = {where}, number
        try:
            optimizer.step()
            optimizer.synchronize()
            was_interrupted = False
        except KeyboardInterrupt:
            was_interrupted = True
        backend.where = set()
        if not was_interrupted:
            assert backend.left > 0, "an interrupt was swallowed"
            optimizer.close()
            break
        interrupted += 1
        try:
            backward(model, 4)
            optimizer.step()
            optimizer.synchronize()
        except BrokenOptimizerError as error:
            said = str(error)
        else:
            said = "KeyboardInterrupt came where it did no harm"
        assert "KeyboardInterrupt" in said
        assert "a transfer of state failed" not in said
        found = optimizer.restore()
        assert found is not None
        train(model, optimizer, *range(found.step + 1, LAST), seal=False)
        sealed = optimizer.checkpoint().result()
        assert differences(sealed, backend, Reference().after(LAST - 1)) == []
        optimizer.close()
    if overlap is None or where == "waits":  # beside the forward a thread does the rest
        assert interrupted > 1


class InterruptedSync(WrapperBackend):
    """Is interrupted when names in the store are made durable, while it is told to."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.interrupts = False

    def sync_dir(self, path: str) -> None:
        if self.interrupts:
            raise KeyboardInterrupt
        super().sync_dir(path)


def test_what_an_interrupt_has_left_unknown_is_said_with_its_name() -> None:
    backend = InterruptedSync()
    model = Model()
    optimizer = optimizer_for(model, "/run", options(backend), keep=1)
    backward(model, 1)
    optimizer.step()
    optimizer.checkpoint().result()
    backend.interrupts = True
    with (
        pytest.raises(KeyboardInterrupt),
        pytest.warns(RuntimeWarning, match=r"could not be made durable \(KeyboardInterrupt\)"),
    ):
        optimizer.pin("best")
    backend.interrupts = False
    optimizer.close()
