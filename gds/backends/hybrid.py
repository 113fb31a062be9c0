"""Direct or buffered, chosen for each request: by size, alignment, page cache and memory.

What decides, as measured on ext4 (see ``bench/hybrid.py``): a request costs a system call and a
trip to the drive, whichever way it goes; past that, direct I/O has the drive's full rate for a
tenth of the processor time, and the page cache has what it holds already (five times the drive's
rate), collects small writes into large ones, and reads ahead.

Both ways may be mixed on one file, because the kernel keeps them coherent: before a direct read it
writes dirty pages of that range back, before and after a direct write it drops cached ones. What it
cannot drop is a page, or a large folio, that a buffered write dirties meanwhile: it then has the
next sync fail with EIO (`dio_warn_stale_pagecache`). So buffered and direct *writes* of one file
take turns here (`WriteGate`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from gds import libc
from gds.waiting import Monitor

Direction = Literal["read", "write"]
Mode = Literal["direct", "buffered"]

_LEAST_GRANULE_BYTES: Final = 64 << 10
_MOST_GRANULES: Final = 1 << 16
_WINDOW_BYTES: Final = 16 << 10
"""Of a larger read's range the page cache is asked for parts of this size only: it looks at every
page, and for megabytes that takes as long as a tenth of copying them."""

_AHEAD_BYTES: Final = 256 << 10
"""What is read ahead of small reads, on our account: the kernel's own reading ahead is off, for it
goes on as long as somebody reads what it has brought, and then everything is cached."""

_STREAK: Final = 4
"""Where so many reads in a row were cached, the page cache is asked again before each fourth
only: a copy from memory is so fast that asking is felt."""

_PRESSURE_S: Final = 1.0
"""How long what is known of the machine's memory is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPolicy:
    """Where the limits are; the defaults are the measured ones."""

    write_bytes: int = 128 << 10
    """Writes shorter than this are collected in the page cache."""

    read_bytes: int = 64 << 10
    """Reads shorter than this, at the start of a file or going on where the last one ended, are
    read ahead by the page cache."""

    unaligned_bytes: int = 128 << 10
    """Reads shorter than this whose ends are within blocks are left to the page cache whole: a
    request of its own for each end would take longer."""

    cached_share: float = 0.9
    """A read goes through the page cache where that holds so much of its range, as far as samples
    of it tell."""

    reread_share: float = 0.25
    """Of the machine's memory, for all files together: what is read directly a second time is
    brought into the page cache if its whole file fits in there; 0 never does that."""

    least_available_share: float = 0.05
    """With less of the machine's memory available, nothing more is put into the page cache."""

    most_stalled_percent: float = 10.0
    """Nor where tasks were waiting for memory for this share of the last ten seconds."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done with a request, and why."""

    mode: Mode
    reason: str


_CACHED: Final = Choice("buffered", "cached")
_SMALL: Final = Choice("buffered", "small")
_SMALL_FILE: Final = Choice("buffered", "small file")
_UNALIGNED: Final = Choice("buffered", "unaligned")
_AGAIN: Final = Choice("buffered", "read again")
_NO_MEMORY: Final = Choice("direct", "memory is short")
_LARGE: Final = Choice("direct", "large")
_RANDOM: Final = Choice("direct", "random")


def choose(
    policy: HybridPolicy,
    direction: Direction,
    nbytes: int,
    *,
    partial: bool,
    continues: bool,
    again: bool,
    cached: bool,
    pressed: bool,
) -> Choice:
    """Decide on a request that could go direct, or mostly. Pure.

    Args:
        policy: The limits.
        direction: Of the request.
        nbytes: Its length.
        partial: Whether one of its ends is within a block.
        continues: It is at the start of the file, or where the last one ended.
        again: All of it was read directly before, and would be welcome in the page cache.
        cached: Whether the page cache holds it, or nearly all of it.
        pressed: Whether memory is short.
    """
    if direction == "write":
        if pressed:
            return _NO_MEMORY
        return _SMALL if nbytes < policy.write_bytes else _LARGE
    if cached:
        return _CACHED
    if pressed:
        return _NO_MEMORY
    if continues and nbytes < policy.read_bytes:
        return _SMALL
    if partial and nbytes < policy.unaligned_bytes:
        return _UNALIGNED
    if again:
        return _AGAIN
    return _LARGE if nbytes >= policy.read_bytes else _RANDOM


class Hybrid:
    """What the files of a backend share: the policy, the state of memory, and the counts."""

    def __init__(
        self,
        policy: HybridPolicy | None = None,
        *,
        read_text: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with a policy.

        Args:
            policy: None is the default one.
            read_text: Reads a file of ``/proc``.
            clock: Seconds.
        """
        self.policy = policy or HybridPolicy()
        self._read_text = read_text or _read_text
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_s = -_PRESSURE_S
        self._pressed = False
        self._memory_bytes = 0
        self._kept_bytes = 0
        self._counts: Counter[tuple[Direction, Mode, str]] = Counter()

    def pressed(self) -> bool:
        """Return whether memory is short; looks once a second."""
        now_s = self._clock()
        with self._lock:
            if now_s - self._looked_s >= _PRESSURE_S:
                self._looked_s = now_s
                self._memory_bytes, available = _memory(self._read_text("/proc/meminfo"))
                stalled = _stalled(self._read_text("/proc/pressure/memory"))
                self._pressed = (
                    available < self.policy.least_available_share * self._memory_bytes
                    or stalled > self.policy.most_stalled_percent
                )
            return self._pressed

    def keep(self, nbytes: int) -> bool:
        """Take so much of what the page cache may hold of files that are read again, if it fits."""
        with self._lock:
            most = self.policy.reread_share * self._memory_bytes
            fits = self._kept_bytes + nbytes <= most
            self._kept_bytes += nbytes * fits
            return fits

    def unkeep(self, nbytes: int) -> None:
        """Give it back."""
        with self._lock:
            self._kept_bytes -= nbytes

    def count(self, direction: Direction, choice: Choice) -> None:
        """Note a decision."""
        with self._lock:
            self._counts[direction, choice.mode, choice.reason] += 1

    def counts(self) -> dict[str, int]:
        """Return how often each decision was taken, such as ``"read buffered: cached"``."""
        with self._lock:
            return {
                f"{direction} {mode}: {reason}": count
                for (direction, mode, reason), count in self._counts.items()
            }


class WriteGate:
    """Lets writes of one mode in while there is none of the other; both come to their turn."""

    def __init__(self) -> None:
        self._changed = Monitor()
        self._mode: Mode = "direct"
        self._num_active = 0
        self._num_waiting: dict[Mode, int] = {"direct": 0, "buffered": 0}
        self._num_called: dict[Mode, int] = {"direct": 0, "buffered": 0}
        """Those that waited, have their turn (they count as active), and have not woken up yet."""

    @contextlib.contextmanager
    def passing(self, mode: Mode) -> Iterator[None]:
        """Run the body as a write of that mode."""
        self._enter(mode)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, mode: Mode) -> None:
        other = _other(mode)
        with self._changed:
            # Who finds the other mode waiting stands behind it, or it might wait for ever.
            if not self._num_active or (self._mode == mode and not self._num_waiting[other]):
                self._mode = mode
                self._num_active += 1
                return
            self._num_waiting[mode] += 1
        self._changed.wait_until(partial(self._is_called, mode))

    def _is_called(self, mode: Mode) -> bool:
        if not self._num_called[mode]:
            return False
        self._num_called[mode] -= 1
        return True

    def _leave(self) -> None:
        with self._changed:
            self._num_active -= 1
            if self._num_active:
                return
            other = _other(self._mode)
            turn = other if self._num_waiting[other] else self._mode
            if count := self._num_waiting[turn]:
                self._mode = turn
                self._num_waiting[turn] = 0
                self._num_called[turn] += count
                self._num_active = count
                self._changed.notify_all()


def _other(mode: Mode) -> Mode:
    return "buffered" if mode == "direct" else "direct"


class HybridFile:
    """Decides for one open file, and remembers what was read from it."""

    def __init__(self, hybrid: Hybrid, size_bytes: int) -> None:
        self._hybrid = hybrid
        self._kept = False
        # Every request of a small file is buffered: no second descriptor, nothing to remember.
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
        self._num_cached = 0  # reads in a row

    def mode(self, direction: Direction, fd: int, offset: int, nbytes: int) -> Mode:
        """Return how a request that could go direct is to go.

        Args:
            direction: Of the request.
            fd: Descriptor that goes through the page cache.
            offset: In the file, in bytes.
            nbytes: Its length; at least a block.
        """
        choice = _SMALL_FILE if self.is_small else self._choice(direction, fd, offset, nbytes)
        self._hybrid.count(direction, choice)
        return choice.mode

    def _choice(self, direction: Direction, fd: int, offset: int, nbytes: int) -> Choice:
        last_end, self._last_end = self._last_end, offset + nbytes  # a hint: threads may race
        is_read = direction == "read"
        if is_read and self._is_cached(fd, offset, nbytes):
            return _CACHED  # decided already, and the copy takes little longer than the rest
        end = offset + nbytes
        choice = choose(
            self._hybrid.policy,
            direction,
            nbytes,
            partial=bool((offset | nbytes) % mmap.PAGESIZE),
            continues=offset in (0, last_end),
            again=is_read and self._again(offset, end),
            cached=False,
            pressed=self._hybrid.pressed(),
        )
        if is_read and choice is _SMALL:
            with contextlib.suppress(OSError):  # advice only
                os.posix_fadvise(fd, end, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        self._note(offset, end, was_read=is_read and choice.mode == "direct")
        return choice

    def close(self) -> None:
        """Give back what was kept. Idempotent."""
        kept, self._kept = self._kept, False
        if kept:
            self._hybrid.unkeep(self._size_bytes)

    def _is_cached(self, fd: int, offset: int, nbytes: int) -> bool:
        streak = self._num_cached
        if streak >= _STREAK and streak % _STREAK:
            self._num_cached += 1
            return True
        # Not by a read that must not wait (RWF_NOWAIT): since Linux 6.0 a miss starts to read
        # ahead, and the same bytes would be fetched twice.
        if nbytes <= 8 * _WINDOW_BYTES:
            found = self._window_is_cached(fd, offset, nbytes)
        else:
            # The end first: what was read ahead of an earlier request is at the beginning.
            found = self._window_is_cached(fd, offset + nbytes - _WINDOW_BYTES, _WINDOW_BYTES)
            if found and not streak:
                found = all(
                    self._window_is_cached(fd, start, _WINDOW_BYTES)
                    for start in (offset, offset + nbytes // 2)
                )
        self._num_cached = streak + 1 if found else 0
        return found

    def _window_is_cached(self, fd: int, offset: int, nbytes: int) -> bool:
        pages = -(-(offset % mmap.PAGESIZE + nbytes) // mmap.PAGESIZE)
        cached = libc.cached_bytes(fd, nbytes, offset) or 0
        return cached >= self._hybrid.policy.cached_share * pages * mmap.PAGESIZE

    def _granules(self, offset: int, end: int) -> slice:
        """Return the granules that lie within a range."""
        return slice(-(-offset // self._granule_bytes), end // self._granule_bytes)

    def _again(self, offset: int, end: int) -> bool:
        inside = self._read_before[self._granules(offset, end)]
        if not inside or not all(inside):
            return False
        self._kept = self._kept or self._hybrid.keep(self._size_bytes)
        return self._kept

    def _note(self, offset: int, end: int, *, was_read: bool) -> None:
        if was_read:
            inside = self._granules(offset, end)
        else:  # all that it touches: what was written is not what was read
            inside = slice(offset // self._granule_bytes, -(-end // self._granule_bytes))
        count = len(self._read_before[inside])
        self._read_before[inside] = (b"\1" if was_read else b"\0") * count


def _memory(text: str) -> tuple[int, int]:
    """Return all memory and what is available, in bytes; zeros where that is not known."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if name in ("MemTotal", "MemAvailable") and words and words[0].isdecimal():
            found[name] = int(words[0]) << 10
    return found.get("MemTotal", 0), found.get("MemAvailable", 0)


def _stalled(text: str) -> float:
    """Return the percentage of the last ten seconds that some task waited for memory."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["some"]:
            for word in words[1:]:
                name, _, value = word.partition("=")
                if name == "avg10":
                    with contextlib.suppress(ValueError):
                        return float(value)
    return 0.0


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:  # not every kernel has it, and not every container shows it
        return ""
