"""Three ranks in processes of their own write and read one model file, with direct I/O."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gds import PosixBackend
from offload.format.header import Header
from offload.model.model_sharing import write_header
from tests.dying import dying
from tests.ranks_model.cuts import owner_of_bytes
from tests.ranks_model.model import CONTEXT, bytes_of, some_shares, values
from tests.ranks_model.ranks import header_of, save_oracle

ROOT = Path(__file__).parent.parent.parent
NUM_RANKS = 3


class Processes:
    """The processes of all ranks, which are asked at the same time."""

    def __init__(self, path: Path, header: Header) -> None:
        with PosixBackend() as backend, backend.create(str(path), header.file_bytes) as file:
            file.write_bytes(b"\xa5" * header.file_bytes, 0)
            write_header(file, header)
            file.sync()
        pairs = [os.pipe() for _ in range(2 * NUM_RANKS)]  # requests and answers, in turns
        given = [read if n % 2 == 0 else write for n, (read, write) in enumerate(pairs)]
        kept = [write if n % 2 == 0 else read for n, (read, write) in enumerate(pairs)]
        self._process = subprocess.Popen(
            dying([sys.executable, "-m", "tests.ranks_model.child", str(path), *map(str, given)]),
            cwd=ROOT,
            pass_fds=given,
        )
        for descriptor in given:
            os.close(descriptor)
        self._requests = [os.fdopen(descriptor, "w") for descriptor in kept[::2]]
        self._answered = [os.fdopen(descriptor) for descriptor in kept[1::2]]
        assert self._answers() == ["ready"] * NUM_RANKS

    def ask(self, *request: object) -> list:
        return self.ask_each([request] * NUM_RANKS)

    def ask_each(self, requests: list) -> list:
        for pipe, request in zip(self._requests, requests, strict=True):
            print(json.dumps(request), file=pipe, flush=True)
        return self._answers()

    def _answers(self) -> list:
        return [json.loads(pipe.readline()) for pipe in self._answered]

    def close(self) -> None:
        for pipe in self._requests:
            pipe.close()
        assert self._process.wait() == 0
        for pipe in self._answered:
            pipe.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    opened = Processes(tmp_path / "model.safetensors", header_of(values(0)))
    yield opened
    opened.close()


def test_seals_reads_and_damage(processes: Processes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = header_of(values(0))
    for seed in range(6):
        assert all(processes.ask("write", seed)), "every rank has edges"
        digests = processes.ask("finish")
        expected = save_oracle(values(seed), header, tmp_path / "oracle")
        assert path.read_bytes() == expected
    shares = some_shares(header, 8192, NUM_RANKS)
    live = values(5)
    reads = [("read", CONTEXT.generation, digests[rank]) for rank in range(NUM_RANKS)]
    for rank, found in enumerate(processes.ask_each(reads)):
        boxes = [bytes_of(live[one.name][one.box.slices]).hex() for one in shares.boxes[rank]]
        assert found == boxes
    owners = owner_of_bytes(header, [list(boxes) for boxes in shares.boxes])
    for rank in range(NUM_RANKS):
        at = int((owners == rank).nonzero()[0][-1])
        data = bytearray(expected)
        data[at] ^= 8
        path.write_bytes(data)
        damaged = ["are damaged" in str(answer) for answer in processes.ask_each(reads)]
        assert damaged == [one == rank for one in range(NUM_RANKS)]
