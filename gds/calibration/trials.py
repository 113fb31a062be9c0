"""Trials: rates of transfers in one directory, measured with a scratch file in a limited time.

The scratch file has no name (or a hidden name, if the file system needs one), and is gone when its
context ends. All transfers go through a real `PosixBackend`, so that the rates are those that its
users get.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from gds import probe
from gds.backends.names import reporting
from gds.backends.posix import PosixBackend
from gds.backends.posix_file import PosixFile
from gds.backends.transfer import Descriptors, Direction
from gds.calibration.tuning import (
    DEFAULT,
    MIB,
    MOST_IN_FLIGHT_BYTES,
    Round,
    Setting,
    candidates,
    survivors,
)
from gds.contract import Buffer, IOFuture
from gds.errors import StorageError

UNIT_BYTES: Final = 4 * MIB
"""Unit of length in bytes: the length of every trial is a multiple of it."""

TRANSFER_BYTES: Final = 32 * MIB
"""Length in bytes of the transfers that a setting cuts into parts. A chunk of the optimizer's state
has this length."""

BOTH: Final[tuple[Direction, ...]] = ("read", "write")

_FIRST_BYTES: Final = MIB
_PIECE_BYTES: Final = 8 * MIB
_RESERVE_BYTES: Final = 32 * MIB
_PATTERN_BYTES: Final = 2 * MIB
_ENOUGH_TRIALS: Final = 16
_MOST_ROUNDS: Final = 8


class Trials:
    """Trials on one file: reads from its first half, and writes to its second half.

    Call `fill` first.
    """

    def __init__(self, backend: PosixBackend, file: PosixFile) -> None:
        """Allocate the memory of the trials."""
        self._backend = backend
        self._file = file
        memory_bytes = min(file.size_bytes // 2, MOST_IN_FLIGHT_BYTES)
        # Random bytes, because some drives compress or skip repeated data. All pages are touched
        # before the first trial, so that no trial measures their allocation.
        pattern = os.urandom(_PATTERN_BYTES)
        self._memory: dict[Direction, Buffer] = {}
        for direction in BOTH:
            self._memory[direction] = memory = backend.allocate(memory_bytes)
            view = memory.memoryview()
            for start in range(0, memory_bytes, _PATTERN_BYTES):
                view[start : start + _PATTERN_BYTES] = pattern
        self.half_bytes = 0
        """Largest number of bytes that one trial can move in each direction."""
        self.bytes_per_s = 0.0
        """Rate of the last trial, in bytes per second, to estimate the time of the next one."""

    def fill(self, fd: int, seconds: float) -> None:
        """Reserve and write the file, or as much of it as possible in the given time.

        The first write to reserved space costs about twice as much as a later one. A read of space
        that was never written does not reach the drive.

        Args:
            fd: Descriptor of the same file.
            seconds: Time limit, checked between requests; at least one request is made.
        """
        self._backend.tune(read_threads=2, write_threads=2, request_bytes=None)
        memory = self._memory["write"]
        started_s = time.perf_counter()
        pending: deque[IOFuture] = deque()
        reserved = filled = 0
        while filled == 0 or (
            filled < self._file.size_bytes and time.perf_counter() - started_s < seconds
        ):
            # The first piece is small, to detect a very slow drive before much is queued.
            piece = _PIECE_BYTES if filled else _FIRST_BYTES
            piece = min(piece, self._file.size_bytes - filled, memory.nbytes)
            if filled + piece > reserved:
                size = min(_RESERVE_BYTES, self._file.size_bytes - reserved)
                with reporting(f"reserve {size} bytes", self._file.path, reserved):
                    os.posix_fallocate(fd, reserved, size)
                reserved += size
            pending.append(self._file.write(memory.slice(0, piece), filled))
            filled += piece
            while len(pending) > (2 if filled > _FIRST_BYTES else 0):
                pending.popleft().result()
        for future in pending:
            future.result()
        self.half_bytes = filled // (2 * UNIT_BYTES) * UNIT_BYTES
        self.bytes_per_s = filled / (time.perf_counter() - started_s)

    def fitting_bytes(self, seconds: float) -> int:
        """Return how many bytes each direction can move in `seconds`, within `half_bytes`.

        The estimate uses the rate of the last trial. The result is a multiple of `UNIT_BYTES`.
        """
        units = int(self.bytes_per_s * seconds) // UNIT_BYTES
        return min(max(units, 1) * UNIT_BYTES, self.half_bytes)

    def seconds(self, setting: Setting, directions: tuple[Direction, ...], nbytes: int) -> float:
        """Move `nbytes` bytes in each direction at the same time, and return the seconds taken.

        All transfers are queued at once, as by an optimizer that knows its next transfers.
        """
        self._backend.tune(
            read_threads=setting.threads,
            write_threads=setting.threads,
            request_bytes=setting.request_bytes,
        )
        futures = []
        started_s = time.perf_counter()
        for start in range(0, nbytes, TRANSFER_BYTES):
            size = min(TRANSFER_BYTES, nbytes - start)
            for direction in directions:
                memory = self._memory[direction]
                # If a trial is longer than the memory, transfers share it: its content is not used.
                part = memory.slice(start % memory.nbytes, size)
                if direction == "read":
                    futures.append(self._file.read(part, start))
                else:
                    futures.append(self._file.write(part, self.half_bytes + start))
        for future in futures:
            future.result()
        elapsed_s = time.perf_counter() - started_s
        self.bytes_per_s = nbytes * len(directions) / elapsed_s
        return elapsed_s

    def compare(self, until_s: float) -> list[Round]:
        """Measure the rates of as many settings as possible, as often as possible.

        Args:
            until_s: End of the measurement on the clock `time.perf_counter`, checked between
                trials.

        Returns:
            Rates in bytes per second, reads and writes together, for each round. The list is empty
            if the time was too short for a fair comparison of two settings.
        """
        self.seconds(DEFAULT, BOTH, self.fitting_bytes((until_s - time.perf_counter()) / 16))
        left_s = max(until_s - time.perf_counter(), 0.0)
        nbytes = self.half_bytes
        while nbytes > TRANSFER_BYTES and self._num_trials(left_s, nbytes) < _ENOUGH_TRIALS:
            nbytes = max(nbytes // 2 // UNIT_BYTES * UNIT_BYTES, TRANSFER_BYTES)
        # Half of the time is for the first round, the rest for rounds that confirm it.
        settings = candidates(nbytes)[: self._num_trials(left_s, nbytes) // 2]
        rounds: list[Round] = []
        while len(settings) > 1 and len(rounds) < _MOST_ROUNDS:
            left_s = until_s - time.perf_counter()
            if rounds and self._num_trials(left_s, nbytes) < len(settings):
                break
            rates: dict[Setting, float] = {}
            # Alternate the order, so that a drive that gets slower treats all settings alike.
            for setting in settings if len(rounds) % 2 == 0 else settings[::-1]:
                if time.perf_counter() > until_s:
                    break
                rates[setting] = 2 * nbytes / self.seconds(setting, BOTH, nbytes)
            if len(rates) < (len(settings) if rounds else 2):
                break
            rounds.append(rates)
            settings = survivors(rounds)
        return rounds

    def rate(self, setting: Setting, directions: tuple[Direction, ...], seconds: float) -> float:
        """Return the rate of a setting in bytes per second, measured for about `seconds`."""
        nbytes = self.fitting_bytes(seconds / 2)
        moved, elapsed_s = 0, 0.0
        while moved == 0 or elapsed_s < seconds:
            elapsed_s += self.seconds(setting, directions, nbytes)
            moved += nbytes * len(directions)
        return moved / elapsed_s

    def _num_trials(self, seconds: float, nbytes: int) -> int:
        """Return how many trials of `nbytes` bytes in each direction fit into a time."""
        return math.floor(max(seconds, 0.0) * self.bytes_per_s / (2 * nbytes))


@contextlib.contextmanager
def trials_in(directory: str, file_bytes: int, fill_s: float) -> Iterator[Trials]:
    """Yield `Trials` on a filled scratch file, which is removed at the end of the context."""
    with contextlib.ExitStack() as stack:
        backend = PosixBackend(direct=True)
        stack.callback(backend.close)
        with reporting("make a scratch file", directory):
            fd = stack.enter_context(probe.scratch_file(directory))
            file = _direct_file(backend, directory, fd, file_bytes)
        stack.callback(file.close)
        trials = Trials(backend, file)
        trials.fill(fd, fill_s)
        yield trials


def _direct_file(backend: PosixBackend, directory: str, fd: int, nbytes: int) -> PosixFile:
    """Open a scratch file whose size `Trials.fill` later brings up to `nbytes` bytes."""

    def refused(reason: str) -> None:
        """Raise `StorageError`: trials need direct transfers."""
        raise StorageError(errno.EOPNOTSUPP, reason, directory)

    memory_alignment, _ = probe.required_alignment(fd) or (1, 1)
    path = f"/proc/self/fd/{fd}"  # the file may have no name
    buffered_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        direct_fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except BaseException:
        os.close(buffered_fd)
        raise
    descriptors = Descriptors(buffered_fd, direct_fd, memory_alignment, refused)
    return PosixFile(backend, f"{directory}/(scratch file)", descriptors, nbytes, writable=True)
