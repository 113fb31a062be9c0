"""Whether the calling thread asks a model for its tensors without using their values.

With ``overlap="backward"`` a model whose parameters are half stepped refuses to be asked for its
state dict: a copy of it would be worthless. A restore asks as well, and may: it overwrites them.
So may whoever lays out the state, who looks at names, shapes and dtypes only; with
``overlap="forward"`` nothing is waited for then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _OfThread(threading.local):
    depth = 0
    describing = 0


_of_thread = _OfThread()


@contextmanager
def replacing() -> Iterator[None]:
    """Ask models for their tensors within the block, to overwrite what they hold."""
    _of_thread.depth += 1
    try:
        yield
    finally:
        _of_thread.depth -= 1


def is_replacing() -> bool:
    """Return whether this thread is within `replacing`."""
    return _of_thread.depth > 0


@contextmanager
def describing() -> Iterator[None]:
    """Ask models for their tensors within the block, to look at names, shapes and dtypes only."""
    _of_thread.describing += 1
    try:
        yield
    finally:
        _of_thread.describing -= 1


def is_describing() -> bool:
    """Return whether this thread is within `describing`."""
    return _of_thread.describing > 0
