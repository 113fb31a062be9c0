"""Choice between direct and buffered I/O for each request: by size, alignment, cache and memory.

The reasons, as measured on ext4 (see ``bench/hybrid.py``): in both modes a request costs a system
call and a trip to the drive. Beyond that, direct I/O reaches the drive's full rate with a tenth of
the processor time. The page cache delivers bytes that it already holds at five times the drive's
rate, collects small writes into large ones, and reads ahead.

Both modes may be mixed on one file, because the kernel keeps them coherent: it writes back dirty
pages of a range before a direct read, and drops cached pages of it before and after a direct write.
It cannot drop a page, or a large folio, that a buffered write dirties in the meantime: then it
makes the next sync fail with EIO (`dio_warn_stale_pagecache`). So buffered and direct *writes* of
one file take turns (`WriteGate`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple

from gds import libc
from gds.waiting import Monitor

Direction = Literal["read", "write"]
Mode = Literal["direct", "buffered"]

_LEAST_GRANULE_BYTES: Final = 64 << 10
"""Smallest granule, in bytes: the unit of a file in which `HybridFile` remembers direct reads."""

_MOST_GRANULES: Final = 1 << 16
"""Largest number of granules of a file. Larger files have larger granules."""

_WINDOW_BYTES: Final = 16 << 10
"""Size of a sample, in bytes. For a larger read, the page cache is only asked about samples. The
kernel checks every page: for a range of megabytes, that takes a tenth of the time of a copy."""

_AHEAD_BYTES: Final = 256 << 10
"""Bytes that are read ahead of small reads, on request of this module. The kernel's own read-ahead
is off: it continues as long as its pages are read, and then the whole file is cached."""

_STREAK: Final = 4
"""After this many cached reads in a row, the page cache is asked before every fourth read only. A
copy from memory is so fast that the question costs noticeable time."""

_PRESSURE_S: Final = 1.0
"""Seconds for which the last look at the machine's memory stays valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPolicy:
    """Limits of the choice; the default values come from measurements."""

    write_bytes: int = 128 << 10
    """Bytes below which a write is buffered, so that the page cache collects small writes."""

    read_bytes: int = 64 << 10
    """Bytes below which a sequential read is buffered and read ahead. A read is sequential if it is
    at the start of the file or begins at the end of the last request."""

    unaligned_bytes: int = 128 << 10
    """Bytes below which a read with an end within a block is buffered as a whole. A separate
    buffered request for each such end would take longer."""

    cached_share: float = 0.9
    """Least share of a read's range that the page cache must hold for the read to be buffered. For
    large reads the share is estimated from samples."""

    reread_share: float = 0.25
    """Share of the machine's memory for files that are read repeatedly, all files together. A range
    that is read directly for the second time is read into the page cache, if the whole file fits
    into this share. 0 switches that off."""

    least_available_share: float = 0.05
    """Least share of the machine's memory that must be available. Below it, nothing more is put
    into the page cache."""

    most_stalled_percent: float = 10.0
    """Largest percentage of the last ten seconds in which tasks may have waited for memory. Above
    it, nothing more is put into the page cache."""


class Choice(NamedTuple):
    """The mode of a request, with the reason in a few words."""

    mode: Mode
    reason: str


_CACHED: Final = Choice("buffered", "cached")
_SMALL: Final = Choice("buffered", "small")
_SMALL_FILE: Final = Choice("buffered", "small file")
_UNALIGNED: Final = Choice("buffered", "unaligned")
_REREAD: Final = Choice("buffered", "read again")
_NO_MEMORY: Final = Choice("direct", "memory is short")
_LARGE: Final = Choice("direct", "large")
_RANDOM: Final = Choice("direct", "random")


class Hybrid:
    """State that all files of a backend share: policy, state of memory, and counts. Thread-safe."""

    def __init__(
        self,
        policy: HybridPolicy | None = None,
        *,
        read_text: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy or HybridPolicy()
        self._read_text = read_text or _read_text
        self._clock = clock
        self._lock = threading.Lock()
        self._checked_s = -_PRESSURE_S
        self._pressed = False
        self._memory_bytes = 0
        self._claimed_bytes = 0
        self._counts: Counter[tuple[Direction, Mode, str]] = Counter()

    def pressed(self) -> bool:
        """Return whether memory is short; the state is read at most once a second."""
        now_s = self._clock()
        with self._lock:
            if now_s - self._checked_s >= _PRESSURE_S:
                self._checked_s = now_s
                self._memory_bytes, available = _memory(self._read_text("/proc/meminfo"))
                stalled = _stalled(self._read_text("/proc/pressure/memory"))
                self._pressed = (
                    available < self.policy.least_available_share * self._memory_bytes
                    or stalled > self.policy.most_stalled_percent
                )
            return self._pressed

    def claim_memory(self, nbytes: int) -> bool:
        """Claim memory for a file that is read repeatedly; returns whether it fits the share."""
        with self._lock:
            most = self.policy.reread_share * self._memory_bytes
            fits = self._claimed_bytes + nbytes <= most
            self._claimed_bytes += nbytes * fits
            return fits

    def release_memory(self, nbytes: int) -> None:
        """Release a claim that `claim_memory` granted."""
        with self._lock:
            self._claimed_bytes -= nbytes

    def count(self, direction: Direction, choice: Choice) -> None:
        """Count a decision."""
        with self._lock:
            self._counts[direction, choice.mode, choice.reason] += 1

    def counts(self) -> dict[str, int]:
        """Return how often each decision was made; keys are like ``"read buffered: cached"``."""
        with self._lock:
            return {
                f"{direction} {mode}: {reason}": count
                for (direction, mode, reason), count in self._counts.items()
            }


class WriteGate:
    """Lets writes of one mode run only while none of the other mode runs; both get their turn."""

    def __init__(self) -> None:
        self._changed = Monitor()
        self._mode: Mode = "direct"
        self._num_active = 0
        self._num_waiting: dict[Mode, int] = {"direct": 0, "buffered": 0}
        self._num_admitted: dict[Mode, int] = {"direct": 0, "buffered": 0}
        """Number of writes in each mode that have got their turn but have not woken up yet. They
        count as active."""

    @contextlib.contextmanager
    def passing(self, mode: Mode) -> Iterator[None]:
        """Run the body as a write of a mode, after waiting for its turn."""
        self._enter(mode)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, mode: Mode) -> None:
        """Wait for the turn of a mode, and count a write as active."""
        other = _other(mode)
        with self._changed:
            # If writes of the other mode wait, this one waits too: else they might wait for ever.
            if not self._num_active or (self._mode == mode and not self._num_waiting[other]):
                self._mode = mode
                self._num_active += 1
                return
            self._num_waiting[mode] += 1
        self._changed.wait_until(partial(self._is_admitted, mode))

    def _is_admitted(self, mode: Mode) -> bool:
        """Return whether a waiting write of a mode has got its turn, and take the turn."""
        if not self._num_admitted[mode]:
            return False
        self._num_admitted[mode] -= 1
        return True

    def _leave(self) -> None:
        """Record the end of a write; the last one gives the turn to the waiting writes."""
        with self._changed:
            self._num_active -= 1
            if self._num_active:
                return
            other = _other(self._mode)
            turn = other if self._num_waiting[other] else self._mode
            if count := self._num_waiting[turn]:
                self._mode = turn
                self._num_waiting[turn] = 0
                self._num_admitted[turn] += count
                self._num_active = count
                self._changed.notify_all()


def _other(mode: Mode) -> Mode:
    return "buffered" if mode == "direct" else "direct"


class HybridFile:
    """Decides on the requests of one open file, and remembers which ranges were read directly."""

    def __init__(self, hybrid: Hybrid, size_bytes: int) -> None:
        self._hybrid = hybrid
        self._has_claim = False
        # All requests of a small file are buffered: it needs no second descriptor and no memory of
        # its reads.
        self.is_small = size_bytes < min(hybrid.policy.read_bytes, hybrid.policy.write_bytes)
        self.gate = None if self.is_small else WriteGate()
        if self.is_small:
            return
        self._size_bytes = size_bytes
        self._granule_bytes = _LEAST_GRANULE_BYTES
        while size_bytes > self._granule_bytes * _MOST_GRANULES:
            self._granule_bytes *= 2
        self._read_before = bytearray(-(-size_bytes // self._granule_bytes))
        self._last_end = 0
        self._num_cached = 0  # cached reads in a row

    def mode(self, direction: Direction, fd: int, offset: int, nbytes: int) -> Mode:
        """Return the mode for a request that could be direct, and count it; `fd` is buffered."""
        choice = _SMALL_FILE if self.is_small else self._choice(direction, fd, offset, nbytes)
        self._hybrid.count(direction, choice)
        return choice.mode

    def _choice(self, direction: Direction, fd: int, offset: int, nbytes: int) -> Choice:
        """Return the choice for a request, and remember the range; may start to read ahead."""
        last_end, self._last_end = self._last_end, offset + nbytes  # only a hint: threads may race
        is_read = direction == "read"
        if is_read and self._is_cached(fd, offset, nbytes):
            return _CACHED  # return early: the copy takes hardly longer than the steps below
        end = offset + nbytes
        policy = self._hybrid.policy
        is_reread = is_read and self._is_kept_reread(offset, end)
        if self._hybrid.pressed():
            choice = _NO_MEMORY
        elif not is_read:
            choice = _SMALL if nbytes < policy.write_bytes else _LARGE
        elif offset in (0, last_end) and nbytes < policy.read_bytes:
            choice = _SMALL
        elif (offset | nbytes) % mmap.PAGESIZE and nbytes < policy.unaligned_bytes:
            choice = _UNALIGNED
        elif is_reread:
            choice = _REREAD
        else:
            choice = _LARGE if nbytes >= policy.read_bytes else _RANDOM
        if is_read and choice is _SMALL:
            with contextlib.suppress(OSError):  # the kernel may ignore advice
                os.posix_fadvise(fd, end, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        self._mark_read(offset, end, was_read=is_read and choice.mode == "direct")
        return choice

    def close(self) -> None:
        """Release the file's claim on memory. Idempotent."""
        had_claim, self._has_claim = self._has_claim, False
        if had_claim:
            self._hybrid.release_memory(self._size_bytes)

    def _is_cached(self, fd: int, offset: int, nbytes: int) -> bool:
        """Return whether the page cache holds a range, as far as samples tell."""
        streak = self._num_cached
        if streak >= _STREAK and streak % _STREAK:
            self._num_cached += 1
            return True
        # A non-blocking read (RWF_NOWAIT) is no way to ask: since Linux 6.0 a miss starts
        # read-ahead, and the same bytes would be fetched twice.
        if nbytes <= 8 * _WINDOW_BYTES:
            found = self._window_is_cached(fd, offset, nbytes)
        else:
            # The end first: read-ahead of an earlier request may have cached the beginning.
            found = self._window_is_cached(fd, offset + nbytes - _WINDOW_BYTES, _WINDOW_BYTES)
            if found and not streak:
                found = all(
                    self._window_is_cached(fd, start, _WINDOW_BYTES)
                    for start in (offset, offset + nbytes // 2)
                )
        self._num_cached = streak + 1 if found else 0
        return found

    def _window_is_cached(self, fd: int, offset: int, nbytes: int) -> bool:
        """Return whether the page cache holds enough of the pages of a range."""
        pages = -(-(offset % mmap.PAGESIZE + nbytes) // mmap.PAGESIZE)
        cached = libc.cached_bytes(fd, nbytes, offset) or 0
        return cached >= self._hybrid.policy.cached_share * pages * mmap.PAGESIZE

    def _granules(self, offset: int, end: int) -> slice:
        """Return the indices of the granules that lie completely within a range."""
        return slice(-(-offset // self._granule_bytes), end // self._granule_bytes)

    def _is_kept_reread(self, offset: int, end: int) -> bool:
        """Return whether a range was read directly before and its file may be kept in memory."""
        inside = self._read_before[self._granules(offset, end)]
        if not inside or not all(inside):
            return False
        self._has_claim = self._has_claim or self._hybrid.claim_memory(self._size_bytes)
        return self._has_claim

    def _mark_read(self, offset: int, end: int, *, was_read: bool) -> None:
        """Remember a range as read directly, or forget that it was."""
        if was_read:
            inside = self._granules(offset, end)
        else:  # all granules that the range touches, because their bytes may have changed
            inside = slice(offset // self._granule_bytes, -(-end // self._granule_bytes))
        count = len(self._read_before[inside])
        self._read_before[inside] = (b"\1" if was_read else b"\0") * count


def _memory(text: str) -> tuple[int, int]:
    """Return the machine's memory and the available memory, in bytes; 0 for a value not known."""
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s*(\d+)", text, re.MULTILINE))
    return int(found.get("MemTotal", 0)) << 10, int(found.get("MemAvailable", 0)) << 10


def _stalled(text: str) -> float:
    """Return the percentage of the last ten seconds in which a task waited for memory."""
    found = re.search(r"^some .*\bavg10=(\d+(?:\.\d+)?)", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _read_text(path: str) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:  # some kernels lack the file, and some containers hide it
        return ""
