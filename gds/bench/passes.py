"""Passes: the requests of a workload to the files of one or several directories, all at once."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash

from gds.bench.target import Target, Words
from gds.bench.workload import Workload
from gds.buffers.device import DeviceBuffer
from gds.buffers.host import HUGE_PAGE_BYTES
from gds.contract import ALIGNMENT, Backend, Buffer, File, IOFuture

Values: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Order: TypeAlias = list[tuple[int, bool]]
"""Requests of a pass in order: number of the block, and whether it is read."""

_Request: TypeAlias = tuple[IOFuture, int, int, bool]
"""A request that was started: future, number of the file, offset in bytes, whether it is a read."""


class Lane:
    """Files of one directory, with a backend and buffers of its own; blocks go round the files."""

    def __init__(self, backend: Backend, workload: Workload, targets: Sequence[Target]) -> None:
        """Open the files, unless each request is to open its own."""
        self.targets = targets
        self._backend = backend
        self._workload = workload
        self._pool: ThreadPoolExecutor | None = None
        self._files: list[File] = []
        if workload.reopen:
            self._pool = ThreadPoolExecutor(workload.threads, "gds-bench")
            with self._open(targets[0]) as file:
                self.direct = file.direct
        else:
            self._files = [self._open(target) for target in targets]
            self.direct = self._files[0].direct
        """Whether transfers bypass the page cache."""
        self.slots = _slots(backend, workload, targets[0])

    def place(self, block: int) -> tuple[int, int]:
        """Return the number of the file that has a block, and the offset in it in bytes."""
        row, file = divmod(block, len(self.targets))
        return file, row * self._workload.size

    def start(self, file: int, buffer: Buffer, offset: int, *, is_read: bool) -> IOFuture:
        """Start a request, and return its future."""
        if self._pool is None:
            opened = self._files[file]
            return (opened.read if is_read else opened.write)(buffer, offset)
        return self._pool.submit(self._open_and_move, file, buffer, offset, is_read)

    def sync(self) -> None:
        """Make all that was written durable."""
        if self._pool is None:
            for file in self._files:
                file.sync()
        else:
            for target in self.targets:
                target.sync()

    def close(self) -> None:
        """Wait for requests that open files themselves. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()

    def _open(self, target: Target) -> File:
        return self._backend.open(target.path, writable=self._workload.writes)

    def _open_and_move(self, number: int, buffer: Buffer, offset: int, is_read: bool) -> int:
        with self._open(self.targets[number]) as file:
            return (file.read if is_read else file.write)(buffer, offset).result()


class Pass:
    """One pass of a workload, which makes each request once, in all lanes at once."""

    def __init__(self, workload: Workload, lanes: Sequence[Lane], *, verify: bool) -> None:
        self._size = workload.size
        self._lanes = lanes
        self._verify = verify
        self._slots = [(lane, buffer) for lane in lanes for buffer in lane.slots]
        self._free: SimpleQueue[int] = SimpleQueue()
        self._pending: list[_Request | None] = [None] * len(self._slots)
        self._waiting: dict[int, Iterator[tuple[int, bool]]] = {}
        self._until_s = math.inf
        self._chains = False
        self._starting = threading.local()
        # Three numbers for each request: its begin, its end, and 1 for a read. A slot has one
        # request at a time, so no two threads append to the same array.
        self._records = [array("d") for _ in self._slots]
        self.started_s = 0.0
        """Start of the pass in seconds, on the clock of `time.perf_counter`."""
        self.verified_bytes = 0

    def run(self, orders: Sequence[Order], *, limit_s: float = math.inf) -> float:
        """Run requests, and return the seconds until the end of the last one.

        A lane goes on with its own requests, in the order given for it, as soon as one of its
        buffers is free, however slow the other lanes are. After `limit_s` seconds no further one is
        started.
        """
        lanes = zip(self._lanes, orders, strict=True)
        self._waiting = {id(lane): iter(order) for lane, order in lanes}
        self._chains = not self._verify
        self._starting.here = True  # this thread starts requests from its loop only
        for slot in range(len(self._slots)):
            self._free.put(slot)
        self.started_s = time.perf_counter()
        self._until_s = self.started_s + limit_s
        busy = len(self._slots)
        try:
            while busy:
                slot = self._free.get()
                self._settle(slot)
                if not self._start_next(slot):
                    busy -= 1
        finally:
            self._chains = False
        return max(record[-2] for record in self._records if record) - self.started_s

    def records(self) -> tuple[Values, Values, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Return begins and ends of all requests in seconds, and whether each is a read.

        The arrays have the shape (requests,), and are in no particular order.
        """
        table = np.concatenate([np.frombuffer(record) for record in self._records]).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2] > 0

    def rates_of_lanes(self) -> list[float]:
        """Return the rate of each lane until the end of its last request, in bytes per second."""
        found = []
        for lane in self._lanes:
            slots = [slot for slot, (owner, _) in enumerate(self._slots) if owner is lane]
            records = [self._records[slot] for slot in slots if self._records[slot]]
            moved = sum(len(record) // 3 for record in records) * self._size
            found.append(moved / (max(record[-2] for record in records) - self.started_s))
        return found

    def _start_next(self, slot: int) -> bool:
        """Start the next request of a slot's lane; returns False if there is none."""
        lane, _ = self._slots[slot]
        if time.perf_counter() >= self._until_s:
            return False
        request = next(self._waiting[id(lane)], None)
        if request is not None:
            self._start(slot, *request)
        return request is not None

    def _start(self, slot: int, block: int, is_read: bool) -> None:
        lane, buffer = self._slots[slot]
        file, offset = lane.place(block)
        if self._verify and not is_read:
            target = lane.targets[file]
            generations = target.generations_of(offset, self._size)
            generations += 1
            _fill(buffer, target, offset, generations)
        begun_s = time.perf_counter()
        future = lane.start(file, buffer, offset, is_read=is_read)
        self._pending[slot] = (future, file, offset, is_read)
        future.add_done_callback(partial(self._ended, slot, begun_s, is_read))

    def _ended(self, slot: int, begun_s: float, is_read: bool, future: IOFuture) -> None:
        """Record the end of a slot's request, on the thread of the transfer, which starts the next.

        The thread of `run` would first have to wake up, while the drive waits. It gets the slot
        after an error, after the last request, and if data is verified.
        """
        self._records[slot].extend((begun_s, time.perf_counter(), is_read))
        # A request may be done before its callback is set, which then runs within `_start`.
        is_nested = getattr(self._starting, "here", False)
        if self._chains and not is_nested:
            self._starting.here = True
            try:
                future.result()
                if self._start_next(slot):
                    return
            except Exception as error:  # noqa: BLE001 - the thread of `run` raises it
                failed: Future[int] = Future()
                failed.set_exception(error)
                self._pending[slot] = (failed, 0, 0, is_read)
            finally:
                self._starting.here = False
        self._free.put(slot)

    def _settle(self, slot: int) -> None:
        """Take the result of the slot's last request, and verify the data of a read."""
        pending, self._pending[slot] = self._pending[slot], None
        if pending is None:
            return
        future, file, offset, is_read = pending
        future.result()
        if self._verify and is_read:
            lane, buffer = self._slots[slot]
            target = lane.targets[file]
            _compare(buffer, target, offset, target.generations_of(offset, self._size))
            self.verified_bytes += self._size


def order_of(workload: Workload, generator: np.random.Generator) -> Order:
    """Return the requests of a pass in order: number of the block, and whether it is read."""
    count = workload.num_requests
    blocks = generator.permutation(count) if workload.rw.startswith("rand") else np.arange(count)
    is_read = np.arange(count) < workload.num_reads
    if workload.reads and workload.writes:
        is_read = generator.permutation(is_read)
    return list(zip(blocks.tolist(), is_read.tolist(), strict=True))


def _slots(backend: Backend, workload: Workload, target: Target) -> list[Buffer]:
    """Return a buffer for each request in flight, cut from one allocation of whole huge pages."""
    wanted = workload.in_flight * workload.size
    memory = backend.allocate(-(-wanted // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
    slots = [memory.slice(n * workload.size, workload.size) for n in range(workload.in_flight)]
    for number, slot in enumerate(slots):  # touches all pages, with data that no drive compresses
        offset = number * workload.size
        generations = np.zeros(workload.size // ALIGNMENT, dtype=np.uint64)
        _fill(slot, target, offset, generations)
    return slots


def _fill(buffer: Buffer, target: Target, offset: int, generations: Words) -> None:
    """Fill a buffer with the data that belongs at `offset`; device memory gets a copy."""
    if isinstance(buffer, DeviceBuffer):
        data = bytearray(buffer.nbytes)
        target.stamps.fill(memoryview(data), offset, generations)
        buffer.upload(data)
    else:
        target.stamps.fill(buffer.memoryview(), offset, generations)


def _compare(buffer: Buffer, target: Target, offset: int, generations: Words) -> None:
    """Compare a buffer with the data that belongs at `offset`, on the host."""
    view = memoryview(
        buffer.download() if isinstance(buffer, DeviceBuffer) else buffer.memoryview()
    )
    target.stamps.check(view, offset, generations, target.path)


_DIGEST_BYTES: Final = 1 << 20
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

    The data of a program rarely lies in memory that direct I/O can use. Copies, digests and
    transfers use the same cores and the same memory, so they are measured together: the thread that
    calls `run` copies and digests the blocks in order, while all buffers but one are in flight.
    """

    def __init__(self, workload: Workload, lanes: Sequence[Lane], memory: memoryview) -> None:
        super().__init__(workload, lanes, verify=False)
        self._is_read = workload.reads
        self._memory = memory
        self._futures: list[IOFuture | None] = [None] * len(self._slots)
        self._ends: list[SimpleQueue[float]] = [SimpleQueue() for _ in self._slots]

    def run(self, orders: Sequence[Order], *, limit_s: float = math.inf) -> float:
        """Run the requests of the only lane; return the seconds until the last block is moved."""
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
        lane, buffer = self._slots[slot]
        file, offset = lane.place(block)
        begun_s = time.perf_counter()
        future = lane.start(file, buffer, offset, is_read=self._is_read)
        self._futures[slot] = future
        future.add_done_callback(partial(self._note, slot))
        self._records[slot].append(begun_s)

    def _note(self, slot: int, _: IOFuture) -> None:
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
    for start in range(0, len(view), _DIGEST_BYTES):
        xxhash.xxh3_64_digest(view[start : start + _DIGEST_BYTES])
