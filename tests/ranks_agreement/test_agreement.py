"""The agreement as an optimizer uses it, with ranks that are threads.

Errors of calls, interrupts and ranks that have closed are shown by real ranks in
`tests/ranks_training`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from offload.distributed.agreement.agreement import Agreement
from offload.distributed.agreement.reports import Report
from offload.distributed.agreement.seal import Offer
from offload.distributed.agreement.sights import Sight
from offload.distributed.agreement.torch_channel import TorchChannel
from offload.errors import InDoubtError, RanksError, SealError
from tests.eventually import eventually
from tests.ranks_agreement.memory_channel import LONG_S, Memory, MemoryChannel


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
                agreement.commit(number, complete, rename)
            else:
                agreement.await_decision(number)

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


def refuse(words: str) -> Any:
    raise OSError(words)


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "error": ({"error": "disk full"}, "rank 1 on node-1: disk full"),
    "step": ({"step": 8}, "in the number of optimizer steps (8 instead of 7)"),
    "hyper-parameters": ({"hyper_digest": "x"}, "in the hyper-parameters: set"),
    "model": ({"model_digest": "x"}, "in the names, dtypes or shapes of the model's tensors"),
    "generation": ({"generation": 9}, "in the generation of the state (9 instead of 3)"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_reports_that_differ_fail_the_seal_on_all(what: str) -> None:
    change, words = DIFFERENT[what]
    ranks = Ranks(2).opened()
    found = ranks.seal(change={1: change}, rename=lambda: pytest.fail("renamed"))
    text = same_error(found, SealError, words)
    assert what == "error" or "rank 1 differs from rank 0" in text
    assert ranks.agreements[1].held == frozenset()
    assert all(one.offer.is_in_place for one in ranks.all(lambda a: granted(a, in_place_of=0)))


@pytest.mark.parametrize(
    ("leave", "words"), [((1, 2, 3), "ranks 1 to 3"), ((2, 3, 5), "ranks 2, 3 and 5")]
)
def test_ranks_that_do_not_call_checkpoint_are_named(leave: tuple[int, ...], words: str) -> None:
    ranks = Ranks(max(leave) + 1, skips=True).opened()
    found = ranks.seal(leave=leave)
    text = same_error(found, SealError, f"{words} did not call checkpoint()")
    assert "call it on every rank" in text


def test_a_writer_that_does_not_call_checkpoint_is_named() -> None:
    """If it comes late, it knows that the other one gave up, and publishes nothing."""
    ranks = Ranks(2, skips=True).opened()
    (error,) = ranks.seal(leave=(0,))
    assert isinstance(error, InDoubtError)
    assert "rank 0 on node-0, which decides, has not called checkpoint()" in str(error)
    (late,) = ranks.seal(leave=(1,), rename=lambda: pytest.fail("renamed"))
    assert isinstance(late, SealError)
    assert "rank 1 on node-1 waited for the decision for 60 s, and gave up" in str(late)
    assert ranks.agreements[1].held == {"part-1"}


def test_a_rank_killed_after_its_report_does_not_stop_the_checkpoint() -> None:
    ranks = Ranks(3, skips=True).opened()
    ranks.agreements[2].begin_seal("part-2")
    fields = {"step": 7, "generation": 3, "part": "part", "hyper_digest": "h"}
    ranks.agreements[2].report(0, Report(**fields))
    reports: list[Any] = []
    assert ranks.seal(reports.append, leave=(2,)) == [None] * 2
    assert [*reports[0]] == [0, 1, 2]


def test_a_failed_rename_is_in_doubt_on_all_and_ends_everything() -> None:
    ranks = Ranks(3).opened()
    found = ranks.seal(rename=lambda: refuse("input/output error"))
    text = same_error(found, InDoubtError, "it is not known whether step 7 is a checkpoint")
    assert "input/output error" in text
    assert [a.held for a in ranks.agreements] == [{"part-0"}, {"part-1"}, {"part-2"}]
    same_error(ranks.all(granted), InDoubtError, text)
    same_error(ranks.seal(), InDoubtError, text)


def test_a_part_is_held_until_an_offer_counts_its_seal() -> None:
    """And nobody goes on in place without having read that the seal was aborted."""
    ranks = Ranks(2).opened()
    assert ranks.seal() == [None] * 2
    assert [a.held for a in ranks.agreements] == [{"part-0"}, {"part-1"}]
    for seal, words in ((0, "this rank knows it as published"), (5, "has not taken part in it")):
        found = ranks.all(lambda a, seal=seal: granted(a, in_place_of=seal))
        same_error(found, RanksError, words)
    found = ranks.all(granted)  # the offer counts the seal: it names the parts itself
    assert [one.notes for one in found] == [{0: [], 1: []}] * 2


def test_a_grant_in_place_waits_for_the_seal_of_this_rank() -> None:
    """The writer may know that a seal is aborted while another rank still writes its part."""
    ranks = Ranks(2).opened()
    writer, other = ranks.agreements
    numbers = [writer.begin_seal("part-0"), other.begin_seal("part-1")]
    assert numbers == [0, 0]

    def abort() -> None:
        writer.report(0, Report(step=1, generation=1, error="disk full"))
        with pytest.raises(SealError):
            writer.commit(0, lambda _: None, lambda: None)

    def late() -> None:
        other.report(0, Report(step=1, generation=1))
        with pytest.raises(SealError):
            other.await_decision(0)

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


def test_a_lost_store_leaves_a_reported_seal_in_doubt_and_takes_no_checkpoint_back() -> None:
    ranks = Ranks(2).opened()
    other = ranks.agreements[1]
    other.begin_seal("part-1")
    other.report(0, Report(step=1, generation=1))
    ranks.memory.is_lost = True
    with pytest.raises(InDoubtError, match="it is not known whether step 1 is a checkpoint"):
        other.await_decision(0)
    assert other.held == {"part-1"}
    ranks = Ranks(2).opened()
    writer, other = ranks.seal(rename=lambda: setattr(ranks.memory, "is_lost", True))
    assert writer is None
    assert isinstance(other, InDoubtError)


def test_why_ranks_have_left_is_told_to_those_that_wait() -> None:
    ranks = Ranks(5).opened()
    for rank in (1, 2, 3, 4):
        ranks.agreements[rank].close(OSError("disk full") if rank == 1 else None)
    (error,) = ranks.all(granted, leave=(1, 2, 3, 4))
    words = "rank 1 could not make the optimizer: disk full"
    assert f"{words}; ranks 2 to 4 have closed their optimizers" in str(error)
    with pytest.raises(RanksError, match=words):
        ranks.agreements[0].require_all_here("step()")


def test_channels_over_one_store_of_torch() -> None:
    store = HashStore()
    one, apart = (TorchChannel(store, name, timeout_s=LONG_S) for name in ("a/", "b/"))
    other = one.clone()
    assert one.get("key") is None
    assert one.wait("key", 0.01) is None
    one.put("key", "✓")
    assert other.wait("key", LONG_S) == "✓"
    assert apart.get("key") is None
    one.enter("start")
    one.put("key", "of a start")
    found = [channel.get("key") for channel in (one, one.clone(), other)]
    assert found == ["of a start", "of a start", "✓"]
    for _ in range(2):
        other.delete("key")
        assert other.get("key") is None
    one.close()
    with pytest.raises(RanksError, match="is closed"):
        one.get("key")
