"""Small models whose boxes are dealt to ranks at random, and the values that they must get."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from offload.distributed.gathering.gather_plan import BoxKey, BoxPiece, GatherPlan, RankChunk
from offload.format.boxes import Box

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SLICE_BYTES = 256


@dataclass
class World:
    """A model, and who updates and holds what."""

    num_ranks: int
    tensors: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """Shape and dtype of each tensor."""

    holders: dict[BoxKey, tuple[int, ...]] = field(default_factory=dict)
    owners: dict[BoxKey, int] = field(default_factory=dict)
    chunks: list[list[RankChunk]] = field(default_factory=list)
    scattered: dict[int, set[str]] = field(default_factory=dict)
    """For each rank, the tensors whose memory is not contiguous on it."""

    @property
    def late(self) -> set[BoxKey]:
        return {key for key, owner in self.owners.items() if key[0] in self.scattered[owner]}

    def plan(self) -> GatherPlan:
        return GatherPlan(self.chunks, self.holders, late=self.late, slice_bytes=SLICE_BYTES)


def holder_choices(num_ranks: int, kind: str) -> list[tuple[int, ...]]:
    """Return the possible sets of holders of a box."""
    everyone = tuple(range(num_ranks))
    alone = [(rank,) for rank in everyone]
    if kind == "ddp":
        return [everyone]
    if kind == "fsdp":
        return alone
    halves = [
        everyone[0::2],
        everyone[1::2],
        everyone[: num_ranks // 2],
        everyone[num_ranks // 2 :],
    ]
    return [everyone, *filter(None, halves), *alone]


def random_world(seed: int, num_ranks: int, kind: str, *, idle: bool = False) -> World:
    """Return a world.

    Args:
        seed: Of the random choices.
        num_ranks: Number of ranks.
        kind: ``ddp``: all ranks hold all; ``fsdp``: each box is on one rank; ``mixed``.
        idle: Whether the last rank updates nothing, and the first one most.
    """
    rng = random.Random(seed)
    world = World(num_ranks, chunks=[[] for _ in range(num_ranks)])
    choices = holder_choices(num_ranks, kind)
    pieces: list[list[BoxPiece]] = [[] for _ in range(num_ranks)]
    for index in range(rng.randint(1, 7)):
        rank_of_shape = rng.randint(0, 3)
        shape = tuple(rng.choice([1, 2, 3, 5, 8, 21]) for _ in range(rank_of_shape))
        if rng.random() < 0.1:
            shape = (0, 3)
        name, dtype = f"t{index}", rng.choice([*DTYPES])
        world.tensors[name] = shape, dtype
        for box in row_boxes(rng, shape, num_ranks):
            key = name, box
            held_by = rng.choice(choices)
            able = [r for r in held_by if not (idle and r == num_ranks - 1)] or list(held_by)
            owner = able[0] if idle and rng.random() < 0.7 else rng.choice(able)
            world.holders[key], world.owners[key] = held_by, owner
            cuts = sorted(rng.randint(0, box.num_elements) for _ in range(rng.randint(0, 2)))
            for start, stop in zip([0, *cuts], [*cuts, box.num_elements], strict=True):
                pieces[owner].append(BoxPiece(name, box, dtype, start, stop))
    for rank, own in enumerate(pieces):
        numbers = rng.sample(range(100), len(own))  # the order need not be ascending
        while own:
            size = rng.randint(1, 3)
            world.chunks[rank].append(RankChunk(numbers.pop(), tuple(own[:size])))
            del own[:size]
        world.scattered[rank] = {n for n in world.tensors if rng.random() < 0.3}
    return world


def row_boxes(rng: random.Random, shape: tuple[int, ...], num_ranks: int) -> list[Box]:
    """Cut a tensor between rows into a random number of boxes."""
    if not shape or shape[0] < 2:
        return [Box.whole(shape)]
    cuts = sorted(rng.sample(range(1, shape[0]), min(rng.randint(0, num_ranks), shape[0] - 1)))
    rest = shape[1:]
    ends = zip([0, *cuts], [*cuts, shape[0]], strict=True)
    return [Box((a, *(0 for _ in rest)), (b - a, *rest)) for a, b in ends]


def memory(shape: tuple[int, ...], dtype: str, *, scattered: bool) -> torch.Tensor:
    """Return a tensor of -1, with memory in another order than its elements if it is scattered."""
    if scattered and len(shape) > 1:
        order = tuple(reversed(range(len(shape))))
        return torch.full(shape[::-1], -1.0, dtype=DTYPES[dtype]).permute(order)
    return torch.full(shape, -1.0, dtype=DTYPES[dtype])


def new_values(name: str, shape: tuple[int, ...], dtype: str, step: int = 1) -> torch.Tensor:
    """Return what all elements of a tensor must be after a step, whoever updates them."""
    generator = torch.Generator().manual_seed(step * 1000 + int(name[1:]))
    return torch.randn(shape, generator=generator).to(DTYPES[dtype])
