"""Ranks that start in a key-value store which has all keys of ranks that were killed before."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from offload.distributed import TorchChannel
from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.messages import encode
from offload.distributed.agreement.sights import Sight
from offload.distributed.agreement.start_name import agree_on_start
from offload.errors import RanksError
from tests.ranks_agreement.memory_channel import Memory, MemoryChannel, TimedChannel

LONG_S = 60.0
"""A limit that is only reached where time is skipped, as ranks do not come."""


def on_ranks(size: int, call: Any) -> list[Any]:
    """Call something with each rank, all at once; errors are returned."""

    def outcome(rank: int) -> Any:
        try:
            return call(rank)
        except RanksError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(outcome, range(size)))


def start(memory: Memory, size: int, leave: Any = ()) -> list[Any]:
    """Let ranks meet; those to leave out are dead."""

    def meet(rank: int) -> Any:
        if rank in leave:
            return None
        try:
            return agree_on_start(MemoryChannel(memory), rank, size, LONG_S)
        finally:
            memory.end()

    memory.at_work = size - len(leave) if leave else 0
    return on_ranks(size, meet)


def test_each_start_has_a_name_of_its_own_on_all_ranks() -> None:
    memory = Memory()
    found = [start(memory, 4) for _ in range(20)]
    assert {len({*one}) for one in found} == {1}
    assert len({one[0] for one in found}) == 20
    assert [*memory.values] == ["name"], "all other keys are deleted"


def test_one_rank_starts_alone() -> None:
    assert len({start(Memory(), 1)[0] for _ in range(2)}) == 2


@pytest.mark.parametrize("leave", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_a_start_in_which_ranks_were_killed_does_not_matter_to_the_next(
    leave: tuple[int, ...],
) -> None:
    memory = Memory()
    start(memory, 3)
    start(memory, 3, leave)  # what it leaves are messages of ranks that are dead
    left = {**memory.values}
    assert len(left) > 1 or 0 in leave
    found = start(memory, 3)
    assert len({*found}) == 1
    assert not any(found[0] in key for key in left)


def test_another_number_of_ranks_starts_where_some_were_killed() -> None:
    memory = Memory()
    start(memory, 4, (3,))
    for size in (2, 3, 1, 4):
        assert len({*start(memory, size)}) == 1


def test_a_rank_that_does_not_come_is_named_on_all_others() -> None:
    memory = Memory()
    start(memory, 3)
    found = start(memory, 3, (1,))
    assert {str(one) for one in found if one is not None} == {str(found[0])}
    assert "the constructor: rank 1 did not come within 60 s" in str(found[0])
    found = start(memory, 3, (0,))
    assert ["rank 0 did not come" in str(one) for one in found] == [False, True, True]


def test_rank_0_that_has_failed_before_is_not_listened_to() -> None:
    """Its error is of the earlier start; the present rank 0 comes later."""
    memory = Memory()
    start(memory, 2, (1,))
    channel = TimedChannel(memory)
    names: list[str] = []

    def welcome() -> None:
        (key,) = [key for key in memory.values if key.startswith("now/answer")]
        names.append(memory.values[key])
        channel.put(f"now/{names[0]}", "welcome")

    announced = encode("name", {"name": "now", "signs": 0})
    channel.at = [(LONG_S / 2, lambda: channel.put("name", announced)), (LONG_S, welcome)]
    assert agree_on_start(channel, 1, 2, LONG_S) == "now"
    assert names


class Entered(MemoryChannel):
    """A connection whose keys begin with a name, and that says when rank 2 is waited for."""

    def __init__(self, memory: Memory, name: str = "") -> None:
        super().__init__(memory)
        self.name = name
        self.awaits_rank_2 = threading.Event()

    def put(self, key: str, value: str, *, within_s: float | None = None) -> None:
        super().put(self.name + key, value, within_s=within_s)

    def get(self, key: str) -> str | None:
        return super().get(self.name + key)

    def wait(self, key: str, timeout_s: float) -> str | None:
        if key.endswith("/2"):
            self.awaits_rank_2.set()
        return super().wait(self.name + key, timeout_s)

    def delete(self, key: str) -> None:
        super().delete(self.name + key)

    def clone(self) -> Entered:
        return Entered(self.memory, self.name)


def test_messages_of_dead_ranks_are_not_read() -> None:
    """Rank 2 has said what it sees, and was killed. Its successor comes later than the others."""
    memory = Memory()

    def begin(host: str, leave: tuple[int, ...]) -> list[Any]:
        channels = [Entered(memory) for _ in range(3)]

        def opened(rank: int) -> Any:
            channel = channels[rank]
            if rank == 2 and not leave:
                channels[0].awaits_rank_2.wait()
            try:
                channel.name = f"{agree_on_start(channel, rank, 3, LONG_S)}/"
                if rank in leave:
                    return None
                agreement = Agreement(channel, rank, 3, timeout_s=LONG_S)
                try:
                    return agreement.open(Sight(host=host, new_id=host), lambda _: None)
                finally:
                    agreement.close()
            finally:
                memory.end()

        memory.at_work = 3 if leave else 0
        return on_ranks(3, opened)

    found = begin("former host", (0, 1))
    assert isinstance(found[2], RanksError)
    for number in range(3):
        found = begin(f"host {number}", ())
        assert {plan.hosts for plan in found} == {(f"host {number}",) * 3}


def test_a_channel_enters_a_name_with_its_clones() -> None:
    store = HashStore()
    channel, other = (TorchChannel(store, "offload/", timeout_s=LONG_S) for _ in range(2))
    channel.put("key", "of all")
    channel.enter("one")
    channel.put("key", "of one")
    clone = channel.clone()
    found = [channel.get("key"), clone.get("key"), other.get("key")]
    assert found == ["of one", "of one", "of all"]
    for one in (channel, other, clone):
        one.close()
