"""The agreement as an optimizer uses it, with ranks that are threads."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from offload.distributed import Agreement, Offer, Report, Sight, TorchChannel
from offload.distributed.agreement.messages import MessageError, decode, encode
from offload.errors import InDoubtError, RanksError, SealError
from tests.eventually import eventually
from tests.ranks_agreement.memory_channel import Memory, MemoryChannel

LONG_S = 60.0
"""A limit that is only reached where time is skipped; something else ends all other waits."""


class Ranks:
    """Ranks as threads, with a store in memory.

    Args:
        size: Number of ranks.
        skips: Whether time in which all of them only wait is skipped, for a limit that is reached.
    """

    def __init__(self, size: int, *, skips: bool = False) -> None:
        self.memory = Memory()
        self.skips = skips
        self.agreements = [
            Agreement(MemoryChannel(self.memory), rank, size, timeout_s=LONG_S)
            for rank in range(size)
        ]
        self._pool = ThreadPoolExecutor(size)

    def all(self, call: Callable[[Agreement], Any], leave: tuple[int, ...] = ()) -> list[Any]:
        """Call something on each rank at once; errors are returned."""

        def outcome(agreement: Agreement) -> Any:
            try:
                return call(agreement)
            except Exception as error:  # noqa: BLE001  (the test looks at it)
                return error
            finally:
                self.memory.end()

        asked = [a for a in self.agreements if a.peers.rank not in leave]
        self.memory.at_work = len(asked) if self.skips else 0
        return list(self._pool.map(outcome, asked))

    def opened(self) -> Ranks:
        """Open a new store on all ranks."""
        found = self.all(lambda a: a.open(sight(a), lambda _: None))
        assert {plan.writer for plan in found} == {0}
        return self

    def seal(self, complete: Callable[..., object] = lambda _: None, **other: Any) -> list[Any]:
        """Seal on all ranks; returns the outcome of each."""
        change: dict[int, dict[str, Any]] = other.get("change", {})
        rename = other.get("rename", lambda: None)

        def seal(agreement: Agreement) -> None:
            number = agreement.begin_seal(f"part-{agreement.peers.rank}")
            fields = {"step": 7, "generation": 3, "part": "part", "hyper_digest": "h"}
            agreement.report(number, Report(**fields | change.get(agreement.peers.rank, {})))
            if agreement.is_writer:
                agreement.decide(number, complete, rename)
            else:
                agreement.decision(number)

        return self.all(seal, other.get("leave", ()))


def sight(agreement: Agreement) -> Sight:
    return Sight(host=f"node-{agreement.peers.rank}", new_id=f"id of {agreement.peers.rank}")


def granted(agreement: Agreement, **offer: Any) -> Any:
    made = Offer(slot="slot-1", generation=4, **offer)
    return agreement.grant(lambda: made, lambda _, held: sorted(held))


def same_error(found: list[Any], kind: type[Exception], words: str) -> str:
    """Require that all ranks have raised the same error, and return its text."""
    assert {type(error) for error in found} == {kind}, found
    (text,) = {str(error) for error in found}
    assert words in text
    return text


def test_ranks_open_get_a_slot_and_seal_again_and_again() -> None:
    ranks = Ranks(3).opened()
    reports: list[Any] = []
    for _ in range(5):
        found = ranks.all(granted)
        assert [one.notes.keys() for one in found] == [{0, 1, 2}] * 3
        assert ranks.seal(reports.append) == [None] * 3
    assert [[*one] for one in reports] == [[0, 1, 2]] * 5
    # Only the keys of the last exchange are left.
    left = {key.rpartition("/")[0].partition("/offer")[0] for key in ranks.memory.values}
    assert all(key.startswith("exchange/5") for key in left), ranks.memory.values


def test_a_rank_that_cannot_get_ready_is_named_on_all() -> None:
    ranks = Ranks(3).opened()

    def ready(agreement: Agreement) -> None:
        if agreement.peers.rank == 2:
            raise OSError("disk full")

    offer = Offer(slot="slot-1", generation=4)
    found = ranks.all(lambda a: a.grant(lambda: offer, lambda *_: ready(a)))
    same_error(found, RanksError, "rank 2 on node-2: disk full")
    assert isinstance(found[2].__cause__, OSError)
    assert all(one.offer.generation == 4 for one in ranks.all(granted))  # and again


def test_an_offer_that_cannot_be_made_is_an_error_on_all() -> None:
    ranks = Ranks(2).opened()

    def offer() -> Offer:
        raise OSError("readers hold every slot")

    found = ranks.all(lambda a: a.grant(offer, lambda *_: None))
    same_error(found, RanksError, "rank 0 on node-0: readers hold every slot")


def test_different_calls_at_one_point_are_named_on_all() -> None:
    ranks = Ranks(2).opened()
    found = ranks.all(lambda a: a.agree(f"call{a.peers.rank}()", lambda _: None, lambda _: None))
    assert {type(error) for error in found} == {RanksError}
    assert all("call0()" in str(error) and "call1()" in str(error) for error in found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"error": "disk full"}, "rank 1 on node-1: disk full"),
        (
            {"step": 8},
            "rank 1 differs from rank 0 in the number of optimizer steps (8 instead of 7)",
        ),
        ({"hyper_digest": "x"}, "rank 1 differs from rank 0 in the hyper-parameters: set"),
        (
            {"model_digest": "x"},
            "rank 1 differs from rank 0 in the names, dtypes or shapes of the model's tensors",
        ),
        (
            {"generation": 9},
            "rank 1 differs from rank 0 in the generation of the state (9 instead of 3)",
        ),
    ],
    ids=["error", "step", "hyper-parameters", "model", "generation"],
)
def test_reports_that_differ_fail_the_seal_on_all(change: dict[str, Any], words: str) -> None:
    ranks = Ranks(2).opened()
    found = ranks.seal(change={1: change}, rename=lambda: pytest.fail("renamed"))
    same_error(found, SealError, words)
    assert ranks.agreements[1].held == frozenset()
    assert all(one.offer.is_in_place for one in ranks.all(lambda a: granted(a, in_place_of=0)))


def test_ranks_that_do_not_call_checkpoint_are_named() -> None:
    ranks = Ranks(4, skips=True).opened()
    found = ranks.seal(leave=(1, 2, 3))
    text = same_error(found, SealError, "ranks 1 to 3 did not call checkpoint()")
    assert "call it on every rank" in text


def test_a_writer_that_does_not_call_checkpoint_is_named() -> None:
    ranks = Ranks(2, skips=True).opened()
    (error,) = ranks.seal(leave=(0,))
    assert isinstance(error, InDoubtError)
    assert "rank 0 on node-0, which decides, has not called checkpoint()" in str(error)


def test_a_failed_rename_is_in_doubt_on_all_and_ends_everything() -> None:
    ranks = Ranks(3).opened()

    def rename() -> None:
        raise OSError("input/output error")

    found = ranks.seal(rename=rename)
    text = same_error(found, InDoubtError, "it is not known whether step 7 is a checkpoint")
    assert "input/output error" in text
    assert [a.held for a in ranks.agreements] == [{"part-0"}, {"part-1"}, {"part-2"}]
    same_error(ranks.all(granted), InDoubtError, text)
    same_error(ranks.seal(), InDoubtError, text)


def test_a_part_is_held_until_an_offer_counts_its_seal() -> None:
    ranks = Ranks(2).opened()
    assert ranks.seal() == [None] * 2
    assert [a.held for a in ranks.agreements] == [{"part-0"}, {"part-1"}]
    found = ranks.all(granted)  # the offer counts the seal: it names the parts itself
    assert [one.notes for one in found] == [{0: [], 1: []}] * 2


def test_nobody_goes_on_in_place_without_having_read_that_the_seal_was_aborted() -> None:
    ranks = Ranks(2).opened()
    assert ranks.seal() == [None] * 2
    found = ranks.all(lambda a: granted(a, in_place_of=0))
    same_error(found, RanksError, "this rank knows it as published")
    found = ranks.all(lambda a: granted(a, in_place_of=5))
    same_error(found, RanksError, "this rank has not taken part in it")


def test_a_grant_in_place_waits_for_the_seal_of_this_rank() -> None:
    """The writer may know that a seal is aborted while another rank still writes its part."""
    ranks = Ranks(2).opened()
    writer, other = ranks.agreements
    numbers = [writer.begin_seal("part-0"), other.begin_seal("part-1")]
    assert numbers == [0, 0]

    def abort() -> None:
        writer.report(0, Report(step=1, generation=1, error="disk full"))
        with pytest.raises(SealError):
            writer.decide(0, lambda _: None, lambda: None)

    def late() -> None:
        other.report(0, Report(step=1, generation=1))
        with pytest.raises(SealError):
            other.decision(0)

    other.report(0, Report(step=1, generation=1))
    threads = [threading.Thread(target=one) for one in (abort, late)]
    threads[0].start()
    assert eventually(lambda: "seal/0/decision" in ranks.memory.values)
    threads[1].start()  # when all have read the decision, its key is deleted
    found = ranks.all(lambda a: granted(a, in_place_of=0))
    assert all(one.offer.is_in_place for one in found), found
    for thread in threads:
        thread.join()


def test_an_announced_error_ends_the_wait_of_the_others() -> None:
    ranks = Ranks(3).opened()
    ranks.agreements[1].broadcast_error(MemoryError("no memory"))
    found = ranks.all(granted, leave=(1,))
    for error in found:
        assert isinstance(error, RanksError)
        assert "rank 1 on node-1 failed: no memory" in str(error)


def test_a_lost_rank_ends_every_further_call_at_once() -> None:
    ranks = Ranks(2, skips=True).opened()
    (error,) = ranks.all(granted, leave=(1,))
    assert "no answer of rank 1" in str(error)
    (again,) = ranks.all(granted, leave=(1,))
    assert str(again) == str(error)
    with pytest.raises(RanksError, match="no answer of rank 1"):
        ranks.agreements[0].begin_seal("")


def test_a_lost_store_leaves_a_reported_seal_in_doubt() -> None:
    ranks = Ranks(2).opened()
    other = ranks.agreements[1]
    other.begin_seal("part-1")
    other.report(0, Report(step=1, generation=1))
    ranks.memory.is_lost = True
    with pytest.raises(InDoubtError, match="it is not known whether step 1 is a checkpoint"):
        other.decision(0)
    assert other.held == {"part-1"}


def test_a_lost_store_after_the_rename_does_not_take_the_checkpoint_back() -> None:
    ranks = Ranks(2).opened()

    def rename() -> None:
        ranks.memory.is_lost = True

    writer, other = ranks.seal(rename=rename)
    assert writer is None
    assert isinstance(other, InDoubtError)


def test_an_interrupt_of_one_rank_is_an_error_of_the_others() -> None:
    ranks = Ranks(2).opened()

    def ready(agreement: Agreement) -> None:
        if agreement.peers.rank == 1:
            raise KeyboardInterrupt

    def call(agreement: Agreement) -> Any:
        try:
            offer = Offer(slot="s", generation=4)
            return agreement.grant(lambda: offer, lambda *_: ready(agreement))
        except KeyboardInterrupt:
            return "interrupted"

    first, second = ranks.all(call)
    assert isinstance(first, RanksError)
    assert "rank 1 on node-1: interrupted" in str(first)
    assert second == "interrupted"
    with pytest.raises(RanksError, match="was interrupted on this rank"):
        ranks.agreements[1].begin_seal("")


def test_closing_exchanges_nothing_and_holds_nobody() -> None:
    ranks = Ranks(2).opened()
    before = dict(ranks.memory.values)
    for _ in range(2):
        ranks.agreements[0].close()
        assert {key: ranks.memory.values[key] for key in before} == before
        assert ranks.memory.values.keys() - before.keys() == {"left/rank/0", "left/anyone"}
    with pytest.raises(RanksError, match="is closed"):
        ranks.agreements[0].begin_seal("")


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_has_closed_is_named_by_the_next_call_of_all_others(leaver: int) -> None:
    ranks = Ranks(3).opened()
    ranks.agreements[leaver].close()
    words = f"step(): rank {leaver} has closed its optimizer. Restart the job"
    for error in ranks.all(granted, leave=(leaver,)):
        assert isinstance(error, RanksError)
        assert str(error) == words
    other = next(a for a in ranks.agreements if a.peers.rank != leaver)
    with pytest.raises(RanksError, match=re.escape(words)):
        other.begin_seal("")


def test_a_rank_that_closes_is_named_by_those_that_wait_for_it_already() -> None:
    ranks = Ranks(3).opened()
    waiting = threading.Thread(
        target=lambda: (
            eventually(lambda: "exchange/1/sign/2" in ranks.memory.values),
            ranks.agreements[1].close(),
        )
    )
    waiting.start()
    for error in ranks.all(granted, leave=(1,)):
        assert "rank 1 has closed its optimizer" in str(error)
    waiting.join()


def test_a_rank_that_has_closed_is_named_by_a_seal_of_the_others() -> None:
    ranks = Ranks(3).opened()
    ranks.agreements[2].close()
    same_error(ranks.seal(leave=(2,)), SealError, ": rank 2 has closed its optimizer")
    ranks = Ranks(2).opened()
    ranks.agreements[0].close()
    same_error(ranks.seal(leave=(0,)), InDoubtError, "rank 0 has closed its optimizer before")


def test_the_error_of_a_constructor_that_has_failed_is_told_to_the_others() -> None:
    ranks = Ranks(2).opened()
    ranks.agreements[1].close(OSError("disk full"))
    (error,) = ranks.all(granted, leave=(1,))
    assert "rank 1 could not make the optimizer: disk full" in str(error)
    with pytest.raises(RanksError, match="rank 1 could not make the optimizer"):
        ranks.agreements[0].require_all_here("step()")


def test_ranks_that_have_all_closed_after_a_seal_have_sealed() -> None:
    ranks = Ranks(3).opened()

    def seal_and_close(agreement: Agreement) -> None:
        number = agreement.begin_seal(f"part-{agreement.peers.rank}")
        agreement.meet(number)
        agreement.report(number, Report(step=7, generation=3))
        if agreement.is_writer:
            agreement.decide(number, lambda _: None, lambda: None)
        else:
            agreement.decision(number)
        agreement.close()

    assert ranks.all(seal_and_close) == [None] * 3


def test_one_rank_alone_agrees_with_itself() -> None:
    ranks = Ranks(1).opened()
    assert ranks.all(granted)[0].notes == {0: []}
    assert ranks.seal() == [None]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object"),
        (encode("a", {"x": 1}).replace('"version":', '"version":1'), "install the same version"),
        (encode("b", {"x": 1}), "expected 'a'"),
        (encode("a", {}), "missing or unknown fields: 'x'"),
        (encode("a", {"x": 1, "y": 1}), "missing or unknown fields: 'y'"),
        (encode("a", {"x": True}), "expected a whole number"),
        (encode("a", {"x": "1"}), "expected a whole number"),
    ],
)
def test_messages_are_checked_when_they_are_read(text: str, words: str) -> None:
    with pytest.raises(MessageError, match=words) as error:
        decode(text, "a", {"x": int}, "rank 5")
    assert "rank 5" in str(error.value)


def test_two_channels_over_one_store_of_torch() -> None:
    store = HashStore()
    one = TorchChannel(store, "a", timeout_s=LONG_S)
    other, apart = one.clone(), TorchChannel(store, "b", timeout_s=LONG_S)
    assert one.get("key") is None
    assert one.wait("key", 0.01) is None
    one.put("key", "✓")
    assert other.wait("key", LONG_S) == "✓"
    assert apart.get("key") is None
    other.delete("key")
    other.delete("key")
    assert one.get("key") is None
    one.close()
    with pytest.raises(RanksError, match="is closed"):
        one.get("key")
