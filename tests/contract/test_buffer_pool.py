"""Buffers that are made once and lent out."""

import threading

import pytest

from gds.buffers.host import HostBuffer
from gds.buffers.pool import BufferPool


def test_buffers_are_made_when_needed_and_used_again() -> None:
    made: list[int] = []

    def allocate(nbytes: int) -> HostBuffer:
        made.append(nbytes)
        return HostBuffer(nbytes)

    pool = BufferPool(allocate, 100, 2)
    assert made == []
    with pool.borrowed() as first:
        assert first.nbytes == 100
    with pool.borrowed() as second, pool.borrowed() as third:
        assert second is first
        assert third is not first
    assert made == [100, 100]
    pool.clear()
    with pool.borrowed() as fourth:
        assert fourth not in (first, third)


def test_who_finds_none_left_waits() -> None:
    pool = BufferPool(HostBuffer, 100, 1)
    got = threading.Event()

    def borrow() -> None:
        with pool.borrowed():
            got.set()

    thread = threading.Thread(target=borrow)
    with pool.borrowed():
        thread.start()
        assert not got.wait(0.05)
    thread.join(60)
    assert got.is_set()


def test_a_larger_pool_lets_waiters_in_and_a_smaller_one_drops_what_comes_back() -> None:
    pool = BufferPool(HostBuffer, 100, 1)
    with pool.borrowed() as first:
        pool.resize(2)
        with pool.borrowed() as second:
            pool.resize(1)
    with pool.borrowed() as third:
        assert third is first
        assert third is not second


def test_an_allocation_that_fails_leaves_room_for_another() -> None:
    answers: list[HostBuffer | None] = [None, HostBuffer(1)]

    def allocate(nbytes: int) -> HostBuffer:
        if (answer := answers.pop(0)) is None:
            raise MemoryError(f"{nbytes} bytes")
        return answer

    pool = BufferPool(allocate, 1, 1)
    with pytest.raises(MemoryError, match="1 bytes"), pool.borrowed():
        pytest.fail("there was no buffer")
    with pool.borrowed() as buffer:
        assert buffer.nbytes == 1


@pytest.mark.parametrize(("nbytes", "num_buffers"), [(0, 1), (1, 0), (-1, 1)])
def test_a_pool_of_nothing_is_refused(nbytes: int, num_buffers: int) -> None:
    with pytest.raises(ValueError, match="at least one buffer"):
        BufferPool(HostBuffer, nbytes, num_buffers)
    with pytest.raises(ValueError, match="at least one buffer"):
        BufferPool(HostBuffer, 1, 1).resize(0)
