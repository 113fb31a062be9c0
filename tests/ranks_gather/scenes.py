"""What the ranks of the tests do; each function runs in a process of its own."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offload.distributed.gathering.gather import BounceBuffer, Gathering
from offload.distributed.gathering.gather_plan import (
    BoxKey,
    BoxPiece,
    RankChunk,
    Transfer,
)
from offload.distributed.gathering.holder_groups import HolderGroups
from offload.format.boxes import Box
from tests.limits import AGREEMENT_S, HANG_S, SHORT_AGREEMENT_S
from tests.ranks_gather.worlds import (
    DTYPES,
    SLICE_BYTES,
    World,
    holder_choices,
    memory,
    new_values,
)

Bits = dict[str, bytes]


class Rank:
    """One rank's tensors of a world, and its pass over its chunks."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.tensors = {
            name: memory(shape, dtype, scattered=name in world.scattered[rank])
            for name, (shape, dtype) in world.tensors.items()
        }
        self.versions = {name: tensor._version for name, tensor in self.tensors.items()}
        self._new = {n: new_values(n, *about) for n, about in world.tensors.items()}

    def live(self, name: str, box: Box) -> torch.Tensor:
        assert self.rank in self.world.holders[name, box]
        return self.tensors[name].detach()[box.slices]

    def update(self, chunk: RankChunk) -> None:
        """Write new values, without a change of versions, so that those of a gathering show."""
        for piece in chunk.pieces:
            box = self._new[piece.name][piece.box.slices]
            live = self.live(piece.name, piece.box).data
            if piece.key not in self.world.late:
                live.view(-1)[piece.start : piece.stop] = box.reshape(-1)[piece.start : piece.stop]
            elif chunk is self._last_of(piece.key):
                live.copy_(box)

    def _last_of(self, key: BoxKey) -> RankChunk:
        own = self.world.chunks[self.rank]
        return [chunk for chunk in own if any(piece.key == key for piece in chunk.pieces)][-1]

    def range(self, piece: BoxPiece) -> torch.Tensor:
        """Return a copy of a piece's present values."""
        box = self.live(piece.name, piece.box)
        return box.reshape(-1)[piece.start : piece.stop].clone()

    def expected(self, piece: BoxPiece) -> torch.Tensor:
        return self._new[piece.name][piece.box.slices].reshape(-1)[piece.start : piece.stop]

    def bits(self) -> Bits:
        return {name: bits(tensor) for name, tensor in self.tensors.items()}


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def gather_worlds(rank: int, worlds: list[World], num_slots: int) -> list[tuple[Bits, list[int]]]:
    """Gather world after world; return this rank's tensors, and the changes of their versions."""
    num_ranks = dist.get_world_size()
    sets = {choice for choice in holder_choices(num_ranks, "mixed") if choice}
    groups = HolderGroups(sets, timeout_s=AGREEMENT_S)
    buffer = BounceBuffer(SLICE_BYTES, num_slots)
    waits = random.Random(rank)
    found = []
    for world in worlds:
        own = Rank(world, rank)

        def arrived(transfer: Transfer, own: Rank = own) -> None:
            assert transfer.owner != own.rank
            for piece in transfer.pieces:
                assert bits(own.range(piece)) == bits(own.expected(piece))

        gathering = Gathering(world.plan(), groups, own.live, buffer, arrived=arrived)
        for chunk in world.chunks[rank]:
            time.sleep(waits.random() / 500)
            own.update(chunk)
            gathering.updated(chunk.number)
        gathering.finish()
        changes = [t._version - own.versions[n] for n, t in own.tensors.items()]
        found.append((own.bits(), changes))
    return found


def ddp_world(num_ranks: int, num_chunks: int, length: int = 3000) -> World:
    """Return a world in which each rank updates `num_chunks` chunks of a tensor of its own."""
    world = World(num_ranks, chunks=[[] for _ in range(num_ranks)])
    everyone = tuple(range(num_ranks))
    for rank in everyone:
        world.scattered[rank] = set()
        name, box = f"t{rank}", Box.whole((num_chunks * length,))
        dtype = [*DTYPES][rank % 3]
        world.tensors[name] = box.sizes, dtype
        world.holders[name, box], world.owners[name, box] = everyone, rank
        for n in range(num_chunks):
            piece = BoxPiece(name, box, dtype, n * length, (n + 1) * length)
            world.chunks[rank].append(RankChunk(n, (piece,)))
    return world


def _run(
    own: Rank,
    gathering: Gathering,
    before: Callable[[RankChunk], object] = lambda _: None,
) -> None:
    """Run a pass as an engine does; raises what the engine would raise."""
    try:
        for chunk in own.world.chunks[own.rank]:
            before(chunk)
            own.update(chunk)
            gathering.updated(chunk.number)
    except BaseException as error:
        failure = gathering.fail(error)
        if failure is error:
            raise
        raise failure from error
    gathering.finish()


class Fault(Exception):  # noqa: N818
    """A fault that a test injects."""


Faults = dict[int, tuple[str, int]]
"""Ranks that fail, each at the n-th call of a place."""


def gather_with_faults(rank: int, world: World, cases: dict[str, Faults]) -> dict[str, Any]:
    """Gather once for each case."""
    return {name: gather_with_fault(rank, world, faults) for name, faults in cases.items()}


def gather_with_fault(rank: int, world: World, faults: Faults) -> Any:
    """Gather; ranks fail. Then show that ranks still talk.

    Returns:
        Class, message, and class of the cause; and the sum of all ranks' numbers.
    """
    place, count = faults.get(rank, ("", 0))
    left = [count]

    def maybe(here: str) -> None:
        if place == here:
            left[0] -= 1
            if left[0] < 0:
                raise Fault(f"the drive of {here} is gone")

    def live(name: str, box: Box) -> torch.Tensor:
        maybe("live")
        return own.live(name, box)

    own = Rank(world, rank)
    plan = world.plan()
    groups = HolderGroups({t.holders for t in plan.transfers}, timeout_s=AGREEMENT_S)
    gathering = Gathering(
        plan,
        groups,
        live,
        BounceBuffer(SLICE_BYTES),
        before_write=lambda _: maybe("before_write"),
        arrived=lambda _: maybe("arrived"),
    )

    try:
        _run(own, gathering, lambda _: maybe("pass"))
    except BaseException as error:  # noqa: BLE001
        said = (type(error).__name__, str(error), type(error.__cause__).__name__)
    else:
        said = ("", "", "")
    numbers = torch.tensor([rank + 1])
    dist.all_reduce(numbers)
    return said, numbers.item()


def shorten(groups: HolderGroups) -> None:
    """Give groups that are connected a short limit, which is waited for."""
    for group in (groups.everyone, *groups._groups.values()):
        group._set_default_timeout(timedelta(seconds=SHORT_AGREEMENT_S))  # type: ignore[attr-defined]


def gather_beside_a_seal(rank: int, world: World) -> tuple[Bits, Bits]:
    """Gather while a seal copies the old values slowly; return what it copied, and the values."""
    own = Rank(world, rank)
    plan = world.plan()
    groups = HolderGroups({t.holders for t in plan.transfers}, timeout_s=AGREEMENT_S)
    copied: dict[str, torch.Tensor] = {}
    changed = threading.Condition()
    versions: list[int] = []

    def seal() -> None:
        for name, tensor in own.tensors.items():
            time.sleep(0.05)
            old = tensor.detach().clone()
            versions.append(tensor._version - own.versions[name])
            with changed:
                copied[name] = old
                changed.notify_all()

    def wait(name: str) -> None:
        with changed:
            assert changed.wait_for(lambda: name in copied, timeout=HANG_S)

    thread = threading.Thread(target=seal)
    thread.start()
    gathering = Gathering(
        plan,
        groups,
        own.live,
        BounceBuffer(SLICE_BYTES),
        before_write=lambda piece: wait(piece.name),
    )
    own_chunks = {piece.name for chunk in world.chunks[rank] for piece in chunk.pieces}
    _run(own, gathering, lambda _: [wait(name) for name in own_chunks])
    thread.join()
    assert not any(versions)
    return {name: bits(tensor) for name, tensor in copied.items()}, own.bits()
