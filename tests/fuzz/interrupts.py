"""Ctrl-C at a moment that is counted, so that it comes at the same place again."""

from __future__ import annotations

import contextlib
import sys
import threading
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
    managers do not stand an interrupt. The list that is yielded gets an item when it has come.
    """
    left, fired = at, list[int]()
    places = (*PLACES, *more_places)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.startswith(places):
            return
        left -= 1
        if left == 0:
            sys.setprofile(None)
            fired.append(1)
            raise KeyboardInterrupt

    sys.setprofile(watch)
    try:
        yield fired
    finally:
        sys.setprofile(None)
