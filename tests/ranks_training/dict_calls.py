"""Calls of ranks that exchange the optimizer's state with torch's own functions for state dicts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate

import offload
from tests.numerics.reference import bits
from tests.ranks_training import given, loading
from tests.ranks_training.calls import Calls
from tests.ranks_training.program import local


def _model(calls: Calls, layout: str, seed: int = 7) -> None:
    """Give the rank a model of a layout of `given.model_of`; empty for DistributedDataParallel."""
    if layout:
        setting = calls.setting
        calls.model = given.model_of(setting.widths, setting.dtype, layout, seed=seed)


def _difference(ours: Any, theirs: Any, path: str = "") -> str:
    """Return the first place at which two state dicts differ; empty if there is none."""
    if isinstance(theirs, Mapping):
        if not isinstance(ours, Mapping) or [*ours] != [*theirs]:
            return f"{path}: {ours!r:.300} is not {theirs!r:.300}"
        pairs: Any = [(f"{path}.{key}", ours[key], theirs[key]) for key in theirs]
    elif isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{path}: {ours} is not {theirs}"
        pairs = [(f"{path}.{n}", *pair) for n, pair in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(theirs, DTensor):
        if (ours.device_mesh, ours.placements, ours.shape, ours.stride()) != (
            theirs.device_mesh,
            theirs.placements,
            theirs.shape,
            theirs.stride(),
        ):
            return f"{path}: {ours.placements} is not {theirs.placements}, or has another mesh"
        return _difference(ours.to_local(), theirs.to_local(), path)
    elif isinstance(theirs, torch.Tensor):
        same = type(ours) is torch.Tensor and ours.shape == theirs.shape
        same = same and ours.dtype == theirs.dtype and torch.equal(bits(ours), bits(theirs))
        return "" if same else f"{path}: {ours} is not {theirs}"
    else:
        return "" if ours == theirs else f"{path}: {ours!r} is not {theirs!r}"
    return next((found for one in pairs if (found := _difference(*reversed(one[1:]), one[0]))), "")


def beside_torch(
    calls: Calls,
    layout: str,
    out: str,
    *,
    flat: bool = False,
    full: bool = False,
    optimizer: str = "AdamW",
    skip: str = "",
    **hyper: Any,
) -> dict[str, Any]:
    """Train with both optimizers, and compare what torch says of them; save that of ours.

    Returns:
        The first difference between the two state dicts, whether nothing is held in memory
        afterwards, and the number of parameters that torch's optimizer has stepped.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
    _model(calls, layout)
    given.open_optimizer(calls, optimizer, **hyper)
    given.steps(calls, 3, skip)
    with calls.optimizer.materialized():
        ours = get_optimizer_state_dict(calls.model, calls.optimizer, options=options)
    empty = not any(map(len, calls.optimizer.state.values()))
    if out:
        dcp.save({"model": get_model_state_dict(calls.model), "optim": ours}, checkpoint_id=out)
    calls.optimizer.close()
    again = Calls(calls.directory.parent, calls.rank, calls.size, calls.setting)
    _model(again, layout)
    model = again.model
    stock = loading.stock(model, optimizer, **hyper)
    loading.steps(model, stock, 1, 3, skip)
    theirs = get_optimizer_state_dict(model, stock, options=options)
    for group in (*ours.get("param_groups", ()), *theirs.get("param_groups", ())):
        group.pop("param_names", None)  # ours was given names
    ours = {key: value for key, value in ours.items() if not key.endswith(".param_names")}
    return {"different": _difference(ours, theirs), "empty": empty, "stepped": len(stock.state)}


def from_torch(
    calls: Calls, layout: str, *, full: bool = False, flat: bool = False, num: int = 2
) -> dict[str, str]:
    """Train with torch's optimizer, hand its state to ours, and go on; return the bits."""
    _model(calls, layout)
    stock = loading.stock(calls.model, "AdamW", named=flat)
    loading.steps(calls.model, stock, 1, 3)
    given_by = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flat)
    taken_by = replace(given_by, broadcast_from_rank0=full)
    found = get_optimizer_state_dict(calls.model, stock, options=given_by)
    given.open_optimizer(calls)
    if full or flat:  # then torch looks for names and shards in the state that there is
        kept = _copies(calls.model)
        given.steps(calls, 1)
        with calls.optimizer.materialized():
            set_optimizer_state_dict(calls.model, calls.optimizer, found, options=taken_by)
        _put(calls.model, kept)
    else:
        set_optimizer_state_dict(calls.model, calls.optimizer, found)
    calls.num_steps = 3
    given.steps(calls, num)
    assert calls.optimizer.position.step == 5
    with calls.optimizer.materialized():
        ours = loading.digest(loading.state_of(calls.model, calls.optimizer))
    calls.optimizer.close()
    return ours


def _copies(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return copies of this rank's memory of all parameters."""
    return [local(p).detach().clone() for p in model.parameters()]


def _put(model: torch.nn.Module, values: Sequence[torch.Tensor]) -> None:
    """Put values into this rank's memory of all parameters."""
    for parameter, value in zip(model.parameters(), values, strict=True):
        local(parameter).detach().copy_(value)


def _all_bits(calls: Calls) -> dict[str, str]:
    """Return digests of parameters, state and masters."""
    with calls.optimizer.materialized():
        found = loading.digest(loading.state_of(calls.model, calls.optimizer))
        masters = calls.optimizer.state_dict()["master"]
    return found | loading.digest({"master": {str(n): value for n, value in masters.items()}})


def there_and_back(calls: Calls, layout: str) -> dict[str, Any]:
    """Load the whole state of one optimizer into that of another store, and let both go on.

    Parameters of 16 bits are scrambled before, so that only the masters of the dict can mend them.
    """
    _model(calls, layout)
    given.open_optimizer(calls)
    given.steps(calls, 3)
    full, values = calls.optimizer.full_state_dict(), _copies(calls.model)
    given.steps(calls, 2)
    expected = _all_bits(calls)
    calls.optimizer.close()
    for parameter, value in zip(calls.model.parameters(), values, strict=True):
        if parameter.requires_grad and parameter.dtype != torch.float32:
            value.fill_(7)
    _put(calls.model, values)
    calls.directory = calls.directory.with_name("other")
    given.open_optimizer(calls)
    calls.optimizer.load_state_dict(full)
    calls.num_steps = 3
    given.steps(calls, 2)
    found = _all_bits(calls)
    calls.optimizer.checkpoint({"step": 5}).result()
    calls.optimizer.close()
    return {"found": found, "expected": expected}


def held_after_restore(calls: Calls, layout: str, seed: int = 99) -> dict[str, Any]:
    """Restore in another cut, and hold the state before any step; return its bits."""
    _model(calls, layout, seed)
    given.open_optimizer(calls)
    calls.optimizer.restore()
    with calls.optimizer.materialized():
        found = loading.digest(loading.state_of(calls.model, calls.optimizer))
    given.set_gradients(calls.model, 4)
    calls.optimizer.step()
    calls.optimizer.close()
    return found


def other_shards(calls: Calls, layout: str) -> list[str]:
    """Load state as whole tensors, state that is sharded in another way, and bad state on rank 0.

    Returns:
        The errors, and whether the state is still the same.
    """
    _model(calls, layout)
    given.open_optimizer(calls)
    given.steps(calls, 2)
    full = calls.optimizer.full_state_dict()
    before = loading.digest(full)
    other, whole = copy.deepcopy(full), copy.deepcopy(full)
    for number, entry in full["state"].items():
        for name, value in entry.items():
            if isinstance(value, DTensor):
                ndim = value.device_mesh.ndim
                changed = value.redistribute(placements=[Replicate()] * ndim)
                other["state"][number][name] = changed
                whole["state"][number][name] = value.full_tensor()
    bad = whole if calls.rank else {**whole, "num_steps": "many"}
    said = []
    for loaded in (whole, other, bad):
        try:
            calls.optimizer.load_state_dict(loaded)
        except offload.OffloadError as error:
            said.append(f"{type(error).__name__}: {error}")
    said.append(str(loading.digest(calls.optimizer.full_state_dict()) == before))
    calls.optimizer.close()
    return said


def listed(calls: Calls) -> list[list[int]]:
    """Return the step and the size in bytes of each checkpoint that the optimizer lists."""
    found = calls.optimizer.checkpoints()
    return [[info.step, info.bytes] for info in found if info.valid]


def load_saved(
    calls: Calls | None, saved: str, widths: Sequence[int], layout: str, num: int
) -> dict[str, str]:
    """Load what `beside_torch` has saved into torch's own AdamW, with `dcp.load`, and go on."""
    model = given.model_of(widths, "float32", layout, seed=99)
    made = loading.stock(model, "AdamW")
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, made)}
    dcp.load(state, checkpoint_id=Path(saved), no_dist=calls is None)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, made, state["optim"])
    loading.steps(model, made, 4, num)
    return loading.digest(loading.state_of(model, made))
