"""`gds bench --staged`: blocks go through ordinary memory, all of them, and rates are of it all."""

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gds import PosixBackend, StorageError
from gds.bench import staged as staged_module
from gds.bench.passes import Lane
from gds.bench.staged import StagedPass, ordinary_memory
from gds.bench.target import Target
from gds.bench.workload import Workload
from tests.command_line import Run

SIZE = 64 << 10
BLOCKS = 16
SMALL = ("--file-size", "1M", "--size", "64K", "--allow-small", "--seconds", "0", "--ramp", "0")


@pytest.fixture
def path(drive: Path) -> Path:
    found = drive / "file"
    found.write_bytes(os.urandom(SIZE * BLOCKS))
    return found


def moved(
    path: Path, rw: Any, memory: memoryview, *, depth: int, limit_s: float = 1e9
) -> StagedPass:
    """Run one pass of a file through `memory`."""
    workload = Workload(rw=rw, size=SIZE, depth=depth, file_bytes=SIZE * BLOCKS, staged=True)
    target = Target(str(path), made=True, seed=0)
    with PosixBackend() as backend, closing(Lane(backend, workload, [target])) as lane:
        one = StagedPass(workload, [lane], memory)
        order = [(block, rw == "read") for block in range(BLOCKS)]
        seconds = one.run([order], limit_s=limit_s)
    begun, ended, is_read = one.records()
    assert (ended > begun).all()
    assert (is_read == (rw == "read")).all()
    if len(begun):
        until_s = max(ended) - one.started_s
        assert seconds >= until_s > 0
        assert one.rates_of_lanes() == pytest.approx([len(begun) * SIZE / until_s])
    return one


@pytest.mark.parametrize("depth", [2, 3, 30])
def test_every_block_is_read_into_memory(path: Path, depth: int) -> None:
    memory = bytearray(SIZE * BLOCKS)
    one = moved(path, "read", memoryview(memory), depth=depth)
    assert memory == path.read_bytes()
    assert len(one.records()[0]) == BLOCKS


@pytest.mark.parametrize("depth", [2, 3, 30])
def test_every_block_is_written_from_memory(path: Path, depth: int) -> None:
    memory = bytearray(os.urandom(SIZE * BLOCKS))
    one = moved(path, "write", memoryview(memory), depth=depth)
    assert path.read_bytes() == memory
    assert len(one.records()[0]) == BLOCKS


def test_memory_that_is_smaller_than_the_file_is_used_again(path: Path) -> None:
    memory = bytearray(os.urandom(SIZE * 5))
    moved(path, "write", memoryview(memory), depth=3)
    assert path.read_bytes() == (memory * 4)[: SIZE * BLOCKS]


@pytest.mark.parametrize("rw", ["read", "write"])
def test_no_request_is_started_after_the_limit_of_time(path: Path, rw: str) -> None:
    before, memory = path.read_bytes(), bytearray(SIZE * BLOCKS)
    one = moved(path, rw, memoryview(memory), depth=2, limit_s=0.0)
    assert len(one.records()[0]) == 0
    assert (path.read_bytes(), memory) == (before, bytes(SIZE * BLOCKS))


def test_a_read_that_fails_is_raised_when_no_other_is_in_flight(path: Path) -> None:
    os.truncate(path, SIZE * 7)
    with pytest.raises(StorageError):
        moved(path, "read", memoryview(bytearray(SIZE * BLOCKS)), depth=4)


def test_ordinary_memory_is_filled_and_limited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(str(path), made=True, seed=0)
    workload = Workload(size=SIZE, file_bytes=SIZE * BLOCKS, staged=True)
    whole = ordinary_memory(workload, target)
    assert len(whole) == SIZE * BLOCKS
    assert len({bytes(whole[at : at + 4096]) for at in range(0, len(whole), 4096)}) == 256
    monkeypatch.setattr(staged_module, "_MOST_MEMORY_BYTES", SIZE * 3 + 5)
    assert len(ordinary_memory(workload, target)) == SIZE * 3


def test_a_staged_row_names_itself(run: Run, drive: Path) -> None:
    arguments = ("bench", drive, *SMALL, "--staged", "--sweep", "rw=read,write", "--repeat", "2")
    status, out, err = run(*arguments, "--json")
    assert status == 0, err
    found = json.loads(out)
    for result in found["results"]:
        assert result["workload"]["staged"] is True
        assert [one["num_requests"] for one in result["runs"]] == [BLOCKS] * 2
        assert all(one["bytes_per_s"] >= one["durable_bytes_per_s"] > 0 for one in result["runs"])
    assert any(note.startswith("Staged: one thread copied") for note in found["notes"])
    status, out, err = run(*arguments)
    assert (status, "staged yes" in " ".join(out.split())) == (0, True), err
    status, out, err = run(*arguments, "--csv")
    assert (status, {line.split(",")[7] for line in out.splitlines()}) == (0, {"staged", "True"})
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rw", "mixed"], "--staged measures read or write, not mixed"),
        (["--rw", "randread"], "--staged measures read or write, not randread"),
        (["--path", "bounce"], "--staged measures paths of host memory, not bounce"),
        (["--reopen"], "leave --reopen out"),
        (["--threads", "1"], "needs two buffers"),
        (["--verify"], "pass one of the two"),
        (["."], "a single directory"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_staged_is_refused(
    run: Run, drive: Path, arguments: list[str], words: str
) -> None:
    status, out, err = run("bench", drive, *SMALL, "--staged", *arguments)
    assert (status, out) == (1, "")
    assert words in err
    assert list(drive.iterdir()) == []
