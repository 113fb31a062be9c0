"""Real DDP: ranks that step their own rows and gather the rest end with the bits of plain DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from offload.distributed.gathering.gather import BounceBuffer, Gathering
from offload.distributed.gathering.gather_plan import GatherPlan, layout_chunks
from offload.distributed.gathering.holder_groups import HolderGroups
from offload.distributed.gathering.step_agreement import StepAgreement, StepTerms
from offload.format.boxes import Box, Cut
from offload.format.layout import Layout, ParameterSpec
from tests.limits import AGREEMENT_S
from tests.ranks_gather import ranks
from tests.ranks_gather.scenes import bits

CODES = {torch.bfloat16: "BF16", torch.float32: "F32"}
NUM_STEPS = 5


class Model(torch.nn.Module):
    """Layers some of which only some ranks use, in two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 37).bfloat16()
        self.sometimes = torch.nn.Linear(37, 37).bfloat16()
        self.never = torch.nn.Linear(3, 3).bfloat16()
        self.last = torch.nn.Linear(37, 5)

    def forward(self, x: torch.Tensor, *, use: bool) -> Any:
        x = self.first(x).relu()
        if use:
            x = self.sometimes(x).relu()
        return self.last(x.float())


def rows_of(shape: torch.Size, rank: int, num_ranks: int) -> Box:
    start, stop = (shape[0] * r // num_ranks for r in (rank, rank + 1))
    return Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))


def backward(model: Any, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 16, generator=generator).bfloat16()
    use = (step + rank) % 2 == 0 if step != 3 else False
    model.zero_grad(set_to_none=True)
    model(x, use=use).square().mean().backward()


def in_fp32(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach().float().clone())


def train(rank: int, num_ranks: int) -> tuple[list[bytes], list[bytes], list[list[str]]]:
    torch.manual_seed(0)
    plain, own = Model(), Model()
    own.load_state_dict(copy.deepcopy(plain.state_dict()))
    # The reference: all of the model in FP32 on each rank, stepped by torch.
    reference = DistributedDataParallel(plain, find_unused_parameters=True)
    masters = {n: in_fp32(p) for n, p in plain.named_parameters()}
    adam = torch.optim.AdamW(masters.values(), lr=1e-2)
    # The same with rows of each parameter on each rank.
    ddp = DistributedDataParallel(own, find_unused_parameters=True)
    live = dict(own.named_parameters())
    boxes = [{n: rows_of(p.shape, r, num_ranks) for n, p in live.items()} for r in range(num_ranks)]
    layouts = [
        Layout(
            tuple(
                ParameterSpec(n, CODES[p.dtype], box.sizes, 0, (), Cut(tuple(p.shape), box))
                for n, p in live.items()
                if (box := boxes[r][n]).num_elements
            ),
            (),
            1024,
        )
        for r in range(num_ranks)
    ]
    holders = {(n, box): tuple(range(num_ranks)) for b in boxes for n, box in b.items()}
    groups = HolderGroups([tuple(range(num_ranks))], timeout_s=AGREEMENT_S)
    agreement, buffer = StepAgreement(groups.everyone), BounceBuffer(1024)
    mine = {n: in_fp32(live[n][box.slices]) for n, box in boxes[rank].items()}
    own_adam = torch.optim.AdamW(mine.values(), lr=1e-2)
    stepped_names = []
    for step in range(1, NUM_STEPS + 1):
        backward(reference, step, rank)
        for name, p in plain.named_parameters():
            masters[name].grad = None if p.grad is None else p.grad.float()
        adam.step()
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.copy_(masters[name])

        backward(ddp, step, rank)
        stepped = [n for n, p in live.items() if p.grad is not None]
        stepped_names.append(stepped)
        order = range(layouts[rank].num_chunks)[:: -1 if step % 2 else 1]
        orders = agreement.agree(StepTerms(step, stepped, list(order)))
        chunks = [
            layout_chunks(layout, order=o, stepped=stepped)
            for layout, o in zip(layouts, orders, strict=True)
        ]
        plan = GatherPlan(chunks, holders, slice_bytes=1024)
        for name, box in boxes[rank].items():
            gradient = live[name].grad
            mine[name].grad = None if gradient is None else gradient[box.slices].float()
        own_adam.step()
        gathering = Gathering(plan, groups, lambda n, b: live[n].detach()[b.slices], buffer)
        for chunk in chunks[rank]:
            for piece in chunk.pieces:
                memory = live[piece.name].detach()[piece.box.slices].view(-1)
                new = mine[piece.name].detach().view(-1)
                memory[piece.start : piece.stop] = new[piece.start : piece.stop]
            gathering.updated(chunk.number)
        gathering.finish()
    return [bits(p) for p in plain.parameters()], [bits(p) for p in own.parameters()], stepped_names


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_step_rows_end_with_the_bits_of_plain_ddp(num_ranks: int) -> None:
    results = ranks.values(ranks.run(num_ranks, train, num_ranks))
    reference = results[0][0]
    for plain, own, _ in results:
        assert plain == reference
        assert own == reference
    # DDP agrees on the parameters that have a gradient; so nothing has to be decided here.
    stepped = results[0][2]
    assert all(names == stepped for _, _, names in results)
    assert {"sometimes.weight" in names for names in stepped} == {True, False}
    assert not any("never.weight" in names for names in stepped)
