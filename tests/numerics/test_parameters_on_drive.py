"""Steps that write parameters into the slot, beside the state: what seals then write, and errors.

Each parameter of these models is one chunk, and 2 MiB of the model file.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import offload
from gds import Buffer, IOFuture, MemoryBackend, StorageError, WrapperBackend
from gds.backends.threads import TransferPool
from gds.backends.wrapper import WrapperFile
from gds.contract import File
from offload import AdamW, SealError
from offload.errors import DamagedError
from offload.stream.model_reader import ModelReader
from tests.crash.seal_gates import waits
from tests.eventually import eventually
from tests.numerics.pairs import CASES, ON_DRIVE, memory_pair
from tests.stores.files import flip, read
from tests.stores.training import read_tensors, same_bits

MIB = 1 << 20
STORE = "/run"
SEAL = "offload-seal"
"""Name of the thread that seals."""

NUM = 3
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


class Rows(torch.nn.Module):
    """Three bf16 parameters, and what else is asked for."""

    def __init__(self, frozen: int = 0, seed: int = 0, *, counts: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.nn.ParameterList(
            torch.randn(MIB, generator=generator).to(torch.bfloat16) for _ in range(NUM)
        )
        if frozen:
            values = torch.randn(frozen, generator=generator).to(torch.bfloat16)
            self.frozen = torch.nn.Parameter(values, requires_grad=False)
        if counts:  # in front of the rows, so that each shares a mebibyte with the next one
            self.register_buffer("counts", torch.zeros(1, dtype=torch.int64))

    def fill_gradients(self, seed: int, rows: Sequence[int] = range(NUM)) -> None:
        generator = torch.Generator().manual_seed(seed)
        for number, row in enumerate(self.rows):
            values = torch.randn(row.shape, generator=generator).to(row.dtype)
            row.grad = values if number in rows else None


class Run:
    """A model that trains, and how many bytes it has moved since it was last asked."""

    def __init__(
        self, backend: WrapperBackend | MemoryBackend, model: Rows, keep: int = 2, **settings: Any
    ) -> None:
        self.backend, self.model = backend, model
        options = offload.Options(
            chunk_bytes=4 * MIB,
            backend=backend,
            allow_volatile=True,
            **{"parameters": "drive", "ring_chunks": 2, **settings},
        )
        parameters = [p for p in model.parameters() if p.requires_grad]
        arguments = {"directory": STORE, "model": model, "keep": keep, **HYPER}
        self.optimizer = AdamW(parameters, options=options, **arguments)
        self.path = ""
        """The newest checkpoint."""
        self.moved()

    def moved(self) -> tuple[int, int]:
        """Return the bytes that have been read and written since the last call."""
        self.optimizer.synchronize()
        stats = self.optimizer.stats()
        now = stats.bytes_read, stats.bytes_written
        before = getattr(self, "_before", now)
        self._before = now
        return now[0] - before[0], now[1] - before[1]

    def step(self, *rows: int) -> None:
        self.model.fill_gradients(self.optimizer.num_steps, rows or range(NUM))
        self.optimizer.step()

    def seal(self) -> tuple[int, int]:
        """Seal, and compare the checkpoint with the model, to the bit.

        Returns the bytes that have been moved since the last call of `moved`.
        """
        checkpoint = self.optimizer.checkpoint().result()
        self.path, moved = checkpoint.path, self.moved()
        assert checkpoint.verify().ok
        found = read_tensors(self.backend, f"{self.path}/model.safetensors")
        assert same_bits(found, dict(self.model.state_dict()))
        self.moved()
        return moved


def test_a_step_writes_parameters_and_a_seal_writes_none() -> None:
    run = Run(MemoryBackend(), Rows())
    num = NUM * MIB
    run.step()
    run.moved()
    for _ in range(4):
        assert run.seal() == (0, 0)
        run.step()
        assert run.moved() == (12 * num, 14 * num)
    run.step(1)
    assert run.moved()[1] == 14 * MIB, "what has no gradient is left where it is"
    assert run.seal()[1] == 0
    run.step(1)
    assert run.moved()[1] == 14 * num, "into another slot everything is moved"
    assert run.seal()[1] == 0
    run.optimizer.close()


def test_results_are_those_of_plain_torch_with_many_seals_in_flight() -> None:
    pair = memory_pair(CASES["adamw"], ON_DRIVE)
    for step in range(6):
        pair.steps(step, step + 1)
        pair.optimizer.checkpoint({"step": step})
    pair.assert_same_state()
    pair.reopen()
    pair.optimizer.restore()
    pair.steps(6, 8)
    pair.assert_same_state()


def test_a_seal_writes_only_the_mebibyte_of_an_edit() -> None:
    run = Run(MemoryBackend(), Rows())
    run.step()
    run.moved()
    with torch.no_grad():
        run.model.rows[1][7] = 3.0
    assert run.seal() == (0, MIB)
    assert run.seal() == (0, 0), "nothing has changed"
    run.model.rows[2].data[0] = -1.0
    moved = 12 * NUM * MIB, 14 * NUM * MIB
    assert run.seal() == moved, "state and parameters are moved to another slot"
    run.optimizer.close()


def test_what_two_parameters_share_is_read_back_and_written_if_it_was_edited() -> None:
    """Also if it has been edited to what the slot held before the step."""
    run = Run(MemoryBackend(), Rows(counts=True), keep=1)
    sealed = []
    for _ in range(4):
        run.step()
        run.moved()
        moved = run.seal()
        sealed.append([row.detach().clone() for row in run.model.rows])
    assert moved == (NUM * MIB, 0), "the first mebibyte of each row has bytes of others"
    run.step()
    run.moved()
    with torch.no_grad():
        for row, before in zip(run.model.rows, sealed[-2], strict=True):
            row.copy_(before)
    assert run.seal()[1] == 2 * NUM * MIB + 8
    run.optimizer.close()


def test_what_is_frozen_is_written_once_for_each_slot() -> None:
    frozen = 3 * MIB // 2 + 100
    run = Run(MemoryBackend(), Rows(frozen))
    written = []
    for _ in range(6):
        run.step()
        run.moved()
        written.append(run.seal()[1])
    assert written == [2 * frozen] * 3 + [0] * 3
    run.optimizer.close()


def test_the_first_checkpoints_of_a_store() -> None:
    """Before the first step there is no state, and parameters are written by the seal."""
    run = Run(MemoryBackend(), Rows())
    assert run.seal() == (0, 2 * NUM * MIB)
    run.step()
    assert run.seal()[1] == 14 * NUM * MIB
    run.optimizer.restore()
    assert run.moved()[1] == 0
    path = run.path
    assert run.seal()[1] == 0, "it is the checkpoint that was restored"
    run.optimizer.param_groups[0]["lr"] = 1e-3
    assert run.seal()[1] == 14 * NUM * MIB
    assert run.path == path
    run.optimizer.close()


def test_parameters_of_resident_chunks_are_written_by_seals_like_their_state() -> None:
    run = Run(MemoryBackend(), Rows(), host_memory=13 * MIB)
    for _ in range(3):
        run.step()
        run.seal()
    assert run.optimizer.stats().resident_bytes > 0
    run.moved()
    run.step()
    run.step()
    state = 12 * (NUM - 1) * MIB
    assert run.moved() == (2 * state, 2 * (state + 2 * (NUM - 1) * MIB))
    assert run.seal() == (0, 14 * MIB)
    run.optimizer.close()


def test_a_state_dict_that_is_loaded_brings_parameters_along() -> None:
    run = Run(MemoryBackend(), Rows())
    run.step()
    full = run.optimizer.full_state_dict()
    other = Run(MemoryBackend(), Rows(seed=1))
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(full)
    other.moved()
    assert other.seal() == (0, 0)
    for one in (run, other):
        one.step()
    assert same_bits(dict(run.model.state_dict()), dict(other.model.state_dict()))
    run.optimizer.close()
    other.optimizer.close()


class Failing(WrapperBackend):
    """Fails writes to the model file while told to."""

    number = 0

    def wrap_file(self, file: File) -> File:
        return _FailingFile(file, self)


class _FailingFile(WrapperFile):
    def __init__(self, inner: File, backend: Failing) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, source: Buffer, offset: int) -> IOFuture:
        if self._backend.number and self.path.endswith("model.safetensors"):
            raise StorageError(self._backend.number, "told to fail", self.path)
        return super().write(source, offset)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_step_that_cannot_write_a_parameter_names_the_file_and_loses_nothing(number: int) -> None:
    backend = Failing(MemoryBackend())
    run = Run(backend, Rows())
    for _ in range(4):
        run.step()
        run.seal()
    sealed = {name: values.clone() for name, values in run.model.state_dict().items()}
    backend.number = number
    with pytest.raises(StorageError, match=r"model\.safetensors: told to fail"):
        run.step()
    with pytest.raises(offload.BrokenOptimizerError, match="call restore"):
        run.step()
    backend.number = 0
    assert run.optimizer.restore().step == 4
    assert same_bits(dict(run.model.state_dict()), sealed)
    for _ in range(4):  # every slot is used, also the one that was torn
        run.step()
        run.seal()
    run.optimizer.close()


def test_a_seal_that_fails_is_repeated() -> None:
    backend = Failing(MemoryBackend())
    run = Run(backend, Rows(frozen=MIB))
    run.step()
    run.optimizer.synchronize()
    backend.number = errno.ENOSPC
    with pytest.raises(SealError, match="told to fail"):
        run.optimizer.checkpoint().result()
    backend.number = 0
    with pytest.raises(SealError, match="told to fail"):  # it is told before training goes on
        run.step()
    run.seal()
    run.step()
    run.seal()
    run.optimizer.close()


class Holding(WrapperBackend):
    """Holds up the next writes to the model file, as many as it is told to."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.num_held = 0
        self.is_open = threading.Event()
        self.pool = TransferPool("held", 8)

    def wrap_file(self, file: File) -> File:
        return _HeldFile(file, self)


class _HeldFile(WrapperFile):
    def __init__(self, inner: File, backend: Holding) -> None:
        super().__init__(inner)
        self._backend = backend

    def write(self, source: Buffer, offset: int) -> IOFuture:
        def move() -> int:
            self._backend.is_open.wait()
            return self.inner.write(source, offset).result()

        if not self._backend.num_held or not self.path.endswith("model.safetensors"):
            return super().write(source, offset)
        self._backend.num_held -= 1
        return self._backend.pool.submit(move)


@pytest.fixture
def holding() -> Iterator[Holding]:
    backend = Holding()
    yield backend
    backend.is_open.set()
    backend.pool.close()


def test_a_seal_waits_for_the_writes_of_the_step_before_it_writes_an_edit(holding: Holding) -> None:
    run = Run(holding, Rows(), ring_chunks=NUM)
    holding.num_held = NUM
    run.step()
    with torch.no_grad():
        run.model.rows[0][0] = 9.0
    handle = run.optimizer.checkpoint()
    assert eventually(lambda: any(waits(t.ident) for t in threading.enumerate() if t.name == SEAL))
    holding.is_open.set()
    handle.result()
    assert run.moved()[1] == 14 * NUM * MIB + MIB
    assert run.seal()[1] == 0, "it is the checkpoint that has been sealed"
    run.optimizer.close()


def reader_of(run: Run, *, restored: bool) -> ModelReader:
    state = run.optimizer._engine.state  # the interface that blocks of parameters will use
    sealed = state.slots.sealed
    return ModelReader(
        state.slots.present,
        state.ring(),
        restored=sealed.manifest if restored else None,
        damaged=lambda _: state.lifecycle.remedy(),
    )


@pytest.mark.parametrize("restored", [False, True])
def test_parameters_are_read_back_from_the_slot(restored: bool) -> None:
    run = Run(MemoryBackend(), Rows(frozen=7 * MIB))
    for _ in range(2):
        run.step()
        run.seal()
    if restored:
        run.optimizer.restore()
    else:
        run.step()
    run.moved()
    reader = reader_of(run, restored=restored)
    expected = torch.cat([row.detach() for row in run.model.rows]).view(torch.uint8)
    places = [(0, 2 * MIB), (2 * MIB + 4096, 100), (MIB - 5, 4 * MIB + 9)]
    for _ in range(2):
        memory = [run.backend.allocate(size) for _, size in places]
        starts = [start for start, _ in places]
        for future in reader.start(list(zip(starts, memory, strict=True))):
            future.result()
        for (start, size), found in zip(places, memory, strict=True):
            values = torch.frombuffer(found.memoryview(), dtype=torch.uint8)
            assert torch.equal(values, expected[start : start + size])
    wanted = sum(size for _, size in places)
    assert run.moved()[0] == (16 * MIB + wanted * 2 - 2 * MIB if restored else 2 * wanted)
    reader.close()
    run.optimizer.close()


def test_a_damaged_parameter_is_refused_before_it_is_used() -> None:
    run = Run(MemoryBackend(), Rows())
    run.step()
    run.seal()
    run.optimizer.restore()
    path = run.path
    size = len(read(run.backend, f"{path}/model.safetensors"))
    flip(run.backend, f"{path}/model.safetensors", size - 2 * NUM * MIB + 5 * MIB)
    reader = reader_of(run, restored=True)
    memory = run.backend.allocate(MIB)
    with pytest.raises(DamagedError, match=f"{path}/model.safetensors: bytes .*call restore"):
        reader.start([(0, memory)])
    assert not any(memory.memoryview())
    reader.close()
    run.optimizer.close()
