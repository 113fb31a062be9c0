"""GPUDirect Storage of one open file, in one of two ways, neither of which waits for training.

KvikIO's plain calls (`CuFile.pread`) wait for the legacy default stream first, on which most
training runs: reads ahead would stand still until all queued work of a model is done. Two ways
avoid that:

- *threads*: cuFile's own plain calls, on the threads of the backend. cuFile orders them with no
  stream. They keep the error number. This is the default.
- *streams*: KvikIO's stream-ordered calls, each on a stream that nothing else uses: as many streams
  as there are transfers at once. They need a configuration file of cuFile; without one, KvikIO
  refuses them.

In both ways the thread of a transfer has waited for the events of `DeviceBuffer.after` before.
Neither has been run on a GPU.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, Literal

from gds.backends.hybrid import Direction
from gds.backends.kvikio_library import CuFileLibrary, Library, open_again, storage_error
from gds.buffers.cuda import Cuda
from gds.buffers.device import DeviceBuffer, DeviceBytes

Way = Literal["threads", "streams"]


class Streams:
    """Lends non-blocking streams of one device; there are as many as were lent at once."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._free: SimpleQueue[Any] = SimpleQueue()

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        """Lend a stream, by its raw handle, whose queued work has ended at the end of the block."""
        try:
            stream = self._free.get_nowait()
        except Empty:
            stream = self._cuda.new_stream()
        try:
            yield int(stream.ptr)
        finally:
            self._free.put(stream)

    def wait(self, stream: int) -> None:
        """Wait for all work that is queued on a stream by now, without the GIL."""
        self._cuda.record(stream).synchronize()


def direct_storage(
    library: Library, streams: Streams, path: str, fd: int, *, writable: bool, way: Way
) -> PlainCalls | StreamCalls:
    """Open the file of a descriptor once more, for one of the two ways.

    Call this only if a child process has shown that cuFile does not hang. The methods of the result
    may be called from any thread.
    """
    with library.cufile():
        if way == "threads":
            return PlainCalls(library, path, fd, writable=writable)
        return StreamCalls(library, streams, path, fd, writable=writable)


class PlainCalls:
    """cuFile's plain calls, on the calling thread."""

    def __init__(self, library: Library, path: str, fd: int, *, writable: bool) -> None:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_DIRECT | os.O_CLOEXEC
        opened = -1
        try:
            self._cufile = library.plain_calls
            opened = open_again(path, fd, flags)
            self._handle = self._cufile.register(opened)
        except (RuntimeError, OSError) as error:
            if opened >= 0:
                os.close(opened)
            raise storage_error(error, "open with cuFile", path) from error
        self._release = weakref.finalize(
            self, _release, self._cufile, self._handle, opened, os.getpid()
        )
        self._release.atexit = False

    def move(self, direction: Direction, memory: DeviceBuffer, offset: int) -> int:
        """Transfer on the calling thread, and return the bytes moved, maybe too few."""
        base = memory.region.base
        start = memory.address - base
        return self._cufile.move(direction, self._handle, base, start, memory.nbytes, offset)

    def close(self) -> None:
        """Release the handle, then the descriptor; no transfer may be running. Idempotent."""
        self._release()


def _release(cufile: CuFileLibrary, handle: int, fd: int, process: int) -> None:
    """Release a handle of cuFile, unless this is a forked child, and its descriptor."""
    if os.getpid() == process:
        cufile.deregister(handle)
    os.close(fd)


class StreamCalls:
    """KvikIO's stream-ordered calls, each on a stream of its own."""

    def __init__(
        self, library: Library, streams: Streams, path: str, fd: int, *, writable: bool
    ) -> None:
        self._streams = streams
        self._handle = library.open(path, fd, writable=writable, compat=False)

    def move(self, direction: Direction, memory: DeviceBuffer, offset: int) -> int:
        """Transfer on a stream, wait for it, and return the bytes moved, maybe too few."""
        call = self._handle.raw_read_async if direction == "read" else self._handle.raw_write_async
        base = memory.region.base
        start = memory.address - base
        whole = DeviceBytes(base, start + memory.nbytes)
        with self._streams.borrowed() as stream:
            # The future owns the memory into which cuFile writes its result: it must live until
            # the stream has got there.
            future = call(whole, stream, memory.nbytes, offset, start)
            self._streams.wait(stream)
            return int(future.check_bytes_done())

    def close(self) -> None:
        """Close the handle of KvikIO; no transfer may be running. Idempotent."""
        self._handle.close()
