"""Models of which little is trained, and a backend that notes what is moved in their model files.

The units in which model files are digested, cloned and rewritten are made small, so that a model of
some hundred kilobytes has many of them. No other builder of stores changes these units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import pytest
import safetensors.torch
import torch

import offload
from gds import Backend, Buffer, File, IOFuture, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload import AdamW, Checkpoint, Options
from offload.checkpoint import checked_reads, sealed_slot
from offload.format import digests, manifest
from offload.model import model_file, model_writing
from offload.stream import model_part
from tests.stores import small

LEAF: Final = 4096
BLOCK: Final = 4 * LEAF
STORE: Final = "/data/run"
HYPER: Final = {"lr": 1e-2, "weight_decay": 0.1}

TRAINED: Final = 1500
"""Elements of the FP32 vector that is trained: one leaf, and part of the next."""

FROZEN_BLOCKS: Final = 6

Tensors = dict[str, torch.Tensor]


def make_units_small(patch: pytest.MonkeyPatch) -> None:
    for module in (digests, manifest, model_file, sealed_slot):
        patch.setattr(module, "MODEL_BLOCK_BYTES", BLOCK)
    for module in (checked_reads, digests, model_part, model_writing):
        patch.setattr(module, "LEAF_BYTES", LEAF)
    patch.setattr(model_writing, "CLONE_REACH_BYTES", BLOCK)


class Model(torch.nn.Module):
    """A trained vector, buffers that change with every forward, and much that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        frozen = FROZEN_BLOCKS * BLOCK // 2 // 2
        self.trained = torch.nn.Parameter(torch.randn(TRAINED, generator=generator))
        self.register_buffer("statistics", torch.zeros(3))
        for name in ("base", "more"):
            values = torch.randn(frozen, generator=generator).to(torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
        self.tied = self.base
        self.register_buffer("table", torch.arange(2 * LEAF, dtype=torch.int16).view(2, -1))

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.trained.grad = torch.randn(TRAINED, generator=generator)
        self.statistics += step


@dataclass
class Expected:
    """What a checkpoint must hold: from torch's own optimizer, and copies taken at the time."""

    model: Tensors
    exp_avg: torch.Tensor


class Reference:
    """The same training by plain torch: an FP32 parameter is its own master."""

    def __init__(self) -> None:
        self.model = Model()
        self._optimizer = torch.optim.AdamW([self.model.trained], **HYPER)
        self.after: dict[int, Expected] = {}

    def step(self, step: int) -> Expected:
        self.model.backward(step)
        self._optimizer.step()
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        exp_avg = self._optimizer.state[self.model.trained]["exp_avg"].clone()
        self.after[step] = Expected(state, exp_avg)
        return self.after[step]


Kind: TypeAlias = Literal["read", "again", "write", "clone"]


@dataclass(frozen=True)
class Move:
    """A transfer of a model file's data; `again` reads from the drive, not from the page cache."""

    kind: Kind
    slot: str
    start: int
    """Within the data, in bytes."""

    nbytes: int

    @property
    def leaves(self) -> range:
        return range(self.start // LEAF, -(-(self.start + self.nbytes) // LEAF))


class Recorded(WrapperBackend):
    """Notes what is moved in model files; a read can be made to fail, a clone to be refused."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.moves: list[Move] = []
        self.fail_reads = False
        self.fail_writes = False
        self.clones: Literal["work", "refused", "fail"] = "work"

    def wrap_file(self, file: File) -> File:
        return _RecordedFile(file, self)

    def taken(self) -> list[Move]:
        """Return what was moved since the last call."""
        moves, self.moves = self.moves, []
        return moves


class _RecordedFile(WrapperFile):
    def __init__(self, inner: File, backend: Recorded) -> None:
        super().__init__(inner)
        self._backend = backend
        self._is_model = inner.path.endswith("model.safetensors")

    def _note(self, kind: Kind, offset: int, nbytes: int) -> None:
        if self._is_model:
            slot = self.path.split("/")[-2]
            start = offset - self._data_start
            self._backend.moves.append(Move(kind, slot, start, nbytes))

    @property
    def _data_start(self) -> int:
        return 8 + int.from_bytes(self.inner.read_bytes(0, 8), "little")

    def read(self, into: Buffer, offset: int) -> IOFuture:
        self._note("read", offset, into.nbytes)
        if self._is_model and self._backend.fail_reads:
            raise StorageError(5, "injected failure of read", self.path, offset=offset)
        return super().read(into, offset)

    def write(self, source: Buffer, offset: int) -> IOFuture:
        self._note("write", offset, source.nbytes)
        if self._is_model and self._backend.fail_writes:
            raise StorageError(5, "injected failure of write", self.path, offset=offset)
        return super().write(source, offset)

    def clone(self, source: File, offset: int, nbytes: int) -> bool:
        if self._backend.clones == "fail":
            # As much as an error can leave behind: half of it is done.
            super().clone(source, offset, nbytes // 2 // LEAF * LEAF)
            raise StorageError(5, "injected failure of clone", self.path, offset=offset)
        done = self._backend.clones == "work" and super().clone(source, offset, nbytes)
        if done:
            self._note("clone", offset, nbytes)
        return done

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        self._note("again", offset, into.nbytes)
        if self._is_model and self._backend.fail_reads:
            raise StorageError(5, "injected failure of read", self.path, offset=offset)
        return super().read_again(into, offset, direct=direct)


def options(backend: Backend, **changes: object) -> Options:
    """Return settings for small chunks and for a short wait for readers."""
    return small.options(backend, **{"reader_timeout_s": 0.2, **changes})


class Process:
    """A process that trains the model, beside plain torch."""

    def __init__(
        self,
        backend: Backend,
        reference: Reference | None = None,
        *,
        restore: bool = True,
        **changes: Any,
    ) -> None:
        self.backend = backend
        self.reference = reference or Reference()
        self.model = Model()
        settings = {"directory": STORE, "model": self.model, **HYPER, **changes}
        self.optimizer = AdamW([self.model.trained], options=options(backend), **settings)
        checkpoint = self.optimizer.restore() if restore and not changes.get("fresh") else None
        self.step_number = checkpoint.step if checkpoint else 0

    def step(self) -> None:
        self.step_number += 1
        self.model.backward(self.step_number)
        self.optimizer.step()
        self.optimizer.synchronize()
        if self.step_number not in self.reference.after:
            self.reference.step(self.step_number)

    def seal(self) -> Checkpoint:
        return self.optimizer.checkpoint({"step": self.step_number}).result()

    def step_and_seal(self) -> list[Move]:
        """Take a step and seal it, check what was sealed, and return what was moved for that."""
        self.step()
        if isinstance(self.backend, Recorded):
            self.backend.taken()
        checkpoint = self.seal()
        moves = self.backend.taken() if isinstance(self.backend, Recorded) else []
        self.check(checkpoint)
        return moves

    def edit(self, name: str, element: int, value: float) -> None:
        """Set an element of a frozen tensor, here and in the reference."""
        for model in (self.model, self.reference.model):
            with torch.no_grad():
                model.get_parameter(name)[element] = value

    def check(self, checkpoint: Checkpoint) -> None:
        assert differences(checkpoint, self.reference.after[checkpoint.step]) == []
        if isinstance(self.backend, Recorded):
            self.backend.taken()

    def close(self) -> None:
        self.optimizer.close()


def differences(checkpoint: Checkpoint, expected: Expected) -> list[str]:
    """Say what is not as it should be: by the safetensors library, and by the digests."""
    file = checkpoint.backend.open(f"{checkpoint.path}/model.safetensors")
    try:
        found = safetensors.torch.load(file.read_bytes(0, file.size_bytes))
    finally:
        file.close()
    wrong = [
        name
        for name, value in expected.model.items()
        if not torch.equal(found["base" if name == "tied" else name], value)
    ]
    if not torch.equal(offload.read_state(checkpoint, "trained")["exp_avg"], expected.exp_avg):
        wrong.append("exp_avg")
    return [*wrong, *checkpoint.verify().problems]


def leaves(moves: list[Move], kind: str) -> list[int]:
    """Return the leaves of the data that were moved, in order."""
    return sorted(leaf for move in moves if move.kind == kind for leaf in move.leaves)
