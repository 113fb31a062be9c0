"""Small tensors on many threads are slow, most of all on a machine that does something else too."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import offload.engine.stepping
import offload.update.pool
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.updater import HostUpdater
from tests.eventually import TIMEOUT_S
from tests.numerics.delays import Held
from tests.numerics.twins import Twins

UPDATE_THREADS = 2
"""Blocks are updated side by side in every test, however many cores there are."""


class AlternatingUpdater(HostUpdater):
    """Updates on one thread and on all of them in turns, from step to step."""

    def __init__(self, rule: UpdateRule, pool: UpdatePool, *args: Any, **options: Any) -> None:
        # The number of threads also changes where blocks are cut.
        pool.num_threads = UPDATE_THREADS if pool.num_threads == 1 else 1
        super().__init__(rule, pool, *args, **options)


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
        patch.setattr(offload.engine.stepping, "HostUpdater", AlternatingUpdater)
        yield
    torch.set_num_threads(before)


@pytest.fixture
def run() -> Iterator[Twins]:
    """Two steps beside the forward have been taken; whether one of those to come ends is held."""
    run = Twins(backend=Held(), num_steps=2)
    yield run
    run.backend.release()
    run.optimizer.close()


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Return what sends a signal until it is heard, to be called on another thread.

    A signal that comes just before the main thread blocks is not heard: so it is in Python.
    """
    heard, ended = threading.Event(), threading.Event()

    def hear(_number: int, _frame: object) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    def send() -> None:
        while not heard.wait(0.05):
            os.kill(os.getpid(), signal.SIGINT)
        ended.set()

    before = signal.signal(signal.SIGINT, hear)
    yield send
    assert ended.wait(TIMEOUT_S)
    signal.signal(signal.SIGINT, before)
