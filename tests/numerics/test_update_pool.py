"""The threads that update blocks: they finish what they began, and change nobody's settings."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import offload.update.pool
from gds.backends.threads import Transfer
from offload.update.pool import UPDATE_THREAD, BlockContext, UpdatePool
from offload.update.rules import UpdateRule
from tests.eventually import TIMEOUT_S, eventually


@pytest.fixture
def pool() -> Iterator[UpdatePool]:
    """A pool of two threads, beside a torch that would use two for each operation."""
    before, others = torch.get_num_threads(), set(threading.enumerate())
    torch.set_num_threads(2)
    made = UpdatePool(UpdateRule(torch.optim.SGD, {"lr": 0.1}))
    yield made
    made.close()
    torch.set_num_threads(before)
    left = set(threading.enumerate()) - others
    assert not any(thread.name.startswith(UPDATE_THREAD) for thread in left)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_item_is_done_once_and_nobodys_settings_change(
    pool: UpdatePool, num_threads: int
) -> None:
    done: list[int] = []
    busy: set[BlockContext] = set()

    def work(context: BlockContext, item: int) -> None:
        assert context not in busy
        busy.add(context)
        assert torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()
        time.sleep(0.001)
        done.append(item)
        busy.remove(context)

    pool.num_threads = num_threads
    for _ in range(3):
        pool.run(work, range(20))
    assert sorted(done) == sorted([*range(20)] * 3)
    assert pool.map(lambda item: item * item, range(1, 20)) == [n * n for n in range(1, 20)]
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == 2
    assert torch.get_num_threads() == 2


def test_an_error_is_raised_when_all_have_stopped(
    pool: UpdatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    ended: list[int] = []
    waited_for: list[Transfer] = []
    waits = threading.Event()
    both_at_work = threading.Barrier(2)
    wait = offload.update.pool.wait

    def watched(futures: Sequence[Transfer]) -> None:
        waited_for.extend(futures)
        waits.set()
        wait(futures)

    def work(_context: BlockContext, item: int) -> None:
        begun.append(item)
        both_at_work.wait(TIMEOUT_S)
        if item == 0:
            raise ZeroDivisionError
        assert waits.wait(TIMEOUT_S)
        assert eventually(lambda: any(future.done() for future in waited_for))
        time.sleep(0.05)  # in which the other thread's error must not be raised
        ended.append(item)

    monkeypatch.setattr(offload.update.pool, "wait", watched)
    with pytest.raises(ZeroDivisionError):
        pool.run(work, range(50))
    assert sorted(begun) == [0, 1], "what had not begun is left out"
    assert ended == [1]


def test_an_interrupt_is_raised_when_all_have_stopped(
    pool: UpdatePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would go on writing into memory and parameters that others use by then."""
    begun: list[int] = []
    ended: list[int] = []
    both_at_work = threading.Barrier(3)
    waits_again = threading.Event()
    wait = offload.update.pool.wait

    def again(futures: Sequence[Transfer]) -> None:
        waits_again.set()
        wait(futures)

    def interrupted(_futures: Sequence[Transfer]) -> None:
        """Stand for a wait during which Ctrl-C is pressed."""
        monkeypatch.setattr(offload.update.pool, "wait", again)
        both_at_work.wait(TIMEOUT_S)
        raise KeyboardInterrupt

    def work(_context: BlockContext, item: int) -> None:
        begun.append(item)
        both_at_work.wait(TIMEOUT_S)
        assert waits_again.wait(TIMEOUT_S)
        time.sleep(0.05)  # in which the interrupt must not be raised
        ended.append(item)

    monkeypatch.setattr(offload.update.pool, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.run(work, range(50))
    assert sorted(begun) == [0, 1], "what had not begun is left out"
    assert sorted(ended) == [0, 1]
    pool.run(lambda _context, item: ended.append(item), [100, 101])
    assert {100, 101} <= set(ended)
