"""A model checker: every order in which actors perform their effects, within bounds.

An actor runs a program of the protocol. A state has the place of each actor in its program, the
key-value store, and whatever else the model has. From each state every actor may go on, so a rank
that is stopped for any time is one that others overtake. Besides, ranks may be killed, and the
key-value store may be lost, if the bounds allow it. A wait whose value is missing may end without
it, if some rank may be silent for long: one was killed, or the bounds say that any may be stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

Effects = Generator[Any, Any, Any]


class ViolationError(AssertionError):
    """An invariant does not hold; the message has the way to the state."""


@dataclass(frozen=True)
class Raised:
    """An error as the result of an effect."""

    error: BaseException

    def key(self) -> object:
        return type(self.error).__name__, str(self.error)


class BlockedError(Exception):
    """A local effect cannot happen yet."""


@dataclass
class Node:
    """A place in an actor's program: all results so far, and what comes next."""

    path: tuple[Any, ...]
    effect: Any
    """Next effect; None if the program has ended."""

    result: Any
    """Result of the program, if it has ended."""

    after: dict[object, Node] = field(default_factory=dict)
    program: Effects | None = None


class Actor:
    """A program, all of whose runs are known by the results of their effects.

    Args:
        rank: Rank that it belongs to, and dies with.
        make: Makes the program anew.
    """

    def __init__(self, rank: int, make: Callable[[], Effects]) -> None:
        self.rank = rank
        self._make = make
        self.start = self._advance((), None)

    def after(self, node: Node, result: Any) -> Node:
        """Return the place after an effect had a result."""
        key = _key(result)
        found = node.after.get(key)
        if found is None:
            program, node.program = node.program, None
            found = node.after[key] = self._advance((*node.path, result), program)
        return found

    def _advance(self, path: tuple[Any, ...], program: Effects | None) -> Node:
        try:
            if program is not None:
                effect = _give(program, path[-1])
            else:
                program = self._make()
                effect = next(program)
                for result in path:
                    effect = _give(program, result)
        except StopIteration as end:
            return Node(path, None, end.value)
        except Exception as error:  # noqa: BLE001  (`explore` reports it)
            return Node(path, None, Raised(error))
        return Node(path, effect, None, program=program)


def _give(program: Effects, result: Any) -> Any:
    return program.throw(result.error) if isinstance(result, Raised) else program.send(result)


def _key(result: Any) -> object:
    if isinstance(result, Raised):
        return result.key()
    if hasattr(result, "values") and hasattr(result, "error"):
        return tuple(sorted(result.values.items())), result.error
    return repr(result)


@dataclass(frozen=True)
class State:
    """A state of the whole system."""

    places: tuple[int, ...]
    """Identity of the node of each actor."""

    keys: frozenset[tuple[str, str]]
    """The key-value store."""

    world: Any
    """All else, in a value that can be compared."""

    dead: frozenset[int] = frozenset()
    is_lost: bool = False
    """Whether the key-value store is gone."""


@dataclass(frozen=True)
class Bounds:
    """What may happen besides the effects of the actors."""

    kills: int = 0
    """Number of times at which ranks are killed, each time any subset of them."""

    silence: bool = False
    """Whether any rank may be stopped for long at any place, so that any wait may end in vain."""

    loses_store: bool = False
    """Whether the key-value store may be lost at any place."""


@dataclass
class Explored:
    """What an exploration has seen."""

    states: int = 0
    ends: int = 0
    """States in which every living actor has ended."""


def explore(model: Any, world: Any, bounds: Bounds, limit: int = 3_000_000) -> Explored:
    """Visit every state that can be reached, and check each.

    Args:
        model: What is checked: its `actors`, `act`, `ended` and `check`, and the `wing` they run.
        world: State of the world at the beginning.
        bounds: What may happen besides the effects of the actors.
        limit: Most states to visit.

    Raises:
        ViolationError: An invariant does not hold, or living actors wait for ever.
    """
    nodes: dict[int, Node] = {}
    actors = model.actors

    def name(node: Node) -> int:
        nodes[id(node)] = node
        return id(node)

    first = State(tuple(name(actor.start) for actor in actors), frozenset(), world)
    seen = {(first, bounds.kills)}
    stack: list[tuple[State, int, Any]] = [(first, bounds.kills, None)]
    explored = Explored()
    while stack:
        state, kills, trail = stack.pop()
        explored.states += 1
        if explored.states > limit:
            raise AssertionError(f"more than {limit} states")
        try:
            model.check(state)
        except ViolationError as error:
            raise ViolationError(f"{error}\n{_way(trail)}") from None
        is_silent = bounds.silence or bool(state.dead)
        moved = False
        follow: list[tuple[State, int, Any]] = []
        for number, actor in enumerate(actors):
            node = nodes[state.places[number]]
            if node.effect is None or actor.rank in state.dead:
                continue
            try:
                for after, result, label in _perform(model, state, actor, node, is_silent):
                    moved = True
                    then = actor.after(node, result)
                    places = list(state.places)
                    places[number] = name(then)
                    after = replace(after, places=tuple(places))
                    if isinstance(then.result, Raised):
                        error = then.result.error
                        raise ViolationError(f"{label}: the program raises {error!r}")
                    if then.effect is None:
                        after = replace(after, world=model.ended(after.world, number, then.result))
                    follow.append((after, kills, (trail, f"rank {actor.rank}: {label}")))
            except ViolationError as error:
                raise ViolationError(
                    f"{error}\nrank {actor.rank}: {node.effect}\n{_way(trail)}"
                ) from None
        living = [n for n, a in enumerate(actors) if a.rank not in state.dead]
        if not moved:
            waiting = [n for n in living if nodes[state.places[n]].effect is not None]
            if waiting:
                effects = [nodes[state.places[n]].effect for n in waiting]
                raise ViolationError(f"these wait for ever: {effects}\n{_way(trail)}")
            explored.ends += 1
        if kills:
            ranks = sorted({actors[n].rank for n in living})
            for size in range(1, len(ranks) + 1):
                for killed in combinations(ranks, size):
                    after = replace(state, dead=state.dead | {*killed})
                    follow.append((after, kills - 1, (trail, f"killed: {killed}")))
        if bounds.loses_store and not state.is_lost:
            after = replace(state, is_lost=True, keys=frozenset())
            follow.append((after, kills, (trail, "the store is lost")))
        for after, left, way in follow:
            if (after, left) not in seen:
                seen.add((after, left))
                stack.append((after, left, way))
    return explored


def _perform(
    model: Any, state: State, actor: Actor, node: Node, is_silent: bool
) -> Iterator[tuple[State, Any, str]]:
    effect = node.effect
    kind = type(effect).__name__
    if kind == "Act":
        try:
            for world, result in model.act(state, actor.rank, effect.call, effect.args):
                label = f"{effect.call}{'' if not isinstance(result, Raised) else ' fails'}"
                yield replace(state, world=world), result, label
        except BlockedError:
            pass
        return
    if state.is_lost:
        error = model.wing.effects.ChannelLostError("the store is lost")
        yield state, Raised(error), f"{kind} fails"
        return
    keys = dict(state.keys)
    match kind:
        case "Put":
            keys[effect.key] = effect.value
            yield replace(state, keys=frozenset(keys.items())), None, f"put {effect.key}"
        case "Get":
            yield state, keys.get(effect.key), f"get {effect.key}"
        case "Delete":
            for key in effect.keys:
                keys.pop(key, None)
            yield replace(state, keys=frozenset(keys.items())), None, "delete"
        case "Await":
            values = {rank: keys[key] for rank, key in effect.wanted if key in keys}
            label = f"await {[key for _, key in effect.wanted]}"
            missing = frozenset(rank for rank, _ in effect.wanted if rank not in values)
            arrived = model.wing.effects.Arrived(values, lost=missing)
            if len(values) == len(effect.wanted):
                yield state, arrived, label
            elif is_silent:
                yield state, arrived, f"{label}: only {sorted(values)}"


def _way(trail: Any) -> str:
    steps: list[str] = []
    while trail is not None:
        trail, step = trail
        steps.append(step)
    return "\n".join(f"  {number}. {step}" for number, step in enumerate(reversed(steps), start=1))
