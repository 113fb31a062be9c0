"""Rates of transfers in one directory, measured over a scratch file within a given time.

The file has no name (or a hidden one, where the file system cannot do without), belongs to nobody,
and is gone when its context ends. Everything goes through a real `PosixBackend`: what is measured
is what its users get.
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
"""All lengths here are multiples of it."""

TRANSFER_BYTES: Final = 32 * MIB
"""Length of the transfers that a setting cuts up: that of a chunk of the optimizer's state."""

BOTH: Final[tuple[Direction, ...]] = ("read", "write")

_FIRST_BYTES: Final = MIB
_PIECE_BYTES: Final = 8 * MIB
_RESERVE_BYTES: Final = 32 * MIB
_PATTERN_BYTES: Final = 2 * MIB
_ENOUGH_TRIALS: Final = 16
_MOST_ROUNDS: Final = 8


class Trials:
    """Reads from the first half of a file that was just filled, and writes to the second."""

    def __init__(self, backend: PosixBackend, file: PosixFile) -> None:
        self._backend = backend
        self._file = file
        memory_bytes = min(file.size_bytes // 2, MOST_IN_FLIGHT_BYTES)
        # Random, because some drives shrink or skip what repeats, and touched before it is timed.
        pattern = os.urandom(_PATTERN_BYTES)
        self._memory: dict[Direction, Buffer] = {}
        for direction in BOTH:
            self._memory[direction] = memory = backend.allocate(memory_bytes)
            view = memory.memoryview()
            for start in range(0, memory_bytes, _PATTERN_BYTES):
                view[start : start + _PATTERN_BYTES] = pattern
        self.half_bytes = 0
        """Most bytes that one trial can move in each direction."""
        self.bytes_per_s = 0.0
        """How fast the drive was last, to foresee how long a trial will take."""

    def fill(self, fd: int, seconds: float) -> None:
        """Reserve and write the file, or as much of it as can be done in that time.

        The first write to reserved space costs about twice a later one, and space that was never
        written is not really read.

        Args:
            fd: Of the same file.
            seconds: The clock is looked at between requests; there is at least one.
        """
        self._backend.tune(read_threads=2, write_threads=2, request_bytes=None)
        memory = self._memory["write"]
        started_s = time.perf_counter()
        pending: deque[IOFuture] = deque()
        reserved = filled = 0
        while filled == 0 or (
            filled < self._file.size_bytes and time.perf_counter() - started_s < seconds
        ):
            # A small one first: it finds out a very slow drive before much is queued there.
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
        """Return how many bytes in one direction take about so long, within what is possible."""
        units = int(self.bytes_per_s * seconds) // UNIT_BYTES
        return min(max(units, 1) * UNIT_BYTES, self.half_bytes)

    def seconds(self, setting: Setting, directions: tuple[Direction, ...], nbytes: int) -> float:
        """Move `nbytes` bytes in each direction, at the same time; returns how long that took.

        Everything is queued at once, as an optimizer does that knows what it will need next.
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
                # Transfers may share memory where a trial is longer than it: nobody looks at it.
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
        """Measure the rates of as many settings, as often, as can be done until then.

        Args:
            until_s: By `time.perf_counter`, which is looked at between trials.

        Returns:
            Rates in bytes per second, reads and writes together; an empty list where there was no
            time for a fair comparison of two.
        """
        self.seconds(DEFAULT, BOTH, self.fitting_bytes((until_s - time.perf_counter()) / 16))
        left_s = max(until_s - time.perf_counter(), 0.0)
        nbytes = self.half_bytes
        while nbytes > TRANSFER_BYTES and self._num_trials(left_s, nbytes) < _ENOUGH_TRIALS:
            nbytes = max(nbytes // 2 // UNIT_BYTES * UNIT_BYTES, TRANSFER_BYTES)
        # Half of the time is for the first round, the rest to make sure.
        settings = candidates(nbytes)[: self._num_trials(left_s, nbytes) // 2]
        rounds: list[Round] = []
        while len(settings) > 1 and len(rounds) < _MOST_ROUNDS:
            left_s = until_s - time.perf_counter()
            if rounds and self._num_trials(left_s, nbytes) < len(settings):
                break
            rates: dict[Setting, float] = {}
            # Back and forth, so that a drive that gets slower is as unfair to the one as the other.
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
        """Return the rate in bytes per second of a setting, measured for about so long."""
        nbytes = self.fitting_bytes(seconds / 2)
        moved, elapsed_s = 0, 0.0
        while moved == 0 or elapsed_s < seconds:
            elapsed_s += self.seconds(setting, directions, nbytes)
            moved += nbytes * len(directions)
        return moved / elapsed_s

    def _num_trials(self, seconds: float, nbytes: int) -> int:
        return math.floor(max(seconds, 0.0) * self.bytes_per_s / (2 * nbytes))


@contextlib.contextmanager
def trials_in(directory: str, file_bytes: int, fill_s: float) -> Iterator[Trials]:
    """Provide `Trials` over a scratch file in a directory, which is gone afterwards.

    Args:
        directory: Where; it must take direct I/O.
        file_bytes: Length of the file; less if the drive cannot write that much in time.
        fill_s: Seconds that may be spent on filling the file.
    """
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
    """Return a file that has no name, and `nbytes` bytes before long."""

    def refused(reason: str) -> None:
        raise StorageError(errno.EOPNOTSUPP, reason, directory)

    memory_alignment, _ = probe.required_alignment(fd) or (1, 1)
    path = f"/proc/self/fd/{fd}"  # for want of a name
    buffered_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        direct_fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except BaseException:
        os.close(buffered_fd)
        raise
    descriptors = Descriptors(buffered_fd, direct_fd, memory_alignment, refused)
    return PosixFile(backend, f"{directory}/(scratch file)", descriptors, nbytes, writable=True)
