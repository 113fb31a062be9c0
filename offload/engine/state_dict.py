"""State dicts: references, and the whole state, read or replaced through the ring."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from offload.device.boundary import HOST
from offload.device.staging import flat_tensors
from offload.engine.caller_hints import warn_unsealed
from offload.engine.engine import Engine
from offload.engine.reference import find_referenced, read_reference, reference_to
from offload.engine.resume import resume
from offload.engine.state_passes import new_pass, run_pass
from offload.engine.training_state import Groups, TrainingState
from offload.errors import DamagedError, MismatchError
from offload.exchange.torch_dicts import (
    MaterializedState,
    check_groups,
    load_groups,
    num_steps,
    read_state_dict,
    stated_steps,
)
from offload.format.layout import Layout
from offload.model.parameters import memories
from offload.store.opening import StoredCheckpoint
from offload.store.quarantine_limit import try_to_quarantine
from offload.stream.passes import RingPass
from offload.update.coding.decoder import StateDecoder, kept_arrays
from offload.update.coding.filler import ParameterState, StateFiller

_LOADING = "load_state_dict()"
"""Call of the user, for messages."""

_INSTEAD = "Use checkpoint() and restore()"
"""Remedy if that call is refused."""


def make_reference(engine: Engine, torch_dict: Mapping[str, Any], *, warn: bool) -> dict[str, Any]:
    """Make a reference from torch's state dict; see `OffloadedOptimizer.state_dict`.

    Only that method may call this, because a warning points at the caller of that method.

    Args:
        engine: Engine of the optimizer.
        torch_dict: torch's state dict of the optimizer.
        warn: Whether to warn if the state is not sealed.
    """
    position = engine.position
    if warn and position.step and not position.sealed:
        if not engine.has_warned:
            warn_unsealed(engine.store.directory, position.step)
        engine.has_warned = True
    return reference_to(position, torch_dict)


def load_reference(engine: Engine, groups: Groups, reference: Mapping[str, Any]) -> None:
    """Load a reference; see `OffloadedOptimizer.load_state_dict`.

    Args:
        engine: Engine of the optimizer.
        groups: ``param_groups`` of the optimizer.
        reference: Reference to the present state, or to the newest checkpoint of the store.

    Raises:
        MismatchError: The reference names another state, or does not fit the optimizer.
        DamagedError: The state of the checkpoint is damaged.
    """
    state = engine.state

    def choose() -> tuple[list[dict[str, Any]], StoredCheckpoint | None]:
        """Return the hyper-parameters, and the checkpoint to load if it is not the present one."""
        wanted, hyper = read_reference(reference)
        if engine.position.is_same_as(wanted):
            return hyper, None
        found = find_referenced(engine.store, wanted, engine.position)
        check_groups(groups, hyper)
        return hyper, found

    hyper, found = state.ranks.together(_LOADING, choose)
    asked = "the present state" if found is None else found.path
    how = " with reencode=True" if state.options.reencode else ""
    state.ranks.require_same(_LOADING, f"{asked}{how}")
    if found is not None:
        state.lifecycle.require_alive()
        state.collect_seal(wait=True, errors=False)
        try:
            reencode = state.options.reencode
            resume(state, groups, found, parameters=False, reencode=reencode)
        except DamagedError as error:
            refusal = try_to_quarantine(engine.store, found, error)
            raise DamagedError(f"{error}; {refusal or state.lifecycle.remedy()}") from error
    check_groups(groups, hyper)
    load_groups(groups, hyper)


def materialize(engine: Engine, groups: Groups) -> MaterializedState:
    """Read the present state into memory, as FP32, through the ring; changes nothing.

    Raises:
        gds.StorageError: A transfer failed.
        DamagedError: The data read differs from the data written.
        MismatchError: This rank steps a parameter in part.
    """
    state = engine.state
    state.lifecycle.require_usable()
    engine.relayout(groups)
    table, layout = state.table, state.layout
    _require_alone(
        state,
        layout,
        "full_state_dict(), like materialized(),",
        "Call checkpoint(), and read the checkpoint: with torch.distributed.checkpoint.load(state, "
        "storage_reader=offload.integrations.dcp.CheckpointReader(path)), which gives each rank "
        "its shards under torch's own names; with offload.read_state(checkpoint, name); or with "
        "`offload export`",
    )
    materialized = MaterializedState(
        table.trainables,
        table.scalars,
        [kept_arrays(t.spec, layout) for t in table.trainables],
        [state.rule.initial_state(group) for group in groups],
    )
    streamer, chunks = state.ring(), range(layout.num_chunks)
    live = flat_tensors(memories(table.trainables), writable=False, traffic=state.meter.traffic)
    decoder = StateDecoder(layout, table.scalars, live)
    reading = RingPass(streamer, source=state.slots.present)
    reading.announce(chunks)
    for chunk in chunks:
        with (
            reading.taken(chunk) as frame,
            frame.tensors_on(HOST, changes=False) as arrays,
        ):
            for block in decoder.blocks(chunk, arrays):
                materialized.copy(*block)
    streamer.begin(state.slots.present, state.chunks())
    return materialized


def _require_alone(state: TrainingState, layout: Layout | None, call: str, remedy: str) -> None:
    """Refuse a call that needs the whole state in this process.

    Args:
        state: State of the training.
        layout: Layout of this rank's state.
        call: The call, for the message.
        remedy: What to do instead, as a sentence without its full stop.

    Raises:
        MismatchError: Other ranks have parts of the state.
    """
    cut = [p for p in layout.parameters if p.cut is not None] if layout is not None else []
    if state.ranks.size > 1 or cut:
        raise MismatchError(
            f"{call} needs the whole state, of which this rank has a part only: it is not "
            f"supported with several ranks yet. {remedy}"
        )


def load_tensors(engine: Engine, groups: Groups, state_dict: Mapping[str, Any]) -> None:
    """Stream a torch state dict into the store; see `OffloadedOptimizer.load_state_dict`.

    Args:
        engine: Engine of the optimizer.
        groups: ``param_groups`` of the optimizer.
        state_dict: State dict with ``state`` and ``param_groups``, as torch's optimizers return
            it.

    Raises:
        MismatchError: The state dict does not fit the optimizer.
    """
    state = engine.state
    if state.ranks.size > 1:  # other ranks may load a reference
        state.ranks.together(_LOADING, partial(_require_alone, state, None, _LOADING, _INSTEAD))
    if not {"state", "param_groups"} <= state_dict.keys():
        raise MismatchError(
            f"load_state_dict() got a dict with the keys {sorted(map(str, state_dict))}, "
            "expected a state dict of an optimizer: of this class, or of torch with 'state' "
            "and 'param_groups'"
        )
    said = stated_steps(state_dict)
    state.lifecycle.require_usable()
    merged, states = read_state_dict(state_dict, groups, state.rule)
    layout, trainables = state.table.describe(merged)
    _require_alone(state, layout, _LOADING, _INSTEAD)
    state.collect_seal(wait=True)
    engine.relayout(merged)
    found = [states.get(t.parameter, ParameterState()) for t in trainables]
    steps = num_steps([given.scalars for given in found]) if said is None else said
    live = flat_tensors(memories(trainables), writable=True, traffic=state.meter.traffic)
    work = StateFiller(
        layout,
        found,
        live,
        step=state.num_steps if steps is None else steps,
        seed=state.options.rounding_seed,
    )
    run_pass(state, new_pass(state, merged, work, state.chunks(), source=None))
    state.num_steps = state.num_steps if steps is None else steps
    load_groups(groups, merged)
