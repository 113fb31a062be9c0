"""How much ranks send each other in the constructor to know who has what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from offload.distributed.ownership import Ownership
from offload.format.boxes import Box, Cut
from offload.format.shares.dealing import own_boxes

SIZE = 1024
RANK = 5
SHAPES = [(2048, 3), (1030, 2), (7, 5), (1024,), (3,)]
PLACEMENTS = {
    "fully_shard": ((SIZE,), [Shard(0)]),
    "replicated shards": ((4, SIZE // 4), [Replicate(), Shard(0)]),
    "tensor parallelism": ((SIZE // 4, 4), [Shard(0), Shard(1)]),
    "twice in one dimension": ((SIZE // 4, 4), [Shard(0), Shard(0)]),
}


class Exchange:
    """Says for all other ranks what this one says, and counts bytes as JSON."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.received: list[int] = []

    def __call__(self, mine: Any) -> list[Any]:
        said = [mine] * SIZE
        self.sent.append(len(json.dumps(mine)))
        self.received.append(len(json.dumps(said)))
        return said


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=RANK, world_size=SIZE, store=FakeStore())
    yield
    dist.destroy_process_group()


def sharded(mesh_shape: tuple[int, ...], placements: list[Any]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", mesh_shape)
    found = {}
    for number, shape in enumerate(SHAPES):
        own = [p for p in placements if not isinstance(p, Shard) or p.dim < len(shape)]
        if len(own) < len(placements):
            continue
        coordinate = mesh.get_coordinate()
        sizes, _ = _compute_local_shape_and_global_offset(shape, mesh_shape, coordinate, own)
        stride = torch.empty(shape, device="meta").stride()
        found[f"p{number}"] = torch.nn.Parameter(
            DTensor.from_local(
                torch.zeros(sizes), mesh, own, run_check=False, shape=shape, stride=stride
            )
        )
    return found


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("case", PLACEMENTS)
def test_boxes_that_all_ranks_can_compute_are_not_sent(case: str) -> None:
    mesh_shape, placements = PLACEMENTS[case]
    tensors = sharded(mesh_shape, placements)
    exchange = Exchange()
    ownership = Ownership(RANK, SIZE, 1, exchange)
    ownership.know([*tensors.items()], replaces=True)
    assert exchange.sent == [72], "two digests"
    assert exchange.received[0] <= 80 * SIZE
    # What torch says of each rank, if asked one by one.
    mesh = torch.arange(SIZE).view(mesh_shape)
    views = [
        [
            (name, Cut(tuple(t.shape), Box(tuple(map(int, offsets)), tuple(map(int, sizes)))))
            for name, t in tensors.items()
            for sizes, offsets in [
                _compute_local_shape_and_global_offset(
                    tuple(t.shape), mesh_shape, (mesh == rank).nonzero()[0].tolist(), placements
                )
            ]
        ]
        for rank in range(SIZE)
    ]
    assert ownership.boxes == own_boxes(views)


def test_the_same_model_is_compared_by_its_digest() -> None:
    named = [(f"layer.{n}", torch.nn.Parameter(torch.zeros(8, 4))) for n in range(300)]
    exchange = Exchange()
    Ownership(RANK, SIZE, 1, exchange).know(named, replaces=True)
    assert exchange.sent == [40]
