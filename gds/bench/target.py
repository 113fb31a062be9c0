"""Target: the file to measure, a scratch file (always removed) or an existing file of the user."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, TypeAlias

import numpy as np

from gds import libc, probe
from gds.backends.names import reporting
from gds.backends.posix import PosixBackend
from gds.bench.workload import size_text
from gds.contract import ALIGNMENT, Buffer, File, IOFuture
from gds.errors import RefusedError, StorageError, WrongDataError
from gds.probe import is_directory

Words: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

_WORDS: Final = ALIGNMENT // 8
# Odd, so that no two blocks, and no two generations of a block, have the same words.
_PLACE: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_AGE: Final = np.uint64(0xBF58_476D_1CE4_E5B9)


class Stamps:
    """Writes and checks the content of one file, to detect wrong, stale or damaged blocks.

    Every block of 4 KiB holds its offset, the number of times it has been rewritten (its
    generation), and a number of the file, and all of its words depend on them.
    """

    def __init__(self, seed: int) -> None:
        """Draw the random words that all blocks share, so that no drive can compress a block."""
        generator = np.random.default_rng(seed)
        self._base: Words = generator.integers(0, 1 << 64, _WORDS, dtype=np.uint64)
        self._number = np.uint64(generator.integers(0, 1 << 64, dtype=np.uint64))

    def fill(self, view: memoryview, offset: int, generations: Words) -> None:
        """Fill memory, in whole blocks of 4 KiB, with the data that belongs at `offset`."""
        words = np.frombuffer(view, dtype=np.uint64).reshape(-1, _WORDS)
        offsets = np.arange(offset, offset + len(view), ALIGNMENT, dtype=np.uint64)
        key = offsets * _PLACE + generations * _AGE
        np.add(self._base, key[:, None], out=words)
        words[:, 0] = offsets
        words[:, 1] = generations
        words[:, 2] = self._number

    def check(self, view: memoryview, offset: int, generations: Words, path: str) -> None:
        """Compare memory with what `fill` would write; raises `WrongDataError` if it differs."""
        expected = bytearray(len(view))
        self.fill(memoryview(expected), offset, generations)
        if view == expected:  # compares single bytes, because both have the format "B"
            return
        found = np.frombuffer(view, dtype=np.uint64).reshape(-1, _WORDS)
        right = np.frombuffer(expected, dtype=np.uint64).reshape(-1, _WORDS)
        wrong = np.flatnonzero((found != right).any(axis=1))
        first = int(wrong[0])
        what = self._describe(found[first], right[first])
        raise WrongDataError(
            errno.EBADMSG,
            f"wrong data in {len(wrong)} of {len(found)} blocks; the first {what},",
            path,
            offset=offset + first * ALIGNMENT,
        )

    def _describe(self, found: Words, right: Words) -> str:
        offset, generation = int(found[0]), int(found[1])
        if found[2] == self._number and offset % ALIGNMENT == 0:
            claimed = bytearray(ALIGNMENT)
            one = np.array([generation], dtype=np.uint64)
            self.fill(memoryview(claimed), offset, one)
            if found.tobytes() == claimed:
                if offset != int(right[0]):
                    return f"holds the data of byte {offset}"
                return f"holds write {generation} of it, but {int(right[1])} was the last"
        return f"differs in {int(np.count_nonzero(found != right))} of {_WORDS} words"


PREFIX: Final = ".gds-bench-"
LEAST_FILE_BYTES: Final = 256 << 20
_MOST_HOLES: Final = 0.01
_PIECE_BYTES: Final = 8 << 20
_IN_FLIGHT: Final = 2
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal(BaseException):
    """A signal asked this process to end. The exception is raised in the main thread."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Run the body so that the first SIGINT, SIGTERM or SIGHUP raises `StopSignal` in it.

    Later signals are ignored, so that they cannot interrupt the removal of a scratch file. In
    any thread but the main one, this has no effect.
    """

    def stop(number: int, _: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise StopSignal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Target:
    """A file to measure, with its expected content and control of its pages in the page cache.

    No descriptor stays open, so that there can be many files.
    """

    def __init__(self, path: str, *, made: bool, seed: int) -> None:
        self.path = path
        self.made = made
        """Whether the file is a scratch file; otherwise it is only read."""
        self.stamps = Stamps(seed)
        with self._opened("open") as fd:
            found = os.fstat(fd)
        self.size_bytes = found.st_size
        if not stat.S_ISREG(found.st_mode):
            raise RefusedError(f"{path} is neither a directory nor a regular file")
        self.generations: Words = np.zeros(self.size_bytes // ALIGNMENT, dtype=np.uint64)
        """Number of times that each block of 4 KiB has been rewritten, dtype uint64."""

    def generations_of(self, offset: int, nbytes: int) -> Words:
        """Return the generations of a range, as a view that the caller may change."""
        return self.generations[offset // ALIGNMENT : (offset + nbytes) // ALIGNMENT]

    def sync(self) -> None:
        """Make all data of a scratch file durable; an existing file of the user is not synced."""
        if self.made:
            with self._opened("sync") as fd:
                os.fdatasync(fd)

    def drop_cache(self) -> None:
        """Ask the kernel to drop the file's clean pages from the page cache."""
        with self._opened("drop the page cache") as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def warm_cache(self) -> None:
        """Read the file into the page cache."""
        with self._opened("read") as fd:
            offset = 0
            while piece := os.pread(fd, _PIECE_BYTES, offset):
                offset += len(piece)

    def cached(self) -> float | None:
        """Return the share of the file that the page cache holds, 0 to 1; None if not known."""
        with self._opened("examine") as fd:
            found = libc.cached_bytes(fd, self.size_bytes)
        return None if found is None else min(found / max(self.size_bytes, 1), 1.0)

    def hole_bytes(self) -> int:
        """Return the number of bytes in holes, which includes reserved space without data."""
        holes = offset = 0
        with self._opened("examine") as fd:
            while offset < self.size_bytes:
                try:
                    data = os.lseek(fd, offset, os.SEEK_DATA)
                except OSError as error:
                    if error.errno != errno.ENXIO:
                        raise
                    data = self.size_bytes
                holes += data - offset
                offset = data
                if data < self.size_bytes:
                    offset = os.lseek(fd, data, os.SEEK_HOLE)
        return holes

    @contextlib.contextmanager
    def _opened(self, what: str) -> Iterator[int]:
        """Yield a descriptor for reading; an error is reported as one of the operation `what`."""
        with reporting(what, self.path):
            # Without O_NONBLOCK, opening a pipe would wait for its other end.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(self.path, flags)
            try:
                yield fd
            finally:
                os.close(fd)


@contextlib.contextmanager
def targets_at(
    place: str,
    file_bytes: int,
    *,
    count: int = 1,
    seed: int,
    allow_volatile: bool = False,
    allow_small: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Target]]:
    """Yield the files to measure: an existing file, or scratch files that are removed afterwards.

    Scratch files are written completely: first writes cost twice as much as later ones, and reads
    of space that was never written do not reach the drive.
    """
    fills_directory = is_directory(place)
    mount = probe.mount_of(place)
    if mount.volatile and not allow_volatile:
        raise RefusedError(
            f"{place} is in memory ({mount.filesystem}), not on a drive: name a directory on a "
            "drive, or pass --allow-volatile to measure memory"
        )
    if mount.remote:
        say(
            f"{place}: {probe.describe_remote(mount.filesystem)}. The measurement includes the "
            "speed of that service"
        )
    if not fills_directory:
        if count > 1:
            raise RefusedError(
                f"{place} is a file, which --files does not apply to: name a directory, in which "
                "scratch files are made"
            )
        target = Target(place, made=False, seed=seed)
        _check_holes(target)
        _check_size(target.size_bytes, place, allow_small=allow_small)
        yield [target]
        return
    _check_size(file_bytes * count, place, allow_small=allow_small)
    if file_bytes % ALIGNMENT:
        raise RefusedError(f"the file size {file_bytes} is not a multiple of {ALIGNMENT} bytes")
    _check_space(place, file_bytes * count)
    start = os.path.join(place, f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}")
    paths = [f"{start}-{number}" if number else start for number in range(count)]
    with _created(paths, place, file_bytes, seed, say) as targets:
        yield targets


@contextlib.contextmanager
def _created(
    paths: list[str], directory: str, file_bytes: int, seed: int, say: Callable[[str], None]
) -> Iterator[list[Target]]:
    """Make scratch files of different seeds, fill them, and remove them in every case."""
    ours: list[str] = []
    with contextlib.ExitStack() as stack:
        try:
            backend = PosixBackend(direct=probe.direct_io(directory).supported)
            stack.callback(backend.close)
            memory = backend.allocate(_IN_FLIGHT * _PIECE_BYTES)
            slots = [memory.slice(n * _PIECE_BYTES, _PIECE_BYTES) for n in range(_IN_FLIGHT)]
            targets = []
            for number, path in enumerate(paths):
                ours.append(path)
                try:
                    file = backend.create(path, file_bytes)
                except StorageError as error:
                    if error.errno == errno.EEXIST:
                        ours.pop()
                    raise
                target = Target(path, made=True, seed=seed + number)
                if number == 0:
                    kind = "a scratch file" if len(paths) == 1 else f"{len(paths)} scratch files"
                    say(f"writing {kind} of {size_text(file_bytes)}")
                _fill(file, target, slots)
                file.sync()
                file.close()
                target.drop_cache()
                targets.append(target)
            yield targets
        finally:
            # Remove the files first: the steps after this may wait for a faulty drive.
            try:
                _remove(ours)
            except StopSignal:  # it is raised only once, so the second attempt is safe
                _remove(ours)
                raise


def _fill(file: File, target: Target, slots: list[Buffer]) -> None:
    """Write the whole content of a file, with a request in flight for each buffer."""
    pending: deque[IOFuture] = deque()
    for number, offset in enumerate(range(0, target.size_bytes, _PIECE_BYTES)):
        if len(pending) == len(slots):
            pending.popleft().result()
        nbytes = min(_PIECE_BYTES, target.size_bytes - offset)
        part = slots[number % len(slots)].slice(0, nbytes)
        target.stamps.fill(part.memoryview(), offset, target.generations_of(offset, nbytes))
        pending.append(file.write(part, offset))
    for future in pending:
        future.result()


def _remove(paths: list[str]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _check_size(nbytes: int, place: str, *, allow_small: bool) -> None:
    if nbytes < LEAST_FILE_BYTES and not allow_small:
        raise RefusedError(
            f"{place}: a file of {nbytes / (1 << 20):.3g} MiB may fit into the cache of the drive, "
            f"which would be measured instead: use at least {LEAST_FILE_BYTES >> 20} MiB, or pass "
            "--allow-small"
        )


def _check_holes(target: Target) -> None:
    """Raise `RefusedError` if too much of a file is holes, whose reads do not reach the drive."""
    share = target.hole_bytes() / max(target.size_bytes, 1)
    if share > _MOST_HOLES:
        raise RefusedError(
            f"{target.path}: {share:.0%} of it was never written, and reads of such space do not "
            "reach the drive: name a file that was written throughout, or a directory"
        )


def _check_space(directory: str, file_bytes: int) -> None:
    with reporting("measure", directory):
        space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    if file_bytes > free * 0.9:
        raise RefusedError(
            f"{directory}: {file_bytes >> 20} MiB are needed, but only {free >> 20} MiB are free: "
            "use a smaller --file-size"
        )
