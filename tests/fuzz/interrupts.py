"""Ctrl-C at a moment that is counted, so that it comes at the same place again."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import gds
import offload

PLACES = (
    str(Path(offload.__file__).parent),
    str(Path(gds.__file__).parent),
    str(threading.__file__),
)


@contextlib.contextmanager
def interrupted(at: int, *more_places: str) -> Iterator[list[int]]:
    """Raise `KeyboardInterrupt` at the `at`-th moment of the library's code on this thread.

    Code of files in `more_places` counts as the library's.

    The moments are those at which Python runs the handlers of signals: where a function begins, and
    where one that is written in C has returned. Code of torch is left alone, whose own context
    managers do not stand an interrupt. So are finalizers, because Python lets no exception out of
    them; the interrupt then comes after the finalizer. The list that is yielded gets an item when
    the interrupt has come.
    """
    left, fired = at, list[int]()
    places = (*PLACES, *more_places)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.startswith(places):
            return
        left -= 1
        if left <= 0 and not _is_in_finalizer(frame):
            sys.setprofile(None)
            fired.append(1)
            raise KeyboardInterrupt

    sys.setprofile(watch)
    try:
        yield fired
    finally:
        sys.setprofile(None)


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Return whether a frame is called by ``__del__`` or by a callback of `weakref`."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False
