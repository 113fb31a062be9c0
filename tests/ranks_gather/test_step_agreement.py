"""Agreement before a step: equal terms are taken, others fail on all ranks with one message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload.distributed.gathering import step_agreement
from offload.distributed.gathering.holder_groups import HolderGroups
from offload.distributed.gathering.sharing import share_bytes, share_numbers
from offload.distributed.gathering.step_agreement import StepAgreement, StepTerms, agree_found_inf
from offload.errors import RanksError
from tests.limits import AGREEMENT_S
from tests.ranks_gather import ranks, scenes


def share(rank: int, lengths: list[int]) -> tuple[list[bytes], list[tuple[int, ...]]]:
    group = HolderGroups([], timeout_s=AGREEMENT_S).everyone
    data = bytes(range(256))[: lengths[rank]]
    return share_bytes(data, group), share_numbers([rank, (1 << 63) - 1 - rank], group)


@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 256, 3], [7, 7, 7]])
def test_all_ranks_see_the_bytes_of_each(lengths: list[int]) -> None:
    numbers = [(rank, (1 << 63) - 1 - rank) for rank in range(3)]
    for found in ranks.values(ranks.run(3, share, lengths)):
        assert found == ([bytes(range(256))[:length] for length in lengths], numbers)


def agree(rank: int, steps: list[list[StepTerms]]) -> list[Any]:
    """Agree on one step after the other; return orders or messages, and the exchanges of each."""
    agreement = StepAgreement(HolderGroups([], timeout_s=AGREEMENT_S).everyone)
    num_exchanges = [0]
    plain = step_agreement.share_numbers

    def counted(*arguments: Any) -> Any:
        num_exchanges[0] += 1
        return plain(*arguments)

    step_agreement.share_numbers = counted
    found: list[Any] = []
    for step in steps:
        num_exchanges[0] = 0
        try:
            found.append((agreement.agree(step[rank]), num_exchanges[0]))
        except RanksError as error:
            found.append(str(error))
    return found


def terms(step: int = 1, stepped: str = "ab", order: tuple[int, ...] = (0, 1), **more: Any) -> Any:
    return StepTerms(step, list(stepped), list(order), **more)


def agreed(*steps: list[StepTerms]) -> list[Any]:
    first, *others = ranks.values(ranks.run(3, agree, list(steps)))
    assert all(other == first for other in others), "the ranks have different answers"
    return list(first)


def test_equal_terms_are_agreed_on_in_one_exchange() -> None:
    found = agreed([terms(1)] * 3, [terms(2)] * 3, [terms(3, "b")] * 3)
    assert found == [([(0, 1)] * 3, 1)] * 3


def test_each_rank_learns_the_order_of_the_others() -> None:
    first = [terms(1), terms(1, order=(3,)), terms(1, order=())]
    then = [terms(2), terms(2, order=(4, 3, 5)), terms(2, order=())]
    found = agreed(first, then, then[:0] + [terms(3, order=tuple(t.order)) for t in then])
    assert [orders for orders, _ in found] == [
        [(0, 1), (3,), ()],
        [(0, 1), (4, 3, 5), ()],
        [(0, 1), (4, 3, 5), ()],
    ]


def layouts(rank: int, steps: list[list[int]]) -> list[Any]:
    agreement = StepAgreement(HolderGroups([], timeout_s=AGREEMENT_S).everyone)
    found = []
    for number, digests in enumerate(steps, 1):
        agreement.agree(terms(number, layout=digests[rank]))
        found.append(agreement.layouts)
    return found


def test_all_ranks_learn_that_the_layout_of_one_has_changed() -> None:
    steps = [[7, 8, 9], [7, 8, 9], [7, 8, 5]]
    expected = [tuple(step) for step in steps]
    assert ranks.values(ranks.run(3, layouts, steps)) == [expected] * 3


def test_a_gradient_on_some_ranks_only_is_named() -> None:
    (said,) = agreed([terms(stepped="abc"), terms(stepped="ac"), terms(stepped="bc")])
    assert "'a' has one on ranks 0, 1 and none on rank 2" in said
    assert "'b' has one on ranks 0, 2 and none on rank 1" in said
    assert "'c'" not in said
    assert "find_unused_parameters=True" in said


def test_only_the_first_parameters_are_named() -> None:
    (said,) = agreed([terms(stepped="abcdef"), terms(stepped="f"), terms(stepped="f")])
    assert "(2 more differ)" in said


def test_other_orders_of_parameters_are_refused() -> None:
    (said,) = agreed([terms(stepped="ab"), terms(stepped="ba"), terms(stepped="ab")])
    assert "in different orders" in said


def test_different_steps_are_refused() -> None:
    (said,) = agreed([terms(4), terms(4), terms(5, "b")])
    assert "rank 0 step 4, rank 1 step 4, rank 2 step 5" in said


def test_a_rank_that_cannot_take_the_step_stops_all() -> None:
    refusal = terms(1, "", (), refusal="the disk is full")
    found = agreed([terms(), refusal, terms(2)], [terms(2)] * 3)
    assert found[0] == "rank 1 of 3 cannot take step 1: the disk is full. No rank has taken it"
    assert found[1][0] == [(0, 1)] * 3, "the ranks cannot go on"


def agree_too_late(rank: int) -> str:
    groups = HolderGroups([], timeout_s=AGREEMENT_S)
    scenes.shorten(groups)
    agreement = StepAgreement(groups.everyone)
    if rank == 0:
        dist.barrier()  # until the other rank has given up
        return ""
    with pytest.raises(RanksError) as raised:
        agreement.agree(terms(7))
    with pytest.raises(RanksError, match="infinite values"):
        agree_found_inf([torch.zeros(1)], agreement._group)
    dist.barrier()
    return str(raised.value)


def test_a_rank_that_does_not_step_is_waited_for_no_longer_than_the_limit() -> None:
    _, said = ranks.values(ranks.run(2, agree_too_late))
    assert said.startswith("rank 1 of 2 waited in vain for the other ranks to begin step 7")


def flags(rank: int, found: list[list[float]]) -> list[float]:
    group = HolderGroups([], timeout_s=AGREEMENT_S).everyone
    own = [torch.tensor([value]) for value in found[rank]]
    agree_found_inf(own, group)
    return [flag.item() for flag in own]


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_all_ranks_skip_a_step_that_one_must_skip(value: float) -> None:
    results = ranks.values(ranks.run(3, flags, [[0.0], [0.0, value], []]))
    expected = 0.0 if value == 0 else 1.0
    assert results == [[expected], [expected, expected], []]


class LateWork:
    """Work of a group that is complete, but was seen to be only after a wait had ended."""

    num_waits = 0

    def wait(self, limit: object = None) -> None:
        self.num_waits += 1
        if limit is not None:
            raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return True


class LateGroup:
    """A group of one rank whose work is late."""

    def __init__(self) -> None:
        self.work = LateWork()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: list[torch.Tensor], options: object, /) -> LateWork:
        del tensors, options
        return self.work


def test_a_rank_that_has_left_after_it_took_part_is_no_loss() -> None:
    def look() -> None:
        raise RanksError("rank 1 has closed its optimizer")

    group = LateGroup()
    assert share_numbers([7], group, look) == [(7,)]  # type: ignore[arg-type]
    assert group.work.num_waits == 2
