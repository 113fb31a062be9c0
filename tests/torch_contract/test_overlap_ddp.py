"""overlap="backward" beside a DistributedDataParallel, in a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gds import MemoryBackend
from offload import AdamW, Options
from offload.errors import OverlapError


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))


def construct(model: torch.nn.Module, overlap: Any = "backward", **changes: Any) -> AdamW:
    settings = Options(
        backend=MemoryBackend(), allow_volatile=True, chunk_bytes=4096, overlap=overlap
    )
    params = changes.pop("params", None) or model.parameters()
    return AdamW(params, directory="/store", model=model, options=settings, lr=0.01)


@pytest.mark.parametrize("part", [False, True], ids=["model", "part"])
def test_a_model_that_is_in_one_is_refused_before_a_store_is_made(part: bool) -> None:
    model = linear()
    wrapped = DistributedDataParallel(model)
    with pytest.raises(OverlapError, match=r"DistributedDataParallel.*'module\.\d\.\w+'.*forward"):
        construct(model[1] if part else model)  # type: ignore[index]
    assert wrapped.module is model


def test_one_that_is_made_later_is_refused_at_its_forward() -> None:
    model = linear()
    before = [p.detach().clone() for p in model.parameters()]
    with construct(model) as optimizer:
        wrapped = DistributedDataParallel(model)
        with pytest.raises(
            OverlapError, match=r"a DistributedDataParallel calls the model.*forward"
        ):
            wrapped(torch.ones(2, 8))
        assert all(map(torch.equal, before, model.parameters()))
        del wrapped
        DistributedDataParallel(linear())(torch.ones(2, 8)).sum().backward()  # of another model
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.checkpoint().result()


@pytest.mark.parametrize("overlap", [None, "forward"])
def test_other_steps_are_taken_with_the_gradients_that_it_leaves(overlap: Any) -> None:
    model, expected = linear(), linear()
    wrapped = DistributedDataParallel(model)
    plain = torch.optim.AdamW(expected.parameters(), lr=0.01, foreach=False)
    with construct(model, overlap) as optimizer:
        for step in range(4):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
            for called, owner in ((wrapped, optimizer), (expected, plain)):
                called(x).sum().backward()
                owner.step()
                owner.zero_grad()
        optimizer.checkpoint().result()
        assert all(map(torch.equal, model.parameters(), expected.parameters()))
