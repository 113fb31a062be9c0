"""Results do not depend on when transfers end, nor on whether a seal is still going on.

Steps, transfers and seals overlap: reads run ahead, writes and seals trail behind. What is used,
written and sealed is the same as if each had waited for the one before.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

import offload.manifest
import offload.model_file
from gds import Buffer, File, IOFuture, MemoryBackend, WrapperBackend
from gds._wrapper import WrapperFile
from offload.errors import SealError
from offload.seal import Seal
from tests.numerics.models import FIRST_LATE_STEP, trainable
from tests.numerics.pairs import CASES, CUTS, Cut, Pair
from tests.numerics.reference import assert_same_bits, assert_same_state, read_state

TIMEOUT_S = 30
"""Only reached where something that should happen does not."""


class Disordered(WrapperBackend):
    """Transfers take random times and overtake each other."""

    def __init__(self, seed: int) -> None:
        super().__init__(MemoryBackend())
        self.random = random.Random(seed)
        self.pool = ThreadPoolExecutor(4)

    def wrap_file(self, file: File) -> File:
        return DisorderedFile(file, self)


class DisorderedFile(WrapperFile):
    def __init__(self, inner: File, backend: Disordered) -> None:
        super().__init__(inner)
        self.backend = backend
        self.in_flight: list[Future[int]] = []

    def read(self, into: Buffer, offset: int) -> IOFuture:
        return self.later(lambda: self.inner.read(into, offset).result())

    def write(self, source: Buffer, offset: int) -> IOFuture:
        return self.later(lambda: self.inner.write(source, offset).result())

    def close(self) -> None:
        for future in self.in_flight:
            future.exception()
        super().close()

    def later(self, transfer: Callable[[], int]) -> Future[int]:
        delay = self.backend.random.choice([0, 0, 0.0005, 0.002])

        def move() -> int:
            time.sleep(delay)
            return transfer()

        future = self.backend.pool.submit(move)
        self.in_flight = [f for f in self.in_flight if not f.done()] + [future]
        return future


@pytest.mark.parametrize("ring_chunks", [2, 3, 7], ids="ring-{}".format)
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-in-some-groups"])
def test_transfers_that_overtake_each_other(name, ring_chunks):
    backend = Disordered(seed=ring_chunks)
    pair = Pair(CASES[name], Cut(4096, ring_chunks), backend)
    for step in range(9):
        pair.step(step)
        pair.assert_same_parameters()
        if step in (2, 3, 6):
            pair.optimizer.checkpoint({"step": step})
        if step == 7:
            pair.optimizer.checkpoint()
            pair.optimizer.restore()
            pair.assert_same_parameters()
    pair.assert_same_state()
    pair.optimizer.close()
    backend.pool.shutdown()


class Gate(WrapperBackend):
    """While closed, holds up a seal after it has copied its first block of parameters."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.opened = threading.Event()
        self.reached = threading.Event()

    def wrap_file(self, file: File) -> File:
        return GatedFile(file, self)


class GatedFile(WrapperFile):
    def __init__(self, inner: File, gate: Gate) -> None:
        super().__init__(inner)
        self.gate = gate

    def write(self, source: Buffer, offset: int) -> IOFuture:
        if self.path.endswith("model.safetensors"):
            self.gate.reached.set()
            assert self.gate.opened.wait(TIMEOUT_S)
        return super().write(source, offset)


@pytest.fixture
def small_blocks(monkeypatch):
    """Let a seal copy 4 KiB of parameters at a time, so that it has many blocks to be amid."""
    for module in (offload.manifest, offload.model_file):
        monkeypatch.setattr(module, "MODEL_BLOCK_BYTES", 4096)


@pytest.mark.parametrize("keep", [2, 3])
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-in-some-groups"])
def test_a_step_amid_a_seal_leaves_no_trace_in_it(name, keep, small_blocks, monkeypatch):
    gate = Gate()
    wait_copied = Seal.wait_copied
    waits: list[int] = []

    def open_gate_and_wait(seal: Seal, nbytes: int) -> None:
        gate.opened.set()  # the step has come here while only the first block is copied
        waits.append(nbytes)
        wait_copied(seal, nbytes)

    monkeypatch.setattr(Seal, "wait_copied", open_gate_and_wait)
    pair = Pair(CASES[name], CUTS[0], gate, keep=keep)
    for step in range(FIRST_LATE_STEP + 2):
        gate.opened.set()
        pair.step(step)
        gate.opened.clear()
        gate.reached.clear()
        handle = pair.optimizer.checkpoint({"step": step})
        assert gate.reached.wait(TIMEOUT_S)
        num_waits = len(waits)
        pair.step_live(step + 1)
        assert len(waits) > num_waits
        stored = read_state(handle.result(TIMEOUT_S).path, gate)
        assert_same_state(stored, pair.reference, trainable(pair.expected))
        for parameter, tensor in pair.expected.named_parameters():
            if parameter in stored.model:
                assert_same_bits(stored.model[parameter], tensor, parameter)
        assert pair.optimizer.restore().step == step + 1
        pair.assert_same_parameters()


def test_an_edit_amid_a_seal_fails_the_seal_and_nothing_else(small_blocks):
    gate = Gate()
    gate.opened.set()
    pair = Pair(CASES["adamw"], CUTS[0], gate)
    pair.step(0)
    pair.optimizer.checkpoint().result()
    pair.step(1)
    gate.opened.clear()
    gate.reached.clear()
    handle = pair.optimizer.checkpoint()
    assert gate.reached.wait(TIMEOUT_S)
    for model in pair.both():
        with torch.no_grad():
            model.wide64[-1] = 2.0  # near the end of the file: not copied yet
    gate.opened.set()
    with pytest.raises(SealError, match=r"'wide64' was changed in place.*call \.result\(\)"):
        handle.result(TIMEOUT_S)
    with pytest.raises(SealError, match="sealing step 2 failed"):
        pair.step_live(2)
    assert pair.optimizer.checkpoint().result().step == 2
    for step in range(2, 9):
        pair.step(step)
        pair.assert_same_parameters()
    pair.assert_same_state()
