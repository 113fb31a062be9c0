"""Contents that tell where they belong; and `gds bench --verify` against drives that do wrong."""

import errno
import os
import struct
import zlib
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gds import StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.bench.run import Plan, run
from gds.bench.stamps import Stamps
from gds.bench.target import PREFIX
from gds.bench.workload import Workload
from gds.errors import WrongDataError
from gds.opening import open_path

BLOCK = 4096
FILE_BYTES = 1 << 20
SIZE = 64 << 10


def stamped(stamps: Stamps, offset: int, generations: list[int]) -> bytearray:
    data = bytearray(BLOCK * len(generations))
    stamps.fill(memoryview(data), offset, np.array(generations, dtype=np.uint64))
    return data


def check(stamps: Stamps, data: bytearray, offset: int, generations: list[int]) -> None:
    stamps.check(memoryview(data), offset, np.array(generations, dtype=np.uint64), "file")


def test_every_block_begins_with_its_offset_and_its_age():
    data = stamped(Stamps(1), 40 * BLOCK, [0, 5, 7])
    for number, generation in enumerate([0, 5, 7]):
        found = struct.unpack_from("<QQ", data, number * BLOCK)
        assert found == ((40 + number) * BLOCK, generation)


def test_no_two_blocks_share_a_word_and_nothing_compresses():
    data = bytes(stamped(Stamps(2), 0, [0] * 16) + stamped(Stamps(2), 0, [1] * 16))
    assert len(zlib.compress(data)) > 0.9 * len(data)
    blocks = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
    for word in range(3, BLOCK // 8):  # after offset, age and number of the file
        assert len({block[8 * word : 8 * word + 8] for block in blocks}) == len(blocks)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 3 * BLOCK - 1), st.integers(1, 255))
def test_any_changed_byte_is_found_in_its_block(position, change):
    stamps = Stamps(3)
    data = stamped(stamps, 8 * BLOCK, [1, 2, 3])
    check(stamps, data, 8 * BLOCK, [1, 2, 3])
    data[position] ^= change
    with pytest.raises(WrongDataError, match="wrong data in 1 of 3 blocks") as caught:
        check(stamps, data, 8 * BLOCK, [1, 2, 3])
    assert caught.value.offset == (8 + position // BLOCK) * BLOCK


def test_what_is_wrong_is_told_apart():
    stamps = Stamps(4)
    with pytest.raises(WrongDataError, match=f"holds the data of byte {9 * BLOCK}"):
        check(stamps, stamped(stamps, 9 * BLOCK, [1]), 8 * BLOCK, [1])
    with pytest.raises(WrongDataError, match="holds write 1 of it, but 2 was the last"):
        check(stamps, stamped(stamps, 8 * BLOCK, [1]), 8 * BLOCK, [2])
    with pytest.raises(WrongDataError, match="differs in"):
        check(stamps, stamped(Stamps(5), 8 * BLOCK, [1]), 8 * BLOCK, [1])
    with pytest.raises(WrongDataError, match="2 of 3 blocks"):
        check(stamps, stamped(stamps, 0, [1, 0, 0]), 0, [1, 1, 1])


class FaultyFile(WrapperFile):
    """Does one of its transfers wrong."""

    def __init__(self, inner, backend):
        super().__init__(inner)
        self._backend = backend

    def read(self, into, offset):
        future = self.inner.read(into, offset)
        if self._backend.due("flip-read", offset):
            future.result()
            into.memoryview()[5000] ^= 1
        return future

    def write(self, source, offset):
        if self._backend.due("lost", offset):
            done: Future[int] = Future()
            done.set_result(source.nbytes)
            return done
        if self._backend.due("misdirected", offset):
            return self.inner.write(source, offset - SIZE)
        future = self.inner.write(source, offset)
        if self._backend.due("flip", offset):
            future.result()
            (byte,) = self.inner.read_bytes(offset + 5000, 1)
            self.inner.write_bytes(bytes([byte ^ 1]), offset + 5000)
            self.inner.sync()
        return future


class FaultyBackend(WrapperBackend):
    """Does one transfer wrong, that of the fourth block."""

    def __init__(self, fault: str, fired: list[str], path: str, threads: int) -> None:
        super().__init__(open_path(path, threads))
        self.fault = fault
        self.fired = fired

    def due(self, fault: str, offset: int) -> bool:
        if fault != self.fault or offset != 3 * SIZE or self.fired:
            return False
        self.fired.append(fault)
        return True

    def wrap_file(self, file):
        return FaultyFile(file, self)


def plan(directory: Path, **settings) -> Plan:
    workload = Workload(**{"size": SIZE, "file_bytes": FILE_BYTES, **settings})
    return Plan(place=str(directory), workloads=[workload], verify=True, allow_small=True)


@pytest.mark.parametrize("path", ["direct", "buffered"])
@pytest.mark.parametrize(
    ("fault", "rw", "offset", "words"),
    [
        ("flip-read", "read", 3 * SIZE + BLOCK, "differs in 1 of 512 words"),
        ("flip-read", "randread", 3 * SIZE + BLOCK, "differs in 1 of 512 words"),
        ("flip", "write", 3 * SIZE + BLOCK, "differs in 1 of 512 words"),
        ("flip", "randwrite", 3 * SIZE + BLOCK, "differs in 1 of 512 words"),
        ("lost", "write", 3 * SIZE, "holds write 0 of it, but 1 was the last"),
        ("misdirected", "write", 2 * SIZE, f"holds the data of byte {3 * SIZE}"),
    ],
)
def test_a_transfer_that_goes_wrong_is_found(drive, path, fault, rw, offset, words):
    fired: list[str] = []
    with pytest.raises(WrongDataError, match=words) as caught:
        run(
            # One at a time, so that a misdirected write is not overwritten by the right one.
            plan(drive, rw=rw, path=path, threads=1),
            backend=lambda name, threads: FaultyBackend(fault, fired, name, threads),
        )
    assert fired == [fault]
    assert caught.value.offset == offset
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize("path", ["direct", "buffered"])
@pytest.mark.parametrize("rw", ["read", "write", "mixed", "randread", "randwrite", "randmixed"])
def test_a_drive_that_does_right_passes_and_every_byte_was_compared(drive, path, rw):
    found = run(plan(drive, rw=rw, path=path, threads=2, depth=3, passes=3))
    (result,) = found.points[0].runs
    again = FILE_BYTES if result.bytes_written else 0  # what was written is read back
    assert result.verified_bytes == result.bytes_read + again
    assert result.bytes_read + result.bytes_written == 3 * FILE_BYTES
    assert result.direct is (path == "direct")


def test_a_sweep_over_sizes_keeps_track_of_who_wrote_what(drive):
    sizes = [BLOCK, 3 * BLOCK, 64 << 10]
    workloads = [
        Workload(rw="randmixed", size=size, mix=40, file_bytes=FILE_BYTES) for size in sizes
    ]
    found = run(
        Plan(place=str(drive), workloads=workloads, verify=True, allow_small=True, repeat=3)
    )
    assert [len(point.runs) for point in found.points] == [3, 3, 3]


def test_a_transfer_that_fails_ends_it_and_leaves_nothing(drive, monkeypatch):
    real = os.preadv

    def broken(fd, views, offset):
        if PREFIX in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", broken)
    workload = Workload(size=SIZE, file_bytes=FILE_BYTES, path="buffered")
    with pytest.raises(StorageError) as caught:
        run(Plan(place=str(drive), workloads=[workload], allow_small=True))
    assert caught.value.errno == errno.EIO
    assert list(drive.iterdir()) == []
