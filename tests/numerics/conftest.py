"""Small tensors on many threads are slow, most of all on a machine that does something else too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import offload.update.pool
import offload.update.updaters
from offload.update.host_place import HostPlace
from offload.update.pool import UpdatePool

UPDATE_THREADS = 2
"""Blocks are updated side by side in every test, however many cores there are."""


class AlternatingPlace(HostPlace):
    """Updates on one thread and on all of them in turns, from step to step."""

    def __init__(self, pool: UpdatePool, *args: Any) -> None:
        # The number of threads also changes where blocks are cut.
        pool.num_threads = UPDATE_THREADS if pool.num_threads == 1 else 1
        super().__init__(pool, *args)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Return what says how many threads torch itself uses for an operation, until a test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")  # or what else a process tests would depend on it
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.update.pool, "default_num_threads", lambda: UPDATE_THREADS)
        patch.setattr(offload.update.updaters, "HostPlace", AlternatingPlace)
        yield
    torch.set_num_threads(before)
