"""Per-thread flags for callers that request a model's state dict without using its values.

With ``overlap="backward"``, a model whose parameters are half stepped refuses requests for its
state dict, because a copy of the values would be worthless. A restore may request the state dict,
because it overwrites the parameters. Code that lays out the state may request it, too, because it
reads only names, shapes and dtypes. With ``overlap="forward"``, the request does not wait for the
step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _OfThread(threading.local):
    """Nesting depths of the calling thread's blocks."""

    depth = 0
    describing = 0


_of_thread = _OfThread()


@contextmanager
def replacing() -> Iterator[None]:
    """Allow requests for a state dict within the block, to overwrite the values."""
    _of_thread.depth += 1
    try:
        yield
    finally:
        _of_thread.depth -= 1


def is_replacing() -> bool:
    """Return whether this thread is within a `replacing` block."""
    return _of_thread.depth > 0


@contextmanager
def describing() -> Iterator[None]:
    """Allow requests for a state dict within the block, to read names, shapes and dtypes."""
    _of_thread.describing += 1
    try:
        yield
    finally:
        _of_thread.describing -= 1


def is_describing() -> bool:
    """Return whether this thread is within a `describing` block."""
    return _of_thread.describing > 0
