"""Threads: the number that torch uses in tests, and those that a test has started."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch use one thread.

    A module or ``conftest.py`` that imports this fixture has it for all its tests. Small tensors
    are slow on many threads, and results must be the same to the bit on every machine.
    """
    import torch  # here, because tests without torch use what follows

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def since(others: Collection[threading.Thread], name: str = "") -> list[threading.Thread]:
    """Return the threads that run now, but for those that ran before; or those with a name.

    Args:
        others: Those that ran before, which are other tests' affair.
        name: Their name; empty for any.
    """
    return [
        thread
        for thread in threading.enumerate()
        if thread not in others and name in ("", thread.name)
    ]
