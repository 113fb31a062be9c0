"""How long a rank waits for others: the limit counts from their last sign of progress."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.reports import Report
from offload.errors import InDoubtError, RanksError, SealError
from tests.ranks_agreement.memory_channel import Memory, TimedChannel, message

LIMIT_S = 60.0
LOOK_S = 4.0
"""Generous bound on the time between two looks."""

Event = tuple[float, str, str]
"""A time, and the key and value that another rank puts then."""


def agreement_of(
    rank: int, size: int = 2, channel: TimedChannel | None = None
) -> tuple[Agreement, TimedChannel]:
    channel = channel or TimedChannel(Memory())
    return Agreement(channel, rank, size, timeout_s=LIMIT_S), channel


def seal(agreement: Agreement) -> None:
    number = agreement.begin_seal("part-1")
    agreement.barrier(number)
    agreement.report(number, Report(step=7, generation=3))
    if agreement.peers.rank == 0:
        agreement.commit(number, lambda _: None, lambda: None)
    else:
        agreement.await_decision(number)


def exchange(agreement: Agreement) -> None:
    agreement.agree("step()", lambda _: None, lambda _: None)


def signs(rank: int, *times_s: float) -> list[Event]:
    return [(t, f"exchange/0/sign/{rank}", str(n)) for n, t in enumerate(times_s)]


def answer(rank: int, at_s: float) -> Event:
    text = message("answer", what="step()", note=None, error="")
    return (at_s, f"exchange/0/answer/{rank}", text)


def failed(rank: int, at_s: float) -> Event:
    text = message("error", rank=rank, error=f"rank {rank} failed: no memory", final=False)
    return (at_s, "exchange/0/error", text)


def closed(rank: int, at_s: float) -> list[Event]:
    note = message("left", reason="")
    return [(at_s, f"left/rank/{rank}", note), (at_s, "left/anyone", note)]


Case = tuple[int, list[Event], str, float]
"""Number of ranks, what the others do, words of rank 0's error, and when its wait ends."""

WAITS: dict[str, Case] = {
    "no sign": (2, [], "no answer of rank 1", LIMIT_S),
    "slow": (2, [*signs(1, *range(0, 3000, 50)), answer(1, 2990)], "", 2990),
    "the last sign counts": (2, signs(1, 0, 50, 100, 150), "no answer of rank 1", 150 + LIMIT_S),
    "signs of another": (3, signs(1, *range(0, 1000, 20)), "no answer of rank 2 came", LIMIT_S),
    "another has answered": (3, [answer(1, 1)], "no answer of rank 2 came", LIMIT_S),
    "an error is announced": (3, [failed(2, 5)], "step(): rank 2 failed: no memory", 5),
    "it answered, and failed": (3, [answer(2, 0), failed(2, 1), answer(1, 30)], "", 30),
    "closed": (3, closed(2, 5), "step(): rank 2 has closed its optimizer", 5),
    "it answered, and closed": (3, [answer(2, 0), *closed(2, 1), answer(1, 30)], "", 30),
}


@pytest.mark.parametrize("case", WAITS)
def test_a_wait_ends(case: str) -> None:
    size, events, words, at_s = WAITS[case]
    agreement, channel = agreement_of(0, size)
    for time_s, key, value in sorted(events, key=lambda event: event[0]):
        channel.at.append((time_s, lambda k=key, v=value: channel.put(k, v)))
    if words:
        with pytest.raises(RanksError) as error:
            exchange(agreement)
        assert words in str(error.value)
    else:
        exchange(agreement)
    assert at_s <= channel.time_s <= at_s + 3 * LOOK_S


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    agreement, channel = agreement_of(0)

    def stopped() -> None:
        channel.time_s += 3600

    channel.at = [(10.0, stopped), (3640.0, lambda: channel.put(*answer(1, 0)[1:]))]
    exchange(agreement)


def test_what_a_rank_has_put_before_it_left_counts() -> None:
    class Racing(TimedChannel):
        def get(self, key: str) -> str | None:
            if key == "left/anyone" and key not in self.memory.values:
                for _, its, value in (answer(1, 0), *closed(1, 0)):
                    self.put(its, value)
            return super().get(key)

    exchange(agreement_of(0, channel=Racing(Memory()))[0])


def test_signs_are_few_and_never_raise() -> None:
    agreement, channel = agreement_of(1)
    agreement.begin_seal("part-1")
    given: set[str | None] = set()
    for _ in range(1000):
        channel.time_s += LIMIT_S / 1000
        agreement.progress()
        given.add(channel.get("seal/0/sign/1"))
    assert 2 <= len(given) <= 12
    channel.memory.is_lost = True
    channel.time_s += LIMIT_S
    agreement.progress()


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
    channel.put(*answer(1, 0)[1:])
    exchange(agreement)
    if has_read:
        channel.put("exchange/0/read/1", "read")
    agreement.close()
    most_s = 0 if has_read else LIMIT_S + 4 * LOOK_S
    assert (0 if has_read else LIMIT_S) <= channel.time_s <= most_s


def test_ranks_that_are_lost_one_after_the_other_are_waited_for_at_the_same_time() -> None:
    agreement, channel = agreement_of(0, 3)
    channel.at = [(0.3 * LIMIT_S, lambda: channel.put("seal/0/sign/1", "0"))]
    with pytest.raises(SealError, match=r"rank 2 did not call checkpoint\(\)"):
        seal(agreement)
    assert 1.3 * LIMIT_S <= channel.time_s <= 1.3 * LIMIT_S + 6 * LOOK_S


def test_a_rank_that_comes_late_is_waited_for_again() -> None:
    agreement, channel = agreement_of(0)
    with pytest.raises(SealError):
        seal(agreement)
    came_s = channel.time_s + 1
    channel.at = [(came_s, lambda: channel.put("exchange/0/sign/1", "0"))]
    with pytest.raises(RanksError):
        exchange(agreement)
    assert came_s + LIMIT_S <= channel.time_s <= came_s + LIMIT_S + 3 * LOOK_S


UNREADABLE: dict[str, tuple[Callable[[str], str], str]] = {
    "not JSON": (lambda text: text[:1], "is not JSON"),
    "no object": (lambda _: "[]", "expected an object"),
    "version": (lambda text: text.replace('n": 2', 'n": 1'), "install the same version"),
    "kind": (lambda text: text.replace('"answer"', '"offer"'), "expected 'answer'"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_message_that_cannot_be_read_is_an_error_that_names_its_rank(case: str) -> None:
    change, words = UNREADABLE[case]
    agreement, channel = agreement_of(0)
    _, key, text = answer(1, 0)
    channel.put(key, change(text))
    with pytest.raises(RanksError, match=words) as error:
        exchange(agreement)
    assert "rank 1" in str(error.value)
