"""How long a rank waits for others: the limit counts from their last sign of progress."""

from __future__ import annotations

import pytest

from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.driver import Driver, announcement
from offload.distributed.agreement.effects import Arrived, Await, Program
from offload.distributed.agreement.leaving import ANYONE, in_words, leave
from offload.distributed.agreement.messages import encode
from offload.distributed.agreement.peers import error_key, names, sign_key
from offload.distributed.agreement.quiet import QuietRanks
from offload.distributed.agreement.reports import Report
from offload.distributed.agreement.signs import SIGNS_PER_LIMIT, Signs
from offload.errors import InDoubtError, RanksError, SealError
from tests.ranks_agreement.memory_channel import CommonClock, Memory, TimedChannel

LIMIT_S = 60.0
LOOK_S = 4.0
"""Generous bound on the time between two looks."""


class Silent:
    def give(self) -> None:
        pass


def waiting(*ranks: int) -> Program[Arrived]:
    return (yield Await(tuple((rank, f"key/{rank}") for rank in ranks), "scope"))


def driver_of(channel: TimedChannel) -> Driver:
    return Driver(channel, Silent(), LIMIT_S, QuietRanks())


def signs_at(channel: TimedChannel, rank: int, *times_s: float) -> None:
    key = sign_key("scope", rank)
    for number, time_s in enumerate(times_s):
        channel.at.append((time_s, lambda n=number: channel.put(key, str(n))))
    channel.at.sort(key=lambda item: item[0])


def test_a_rank_without_a_sign_is_given_up_after_the_limit() -> None:
    channel = TimedChannel(Memory())
    assert driver_of(channel).run(waiting(1)) == Arrived({}, lost=frozenset({1}))
    assert LIMIT_S <= channel.time_s <= LIMIT_S + 2 * LOOK_S


def test_a_slow_rank_is_waited_for_as_long_as_it_gives_signs() -> None:
    channel = TimedChannel(Memory())
    signs_at(channel, 1, *range(0, 3000, 50))
    channel.at.append((2990.0, lambda: channel.put("key/1", "done")))
    assert driver_of(channel).run(waiting(1)) == Arrived({1: "done"})


def test_the_limit_counts_from_the_last_sign() -> None:
    channel = TimedChannel(Memory())
    signs_at(channel, 1, 0, 50, 100, 150)
    assert driver_of(channel).run(waiting(1)) == Arrived({}, lost=frozenset({1}))
    assert 150 + LIMIT_S <= channel.time_s <= 150 + LIMIT_S + 2 * LOOK_S


def test_signs_of_one_rank_do_not_prolong_the_wait_for_another() -> None:
    channel = TimedChannel(Memory())
    signs_at(channel, 1, *range(0, 1000, 20))
    assert driver_of(channel).run(waiting(1, 2)) == Arrived({}, lost=frozenset({2}))
    assert channel.time_s <= LIMIT_S + 2 * LOOK_S


def test_what_has_arrived_is_returned_when_another_rank_is_given_up() -> None:
    channel = TimedChannel(Memory())
    channel.put("key/2", "here")
    assert driver_of(channel).run(waiting(1, 2, 3)) == Arrived({2: "here"}, lost=frozenset({1, 3}))


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    channel = TimedChannel(Memory())

    def stopped() -> None:
        channel.time_s += 3600

    channel.at = [(10.0, stopped), (3640.0, lambda: channel.put("key/1", "done"))]
    assert driver_of(channel).run(waiting(1)) == Arrived({1: "done"})


def test_an_announced_error_ends_the_wait_for_the_rank_that_announced_it() -> None:
    channel = TimedChannel(Memory())
    text = announcement(2, "rank 2 failed: no memory")
    channel.at = [(5.0, lambda: channel.put(error_key("scope"), text))]
    assert driver_of(channel).run(waiting(1, 2)) == Arrived({}, "rank 2 failed: no memory")
    assert channel.time_s < LIMIT_S / 2


def test_an_announced_error_does_not_end_the_wait_for_other_ranks() -> None:
    channel = TimedChannel(Memory())
    channel.put(error_key("scope"), announcement(2, "rank 2 failed"))
    channel.at = [(30.0, lambda: channel.put("key/1", "done"))]
    assert driver_of(channel).run(waiting(1)) == Arrived({1: "done"})


def test_the_wait_for_a_rank_that_has_left_ends_at_once() -> None:
    channel = TimedChannel(Memory())
    channel.at = [(5.0, lambda: leave(channel.put, 2, ""))]
    found = driver_of(channel).run(waiting(1, 2))
    assert found == Arrived({}, lost=frozenset({2}), left={2: ""})
    assert channel.time_s <= 5.0 + LOOK_S


def test_a_rank_that_has_left_does_not_end_the_wait_for_others() -> None:
    channel = TimedChannel(Memory())
    leave(channel.put, 2, "no memory")
    channel.at = [(30.0, lambda: channel.put("key/1", "done"))]
    assert driver_of(channel).run(waiting(1)) == Arrived({1: "done"})


def test_what_a_rank_has_put_before_it_left_counts() -> None:
    class Racing(TimedChannel):
        def get(self, key: str) -> str | None:
            if key == ANYONE and key not in self.memory.values:
                self.put("key/1", "done")
                leave(self.put, 1, "")
            return super().get(key)

    assert driver_of(Racing(Memory())).run(waiting(1)) == Arrived({1: "done"})


def test_ranks_that_have_left_in_words() -> None:
    assert in_words({1: ""}) == "rank 1 has closed its optimizer"
    assert in_words({3: "", 1: "", 2: "", 0: "no memory"}) == (
        "rank 0 could not make the optimizer: no memory; ranks 1 to 3 have closed their optimizers"
    )


def test_signs_are_few_and_only_for_what_is_in_progress() -> None:
    channel = TimedChannel(Memory())
    signs = Signs(channel, 3, LIMIT_S)
    signs.begin("a")
    signs.begin("b")
    given: list[str | None] = []
    for _ in range(1000):
        channel.time_s += LIMIT_S / 1000
        signs.give()
        given.append(channel.get(sign_key("a", 3)))
    assert 2 <= len(set(given)) <= SIGNS_PER_LIMIT + 1
    signs.end("a")
    channel.time_s += LIMIT_S
    before = channel.get(sign_key("a", 3)), channel.get(sign_key("b", 3))
    signs.give()
    assert channel.get(sign_key("a", 3)) == before[0]
    assert channel.get(sign_key("b", 3)) != before[1]


def test_a_sign_never_raises() -> None:
    channel = TimedChannel(Memory())
    channel.memory.is_lost = True
    signs = Signs(channel, 3, LIMIT_S)
    signs.begin("a")
    signs.give()


def agreement_of(rank: int, size: int = 2) -> tuple[Agreement, CommonClock]:
    channel = CommonClock(Memory())
    return Agreement(channel, rank, size, timeout_s=LIMIT_S), channel


def seal(agreement: Agreement) -> None:
    number = agreement.begin_seal("part-1")
    agreement.meet(number)
    agreement.report(number, Report(step=7, generation=3))
    if agreement.peers.rank == 0:
        agreement.decide(number, lambda _: None, lambda: None)
    else:
        agreement.decision(number)


def exchange(agreement: Agreement) -> None:
    agreement.agree("step()", lambda _: None, lambda _: None)


def test_the_writer_waits_one_limit_for_a_rank_that_does_not_seal_nor_step() -> None:
    agreement, channel = agreement_of(0)
    with pytest.raises(SealError, match=r"rank 1 did not call checkpoint\(\)"):
        seal(agreement)
    with pytest.raises(RanksError, match="no answer of rank 1"):
        exchange(agreement)
    assert LIMIT_S <= channel.time_s <= LIMIT_S + 4 * LOOK_S


def test_a_rank_waits_one_limit_for_a_writer_that_does_not_seal() -> None:
    agreement, channel = agreement_of(1)
    with pytest.raises(InDoubtError, match=r"has not called checkpoint\(\)"):
        seal(agreement)
    assert LIMIT_S <= channel.time_s <= LIMIT_S + 4 * LOOK_S


@pytest.mark.parametrize("has_read", [True, False])
def test_rank_0_stays_one_limit_for_a_rank_that_has_not_read_how_an_exchange_has_ended(
    *, has_read: bool
) -> None:
    agreement, channel = agreement_of(0)
    answer = {"what": "step()", "note": None, "error": ""}
    channel.put("exchange/0/answer/1", encode("answer", answer))
    exchange(agreement)
    if has_read:
        channel.put("exchange/0/read/1", "read")
    agreement.close()
    most_s = 0 if has_read else LIMIT_S + 4 * LOOK_S
    assert (0 if has_read else LIMIT_S) <= channel.time_s <= most_s


def test_ranks_that_are_lost_one_after_the_other_are_waited_for_at_the_same_time() -> None:
    agreement, channel = agreement_of(0, 3)
    key = sign_key("seal/0", 1)
    channel.at = [(0.3 * LIMIT_S, lambda: channel.put(key, "0"))]
    with pytest.raises(SealError, match=r"rank 2 did not call checkpoint\(\)"):
        seal(agreement)
    assert 1.3 * LIMIT_S <= channel.time_s <= 1.3 * LIMIT_S + 6 * LOOK_S


def test_a_rank_that_comes_late_is_waited_for_again() -> None:
    agreement, channel = agreement_of(0)
    with pytest.raises(SealError):
        seal(agreement)
    came_s = channel.time_s + 1
    channel.at = [(came_s, lambda: channel.put(sign_key("exchange/0", 1), "0"))]
    with pytest.raises(RanksError):
        exchange(agreement)
    assert came_s + LIMIT_S <= channel.time_s <= came_s + LIMIT_S + 3 * LOOK_S


def test_ranks_in_words() -> None:
    assert names([2]) == "rank 2"
    assert names([3, 1, 2]) == "ranks 1 to 3"
    assert names([0, 1]) == "ranks 0 and 1"
    assert names([0, 2, 3, 4, 7]) == "ranks 0, 2 to 4 and 7"
