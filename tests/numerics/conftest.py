"""Small tensors on many threads are slow, most of all on a machine that does something else too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import offload.update_pool

UPDATE_THREADS = 2
"""Blocks are updated side by side in every test, however many cores there are."""


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.update_pool, "default_num_threads", lambda: UPDATE_THREADS)
        yield
    torch.set_num_threads(before)
