"""References to state, which `state_dict()` returns: they name the state and do not hold it.

A reference names a store, a step and a generation, all by value. It can be loaded if it names the
state that the optimizer is at already, or a sealed checkpoint of its store. A step number alone
would be ambiguous: if training goes back to step 4 and on again, the new step 5 is another state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload.errors import MismatchError
from offload.exchange.carried_reference import uncarried
from offload.format._manifest_fields import NUMPY_DTYPES, without_numpy
from offload.store.opening import StoredCheckpoint, require_state
from offload.store.state_store import StateStore

REFERENCE_FORMAT = "offload-reference-2"
_PREFIX = "offload-reference"


@dataclass(frozen=True, slots=True)
class Position:
    """Location of an optimizer's state."""

    store: str
    """Identity of the store."""

    step: int
    """Optimizer steps taken."""

    generation: int
    """Generation of the slot that holds the state; 0 if no parameter has state yet."""

    run: str
    """Identity of the optimizer object. State that is not sealed exists for this object only."""

    sealed: bool
    """Whether the state is a checkpoint, or is being sealed."""

    def is_same_as(self, other: Position) -> bool:
        """Return whether both positions are of the same state; `self` is that of the optimizer."""
        mine = (self.store, self.step, self.generation)
        if mine != (other.store, other.step, other.generation):
            return False
        # Another process may have used this generation for steps that it never sealed.
        return self.run == other.run or (self.sealed and other.sealed)

    def __str__(self) -> str:
        state = "sealed" if self.sealed else "not sealed"
        return f"step {self.step} of store {self.store} (generation {self.generation}, {state})"


def is_reference(state_dict: Mapping[str, Any]) -> bool:
    """Return whether a state dict is a reference, of any version, rather than torch's own form."""
    return str(state_dict.get("format", "")).startswith(_PREFIX)


def reference_of(state_dict: Mapping[str, Any]) -> Position | None:
    """Return the state that a reference names; None for a state dict that holds the state itself.

    `OffloadedOptimizer.state_dict` returns a reference, which names the state and does not hold it.
    `OffloadedOptimizer.find` returns the checkpoint that a reference names.

    Args:
        state_dict: State dict of an `OffloadedOptimizer` or of a torch optimizer. It may have been
            saved and loaded by another process.

    Raises:
        MismatchError: The reference is of another version of this package, or is not complete.
    """
    state_dict = uncarried(state_dict)
    return read_reference(state_dict)[0] if is_reference(state_dict) else None


def reference_to(position: Position, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reference to a position. It shares no objects with the optimizer.

    Scalar tensors and NumPy values become builtins; other values are copied. A reference has no
    ``state``, so that code which takes it for the state itself fails (`KeyError`), instead of going
    on with no state at all.
    """
    return {
        **{key: copy.deepcopy(v) for key, v in state_dict.items() if key != "state"},
        "format": REFERENCE_FORMAT,
        "store": position.store,
        "step": position.step,
        "generation": position.generation,
        "run": position.run,
        "sealed": position.sealed,
        "param_groups": [
            {key: _by_value(value) for key, value in group.items()}
            for group in state_dict["param_groups"]
        ],
    }


def read_reference(
    state_dict: Mapping[str, Any],
) -> tuple[Position, list[dict[str, Any]]]:
    """Return the position that a reference names, and the hyper-parameters of its groups."""
    if state_dict.get("format") != REFERENCE_FORMAT:
        raise MismatchError(
            f"load_state_dict() got a reference of format {state_dict.get('format')!r:.60}, "
            f"expected {REFERENCE_FORMAT!r}: another version of this package made it. Call "
            "restore() to continue from a checkpoint"
        )
    kinds = {"store": str, "step": int, "generation": int, "run": str, "sealed": bool}
    for key, kind in kinds.items():
        if type(state_dict.get(key)) is not kind:
            raise MismatchError(
                f"load_state_dict() got a reference whose {key!r} is "
                f"{state_dict.get(key)!r:.60}, expected a {kind.__name__}"
            )
    groups = [
        {key: _from_value(value) for key, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    return Position(**{key: state_dict[key] for key in kinds}), groups


def find_referenced(store: StateStore, wanted: Position, present: Position) -> StoredCheckpoint:
    """Return the sealed checkpoint that a reference names, if it is the store's newest."""
    checkpoint = find_sealed(store, wanted, present)
    if checkpoint is not store.newest:
        raise MismatchError(
            f"load_state_dict() got a reference to {wanted}, and {store.directory} has newer "
            f"checkpoints: to withdraw them, call restore({wanted.step}, discard_newer=True)"
        )
    return checkpoint


def find_sealed(store: StateStore, wanted: Position, present: Position) -> StoredCheckpoint:
    """Return the sealed checkpoint that a reference names, whether or not there are newer ones."""
    usable = [c for c in store.checkpoints if not c.superseded]
    at = f"load_state_dict() got a reference to {wanted}"
    if not wanted.step and not wanted.sealed:
        raise MismatchError(
            f"{at}, which was taken before the first step of another optimizer, so no state "
            f"belongs to it. This optimizer is at {present}, in {store.directory}"
        )
    if not wanted.sealed:  # checked first: a store without checkpoints has no lasting identity
        raise MismatchError(_never_sealed(store, wanted, present, usable))
    if wanted.store != present.store:
        other = (
            "has no checkpoint: either the reference was made in another directory, which "
            "directory= must name, or sealing did not end before that process did"
            if not usable
            else f"is store {present.store}: construct the optimizer with directory= of the store "
            "that the reference was made in, or call restore() to continue from the newest "
            "checkpoint of this one"
        )
        raise MismatchError(f"{at}, but {store.directory} {other}")
    for checkpoint in usable:
        manifest = checkpoint.manifest
        if (manifest.step, manifest.generation) == (wanted.step, wanted.generation):
            break
    else:
        names = [f"step {c.manifest.step} (generation {c.manifest.generation})" for c in usable]
        raise MismatchError(
            f"{at}; this optimizer is at {present}, and its store {store.directory} has "
            f"{', '.join(names) or 'no checkpoint'}. The state that it refers to has been "
            "withdrawn, or sealing it failed: call restore() to continue from the newest "
            "checkpoint"
        )
    require_state(checkpoint)
    return checkpoint


def _never_sealed(
    store: StateStore, wanted: Position, present: Position, usable: Sequence[StoredCheckpoint]
) -> str:
    """Return the message about a state that was not sealed when a reference to it was made."""
    named = (wanted.store, wanted.step, wanted.generation)
    later = [
        c.path
        for c in usable
        if (c.manifest.store_id, c.manifest.step, c.manifest.generation) == named
    ]
    if later:
        fate = f". It is not known whether {later[0]}, sealed later, is the same state"
    elif wanted.run == present.run:
        fate = f", and the optimizer is at step {present.step} now"
    else:
        fate = ", and the state ended with the process that had it"
    newest = store.newest
    return (
        "load_state_dict() got a reference to a state that was never sealed: checkpoint() had not "
        f"been called when state_dict() was taken at step {wanted.step}{fate}. "
        + (
            f"To continue from the newest checkpoint, {newest.path}, call restore()"
            if newest is not None
            else f"{store.directory} has no checkpoint to continue from"
        )
        + ". For a reference that can be resumed from, call checkpoint() before state_dict(); the "
        "state itself is full_state_dict()"
    )


def _by_value(value: Any) -> Any:
    """Return a copy of a value: a scalar tensor as a dict with its value, dtype and shape.

    Plain lists and tuples are copied with their items. NumPy scalars become builtins, or a dict if
    a builtin would change what torch computes. Everything else is copied as a whole.
    """
    value = without_numpy(value)
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return value.detach().clone()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": value.item(), "dtype": dtype, "shape": list(value.shape)}
    if type(value) in (list, tuple):
        return type(value)([_by_value(v) for v in value])
    if isinstance(value, np.generic):
        name, number = value.dtype.name, value.item()
        return number if isinstance(value, float) else {"numpy": number, "dtype": name}
    return copy.deepcopy(value)


def _from_value(value: Any) -> Any:
    """Return the value that `_by_value` has copied, with scalar tensors on the CPU."""
    if isinstance(value, dict) and value.keys() == {"tensor", "dtype", "shape"}:
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise MismatchError(f"load_state_dict(): {value['dtype']!r:.60} is not a torch dtype")
        return torch.full(value["shape"], value["tensor"], dtype=dtype, device="cpu")
    if isinstance(value, dict) and value.keys() == {"numpy", "dtype"}:
        if value["dtype"] not in NUMPY_DTYPES:
            raise MismatchError(f"load_state_dict(): {value['dtype']!r:.60} is not a NumPy dtype")
        return np.dtype(value["dtype"]).type(value["numpy"])
    if type(value) in (list, tuple):
        return type(value)([_from_value(v) for v in value])
    return value
