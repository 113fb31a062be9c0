"""Interrupts of the fuzzer come where Python lets them out."""

from __future__ import annotations

from tests.fuzz.interrupts import interrupted


class Closing:
    def __init__(self, closed: list[int]) -> None:
        self._closed = closed

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        len(self._closed)
        self._closed.append(1)


def drop(held: list[Closing]) -> None:
    len(held)
    held.clear()
    len(held)


def test_an_interrupt_is_raised_after_a_finalizer_and_not_within() -> None:
    num_raised, at = 0, 0
    while True:
        at += 1
        closed: list[int] = []
        held = [Closing(closed)]
        with interrupted(at, __file__) as fired:
            try:
                drop(held)
            except KeyboardInterrupt:
                num_raised += 1
        assert len(held) + len(closed) == 1
        if not fired:
            break
    assert num_raised == at - 1 > 3
