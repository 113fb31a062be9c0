"""Passes through ordinary memory: one thread copies and digests blocks, the drive moves others.

The data of a program rarely lies in memory that direct I/O can use. So a program that writes it
copies each block into such memory first, and a program that reads it copies each block out. Copies,
digests and transfers use the same cores and the same memory, so all of them together are slower
than the slowest of them alone. These passes measure them together.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final

import numpy as np
import xxhash

from gds.bench.passes import Lane, Order, Pass
from gds.bench.target import Target
from gds.bench.workload import Workload
from gds.contract import ALIGNMENT, IOFuture

_DIGEST_BYTES: Final = 1 << 20
"""Bytes of one digest."""

_MOST_MEMORY_BYTES: Final = 512 << 20
"""Most ordinary memory, in bytes. It is more than processors cache, so that copies really read and
write memory, as those of a large program do."""


def ordinary_memory(workload: Workload, target: Target) -> memoryview:
    """Return memory as programs have it, filled with data that no drive compresses."""
    size = workload.size
    count = max(1, min(workload.num_requests, _MOST_MEMORY_BYTES // size))
    view = memoryview(mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    generations = np.zeros(size // ALIGNMENT, dtype=np.uint64)
    for start in range(0, len(view), size):
        target.stamps.fill(view[start : start + size], start, generations)
    return view


class StagedPass(Pass):
    """One pass of a workload in one lane, through ordinary memory.

    The thread that calls `run` copies and digests the blocks, in order. All buffers but one are in
    flight meanwhile. The time of a pass includes the copies: of the first block before its write,
    and of the last block after its read.
    """

    def __init__(self, workload: Workload, lanes: Sequence[Lane], memory: memoryview) -> None:
        """Prepare a pass."""
        super().__init__(workload, lanes, verify=False)
        self._is_read = workload.reads
        self._memory = memory
        self._futures: list[IOFuture | None] = [None] * len(self._slots)
        self._ends: list[SimpleQueue[float]] = [SimpleQueue() for _ in self._slots]

    def run(self, orders: Sequence[Order], *, limit_s: float = math.inf) -> float:
        """Run requests, and return the seconds until the last block is where it belongs.

        Args:
            orders: Number of the block for each request, as a sequence for the only lane.
            limit_s: Time in seconds after which no further request is started.
        """
        (order,) = orders
        blocks = deque(block for block, _ in order)
        free, busy = deque(range(len(self._slots))), deque[int]()
        self.started_s = time.perf_counter()
        until_s = self.started_s + limit_s
        move = self._read if self._is_read else self._write
        number = 0
        try:
            while blocks and time.perf_counter() < until_s:
                move(blocks, free, busy, number)
                number += 1
            while busy:
                slot = busy.popleft()
                self._finish(slot)
                if self._is_read:
                    self._take(slot, number)
                    number += 1
        finally:
            for future in self._futures:  # some are left only if another request has failed
                if future is not None:
                    with contextlib.suppress(OSError):
                        future.result()
        return time.perf_counter() - self.started_s

    def _write(self, blocks: deque[int], free: deque[int], busy: deque[int], number: int) -> None:
        """Copy and digest the next block, and start its write."""
        if not free:
            free.append(busy.popleft())
            self._finish(free[0])
        slot = free.popleft()
        _, buffer = self._slots[slot]
        view = buffer.memoryview()
        _copy(self._part(number), view)
        _digest(view)
        self._begin(slot, blocks.popleft())
        busy.append(slot)

    def _read(self, blocks: deque[int], free: deque[int], busy: deque[int], number: int) -> None:
        """Start reads into all free buffers, then digest and copy the first block that was read."""
        while free and blocks:
            self._begin(free[0], blocks.popleft())
            busy.append(free.popleft())
        slot = busy.popleft()
        self._finish(slot)
        self._take(slot, number)
        free.append(slot)

    def _take(self, slot: int, number: int) -> None:
        """Digest a block that was read, and copy it to its place."""
        _, buffer = self._slots[slot]
        view = buffer.memoryview()
        _digest(view)
        _copy(view, self._part(number))

    def _part(self, number: int) -> memoryview:
        """Return the ordinary memory of the block that is the pass's `number`th."""
        start = number * self._size % len(self._memory)
        return self._memory[start : start + self._size]

    def _begin(self, slot: int, block: int) -> None:
        """Start the request of a slot."""
        lane, buffer = self._slots[slot]
        file, offset = lane.place(block)
        begun_s = time.perf_counter()
        future = lane.start(file, buffer, offset, is_read=self._is_read)
        self._futures[slot] = future
        future.add_done_callback(partial(self._note, slot))
        self._records[slot].append(begun_s)

    def _note(self, slot: int, _: IOFuture) -> None:
        """Note the end of a slot's request, on the thread of the transfer."""
        self._ends[slot].put(time.perf_counter())

    def _finish(self, slot: int) -> None:
        """Wait for the request of a slot, and record it; raises its error."""
        ended_s = self._ends[slot].get()
        future, self._futures[slot] = self._futures[slot], None
        if future is not None:
            future.result()
        self._records[slot].extend((ended_s, self._is_read))


def _copy(source: memoryview, into: memoryview) -> None:
    """Copy bytes on the calling thread, while other threads run."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(into))
    ctypes.memmove(address, ctypes.addressof(ctypes.c_char.from_buffer(source)), len(source))


def _digest(view: memoryview) -> None:
    """Compute the digests of a block."""
    for start in range(0, len(view), _DIGEST_BYTES):
        xxhash.xxh3_64_digest(view[start : start + _DIGEST_BYTES])
