"""State dicts: references, and the whole state, read or replaced through the ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from offload.device.filed import FiledTensor, FiledTensors
from offload.device.staging import FlatTensors, flat_tensors
from offload.engine.lifecycle import warn_unsealed
from offload.engine.reference import Position, find_referenced, read_reference, reference_to
from offload.engine.resume import resume
from offload.engine.stepping import StepStrategy, new_pass, run_pass
from offload.engine.training_state import Groups, TrainingState
from offload.errors import DamagedError, MismatchError
from offload.exchange.torch_dicts import (
    MASTERS,
    HeldParameter,
    MaterializedState,
    check_groups,
    load_groups,
    num_steps,
    read_state_dict,
    stated_steps,
)
from offload.format.layout import Layout
from offload.model.parameters import Trainable, group_names, memories
from offload.model.shards import Shard
from offload.store.opening import StoredCheckpoint
from offload.store.state_store import StateStore, try_to_quarantine
from offload.stream.passes import RingPass
from offload.update.coding.decoder import DecodedBlock, StateDecoder, kept_arrays
from offload.update.coding.filler import ParameterState, StateFiller
from offload.update.dtypes import DTYPE_CODES
from offload.update.kept_state import Scalars

_LOADING = "load_state_dict()"
"""Call of the user, for messages."""

_HOLDING = "materialized()"


class Holder(Protocol):
    """The engine of an optimizer, as far as state dicts need it."""

    state: TrainingState
    strategy: StepStrategy
    store: StateStore
    has_warned: bool

    @property
    def position(self) -> Position:
        """Position of the present state."""
        ...

    def relayout(self, groups: Groups) -> None:
        """Update the layout for what is new."""
        ...


def make_reference(engine: Holder, torch_dict: Mapping[str, Any], *, warn: bool) -> dict[str, Any]:
    """Make a reference from torch's state dict; see `OffloadedOptimizer.state_dict`.

    Only that method may call this, because a warning points at the caller of that method.
    """
    position = engine.position
    if warn and position.step and not position.sealed and not engine.has_warned:
        engine.has_warned = warn_unsealed(engine.store.directory, position.step)
    return reference_to(position, torch_dict)


def load_reference(engine: Holder, groups: Groups, reference: Mapping[str, Any]) -> None:
    """Load a reference; see `OffloadedOptimizer.load_state_dict`."""
    state = engine.state

    def choose() -> tuple[tuple[list[dict[str, Any]], StoredCheckpoint | None], str]:
        """Return the hyper-parameters, and the checkpoint to load if it is not the present one."""
        wanted, hyper = read_reference(reference)
        found: StoredCheckpoint | None = None
        if not engine.position.is_same_as(wanted):
            found = find_referenced(engine.store, wanted, engine.position)
            check_groups(groups, hyper)
        asked = "the present state" if found is None else found.path
        how = " with reencode=True" if state.options.reencode else ""
        return (hyper, found), f"{asked}{how}"

    hyper, found = state.ranks.choose(_LOADING, choose)
    if found is not None:
        state.lifecycle.require_alive()
        state.collect_seal(wait=True, errors=False)
        # A seal that was in flight may have added a newer checkpoint, or recycled this one.
        hyper, found = state.ranks.choose(_LOADING, choose)
    if found is not None:
        try:
            reencode = state.options.reencode
            engine.strategy.keep_parameters()
            resume(state, groups, found, parameters=False, reencode=reencode)
            engine.strategy.kept_parameters()
        except DamagedError as error:
            refusal = try_to_quarantine(engine.store, found, error)
            raise DamagedError(f"{error}; {refusal or state.lifecycle.remedy()}") from error
    check_groups(groups, hyper)
    load_groups(groups, state.rule.without_flags(hyper, _LOADING), state.rule)


def materialize(engine: Holder, groups: Groups) -> MaterializedState:
    """Read the present state into memory as FP32, through the ring; changes nothing. Collective."""
    state = engine.state
    state.ranks.together(_HOLDING, state.lifecycle.require_usable)
    engine.relayout(groups)
    held = _held_by_ranks(state, groups) if state.ranks.size > 1 else _held_alone(state)
    initial = [state.rule.initial_state(group) for group in groups]
    materialized = MaterializedState(held, initial)

    def read() -> None:
        """Read what this rank steps into memory."""
        for index, start, values in read_blocks(state):
            materialized.copy(state.table.trainables[index], start, values)

    state.ranks.together(_HOLDING, read)
    state.ranks.share_state(materialized.shared())
    return materialized


def _held_alone(state: TrainingState) -> list[HeldParameter]:
    """Return the parameters that this process trains alone."""
    layout = state.layout
    return [
        HeldParameter(t.spec.name, t.parameter, t.spec.group, scalars, kept_arrays(t.spec, layout))
        for t, scalars in zip(state.table.trainables, state.table.scalars, strict=True)
    ]


def _held_by_ranks(state: TrainingState, groups: Groups) -> list[HeldParameter]:
    """Return the parameters that any rank steps a part of. Collective.

    A rank knows the scalar state of those only that it steps itself.
    """
    mine = [
        [t.spec.name, scalars and [(n, kind, _as_text(v)) for n, kind, v in scalars]]
        for t, scalars in zip(state.table.trainables, state.table.scalars, strict=True)
    ]
    said: dict[str, Scalars | None] = {
        name: scalars and tuple((n, kind, _from_text(v)) for n, kind, v in scalars)
        for one in state.ranks.everywhere(_HOLDING, lambda: mine)
        for name, scalars in one
    }
    numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
    arrays = [state.rule.rule(group).arrays for group in groups]
    named = group_names(groups, state.table.model, state.table.shards)
    return [
        HeldParameter(name, parameter, number, said[name], arrays[number])
        for number, (name, parameter) in zip(numbers, named, strict=True)
        if name in said
    ]


def _as_text(value: float | int) -> str | int:
    """Return a number as JSON that keeps its bits; messages have no infinite ones."""
    return value if isinstance(value, int) else float(value).hex()


def _from_text(value: str | int) -> float | int:
    return float.fromhex(value) if isinstance(value, str) else value


def read_blocks(state: TrainingState) -> Iterator[DecodedBlock]:
    """Yield all state that this rank steps, block by block."""
    table = state.table
    streamer, chunks = state.ring(), range(state.layout.num_chunks)
    memory, traffic = memories(table.trainables), state.meter.traffic
    filed = FiledTensors(memory, writable=False, traffic=traffic) if _is_filed(memory) else None
    live: FlatTensors = filed or flat_tensors(memory, writable=False, traffic=traffic)
    decoder = StateDecoder(state.layout, table.scalars, live)
    reading = RingPass(streamer, source=state.slots.present)
    reading.announce(chunks)
    for chunk in chunks:
        with reading.taken(chunk) as frame, frame.copied_to_host(changes=False) as arrays:
            if filed is not None and frame.model is not None:
                filed.place(frame.model.values(chunk))
            yield from decoder.blocks(chunk, arrays)
        state.ranks.progress()
    streamer.begin(state.slots.present, state.chunks())


def _is_filed(memory: Sequence[torch.Tensor]) -> bool:
    """Return whether any parameter is in the model file only."""
    return any(isinstance(one, FiledTensor) for one in memory)


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """A state dict that has been checked against the optimizer."""

    groups: list[dict[str, Any]]
    """Parameter groups with the dict's hyper-parameters."""

    layout: Layout
    trainables: Sequence[Trainable]

    states: Sequence[ParameterState]
    """State of what this rank steps of each of the trainables."""

    stated_steps: int | None
    """Number of steps that the dict states."""


def load_tensors(engine: Holder, groups: Groups, state_dict: Mapping[str, Any]) -> None:
    """Stream a torch state dict into the store; see `OffloadedOptimizer.load_state_dict`.

    Collective.
    """
    state, ranks = engine.state, engine.state.ranks
    state.know_parameters(groups)

    def check() -> tuple[_Loaded, str]:
        """Check the state dict, and say in words what it is."""
        checked = _check(state, groups, state_dict)
        return checked, f"a state dict of torch{' with masters' if state_dict.get(MASTERS) else ''}"

    loaded = ranks.choose(_LOADING, check)  # one exchange, as for a rank that loads a reference
    state.collect_seal(wait=True)
    engine.relayout(loaded.groups)
    steps = loaded.stated_steps
    if steps is None:
        mine = num_steps([given.scalars for given in loaded.states])
        steps = _largest(ranks.everywhere(_LOADING, lambda: mine))
    steps = state.num_steps if steps is None else steps
    live = flat_tensors(memories(loaded.trainables), writable=True, traffic=state.meter.traffic)
    work = StateFiller(
        loaded.layout,
        loaded.states,
        live,
        step=steps,
        seed=state.options.rounding_seed,
    )
    filling = new_pass(state, state.ring(), loaded.groups, work, state.chunks(), source=None)
    try:
        ranks.together(_LOADING, partial(run_pass, state, filling))
    except BaseException:
        state.lifecycle.broken = state.lifecycle.broken or f"{_LOADING} failed on another rank"
        raise
    state.num_steps = steps
    if state_dict.get(MASTERS) and ranks.size > 1:
        named = group_names(loaded.groups, state.table.model, state.table.shards)
        ranks.share_state(
            [(name, DTYPE_CODES[p.dtype], p) for name, p in named if p.dtype != torch.float32]
        )
    load_groups(groups, loaded.groups, state.rule)


def _check(state: TrainingState, groups: Groups, state_dict: Mapping[str, Any]) -> _Loaded:
    """Check a state dict of torch; changes nothing, and makes no collective call."""
    said = stated_steps(state_dict)
    state.lifecycle.require_usable()
    shards: dict[torch.Tensor, Shard | None] | None = None
    if (shard_of := state.table.shards) is not None:
        named = group_names(groups, state.table.model, shard_of)
        shards = {parameter: shard_of(name, parameter) for name, parameter in named}
    merged, states = read_state_dict(state_dict, groups, state.rule, shards)
    layout, trainables = state.table.describe(merged)
    if _is_filed(memories(trainables)):
        raise MismatchError(
            'parameters="drive" does not take a state dict of torch once parameters are on the '
            "drive: use offload import and restore(), or load it before the first step"
        )
    found = [states.get(t.parameter, ParameterState()) for t in trainables]
    return _Loaded(merged, layout, trainables, found, said)


def _largest(said: Sequence[int | None]) -> int | None:
    """Return the largest number of steps that a rank says; None if none says any."""
    return max((steps for steps in said if steps is not None), default=None)
