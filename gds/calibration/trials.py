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
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from gds import probe
from gds.backends.hybrid import Direction
from gds.backends.names import reporting
from gds.backends.posix import PosixBackend
from gds.backends.posix_file import PosixFile
from gds.backends.transfer import Descriptors
from gds.contract import Buffer, IOFuture
from gds.errors import StorageError

MIB: Final = 1 << 20

# What to try.
NUM_THREADS: Final = (1, 2, 4, 8)
REQUEST_BYTES: Final = (32 * MIB, 16 * MIB, 8 * MIB, 4 * MIB)

MOST_IN_FLIGHT_BYTES: Final = 64 * MIB
"""Largest number of bytes in flight in each direction. More keeps no drive busier, and needs larger
buffers."""

TIE: Final = 0.05
"""Largest relative difference between two rates that is no reason to prefer one setting."""

_MOST_DOUBT: Final = 0.15
"""Largest relative difference that noise can excuse: a setting that is slower than the best by more
than this is never chosen, however noisy the rates are."""

_NUM_KEPT: Final = 3
"""Number of fastest settings that stay after the second round and later ones."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of the transfers, the same in both directions."""

    threads: int
    request_bytes: int


DEFAULT: Final = Setting(threads=2, request_bytes=32 * MIB)
"""Setting that is used if nothing can be measured. It is right for one NVMe drive, and good enough
for others."""

Round: TypeAlias = Mapping[Setting, float]
"""Rates by setting, all in the same unit, measured one shortly after another."""


def candidates(most_in_flight_bytes: int) -> list[Setting]:
    """Return the settings to try, in the order of what they reveal about a drive.

    The list begins with each number of threads at its largest request size, followed by each number
    at the next smaller size, and so on. So any beginning of the list is a sensible choice for a
    drive that is too slow for all settings.
    """
    limit = min(most_in_flight_bytes, MOST_IN_FLIGHT_BYTES)
    ranked = []
    for threads in NUM_THREADS:
        fitting = [Setting(threads, size) for size in REQUEST_BYTES if threads * size <= limit]
        ranked += [(rank, threads, setting) for rank, setting in enumerate(fitting)]
    return [setting for _, _, setting in sorted(ranked, key=lambda entry: entry[:2])]


def choose(rounds: Sequence[Round]) -> Setting:
    """Return the simplest setting that is as fast as the fastest, as far as the rates can tell.

    The simplest setting has the fewest threads, then the largest requests. A setting is as fast as
    another if the difference is at most `TIE`, or if the rates scatter so much that chance explains
    the difference. Only settings that are in every round count: the others were dropped, and a
    single lucky rate says little.
    """
    scores = _scores(rounds)
    return _simplest(_in_all(rounds), scores, _tolerance(rounds, scores))


def survivors(rounds: Sequence[Round]) -> list[Setting]:
    """Return the settings to measure in the next round, so that the time goes to close decisions.

    These are the fastest one for each number of threads, later the fastest few, and the choice so
    far.
    """
    scores = _scores(rounds)
    tolerance = _tolerance(rounds, scores)
    finalists = _in_all(rounds)
    fastest = sorted(finalists, key=lambda setting: scores[setting], reverse=True)
    if len(rounds) == 1:
        groups = [[s for s in finalists if s.threads == threads] for threads in NUM_THREADS]
        kept = [_simplest(group, scores, tolerance) for group in groups if group] + fastest[:1]
    else:
        kept = [*fastest[:_NUM_KEPT], _simplest(finalists, scores, tolerance)]
    return list(dict.fromkeys(kept))


def _simplest(
    settings: Sequence[Setting], scores: Mapping[Setting, float], tolerance: float
) -> Setting:
    enough = max(scores[setting] for setting in settings) * (1 - tolerance)
    as_fast = [setting for setting in settings if scores[setting] >= enough]
    return min(as_fast, key=lambda setting: (setting.threads, -setting.request_bytes))


def _tolerance(rounds: Sequence[Round], scores: Mapping[Setting, float]) -> float:
    """Return the largest relative difference between two scores that counts as a tie."""
    # Three standard errors of a difference, because several settings can be the lucky one.
    doubt = 3 * _noise(rounds, scores) * math.sqrt(2 / len(rounds))
    return min(max(TIE, doubt), _MOST_DOUBT)


def _in_all(rounds: Sequence[Round]) -> list[Setting]:
    return [setting for setting in rounds[0] if all(setting in rates for rates in rounds)]


def _relative(rounds: Sequence[Round]) -> dict[Setting, list[float]]:
    """Return each setting's rates, divided by the round's mean of the settings in every round.

    A drive's rate changes from round to round far more than settings differ.
    """
    common = _in_all(rounds)
    relative: dict[Setting, list[float]] = {}
    for rates in rounds:
        mean = statistics.fmean(rates[setting] for setting in common)
        for setting, rate in rates.items():
            relative.setdefault(setting, []).append(rate / mean)
    return relative


def _scores(rounds: Sequence[Round]) -> dict[Setting, float]:
    return {setting: statistics.median(rates) for setting, rates in _relative(rounds).items()}


def _noise(rounds: Sequence[Round], scores: Mapping[Setting, float]) -> float:
    """Return the relative standard deviation of a rate; infinite if no rate was repeated."""
    square, freedom = 0.0, 0
    for setting, rates in _relative(rounds).items():
        square += sum((rate / scores[setting] - 1) ** 2 for rate in rates)
        freedom += len(rates) - 1
    return math.sqrt(square / freedom) if freedom else math.inf


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
    """Trials on one file, after `fill`: reads from its first half, writes to its second half."""

    def __init__(self, backend: PosixBackend, file: PosixFile) -> None:
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
        """Reserve and write the file, or as much of it as possible in the given time."""
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
        """Return how many bytes each direction can move in `seconds`, by the last trial."""
        units = int(self.bytes_per_s * seconds) // UNIT_BYTES
        return min(max(units, 1) * UNIT_BYTES, self.half_bytes)

    def seconds(self, setting: Setting, directions: tuple[Direction, ...], nbytes: int) -> float:
        """Move bytes in each direction, all queued at once, and return the seconds taken."""
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
        """Return the rates of as many settings as possible, measured as often as possible.

        They are in bytes per second; none if the time was too short to compare two settings.
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
