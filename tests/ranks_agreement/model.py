"""Ranks that write parts and seal them, with nodes that lose what was not synced.

What the engine and the store do is stood in for by a few local effects, as plain as they can be;
the protocol between them is the library's own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tests.ranks_agreement.checker import (
    Actor,
    BlockedError,
    Effects,
    Raised,
    State,
    ViolationError,
)
from tests.ranks_agreement.wing import Wing
from tests.ranks_agreement.world import (
    INVALID,
    NUM_PARTS,
    TORN,
    WRITER,
    Checkpoint,
    Invariants,
    Memory,
    World,
    whole,
)

_MAY_FAIL = {"ready", "fill", "sync", "complete", "rename", "offer"}


@dataclass(frozen=True)
class Op:
    """A local effect, which only the model performs."""

    name: str

    def __call__(self, *_: object) -> None:
        raise AssertionError(f"{self.name} is performed by the model")

    def __str__(self) -> str:
        return self.name


class Ranks:
    """The model.

    Args:
        wing: The protocol.
        size: Number of ranks.
        seals: Number of seals.
        beside: Whether seals run on a thread of their own, beside training.
        skips: Ranks that do not call ``checkpoint()``.
        forgets: Local effect that does nothing, as if engine or store had left it out.
    """

    def __init__(
        self,
        wing: Wing,
        size: int,
        seals: int,
        *,
        beside: bool,
        skips: tuple[int, ...],
        forgets: str,
    ) -> None:
        self.wing = wing
        self._size = size
        self._seals = seals
        self._beside = beside
        self._skips = skips
        self._forgets = forgets
        self._invariants = Invariants(wing)
        self.actors = [Actor(rank, lambda r=rank: self._training(r)) for rank in range(size)]
        if beside:
            self.actors += [Actor(rank, lambda r=rank: self._sealer(r)) for rank in range(size)]

    # The programs: what the engine does, around the library's.

    def _training(self, rank: int) -> Effects:
        wing, peers = self.wing, self._peers(rank)
        act, scope = wing.effects.Act, wing.peers.exchange_scope
        for number in range(self._seals + 1):
            if rank == WRITER and number:
                yield act(Op("withdraw"))
                yield act(Op("sync names"))
            exchange = wing.unanimous.Exchange(
                peers=peers,
                scope=scope(number),
                what="step()",
                make=Op("offer"),
                ready=Op("ready"),
                stale=(scope(number - 1),) if number else (),
            )
            try:
                yield from wing.unanimous.unanimous(exchange)
            except (wing.unanimous.OutOfStepError, wing.effects.ChannelLostError):
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
            except wing.effects.ChannelLostError:
                return "lost"
            if not self._beside and (yield from self._seal(rank, number)) == "in doubt":
                return "in doubt"
        return "done"

    def _sealer(self, rank: int) -> Effects:
        for number in range(self._seals):
            if not (yield self.wing.effects.Act(Op("begun"), (number,))):
                return "done"
            if (yield from self._seal(rank, number)) == "in doubt":
                return "in doubt"
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
        with suppress(wing.effects.ChannelLostError):
            yield from wing.seal.report(peers, number, own)
        if rank == WRITER:
            ops = Op("complete"), Op("rename"), Op("settle")
            decision = yield from wing.seal.commit(peers, number, own, *ops)
        else:
            decision = yield from wing.seal.await_decision(peers, number, own, Op("settle"))
        yield act(Op("told"), (number, decision.outcome.value, generation))
        return decision.outcome.value

    def _peers(self, rank: int) -> Any:
        return self.wing.peers.Peers(rank, self._size, 1.0)

    # Their local effects: each returns the world after it, and a result.

    def act(self, state: State, rank: int, call: Any, args: tuple[Any, ...]) -> Iterator[Any]:
        """Yield each outcome of a local effect."""
        world: World = state.world
        if call.name == self._forgets:
            yield world, None
            return
        perform = getattr(self, "_" + call.name.replace(" ", "_"))
        yield perform(state, world, rank, *args)
        if call.name in _MAY_FAIL and world.faults:
            fault = Raised(OSError(f"{call.name} failed"))
            left = replace(world, faults=world.faults - 1)
            yield left, fault
            if call.name == "rename":  # it happened, and the sync of the directory failed
                yield replace(left, names=self._renamed(world, rank)), fault

    def _withdraw(self, _state: State, world: World, _: int) -> Any:
        return replace(world, names=world.names[-1:]), None

    def _sync_names(self, _state: State, world: World, _: int) -> Any:
        return replace(world, durable_names=world.names), None

    def _offer(self, _state: State, world: World, rank: int, _: object) -> Any:
        memory, wing = world.memory[rank], self.wing
        outcomes = dict(memory.outcomes)
        named = tuple((owner, str(part)) for _, parts in world.names for owner, part in parts)
        in_place = wing.seal.NO_SEAL
        generation = memory.generation + 1
        if outcomes.get(memory.begun) == "aborted" and memory.generation == memory.sealed:
            in_place, generation = memory.begun, memory.generation
        offer = wing.seal.Offer(
            slot="slot",
            generation=generation,
            named=named,
            in_place_of=in_place,
            decided=max(outcomes, default=wing.seal.NO_SEAL),
        )
        return world, offer.as_json()

    def _ready(self, _state: State, world: World, rank: int, value: Any) -> Any:
        memory, wing = world.memory[rank], self.wing
        outcomes = dict(memory.outcomes)
        chosen: list[int] = []
        ledgers: list[Any] = []

        def outcome_of(number: int) -> Any:
            if number > memory.begun:
                return None
            if number not in outcomes:
                raise BlockedError
            return wing.seal.Outcome(outcomes[number])

        def ready(offer: Any) -> None:
            if offer.is_in_place:
                chosen.append(memory.part)
                return
            ledger = self._ledger(memory).covered(offer.decided)
            ledgers.append(ledger)
            taken = {int(part) for owner, part in offer.named if owner == rank}
            taken |= {int(part) for part in ledger.held}
            if outcomes.get(memory.begun) == "aborted":
                taken.add(memory.part)  # the engine reads from it, and it is no checkpoint's
            chosen.append(min(set(range(NUM_PARTS)) - taken))

        offer = wing.seal.Offer.from_json(value)
        try:
            wing.seal.accept(self._peers(rank), offer, outcome_of, ready)
        except wing.unanimous.RanksError as error:
            return world, Raised(error)
        (part,) = chosen
        number = memory.begun + 1
        world = replace(world, ready=world.ready | {(number, rank, offer.generation)})
        if not offer.is_in_place:
            world.require_unnamed(rank, part)
            world = self._with_ledger(world, rank, ledgers[0])
            world = world.with_part(rank, part, INVALID, INVALID)
        return world.with_memory(rank, part=part, generation=offer.generation), str(part)

    def _refused(self, _state: State, world: World, _: int, number: int, text: str) -> Any:
        return replace(world, answers=world.answers | {(number, text)}), None

    def _write(self, _state: State, world: World, rank: int, number: int) -> Any:
        memory = world.memory[rank]
        every = {(number, other, memory.generation) for other in range(self._size)}
        if missing := every - world.ready:
            raise ViolationError(f"rank {rank} writes before these are ready: {missing}")
        world.require_unnamed(rank, memory.part)
        world = replace(world, answers=world.answers | {(number, "go")})
        return world.with_part(rank, memory.part, TORN, TORN), None

    def _begin(self, _state: State, world: World, rank: int, number: int) -> Any:
        one = world.memory[rank]
        sealing = {"begun": number, "sealed": one.generation, "sealed_part": one.part}
        return world.with_memory(rank, **sealing), str(one.part)

    def _begun(self, _state: State, world: World, rank: int, number: int) -> Any:
        memory = world.memory[rank]
        has_begun = number in dict(memory.parts) | dict(memory.outcomes)
        if not has_begun and not memory.is_over:
            raise BlockedError
        return world, has_begun

    def _outcome(self, _state: State, world: World, rank: int, number: int) -> Any:
        found = dict(world.memory[rank].outcomes).get(number)
        if found is None:
            raise BlockedError
        return world, found

    def _fill(self, _state: State, world: World, rank: int, _: int) -> Any:
        # With a seal beside training, the working part may be another one by now.
        generation, part = world.memory[rank].sealed, world.memory[rank].sealed_part
        world.require_unnamed(rank, part)
        return world.with_part(rank, part, whole(generation), TORN), (generation, part)

    def _sync(self, _state: State, world: World, rank: int, generation: int, part: int) -> Any:
        now, _ = world.disks[rank][part]
        return world.with_part(rank, part, now, whole(generation)), None

    def _hold(self, _state: State, world: World, rank: int, number: int, part: str) -> Any:
        ledger = self._ledger(world.memory[rank]).begun(number, part)
        return self._with_ledger(world, rank, ledger), None

    def _settle(self, _state: State, world: World, rank: int, number: int, outcome: Any) -> Any:
        ledger = self._ledger(world.memory[rank]).settled(number, outcome)
        return self._with_ledger(world, rank, ledger), None

    def _complete(self, state: State, world: World, rank: int, reports: Any) -> Any:
        memory = world.memory[rank]
        parts = tuple((owner, int(report.part)) for owner, report in sorted(reports.items()))
        was_left = self._left_key(memory.begun) in dict(state.keys)
        return world.with_memory(rank, manifest=(memory.sealed, parts), was_left=was_left), None

    def _renamed(self, world: World, rank: int) -> tuple[Checkpoint, ...]:
        manifest = world.memory[rank].manifest
        if manifest is None:
            raise ViolationError("renamed without a manifest")
        return (*world.names, manifest)

    def _rename(self, _state: State, world: World, rank: int) -> Any:
        if world.memory[rank].was_left:
            raise ViolationError("published although a rank was known to have given up")
        names = self._renamed(world, rank)
        world = replace(world, names=names)
        self._invariants.check(world)  # killed before the sync
        return replace(world, durable_names=names), None

    def _told(
        self, state: State, world: World, rank: int, number: int, outcome: str, generation: int
    ) -> Any:
        if outcome == "in doubt":
            is_decided = number in dict(world.memory[WRITER].outcomes)
            knows = state.is_lost or self._left_key(number) in dict(state.keys)
            if not is_decided and not knows:
                raise ViolationError(f"rank {rank} gives up, and the writer cannot know it")
            return world, None
        world = replace(world, told=world.told | {(number, outcome)})
        if outcome == "published":
            world = replace(world, acknowledged=max(world.acknowledged, generation))
        return world, None

    def ended(self, world: World, actor: int, _: Any) -> World:
        """Return the world after the program of training, or of a thread that seals, has ended."""
        return world if actor >= self._size else world.with_memory(actor, is_over=True)

    def check(self, state: State) -> None:
        """Check the invariants."""
        self._invariants.check(state.world)

    def _left_key(self, number: int) -> str:
        return self.wing.peers.key(self.wing.peers.seal_scope(number), "left")

    def _ledger(self, memory: Memory) -> Any:
        outcomes = {n: self.wing.seal.Outcome(value) for n, value in memory.outcomes}
        return self.wing.seal.Ledger(dict(memory.parts), outcomes)

    def _with_ledger(self, world: World, rank: int, ledger: Any) -> World:
        outcomes = tuple(sorted((n, outcome.value) for n, outcome in ledger.outcomes.items()))
        parts = tuple(sorted(ledger.parts.items()))
        return world.with_memory(rank, parts=parts, outcomes=outcomes)
