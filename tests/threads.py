"""Number of threads that torch uses in tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch use one thread.

    A module or ``conftest.py`` that imports this fixture has it for all its tests. Small tensors
    are slow on many threads, and results must be the same to the bit on every machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
