"""Pieces of a model's file: their memory is used again, and never under a reader."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from gds import MemoryBackend
from offload.format.digests import DigestContext
from offload.tiers.contents import Chunk
from offload.tiers.model_objects import ModelRun
from offload.tiers.source import read_model

CONTEXT = DigestContext("0" * 32, 7)
NBYTES = 4096
NUM = 6


class _Counting(MemoryBackend):
    """Counts how often memory is allocated."""

    num_allocated = 0

    def allocate(self, nbytes: int, kind: Any = None) -> Any:
        self.num_allocated += 1
        return super().allocate(nbytes, kind)


def pieces_of(backend: MemoryBackend) -> Any:
    """Return the pieces of a file of six blocks, after its header."""
    backend.make_dir("/a")
    file = backend.create("/a/model", NUM * NBYTES)
    runs = []
    for number in range(NUM):
        data = bytes([number + 1]) * NBYTES
        file.write_bytes(data, number * NBYTES)
        digest = CONTEXT.digest("m", number, memoryview(data))
        runs.append(ModelRun(number * NBYTES, (Chunk("m", number, NBYTES, digest),)))
    model = SimpleNamespace(header=SimpleNamespace(encoded=b"{}"), runs=lambda: iter(runs))
    untyped: Any = read_model
    pieces = untyped(model, file, backend, CONTEXT, nullcontext, backend.allocate(0, "host"))
    assert bytes(next(pieces)) == b"{}"
    return pieces


def test_a_part_of_a_piece_keeps_its_bytes() -> None:
    backend = _Counting()
    kept, whole = [], []
    for number, piece in enumerate(pieces_of(backend)):
        if number % 2:
            whole.append(piece)
        else:
            kept.append(piece[16:32])
        del piece
    assert [bytes(one) for one in kept] == [bytes([n + 1]) * 16 for n in range(0, NUM, 2)]
    assert [bytes(one) for one in whole] == [bytes([n + 1]) * NBYTES for n in range(1, NUM, 2)]


def test_memory_of_pieces_that_are_gone_is_used_again() -> None:
    backend = _Counting()
    for number, piece in enumerate(pieces_of(backend)):
        assert bytes(piece) == bytes([number + 1]) * NBYTES
        del piece
    assert backend.num_allocated <= 1 + 2  # that of the caller, and at most two pieces at a time
