"""`gds bench` on several directories and several files at once, and on many small files."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from gds import Buffer, File, IOFuture, WrapperBackend
from gds.backends.wrapper import WrapperFile
from gds.bench.report import Report
from gds.bench.run import Plan
from gds.bench.run import run as run_plan
from gds.bench.target import PREFIX
from gds.bench.workload import Workload
from gds.errors import WrongDataError
from gds.opening import open_path
from gds.paths import PathName
from tests.command_line import Run

SIZE = 64 << 10
FILE_BYTES = 8 * SIZE
QUICK = ("--allow-small", "--seconds", "0", "--ramp", "0", "--repeat", "1")


@pytest.fixture
def drives(drive: Path) -> list[Path]:
    found = [drive / "a", drive / "b"]
    for path in found:
        path.mkdir()
    return found


class Noting(WrapperBackend):
    """Notes the path and the offset of every transfer."""

    def __init__(self, name: PathName, threads: int, seen: list[tuple[str, int]]) -> None:
        super().__init__(open_path(name, threads))
        self.seen = seen

    def wrap_file(self, file: File) -> File:
        """Return a file that notes."""
        return NotingFile(file, self)


class NotingFile(WrapperFile):
    def __init__(self, inner: File, backend: Noting) -> None:
        super().__init__(inner)
        self._backend = backend

    def read(self, into: Buffer, offset: int) -> IOFuture:
        """Read, and note it."""
        self._backend.seen.append((str(self.inner.path), offset))
        return self.inner.read(into, offset)

    def write(self, source: Buffer, offset: int) -> IOFuture:
        """Write, and note it."""
        self._backend.seen.append((str(self.inner.path), offset))
        return self.inner.write(source, offset)


def noted(drives: list[Path], verify: bool = False, **settings: object) -> tuple[Report, Counter]:
    seen: list[tuple[str, int]] = []
    workload = Workload(**{"size": SIZE, "file_bytes": FILE_BYTES, **settings})  # type: ignore[arg-type]
    plan = Plan(
        place=str(drives[0]),
        beside=[str(path) for path in drives[1:]],
        workloads=[workload],
        allow_small=True,
        verify=verify,
    )
    report = run_plan(plan, backend=lambda name, threads: Noting(name, threads, seen))
    return report, Counter(seen)


@pytest.mark.parametrize("rw", ["read", "randwrite", "mixed"])
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("reopen", [False, True])
def test_every_block_of_every_file_is_moved_once(
    drives: list[Path], rw: str, files: int, reopen: bool
) -> None:
    report, seen = noted(drives, rw=rw, files=files, reopen=reopen, threads=2, depth=3)
    assert set(seen.values()) == {1}
    paths = Counter(path for path, _ in seen)
    assert sorted(paths.values()) == [8] * 2 * files
    assert Counter(Path(path).parent for path in paths) == dict.fromkeys(drives, files)
    (run,) = report.points[0].runs
    assert run.num_bytes == 2 * files * FILE_BYTES
    assert len(run.lane_bytes_per_s) == 2
    assert all(list(path.iterdir()) == [] for path in drives)


@pytest.mark.parametrize("reopen", [False, True])
def test_every_file_is_verified(drives: list[Path], reopen: bool) -> None:
    report, _ = noted(drives, verify=True, rw="randmixed", files=3, reopen=reopen, passes=2)
    (run,) = report.points[0].runs
    assert run.verified_bytes == run.bytes_read + 2 * 3 * FILE_BYTES


def test_data_of_another_file_is_noticed(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[bytes] = []

    def swap(self: NotingFile, into: Buffer, offset: int) -> IOFuture:
        """Give the first file's block for that of every file."""
        future = self.inner.read(into, offset)
        future.result()
        if offset == 0:
            first.append(bytes(into.memoryview()))
            into.memoryview()[:] = first[0]
        return future

    monkeypatch.setattr(NotingFile, "read", swap)
    with pytest.raises(WrongDataError):
        noted([drive], verify=True, files=2, threads=1)
    assert list(drive.iterdir()) == []


def test_a_slow_directory_does_not_hold_up_another(drives: list[Path]) -> None:
    seen: list[str] = []

    class Uneven(WrapperBackend):
        def wrap_file(self, file: File) -> File:
            return UnevenFile(file)

    class UnevenFile(WrapperFile):
        def read(self, into: Buffer, offset: int) -> IOFuture:
            """Read; in the second directory only after a while."""
            directory = Path(str(self.inner.path)).parent.name
            seen.append(directory)
            if directory == "b":
                time.sleep(0.02)  # a request to a starts as soon as this is over
            return self.inner.read(into, offset)

    workload = Workload(size=SIZE, file_bytes=FILE_BYTES, threads=1, reopen=True)
    plan = Plan(
        place=str(drives[0]), beside=[str(drives[1])], workloads=[workload], allow_small=True
    )
    report = run_plan(plan, backend=lambda name, threads: Uneven(open_path(name, threads)))
    (run,) = report.points[0].runs
    assert Counter(seen) == {"a": 8, "b": 8}
    assert run.lane_bytes_per_s[0] > run.lane_bytes_per_s[1]
    assert min(run.lane_bytes_per_s) == pytest.approx(run.bytes_per_s / 2, rel=1e-6)


def test_the_command_line_names_all_of_them(run: Run, drives: list[Path]) -> None:
    status, out, err = run("bench", *drives, *QUICK, "--file-size", "1M", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["target"]["paths"] == [str(path) for path in drives]
    (result,) = found["results"]
    assert len(result["runs"][0]["lane_bytes_per_s"]) == 2
    _, out, _ = run("bench", *drives, *QUICK, "--file-size", "1M")
    for path in drives:
        assert f"{path}:" in out.replace("\n", " ")


def test_many_small_files(run: Run, drive: Path) -> None:
    arguments = ("--files", "300", "--file-size", "8K", "--size", "4K", "--rw", "randread")
    status, out, err = run("bench", drive, *QUICK, *arguments, "--reopen", "--json")
    assert status == 0, err
    (one,) = json.loads(out)["results"][0]["runs"]
    assert one["num_requests"] == 600
    assert list(drive.iterdir()) == []
    status, _, err = run("bench", drive, *QUICK, *arguments)
    assert status == 1
    assert "files is 300, not 1 to 64, or up to 20000 with --reopen" in err


def test_files_of_different_sizes_are_not_measured_together(run: Run, drive: Path) -> None:
    for name, count in (("x", 1), ("y", 2)):
        (drive / name).write_bytes(os.urandom(count << 20))
    status, _, err = run("bench", drive / "x", drive / "y", *QUICK)
    assert status == 1
    assert "the files have different sizes (1048576 and 2097152 bytes)" in err


def test_several_scratch_files_need_a_directory(run: Run, drive: Path) -> None:
    (drive / "x").write_bytes(os.urandom(1 << 20))
    status, _, err = run("bench", drive / "x", *QUICK, "--files", "3")
    assert status == 1
    assert "is a file, which --files does not apply to" in err


@pytest.mark.parametrize(("written", "share"), [(0, 100), (512 << 10, 50)])
def test_a_file_with_holes_is_refused(run: Run, drive: Path, written: int, share: int) -> None:
    file = drive / "sparse"
    file.write_bytes(os.urandom(written))
    os.truncate(file, 1 << 20)
    status, _, err = run("bench", file, *QUICK, "--size", "64K")
    assert status == 1
    assert f"{file}: {share}% of it was never written" in err


def test_a_file_with_a_short_hole_is_measured(run: Run, drive: Path) -> None:
    file = drive / "padded"
    file.write_bytes(os.urandom((1 << 20) - 4096))
    os.truncate(file, 1 << 20)
    status, _, err = run("bench", file, *QUICK, "--size", "64K")
    assert status == 0, err


def test_directories_of_one_file_system_are_named(run: Run, drives: list[Path]) -> None:
    _, out, _ = run("bench", *drives, *QUICK, "--file-size", "1M", "--json")
    (note,) = json.loads(out)["notes"]
    assert note == (
        f"{drives[0]} and {drives[1]} are on the same file system: together they share its rate."
    )


def test_fio_is_not_compared_with_several_files(run: Run, drive: Path) -> None:
    arguments = ("--files", "2", "--file-size", "1M", "--compare-fio", "--json")
    _, out, _ = run("bench", drive, *QUICK, *arguments)
    assert json.loads(out)["notes"] == [
        "not compared with fio: only a single file, opened once, can be compared"
    ]


def test_all_files_are_removed_if_one_cannot_be_made(
    drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = os.open

    def failing(path: str, flags: int, *more: int, **named: int) -> int:
        name = os.path.basename(str(path))
        if name.startswith(PREFIX) and flags & os.O_CREAT:
            made.append(name)
            if len(made) == 4:
                raise OSError(28, "No space left on device", path)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(OSError, match="No space left"):
        noted(drives, files=3)
    assert len(made) == 4
    assert all(list(path.iterdir()) == [] for path in drives)
