"""Small tensors on many threads are slow, most of all on a machine that does something else too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import offload.update.pool

UPDATE_THREADS = 2
"""Blocks are updated side by side in every test, however many cores there are."""


class Alternating(offload.update.pool.UpdateThreads):
    """Updates on one thread and on all of them in turns, whatever the drive does."""

    def passed(self, num_chunks: int, updating_s: float, waiting_s: float) -> None:
        """Change the number of threads, and with it where blocks are cut."""
        del num_chunks, updating_s, waiting_s
        self.num_threads = self.most if self.num_threads == 1 else 1


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
        patch.setattr(offload.update.pool, "UpdateThreads", Alternating)
        yield
    torch.set_num_threads(before)
