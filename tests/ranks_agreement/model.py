"""Ranks that write parts and seal them, with nodes that lose what was not synced.

Each rank is on a node of its own and owns the parts there; rank 0 is the writer, whose node has the
names of the checkpoints as well. What the engine and the store do is stood in for by a few local
effects, as plain as they can be; the protocol between them is the library's own code. A run begins
with one checkpoint, of generation 1 in part 0 of every rank.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tests.ranks_agreement.checker import Actor, BlockedError, Raised, State, ViolationError
from tests.ranks_agreement.wing import Wing

Effects = Generator[Any, Any, Any]
Checkpoint = tuple[int, tuple[tuple[int, int], ...]]
"""Generation, and the part of each owner."""

TORN, INVALID = "torn", "invalid"
NUM_PARTS = 4
WRITER = 0


@dataclass(frozen=True)
class Op:
    """A local effect, which only the model performs."""

    name: str

    def __call__(self, *_: object) -> None:
        raise AssertionError(f"{self.name} is performed by the model")

    def __str__(self) -> str:
        return self.name


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
    answers: frozenset[tuple[int, str]] = frozenset()


def whole(generation: int) -> str:
    return f"whole {generation}"


class Ranks:
    """The model.

    Args:
        wing: The protocol.
        size: Number of ranks.
        seals: Number of seals.
        beside: Whether seals run on a thread of their own, beside training.
        keep: Number of checkpoints that are kept.
        skips: Ranks that do not call ``checkpoint()``.
        forgets: Local effect that does nothing, as if engine or store had left it out.
    """

    def __init__(
        self,
        wing: Wing,
        size: int,
        seals: int = 1,
        *,
        beside: bool = False,
        keep: int = 1,
        skips: tuple[int, ...] = (),
        forgets: str = "",
    ) -> None:
        self.wing = wing
        self._size = size
        self._seals = seals
        self._beside = beside
        self._keep = keep
        self._skips = skips
        self._forgets = forgets
        self._checked: set[object] = set()
        self.actors = [Actor(rank, lambda r=rank: self._training(r)) for rank in range(size)]
        if beside:
            self.actors += [Actor(rank, lambda r=rank: self._sealer(r)) for rank in range(size)]

    def first(self, faults: int = 0) -> World:
        """Return the state at the beginning."""
        disk = ((whole(1),) * 2, *[(INVALID, INVALID)] * (NUM_PARTS - 1))
        names = ((1, tuple((rank, 0) for rank in range(self._size))),)
        memory = (Memory(),) * self._size
        return World((disk,) * self._size, names, names, memory, faults)

    # The programs: what the engine does, around the library's.

    def _training(self, rank: int) -> Effects:
        wing, peers = self.wing, self._peers(rank)
        act = wing.effects.Act
        for number in range(self._seals + 1):
            if rank == WRITER and number:
                yield act(Op("withdraw"))
                yield act(Op("sync names"))
            try:
                yield from wing.unanimous.unanimous(
                    wing.unanimous.Exchange(
                        peers=peers,
                        scope=wing.peers.exchange_scope(number),
                        what="step()",
                        make=Op("offer"),
                        ready=Op("ready"),
                        stale=(wing.peers.exchange_scope(number - 1),) if number else (),
                    )
                )
            except wing.unanimous.OutOfStepError:
                return "lost"
            except wing.channel.ChannelLostError:
                return "lost"
            except wing.unanimous.RanksError as error:
                yield act(Op("refused"), (number, str(error)))
                return "refused"
            yield act(Op("write"), (number,))
            if number == self._seals or rank in self._skips:
                return "done"
            if self._beside and number and (yield act(Op("outcome"), (number - 1,))) == "in doubt":
                return "in doubt"
            part = yield act(Op("begin"), (number,))
            try:
                yield from wing.seal.begin(peers, number, part, Op("hold"))
            except wing.channel.ChannelLostError:
                return "lost"
            if self._beside:
                continue
            outcome = yield from self._seal(rank, number)
            if outcome == "in doubt":
                return outcome
        return "done"

    def _sealer(self, rank: int) -> Effects:
        for number in range(self._seals):
            if not (yield self.wing.effects.Act(Op("begun"), (number,))):
                return "done"
            outcome = yield from self._seal(rank, number)
            if outcome == "in doubt":
                return outcome
        return "done"

    def _seal(self, rank: int, number: int) -> Effects:
        wing, peers = self.wing, self._peers(rank)
        act = wing.effects.Act
        generation = part = 0
        error = ""
        try:
            generation, part = yield act(Op("fill"), (number,))
            yield act(Op("sync"), (generation, part))
        except OSError as failure:
            error = str(failure)
        own = wing.reports.Report(step=number, generation=generation, part=str(part), error=error)
        with suppress(wing.channel.ChannelLostError):
            yield from wing.seal.report(peers, number, own)
        if rank == WRITER:
            decision = yield from wing.seal.decide(
                peers, number, own, Op("complete"), Op("rename"), Op("settle")
            )
        else:
            decision = yield from wing.seal.await_decision(peers, number, own, Op("settle"))
        yield act(Op("told"), (number, decision.outcome.value, generation))
        return decision.outcome.value

    def _peers(self, rank: int) -> Any:
        return self.wing.peers.Peers(rank, self._size, 1.0)

    # Their local effects.

    def act(self, state: State, rank: int, call: Any, args: tuple[Any, ...]) -> Iterator[Any]:
        """Yield each outcome of a local effect."""
        world: World = state.world
        if call.name == self._forgets:
            yield world, None
            return
        perform = getattr(self, "_" + call.name.replace(" ", "_"))
        yield perform(state, rank, *args)
        if call.name in _MAY_FAIL and world.faults:
            fault = Raised(OSError(f"{call.name} failed"))
            left = replace(world, faults=world.faults - 1)
            yield left, fault
            if call.name == "rename":  # it happened, and the sync of the directory failed
                yield replace(left, names=self._renamed(world, rank)), fault

    def _withdraw(self, state: State, _: int) -> Any:
        world = state.world
        return replace(world, names=world.names[-self._keep :]), None

    def _sync_names(self, state: State, _: int) -> Any:
        world = state.world
        return replace(world, durable_names=world.names), None

    def _offer(self, state: State, rank: int, _: object) -> Any:
        world: World = state.world
        memory, wing = world.memory[rank], self.wing
        outcomes = dict(memory.outcomes)
        named = tuple((owner, str(part)) for _, parts in world.names for owner, part in parts)
        decided = max(outcomes, default=wing.grant.NO_SEAL)
        in_place = wing.grant.NO_SEAL
        generation = memory.generation + 1
        if outcomes.get(memory.begun) == "aborted" and memory.generation == memory.sealed:
            in_place, generation = memory.begun, memory.generation
        offer = wing.grant.Offer(
            slot="slot",
            generation=generation,
            named=named,
            in_place_of=in_place,
            decided=decided,
        )
        return world, offer.as_json()

    def _ready(self, state: State, rank: int, value: Any) -> Any:
        world: World = state.world
        memory, wing = world.memory[rank], self.wing
        chosen: list[tuple[int, int]] = []
        remembered = [memory]

        def outcome_of(number: int) -> Any:
            if number > memory.begun:
                return None
            if number not in dict(memory.outcomes):
                raise BlockedError
            return wing.ledger.Outcome(dict(memory.outcomes)[number])

        def ready(offer: Any) -> None:
            if offer.is_in_place:
                chosen.append((memory.part, offer.generation))
                return
            ledger = self._ledger(memory).covered(offer.decided)
            remembered.append(self._with_ledger(memory, ledger))
            named = {int(part) for owner, part in offer.named if owner == rank}
            taken = named | {int(part) for part in ledger.held}
            if dict(memory.outcomes).get(memory.begun) == "aborted":
                taken.add(memory.part)  # the engine reads from it, and it is no checkpoint's
            part = min(set(range(NUM_PARTS)) - taken)
            chosen.append((part, offer.generation))

        try:
            offer = wing.grant.Offer.from_json(value)
            wing.grant.accept(self._peers(rank), offer, outcome_of, ready)
        except wing.unanimous.RanksError as error:
            return world, Raised(error)
        part, generation = chosen[0]
        number = memory.begun + 1
        world = replace(world, ready=world.ready | {(number, rank, generation)})
        if not offer.is_in_place:
            self._require_unnamed(world, rank, part)
            world = self._with_part(world, rank, part, INVALID, INVALID)
        memory = replace(remembered[-1], part=part, generation=generation)
        return self._with_memory(world, rank, memory), str(part)

    def _refused(self, state: State, _: int, number: int, text: str) -> Any:
        world = state.world
        return replace(world, answers=world.answers | {(number, text)}), None

    def _write(self, state: State, rank: int, number: int) -> Any:
        world: World = state.world
        memory = world.memory[rank]
        missing = {
            other
            for other in range(self._size)
            if (number, other, memory.generation) not in world.ready
        }
        if missing:
            raise ViolationError(f"rank {rank} writes before ranks {missing} are ready")
        self._require_unnamed(world, rank, memory.part)
        world = replace(world, answers=world.answers | {(number, "go")})
        return self._with_part(world, rank, memory.part, TORN, TORN), None

    def _begin(self, state: State, rank: int, number: int) -> Any:
        memory = state.world.memory[rank]
        memory = replace(memory, begun=number, sealed=memory.generation, sealed_part=memory.part)
        return self._with_memory(state.world, rank, memory), str(memory.part)

    def _begun(self, state: State, rank: int, number: int) -> Any:
        memory = state.world.memory[rank]
        if number not in dict(memory.parts) | dict(memory.outcomes):
            if not memory.is_over:
                raise BlockedError
            return state.world, False
        return state.world, True

    def _outcome(self, state: State, rank: int, number: int) -> Any:
        found = dict(state.world.memory[rank].outcomes).get(number)
        if found is None:
            raise BlockedError
        return state.world, found

    def _fill(self, state: State, rank: int, _: int) -> Any:
        world: World = state.world
        memory = world.memory[rank]
        # With a seal beside training, the working part may be another one by now.
        generation, part = memory.sealed, memory.sealed_part
        self._require_unnamed(world, rank, part)
        world = self._with_part(world, rank, part, whole(generation), TORN)
        return world, (generation, part)

    def _sync(self, state: State, rank: int, generation: int, part: int) -> Any:
        world: World = state.world
        return self._with_part(
            world, rank, part, world.disks[rank][part][0], whole(generation)
        ), None

    def _hold(self, state: State, rank: int, number: int, part: str) -> Any:
        memory = state.world.memory[rank]
        ledger = self._ledger(memory).begun(number, part)
        return self._with_memory(state.world, rank, self._with_ledger(memory, ledger)), None

    def _settle(self, state: State, rank: int, number: int, outcome: Any) -> Any:
        memory = state.world.memory[rank]
        ledger = self._ledger(memory).settled(number, outcome)
        return self._with_memory(state.world, rank, self._with_ledger(memory, ledger)), None

    def _complete(self, state: State, rank: int, reports: Any) -> Any:
        world: World = state.world
        memory = world.memory[rank]
        parts = tuple((owner, int(report.part)) for owner, report in sorted(reports.items()))
        left = self.wing.peers.key(self.wing.peers.seal_scope(memory.begun), "left")
        memory = replace(memory, manifest=(memory.sealed, parts), was_left=left in dict(state.keys))
        return self._with_memory(world, rank, memory), None

    def _renamed(self, world: World, rank: int) -> tuple[Checkpoint, ...]:
        manifest = world.memory[rank].manifest
        if manifest is None:
            raise ViolationError("renamed without a manifest")
        return (*world.names, manifest)

    def _rename(self, state: State, rank: int) -> Any:
        world: World = state.world
        if world.memory[rank].was_left:
            raise ViolationError("published although a rank was known to have given up")
        names = self._renamed(world, rank)
        world = replace(world, names=names)
        self.check(replace(state, world=world))  # killed before the sync
        return replace(world, durable_names=names), None

    def _told(self, state: State, rank: int, number: int, outcome: str, generation: int) -> Any:
        world: World = state.world
        if outcome == "in doubt":
            left = self.wing.peers.key(self.wing.peers.seal_scope(number), "left")
            is_decided = number in dict(world.memory[WRITER].outcomes)
            if not is_decided and not state.is_lost and left not in dict(state.keys):
                raise ViolationError(f"rank {rank} gives up, and the writer cannot know it")
            return world, None
        world = replace(world, told=world.told | {(number, outcome)})
        if outcome == "published":
            world = replace(world, acknowledged=max(world.acknowledged, generation))
        return world, None

    def ended(self, world: World, actor: int, _: Any) -> World:
        """Return the world after a program has ended."""
        if actor >= self._size:
            return world  # a thread that seals
        return self._with_memory(world, actor, replace(world.memory[actor], is_over=True))

    # Invariants.

    def check(self, state: State) -> None:
        """Check every way in which nodes may lose power now, and what was said so far."""
        world: World = state.world
        key = (world.disks, world.names, world.durable_names, world.acknowledged)
        if (key, world.told, world.answers) in self._checked:
            return
        self._checked.add((key, world.told, world.answers))
        for number in {number for number, _ in world.told}:
            if len({outcome for n, outcome in world.told if n == number}) > 1:
                raise ViolationError(f"ranks were told different outcomes: {world.told}")
        for number in {number for number, _ in world.answers}:
            answers = {text for n, text in world.answers if n == number}
            if len(answers) > 1:
                raise ViolationError(f"ranks were told different things: {answers}")
        if key in self._checked:
            return
        self._checked.add(key)
        for cut in product((0, 1), repeat=self._size):
            self._check_reopened(world, cut)

    def _check_reopened(self, world: World, cut: tuple[int, ...]) -> None:
        """Check what the next job finds if power was lost on some nodes."""
        names = world.durable_names if cut[WRITER] else world.names
        found = [
            [content[cut[rank]] for content in world.disks[rank]] for rank in range(self._size)
        ]
        for generation, parts in names:
            if [owner for owner, _ in parts] != [*range(self._size)]:
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
        sights = [self._sight(names, found, node) for node in range(self._size)]
        for order in (sights, sights[::-1]):
            plan = self.wing.opening.decide(order)
            if plan.checkpoint != (newest, newest) or plan.refused:
                raise ViolationError(f"reopened with {plan.checkpoint}, expected {newest}")
            if plan.writer != order.index(sights[WRITER]):
                raise ViolationError(f"the writer is {plan.writer}")

    def _sight(self, names: tuple[Checkpoint, ...], found: list[list[str]], node: int) -> Any:
        sights = self.wing.sights
        checkpoints = tuple(
            sights.CheckpointSight(
                step=generation,
                generation=generation,
                parts=tuple((o + 1, str(part), whole(generation)) for o, part in parts),
            )
            for generation, parts in names
        )
        parts = tuple(
            sights.PartSight(name=str(part), digest=content)
            for part, content in enumerate(found[node])
        )
        # The model's owner 0 is like any other, so all are counted from 1 here.
        owner = sights.OwnerSight(owner=node + 1, place=f"node {node}", parts=parts)
        store = sights.StoreSight(
            store_id="store",
            place="first" if node == WRITER else "",
            checkpoints=checkpoints if node == WRITER else (),
            owners=(owner,),
        )
        return sights.Sight(host=f"node{node}", new_id="new", stores=(store,))

    def _require_unnamed(self, world: World, rank: int, part: int) -> None:
        for names in (world.names, world.durable_names):
            for generation, parts in names:
                if (rank, part) in parts:
                    raise ViolationError(
                        f"rank {rank} writes to part {part}, which checkpoint {generation} names"
                    )

    # Pieces of the world.

    def _ledger(self, memory: Memory) -> Any:
        outcomes = {n: self.wing.ledger.Outcome(value) for n, value in memory.outcomes}
        return self.wing.ledger.Ledger(dict(memory.parts), outcomes)

    def _with_ledger(self, memory: Memory, ledger: Any) -> Memory:
        outcomes = tuple(sorted((n, outcome.value) for n, outcome in ledger.outcomes.items()))
        return replace(memory, parts=tuple(sorted(ledger.parts.items())), outcomes=outcomes)

    def _with_memory(self, world: World, rank: int, memory: Memory) -> World:
        every = list(world.memory)
        every[rank] = memory
        return replace(world, memory=tuple(every))

    def _with_part(self, world: World, rank: int, part: int, now: str, durable: str) -> World:
        disk = list(world.disks[rank])
        disk[part] = (now, durable)
        disks = list(world.disks)
        disks[rank] = tuple(disk)
        return replace(world, disks=tuple(disks))


_MAY_FAIL = {"ready", "fill", "sync", "complete", "rename", "offer"}
