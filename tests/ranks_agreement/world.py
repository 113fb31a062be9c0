"""The world of the modelled ranks: disks that lose what was not synced, names, and memory.

Each rank is on a node of its own and owns the parts there; rank 0 is the writer, whose node has the
names of the checkpoints as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tests.ranks_agreement.checker import ViolationError
from tests.ranks_agreement.wing import Wing

Checkpoint = tuple[int, tuple[tuple[int, int], ...]]
"""Generation, and the part of each owner."""

TORN, INVALID = "torn", "invalid"
NUM_PARTS = 4
WRITER = 0


def whole(generation: int) -> str:
    """Return the content of a part that is whole."""
    return f"whole {generation}"


@dataclass(frozen=True)
class Memory:
    """What a rank knows besides the variables of its programs; it dies with the rank."""

    parts: tuple[tuple[int, str], ...] = ()
    outcomes: tuple[tuple[int, str], ...] = ()
    part: int = -1
    generation: int = 1
    begun: int = -1
    sealed: int = 1
    """Generation of the newest seal that was begun."""

    sealed_part: int = -1

    is_over: bool = False
    """Whether training has ended on this rank, so that no further seal begins."""

    manifest: Checkpoint | None = None
    was_left: bool = False
    """Whether some rank had given up when the manifest was complete."""


@dataclass(frozen=True)
class World:
    """All but the programs and the key-value store."""

    disks: tuple[tuple[tuple[str, str], ...], ...]
    """Content of each part of each rank: as programs see it, and as it is after a power cut."""

    names: tuple[Checkpoint, ...]
    durable_names: tuple[Checkpoint, ...]
    memory: tuple[Memory, ...]
    faults: int
    """Number of local effects that may still fail."""

    ready: frozenset[tuple[int, int, int]] = frozenset()
    """Exchange, rank and generation of each rank that got ready."""

    acknowledged: int = 1
    told: frozenset[tuple[int, str]] = frozenset()
    """Each seal, and what became of it as some rank was told."""

    answers: frozenset[tuple[int, str]] = frozenset()
    """Each exchange, and its result on some rank."""

    def with_memory(self, rank: int, **changes: Any) -> World:
        """Return the world with changes in the memory of a rank."""
        every = list(self.memory)
        every[rank] = replace(every[rank], **changes)
        return replace(self, memory=tuple(every))

    def with_part(self, rank: int, part: int, now: str, durable: str) -> World:
        """Return the world with other content of a part."""
        disks = [list(disk) for disk in self.disks]
        disks[rank][part] = (now, durable)
        return replace(self, disks=tuple(map(tuple, disks)))

    def require_unnamed(self, rank: int, part: int) -> None:
        """Check that no checkpoint names a part, which is about to be written to."""
        for generation, parts in (*self.names, *self.durable_names):
            if (rank, part) in parts:
                raise ViolationError(
                    f"rank {rank} writes to part {part}, which checkpoint {generation} names"
                )


def begin(size: int, faults: int) -> World:
    """Return the world of ranks that have one checkpoint, of generation 1 in part 0."""
    disk = ((whole(1),) * 2, *[(INVALID, INVALID)] * (NUM_PARTS - 1))
    names = ((1, tuple((rank, 0) for rank in range(size))),)
    return World((disk,) * size, names, names, (Memory(),) * size, faults)


class Invariants:
    """What holds in every state; each part of a state is checked once."""

    def __init__(self, wing: Wing) -> None:
        self._wing = wing
        self._checked: set[object] = set()

    def check(self, world: World) -> None:
        """Check every way in which nodes may lose power now, and what was said so far."""
        for said in (world.told, world.answers):
            if len({number for number, _ in said}) < len(said):
                raise ViolationError(f"ranks were told different things: {sorted(said)}")
        key = (world.disks, world.names, world.durable_names, world.acknowledged)
        if key in self._checked:
            return
        self._checked.add(key)
        for cut in product((0, 1), repeat=len(world.disks)):
            self._check_reopened(world, cut)

    def _check_reopened(self, world: World, cut: tuple[int, ...]) -> None:
        """Check what the next job finds if power was lost on some nodes."""
        names = world.durable_names if cut[WRITER] else world.names
        found = [[content[lost] for content in d] for d, lost in zip(world.disks, cut, strict=True)]
        for generation, parts in names:
            if [owner for owner, _ in parts] != [*range(len(found))]:
                raise ViolationError(f"checkpoint {generation} has no part of some ranks: {parts}")
            for owner, part in parts:
                if found[owner][part] != whole(generation):
                    raise ViolationError(
                        f"checkpoint {generation} names part {part} of rank {owner}, which is "
                        f"{found[owner][part]!r}; power lost on {cut}"
                    )
        newest = max(generation for generation, _ in names)
        if newest < world.acknowledged:
            raise ViolationError(f"checkpoint {world.acknowledged} was acknowledged, and is gone")
        sights = [self._sight(names, content, node) for node, content in enumerate(found)]
        for order in (sights, sights[::-1]):
            plan = self._wing.opening.plan_opening(order)
            if plan.checkpoint != (newest, newest) or plan.refused:
                raise ViolationError(f"reopened with {plan.checkpoint}, expected {newest}")
            if plan.writer != order.index(sights[WRITER]):
                raise ViolationError(f"the writer is {plan.writer}")

    def _sight(self, names: tuple[Checkpoint, ...], found: list[str], node: int) -> Any:
        """Return what a rank sees; the model's owner 0 is like any other, so they begin at 1."""
        sights = self._wing.sights
        checkpoints = tuple(
            sights.CheckpointSight(
                step=generation,
                generation=generation,
                parts=tuple((o + 1, str(part), whole(generation)) for o, part in parts),
            )
            for generation, parts in names
        )
        parts = tuple(sights.PartSight(name=str(n), digest=c) for n, c in enumerate(found))
        owner = sights.OwnerSight(owner=node + 1, place=f"node {node}", parts=parts)
        store = sights.StoreSight(
            store_id="store",
            place="first" if node == WRITER else "",
            checkpoints=checkpoints if node == WRITER else (),
            owners=(owner,),
        )
        return sights.Sight(host=f"node{node}", new_id="new", stores=(store,))
