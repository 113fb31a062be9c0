"""Ranks that start in a key-value store which has all keys of ranks that were killed before.

`agree_on_start` is called as it is: ranks that train meet in it, but no call of a user says which
keys it has left, or lets one rank be killed in the middle of it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.sights import Sight
from offload.distributed.rendezvous import agree_on_start
from offload.errors import RanksError
from tests.eventually import eventually
from tests.ranks_agreement.memory_channel import (
    LONG_S,
    Memory,
    MemoryChannel,
    TimedChannel,
    message,
)


def on_ranks(
    memory: Memory, size: int, call: Callable[[int], Any], leave: tuple[int, ...] = ()
) -> list[Any]:
    """Call something with each rank, all at once; errors are returned, and time is skipped."""

    def outcome(rank: int) -> Any:
        if rank in leave:
            return None
        try:
            return call(rank)
        except RanksError as error:
            return error
        finally:
            memory.end()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(outcome, range(size)))


def start(memory: Memory, size: int, leave: tuple[int, ...] = ()) -> list[Any]:
    """Let ranks meet; those to leave out are dead."""
    memory.at_work = size - len(leave) if leave else 0
    meet = lambda rank: agree_on_start(MemoryChannel(memory), rank, size, LONG_S)  # noqa: E731
    return on_ranks(memory, size, meet, leave)


def test_each_start_has_a_name_of_its_own_on_all_ranks() -> None:
    memory = Memory()
    found = [start(memory, size) for size in (4, 4, 4, 2, 3, 1, 1, 4)]
    assert {len({*one}) for one in found} == {1}
    assert len({one[0] for one in found}) == len(found)
    assert [*memory.values] == ["name"], "all other keys are deleted"


@pytest.mark.parametrize("leave", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_a_start_in_which_ranks_were_killed_does_not_matter_to_the_next(
    leave: tuple[int, ...],
) -> None:
    """Whatever number of ranks it has. The ranks that were left out are named on all others."""
    memory = Memory()
    start(memory, 3)
    said = start(memory, 3, leave)
    for error in said[: leave[0]]:
        ranks = "ranks 1 and 2" if len(leave) == 2 else f"rank {leave[0]}"
        assert f"the constructor: {ranks} did not come within 60 s" in str(error)
    assert all("did not come" in str(error) for error in said if error is not None)
    left = {**memory.values}  # messages of ranks that are dead
    assert len(left) > 1 or 0 in leave
    for size in (3, 2, 1, 4):
        found = start(memory, size)
        assert len({*found}) == 1
        assert not any(found[0] in key for key in left)


def test_rank_0_that_has_failed_before_is_not_listened_to() -> None:
    """Its error is of the earlier start; the present rank 0 comes later."""
    memory = Memory()
    start(memory, 2, (1,))
    channel = TimedChannel(memory)

    def welcome() -> None:
        (answer,) = [v for key, v in memory.values.items() if key.startswith("now/answer")]
        channel.put(f"now/{answer}", "welcome")

    announced = message("name", name="now", signs=0)
    channel.at = [(LONG_S / 2, lambda: channel.put("name", announced)), (LONG_S, welcome)]
    assert agree_on_start(channel, 1, 2, LONG_S) == "now"


def test_messages_of_dead_ranks_are_not_read() -> None:
    """Rank 2 has said what it sees, and was killed. Its successor comes later than the others."""
    memory = Memory()

    def begin(host: str, killed: tuple[int, ...]) -> list[Any]:
        def opened(rank: int) -> Any:
            channel = MemoryChannel(memory)
            channel.enter(agree_on_start(channel, rank, 3, LONG_S))
            if rank in killed:
                return None
            if rank == 2 and not killed:
                assert eventually(lambda: f"{channel.name}exchange/0/ask/1" in memory.values)
            agreement = Agreement(channel, rank, 3, timeout_s=LONG_S)
            try:
                return agreement.open(Sight(host=host, new_id=host), lambda _: None)
            finally:
                agreement.close()

        memory.at_work = 3 if killed else 0
        return on_ranks(memory, 3, opened)

    assert isinstance(begin("former host", (0, 1))[2], RanksError)
    for number in range(3):
        found = begin(f"host {number}", ())
        assert {plan.hosts for plan in found} == {(f"host {number}",) * 3}
