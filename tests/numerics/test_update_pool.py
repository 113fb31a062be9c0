"""The threads that update blocks: they finish what they began, and change nobody's settings."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

import offload.update.pool
from gds.backends.threads import Transfer
from offload.format.digests import LEAF_BYTES, ChunkDigests, DigestContext
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


def test_every_item_is_done_once_and_no_context_is_shared(pool: UpdatePool) -> None:
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

    for _ in range(3):
        pool.run(work, range(20))
    assert sorted(done) == sorted([*range(20)] * 3)


def test_one_thread_of_the_pool_takes_the_items_in_order(pool: UpdatePool) -> None:
    done: list[int] = []
    threads: set[threading.Thread] = set()

    def work(_context: BlockContext, item: int) -> None:
        assert torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()
        threads.add(threading.current_thread())
        done.append(item)

    pool.num_threads = 1
    pool.run(work, range(20))
    assert done == [*range(20)]
    (thread,) = threads
    assert thread.name.startswith(UPDATE_THREAD)


def test_torchs_number_of_threads_is_what_it_was(pool: UpdatePool) -> None:
    before = torch.get_num_threads()
    pool.run(lambda _context, _item: None, range(4))
    assert torch.get_num_threads() == before
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == before


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


def test_results_come_in_the_order_of_the_items(pool: UpdatePool) -> None:
    def slower_at_first(item: int) -> int:
        time.sleep(0.004 / item)
        return item * item

    assert pool.map(slower_at_first, range(1, 20)) == [n * n for n in range(1, 20)]
    assert pool.map(slower_at_first, [3]) == [9]
    assert pool.map(slower_at_first, []) == []


@pytest.mark.parametrize("nbytes", [0, 1, LEAF_BYTES, 8 * LEAF_BYTES, 21 * LEAF_BYTES + 17])
def test_digests_on_threads_are_those_of_one_call(pool: UpdatePool, nbytes: int) -> None:
    context = DigestContext("0" * 32, 7)
    arrays = {
        name: memoryview(random.Random(name).randbytes(nbytes + more))
        for more, name in enumerate(("master", "exp_avg", "exp_avg_sq"))
    }
    found = ChunkDigests(arrays).finish(context, 5, pool.map)
    assert found == {name: context.digest(name, 5, data) for name, data in arrays.items()}


@pytest.mark.parametrize("seed", range(5))
def test_digests_of_what_is_written_piece_by_piece(pool: UpdatePool, seed: int) -> None:
    context, chance = DigestContext("0" * 32, 7), random.Random(seed)
    content = {name: chance.randbytes(5 * LEAF_BYTES + 17) for name in ("master", "exp_avg")}
    arrays = {name: bytearray(chance.randbytes(len(data))) for name, data in content.items()}
    digests = ChunkDigests({name: memoryview(data) for name, data in arrays.items()})
    pieces = []
    for name, data in content.items():
        cuts = [0, LEAF_BYTES, *chance.sample(range(len(data)), 40), len(data)]
        pieces += [(name, *cut) for cut in pairwise(sorted(set(cuts)))]
    chance.shuffle(pieces)

    def write(_: BlockContext, piece: tuple[str, int, int]) -> None:
        name, start, stop = piece
        arrays[name][start:stop] = content[name][start:stop]
        digests.written(name, start, stop)

    pool.run(write, pieces[:-3])
    for name, start, stop in pieces[-3:]:  # some that nobody tells of
        arrays[name][start:stop] = content[name][start:stop]
    found = digests.finish(context, 5, pool.map)
    assert found == {n: context.digest(n, 5, memoryview(d)) for n, d in content.items()}
