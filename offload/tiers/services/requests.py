"""Requests to an object store: they can be interrupted, are repeated, and their errors have names.

The library repeats a request that was refused or not answered. It does not repeat one whose answer
breaks off, or whose refusal depends on other writers. That is done here.

New memory for every request costs more processor time than the transfer itself: the kernel hands it
out page by page, each filled with zeros.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from gds.waiting import Pending, start
from offload.errors import OffloadError, TierError, TierUnavailableError
from offload.tiers.services.cloud_errors import named_error, was_repeated

_T = TypeVar("_T")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 15.0


class Requests:
    """Requests by way of the library `obstore`; any thread may make them.

    Args:
        obstore: The library.
        url: URL of the tier, for messages.
        retry_s: Seconds for which a request that failed is tried again.
    """

    def __init__(self, obstore: Any, url: str, retry_s: float) -> None:
        self._base_error: type[Exception] = obstore.exceptions.BaseError
        self._url = url
        self._retry_s = retry_s

    def call(
        self, name: str, doing: str, request: Callable[[], _T], *, repeatable: bool = True
    ) -> _T:
        """Make a request, and repeat it while the server cannot answer.

        Args:
            name: Name of the object, or of a folder of objects.
            doing: What the request does, in words that follow "cannot".
            request: Function that calls the library.
            repeatable: Whether the function may be called again.

        Raises:
            TierError: The request has failed. Errors of an iterator of blocks are raised as they
                are.
        """
        until_s, pause_s, is_first = time.monotonic() + self._retry_s, _FIRST_PAUSE_S, True
        while True:
            error: BaseException
            try:
                return interruptible(request)
            except OffloadError:  # of an iterator of blocks
                raise
            except OSError as caught:
                if not isinstance(caught, FileNotFoundError) or caught.filename is not None:
                    raise  # of an iterator of blocks, as well
                error = caught
            except self._base_error as caught:
                error = caught
            except BaseException as caught:
                if not is_panic(caught):
                    raise
                error = caught
            named = self.named(error, name, doing)
            left_s = until_s - time.monotonic()
            # A single attempt may have taken longer than all of them may.
            is_due = left_s > 0 or (is_first and not was_repeated(error))
            # The library's error may contain secrets, and must not go along with ours.
            del error
            if not (
                repeatable and self._retry_s and is_due and isinstance(named, TierUnavailableError)
            ):
                raise named
            time.sleep(min(pause_s, max(left_s, _FIRST_PAUSE_S)))
            pause_s, is_first = min(2 * pause_s, _LONGEST_PAUSE_S), False

    def named(self, error: BaseException, name: str, doing: str) -> TierError:
        """Return the error to raise for one of the library."""
        return named_error(error, f"{self._url}{'/' if name else ''}{name}", doing)


def interruptible(request: Callable[[], _T]) -> _T:
    """Call a function that may wait for long, so that an interrupt ends the waiting.

    Only the main thread is interrupted, and not while the library waits. So for the main thread
    another thread calls the function. It is left behind if the main thread is interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        return request()
    outcome: Pending[_T] = Pending()

    def run() -> None:
        """Call the function, and pass its outcome on."""
        try:
            value = request()
        except BaseException as error:  # noqa: BLE001  (raised by the waiting thread)
            outcome.set_exception(error)
        else:
            outcome.set_result(value)

    start(threading.Thread(target=run, name="offload tier request", daemon=True))
    return outcome.result()


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of the library, which is no `Exception`."""
    return type(error).__name__ == "PanicException"


class ReusedMemory:
    """Memory of requests that have ended, for the next ones; any thread may use it.

    At most as many blocks exist as are in use at a time. They are freed with this object.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, nbytes: int) -> memoryview:
        """Return memory of some content.

        It is used again when the result, and everything that was made from it, is gone.

        Args:
            nbytes: Size in bytes, at least 1.
        """
        block = self._free.pop() if self._free else None
        if block is None or len(block) < nbytes:
            block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                block.madvise(mmap.MADV_HUGEPAGE)
        # A memoryview keeps what it was made from, and so do its slices.
        lent = (ctypes.c_ubyte * nbytes).from_buffer(block)
        weakref.finalize(lent, self._free.append, block).atexit = False
        return memoryview(lent).cast("B")
