"""Reading an optimizer's whole state, and replacing it by other state, through the ring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.device.boundary import HOST
from offload.device.staging import flat_tensors
from offload.engine.caller_hints import warn_unsealed
from offload.engine.engine import Engine, Groups
from offload.engine.reference import (
    Position,
    find_referenced,
    read_reference,
    reference_to,
)
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
from offload.store.store import Store
from offload.update.decoder import StateDecoder, kept_arrays
from offload.update.filler import ParameterState, StateFiller


class ExchangingEngine(Engine):
    """Engine whose state can be named by a reference, read whole, and replaced."""

    @property
    def position(self) -> Position:
        """Position of the present state."""
        slot = self._slots.present
        sealing = self._seal is not None and self._seal.slot is slot and not self._slots.is_working
        return Position(
            self.store.store_id,
            self.num_steps,
            slot.context.generation if slot is not None else 0,
            self._run,
            sealed=slot is not None and (sealing or self._slots.sealed is not None),
        )

    def open_store(self) -> Store:
        """Return the store, which this process has open.

        Raises:
            OffloadError: The optimizer is closed, or was made by another process.
        """
        self._require_alive()
        return self.store

    _has_warned = False
    """Whether the warning about a reference to unsealed state has been given."""

    def refer(self, torch_dict: Mapping[str, Any], *, warn: bool) -> dict[str, Any]:
        """Make a reference from torch's state dict; see `OffloadedOptimizer.state_dict`.

        Only that method may call this, because a warning points at the caller of that method.

        Args:
            torch_dict: torch's state dict of the optimizer.
            warn: Whether to warn if the state is not sealed.
        """
        position = self.position
        if warn and position.step and not position.sealed:
            if not self._has_warned:
                warn_unsealed(self.store.directory, position.step)
            self._has_warned = True
        return reference_to(position, torch_dict)

    def load_reference(self, groups: Groups, reference: Mapping[str, Any]) -> None:
        """Load a reference; see `OffloadedOptimizer.load_state_dict`.

        Args:
            groups: ``param_groups`` of the optimizer.
            reference: Reference to the present state, or to the newest checkpoint of the store.

        Raises:
            MismatchError: The reference names another state, or does not fit the optimizer.
            DamagedError: The state of the checkpoint is damaged.
        """
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
            DamagedError: The data read differs from the data written.
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
        streamer.begin(self._slots.present, chunks)
        for chunk in chunks:
            frame = streamer.take(chunk)
            try:
                with frame.tensors_on(HOST, changes=False) as arrays:
                    for block in decoder.blocks(chunk, arrays):
                        held.copy(*block)
            finally:
                streamer.keep(frame)
        streamer.begin(self._slots.present, self._order())
        return held

    def load_tensors(self, groups: Groups, state_dict: Mapping[str, Any]) -> None:
        """Stream a torch state dict into the store; see `OffloadedOptimizer.load_state_dict`.

        Args:
            groups: ``param_groups`` of the optimizer.
            state_dict: State dict with ``state`` and ``param_groups``, as torch's optimizers return
                it.

        Raises:
            MismatchError: The state dict does not fit the optimizer.
        """
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
