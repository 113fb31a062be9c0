"""The requests of `gds bench`: each block once, in every file, verified, and staged."""

import json
import os
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from gds import PosixBackend, StorageError, WrapperBackend
from gds.backends import WrapperFile
from gds.bench.passes import Lane, StagedPass
from gds.bench.run import Plan
from gds.bench.run import run as run_plan
from gds.bench.target import PREFIX, Target
from gds.bench.workload import Workload
from gds.errors import WrongDataError
from gds.opening import open_path

BLOCK = 4096
SIZE = 64 << 10
BLOCKS = 16
FILE_BYTES = BLOCKS * SIZE
QUICK = ("--allow-small", "--seconds", "0", "--ramp", "0", "--repeat", "1")


@pytest.fixture
def drives(drive):
    found = [drive / "a", drive / "b"]
    for path in found:
        path.mkdir()
    return found


class Watched(WrapperBackend):
    """Shows each transfer to a function, which may do it in its own way."""

    def __init__(self, name, threads, watch):
        super().__init__(open_path(name, threads))
        self.watch = watch

    def wrap_file(self, file):
        return WatchedFile(file, self.watch)


class WatchedFile(WrapperFile):
    def __init__(self, inner, watch):
        super().__init__(inner)
        self._watch = watch

    def read(self, into, offset):
        return self._watch("read", self.inner, into, offset)

    def write(self, source, offset):
        return self._watch("write", self.inner, source, offset)


def passed_on(name, file, memory, offset):
    return (file.read if name == "read" else file.write)(memory, offset)


def bench(drives, watch=passed_on, verify=False, **settings):
    workload = Workload(**{"size": SIZE, "file_bytes": FILE_BYTES, **settings})
    plan = Plan(
        places=[str(path) for path in drives],
        workloads=[workload],
        allow_small=True,
        verify=verify,
    )
    report = run_plan(plan, backend=lambda name, threads: Watched(name, threads, watch))
    assert all(list(path.iterdir()) == [] for path in drives)
    return report.points[0].runs[0]


@pytest.mark.parametrize(
    ("rw", "num_reads", "settings"),
    [
        ("read", 16, {"path": "direct"}),
        ("write", 0, {"path": "buffered"}),
        ("mixed", 5, {"path": "direct", "mix": 30}),
        ("randwrite", 0, {"path": "direct", "files": 3, "reopen": True}),
        ("randmixed", 5, {"path": "direct", "mix": 30, "reopen": True}),
    ],
)
def test_each_block_of_each_file_is_moved_once_a_pass(drives, rw, num_reads, settings):
    seen = []

    def watch(name, file, memory, offset):
        seen.append((str(file.path), offset, name))
        assert memory.nbytes == SIZE
        return passed_on(name, file, memory, offset)

    found = bench(drives, watch, rw=rw, threads=1, depth=1, passes=2, **settings)
    files = settings.get("files", 1)
    assert set(Counter((path, offset) for path, offset, _ in seen).values()) == {2}
    paths = {path for path, _, _ in seen}
    assert Counter(Path(path).parent for path in paths) == dict.fromkeys(drives, files)
    assert len(seen) == 2 * 2 * files * BLOCKS
    assert sum(name == "read" for *_, name in seen) == 2 * 2 * files * num_reads
    assert found.total.num_bytes == len(seen) * SIZE
    assert found.direct is (settings["path"] == "direct")
    one = [offset for path, offset, _ in seen if path == seen[0][0]][:BLOCKS]
    if rw != "mixed":  # reads and writes have a thread each
        assert (one == sorted(one)) is not rw.startswith("rand")


# Verifying


@pytest.mark.parametrize(
    ("rw", "settings"),
    [
        ("read", {"path": "direct"}),
        ("write", {"path": "buffered"}),
        ("randmixed", {"path": "direct", "threads": 2, "depth": 3}),
        ("randmixed", {"path": "direct", "files": 3, "reopen": True}),
    ],
)
def test_a_drive_that_does_right_passes_and_every_byte_was_compared(drives, rw, settings):
    found = bench(drives, verify=True, rw=rw, passes=3, **settings)
    size = settings.get("file_bytes", FILE_BYTES)
    again = 2 * settings.get("files", 1) * size if found.writes else 0  # is read back
    assert found.verified_bytes == (found.reads.num_bytes if found.reads else 0) + again
    assert found.total.num_bytes == 3 * 2 * settings.get("files", 1) * size


@pytest.mark.parametrize(
    ("fault", "rw", "path", "offset", "words"),
    [
        ("flip-read", "read", "direct", 3 * SIZE + BLOCK, "differs in 1 of 512 words"),
        ("flip", "randwrite", "buffered", 3 * SIZE + BLOCK, "differs in 1 of 512 words"),
        ("lost", "write", "direct", 3 * SIZE, "holds write 0 of it, but 1 was the last"),
        ("misdirected", "write", "buffered", 2 * SIZE, f"holds the data of byte {3 * SIZE}"),
    ],
)
def test_a_transfer_that_goes_wrong_is_found(drive, fault, rw, path, offset, words):
    fired = []

    def faulty(name, file, memory, at):
        direction = "read" if fault == "flip-read" else "write"
        if fired or (name, at) != (direction, 3 * SIZE):
            return passed_on(name, file, memory, at)
        fired.append(fault)
        if fault == "lost":
            return file.read(open_path("direct", 1).allocate(memory.nbytes), at)
        future = passed_on(name, file, memory, at - SIZE if fault == "misdirected" else at)
        future.result()
        if fault == "flip-read":
            memory.memoryview()[5000] ^= 1
        elif fault == "flip":
            (byte,) = file.read_bytes(at + 5000, 1)
            file.write_bytes(bytes([byte ^ 1]), at + 5000)
            file.sync()
        return future

    with pytest.raises(WrongDataError, match=words) as caught:
        # One at a time, so that a misdirected write is not overwritten by the right one.
        bench([drive], faulty, verify=True, rw=rw, path=path, threads=1)
    assert fired == [fault]
    assert caught.value.offset == offset
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize("last", ["a transfer", "the fourth file"])
def test_what_fails_ends_it_and_leaves_no_file(drives, monkeypatch, last):
    made, real_open = [], os.open

    def failing(path, flags, *more, **named):
        if os.path.basename(str(path)).startswith(PREFIX) and flags & os.O_CREAT:
            made.append(path)
            if len(made) == 4:
                raise OSError(28, "No space left on device", path)
        return real_open(path, flags, *more, **named)

    def broken(name, file, memory, offset):
        raise StorageError(5, "Input/output error", file.path)

    if last == "the fourth file":
        monkeypatch.setattr(os, "open", failing)
    with pytest.raises(OSError, match=r"No space left|Input/output"):
        bench(drives, broken if last == "a transfer" else passed_on, files=3)
    assert len(made) == (4 if last == "the fourth file" else 0)
    assert all(list(path.iterdir()) == [] for path in drives)


# Several directories, many files


def test_a_slow_directory_does_not_hold_up_another(drives):
    def uneven(name, file, memory, offset):
        if Path(str(file.path)).parent.name == "b":
            time.sleep(0.02)  # a request to a starts as soon as this is over
        return passed_on(name, file, memory, offset)

    found = bench(drives, uneven, threads=1, reopen=True)
    assert found.lane_bytes_per_s[0] > found.lane_bytes_per_s[1]
    assert min(found.lane_bytes_per_s) == pytest.approx(found.bytes_per_s / 2, rel=1e-6)


def test_the_command_line_names_all_directories(run, drives):
    _, out, _ = run("bench", *drives, *QUICK, "--file-size", "1M")
    assert all(f"{path}:" in out.replace("\n", " ") for path in drives)
    status, out, err = run("bench", *drives, *QUICK, "--file-size", "1M", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["target"]["paths"] == [str(path) for path in drives]
    assert len(found["results"][0]["runs"][0]["lane_bytes_per_s"]) == 2
    assert found["notes"] == [
        f"{drives[0]} and {drives[1]} are on the same file system: together they share its rate."
    ]


# Through ordinary memory


def staged(path, rw, memory, depth):
    """Run one pass of a file through `memory`, which the command line does not show."""
    workload = Workload(rw=rw, size=SIZE, depth=depth, file_bytes=FILE_BYTES, staged=True)
    target = Target(str(path), made=True, seed=0)
    with PosixBackend() as backend, closing(Lane(backend, workload, [target])) as lane:
        one = StagedPass(workload, [lane], memoryview(memory))
        seconds = one.run([[(block, rw == "read") for block in range(BLOCKS)]], limit_s=1e9)
    begun, ended, is_read = one.records()
    assert (ended > begun).all()
    assert (len(begun), set(is_read)) == (BLOCKS, {rw == "read"})
    until_s = max(ended) - one.started_s
    assert seconds >= until_s > 0
    assert one.rates_of_lanes() == pytest.approx([FILE_BYTES / until_s])


def test_every_block_is_staged_through_ordinary_memory(drive):
    path = drive / "file"
    path.write_bytes(os.urandom(FILE_BYTES))
    for depth in (2, 30):
        staged(path, "read", memory := bytearray(FILE_BYTES), depth)
        assert memory == path.read_bytes()
        staged(path, "write", memory := bytearray(os.urandom(FILE_BYTES)), depth)
        assert path.read_bytes() == memory
    staged(path, "write", memory := bytearray(os.urandom(SIZE * 5)), 3)
    assert path.read_bytes() == (memory * 4)[:FILE_BYTES], "memory that is smaller is used again"
    os.truncate(path, SIZE * 7)
    with pytest.raises(StorageError):
        staged(path, "read", bytearray(FILE_BYTES), 4)


def test_a_staged_row_names_itself(run, drive):
    arguments = ("--file-size", "1M", "--size", "64K", *QUICK, "--sweep", "rw=read,write")
    status, out, err = run("bench", drive, *arguments, "--staged", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert [result["workload"]["staged"] for result in found["results"]] == [True, True]
    assert [result["runs"][0]["num_requests"] for result in found["results"]] == [BLOCKS] * 2
    assert any(note.startswith("Staged: one thread copied") for note in found["notes"])
    assert list(drive.iterdir()) == []
