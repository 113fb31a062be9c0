"""Taking the state of an optimizer out, and putting state from elsewhere in, through the ring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.device.boundary import HOST
from offload.device.staging import flat_tensors
from offload.engine.caller_hints import warn_unsealed
from offload.engine.engine import Engine, Groups
from offload.engine.reference import Position, find_referenced, read_reference, reference_to
from offload.errors import DamagedError, MismatchError
from offload.exchange.torch_dicts import (
    MaterializedState,
    check_groups,
    load_groups,
    num_steps,
    read_state_dict,
    said_steps,
)
from offload.store.giving_up import give_up
from offload.stream.passes import RingPass
from offload.update.decoder import StateDecoder, kept_arrays
from offload.update.filler import ParameterState, StateFiller


class ExchangingEngine(Engine):
    """An engine whose state can be named, read whole, and replaced."""

    @property
    def position(self) -> Position:
        """Where the present state is."""
        slot = self._slots.present
        sealing = self._seal is not None and self._seal.slot is slot and not self._slots.is_working
        return Position(
            self.store.store_id,
            self.num_steps,
            slot.context.generation if slot is not None else 0,
            self._run,
            sealed=slot is not None and (sealing or self._slots.sealed is not None),
        )

    seals_references = False
    """Whether somebody seals the state whenever a reference to it is written: an integration."""
    _has_warned = False
    """Of a reference to a state that is not sealed."""

    def refer(self, torch_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Make a reference of torch's state dict; see `OffloadedOptimizer.state_dict`.

        Called by it alone: a warning points at what called that.
        """
        position = self.position
        if position.step and not position.sealed and not self.seals_references:
            if not self._has_warned:
                warn_unsealed(self.store.directory, position.step)
            self._has_warned = True
        return reference_to(position, torch_dict)

    def load_reference(self, groups: Groups, reference: Mapping[str, Any]) -> None:
        """Go where a reference says; see `OffloadedOptimizer.load_state_dict`."""
        wanted, hyper = read_reference(reference)
        if not self.position.is_same_as(wanted):
            found = find_referenced(self.store, wanted, self.position)
            check_groups(groups, hyper)
            self._require_alive()
            self._collect_seal(wait=True, errors=False)
            try:
                self._resume(found, groups, parameters=False)
            except DamagedError as error:
                refusal = give_up(self.store, found, error)
                raise DamagedError(f"{error}; {refusal or self._remedy()}") from error
        check_groups(groups, hyper)
        load_groups(groups, hyper)

    def materialize(self, groups: Groups) -> MaterializedState:
        """Read the present state into memory, as FP32, through the ring; changes nothing.

        Raises:
            gds.StorageError: A transfer failed.
            DamagedError: What was read is not what was written.
        """
        self._require_usable()
        self._relayout(groups)
        table, layout = self._table, self._layout()
        held = MaterializedState(
            table.trainables,
            table.scalars,
            [kept_arrays(t.spec, layout) for t in table.trainables],
            [self._rule.initial_state(group) for group in groups],
        )
        streamer, chunks = self._ring(), range(layout.num_chunks)
        live = flat_tensors(
            [t.tensor for t in table.trainables], writable=False, traffic=self._meter.traffic
        )
        decoder = StateDecoder(layout, table.scalars, live)
        reading = RingPass(streamer, source=self._slots.present)
        reading.announce(chunks)
        for chunk in chunks:
            with (
                reading.taken(chunk) as frame,
                frame.tensors_on(HOST, changes=False) as arrays,
            ):
                for block in decoder.blocks(chunk, arrays):
                    held.copy(*block)
        streamer.begin(self._slots.present, self._order())
        return held

    def load_tensors(self, groups: Groups, state_dict: Mapping[str, Any]) -> None:
        """Stream a torch state dict into the store; see `OffloadedOptimizer.load_state_dict`."""
        if not {"state", "param_groups"} <= state_dict.keys():
            raise MismatchError(
                f"load_state_dict() got a dict with the keys {sorted(map(str, state_dict))}, "
                "expected a state dict of an optimizer: of this class, or of torch with 'state' "
                "and 'param_groups'"
            )
        said = said_steps(state_dict)
        self._require_usable()
        merged, states = read_state_dict(state_dict, groups, self._rule)
        layout, trainables = self._table.describe(merged)
        self._collect_seal(wait=True)
        self._relayout(merged)
        found = [states.get(t.tensor, ParameterState()) for t in trainables]
        steps = num_steps([state.scalars for state in found]) if said is None else said
        live = flat_tensors(
            [t.tensor for t in trainables], writable=True, traffic=self._meter.traffic
        )
        work = StateFiller(
            layout,
            found,
            live,
            step=self.num_steps if steps is None else steps,
            seed=self._options.rounding_seed,
        )
        self._run_pass(self._new_pass(merged, work, self._order(), source=None))
        self.num_steps = self.num_steps if steps is None else steps
        load_groups(groups, merged)
