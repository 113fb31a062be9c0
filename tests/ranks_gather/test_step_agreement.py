"""Agreement before a step: equal terms are taken, others fail on all ranks with one message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload.distributed.gathering import step_agreement
from offload.distributed.gathering.holder_groups import HolderGroups, share_numbers
from offload.distributed.gathering.step_agreement import StepAgreement, StepTerms
from offload.errors import RanksError
from tests.limits import AGREEMENT_S
from tests.ranks_gather import scenes
from tests.ranks_gather.ranks import Run


def agree(rank: int, steps: list[list[StepTerms]]) -> list[Any]:
    """Agree on steps; return orders, number of exchanges and layouts of each, or its error."""
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
            orders = agreement.agree(step[rank])
            found.append((orders, num_exchanges[0], agreement.layouts))
        except RanksError as error:
            found.append(str(error))
    return found


def terms(step: int = 1, stepped: str = "ab", order: tuple[int, ...] = (0, 1), **more: Any) -> Any:
    return StepTerms(step, list(stepped), list(order), **more)


TERMS: dict[str, tuple[list[StepTerms], list[str]]] = {
    # What each rank says of a step, and words of the error; an error changes nothing.
    "gradients": (
        [terms(1, "abc"), terms(1, "ac"), terms(1, "bc")],
        [
            "'a' has one on ranks 0, 1 and none on rank 2",
            "'b' has one on ranks 0, 2 and none on rank 1",
            "find_unused_parameters=True",
        ],
    ),
    "many gradients": (
        [terms(1, "abcdef"), terms(1, "f"), terms(1, "f")],
        ["(2 more differ)"],
    ),
    "order of parameters": (
        [terms(1, "ab"), terms(1, "ba"), terms(1, "ab")],
        ["in different orders"],
    ),
    "steps": (
        [terms(4), terms(4), terms(5, "b")],
        ["rank 0 step 4, rank 1 step 4, rank 2 step 5"],
    ),
    "refusal": (
        [terms(), terms(1, "", (), refusal="the disk is full"), terms(2)],
        ["rank 1 of 3 cannot take step 1: the disk is full. No rank has taken it"],
    ),
}


def test_what_differs_is_named_on_all_ranks_and_the_next_step_is_agreed_on(run: Run) -> None:
    """Equal terms take one exchange; each rank learns the orders and layouts of the others."""
    orders = [terms(1), terms(1, order=(3,)), terms(1, order=())]
    steps = [[terms(1)] * 3, [terms(2)] * 3, orders, *(given for given, _ in TERMS.values())]
    layouts = [
        [terms(7, layout=digest) for digest in digests] for digests in ((7, 8, 9), (7, 8, 5))
    ]
    first, *others = run(3, agree, [*steps, *layouts])
    assert all(other == first for other in others), "the ranks have different answers"
    equal, again, learnt, *refused = first
    assert equal[:2] == again[:2] == ([(0, 1)] * 3, 1)
    assert learnt[0] == [(0, 1), (3,), ()]
    for (name, (_, words)), said in zip(TERMS.items(), refused[: len(TERMS)], strict=True):
        assert all(one in said for one in words), (name, said)
    assert "'c'" not in refused[0]
    assert [found[2] for found in refused[len(TERMS) :]] == [(7, 8, 9), (7, 8, 5)]


def agree_too_late(rank: int) -> str:
    groups = HolderGroups([], timeout_s=AGREEMENT_S)
    scenes.shorten(groups)
    agreement = StepAgreement(groups.everyone)
    if rank == 0:
        dist.barrier()  # until the other rank has given up
        return ""
    with pytest.raises(RanksError) as raised:
        agreement.agree(terms(7))
    dist.barrier()
    return str(raised.value)


def test_a_rank_that_does_not_step_is_waited_for_no_longer_than_the_limit(run: Run) -> None:
    _, said = run(2, agree_too_late)
    assert said.startswith("rank 1 of 2 waited in vain for the other ranks to begin step 7")


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
