"""Calls of ranks that exchange the optimizer's state with torch's own functions and optimizers.

Gradients are given by a formula, so any number of ranks trains the same, and what one process
stores or torch computes is the oracle for what several ranks have stored.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate

import offload
from offload.integrations.dcp import CheckpointReader
from tests.numerics.reference import bits
from tests.ranks_training.calls import Calls, Model, Setting
from tests.ranks_training.models import local, make_model, plain_name, set_gradients

WIDTHS = (40, 70, 33)
"""Sizes for which a parameter has several chunks, and shards of FSDP2 are uneven."""


def _groups(model: torch.nn.Module, *, named: bool) -> list[dict[str, Any]]:
    """Return two groups: weights, and the rest."""
    trained = [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    weights = [one for one in trained if one[1].dim() > 1]
    others = [one for one in trained if one[1].dim() <= 1]
    return [
        {"params": weights if named else [p for _, p in weights], "weight_decay": 0.1},
        {"params": others if named else [p for _, p in others]},
    ]


def open_optimizer(calls: Calls, optimizer: str = "AdamW", **hyper: Any) -> None:
    """Make an optimizer of a class of `offload`."""
    made = getattr(offload, optimizer)
    groups = _groups(calls.model, named=True)
    calls.open(params=groups, optimizer_class=made, **{"lr": 1e-2, **hyper})


def stock(model: torch.nn.Module, optimizer: str = "AdamW", **hyper: Any) -> torch.optim.Optimizer:
    """Return torch's own optimizer, with the same groups."""
    groups = _groups(model, named=False)
    return getattr(torch.optim, optimizer)(groups, **{"lr": 1e-2, **hyper})  # type: ignore[no-any-return]


def steps(calls: Calls, times: int, skip: str = "") -> None:
    """Take steps."""
    for _ in range(times):
        set_gradients(calls.model, calls.num_steps + 1, skip)
        calls.update()


def stock_steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, num: int, skip: str = ""
) -> None:
    """Take steps with the same gradients."""
    for step in range(first, first + num):
        set_gradients(model, step, skip)
        optimizer.step()
        model.zero_grad()


def plain(num_steps: int, optimizer: str = "AdamW", skip: str = "", **hyper: Any) -> dict[str, str]:
    """Return the digests of the same training by torch in one process, in memory."""
    torch.manual_seed(7)
    model = Model(WIDTHS)
    made = stock(model, optimizer, **hyper)
    stock_steps(model, made, 1, num_steps, skip)
    return digest(state_of(model, made))


def train(calls: Calls, times: int = 3, *, skip: str = "", **how: Any) -> None:
    """Make an optimizer, take steps, and seal a checkpoint."""
    open_optimizer(calls, **how)
    steps(calls, times, skip)
    calls.optimizer.checkpoint({"step": calls.num_steps}).result()
    calls.optimizer.close()


def train_alone(folder: Path, setting: Mapping[str, Any], **how: Any) -> Path:
    """Do the same in this process; return the store."""
    folder.mkdir(exist_ok=True)
    alone = Calls(folder, 0, 1, Setting(**{"widths": WIDTHS, **setting, "kind": "one"}))
    train(alone, **how)
    return folder / "run"


def digest(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each whole tensor in nested mappings, by its path."""
    found: dict[str, str] = {}
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": one for inner, one in digest(value).items()}
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            data = bits(whole.detach()).contiguous().numpy().tobytes()
            found[name] = hashlib.sha256(data).hexdigest()[:16]
    return found


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the parameters and the optimizer's state by torch's names."""
    named = {plain_name(n): p for n, p in model.named_parameters()}
    state = {n: dict(optimizer.state[p]) for n, p in named.items() if p in optimizer.state}
    return {"model": named, "state": state}


def _into(
    model: torch.nn.Module, made: torch.optim.Optimizer, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the tensors that a load is to fill."""
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, made, options=options),
    }


def load(
    calls: Calls | None,
    store: str,
    *,
    kind: str = "fsdp2",
    optimizer: str = "AdamW",
    num: int = 0,
    skip: str = "",
    flat: bool = False,
    verify: bool = True,
    is_ours: bool = True,
    **hyper: Any,
) -> dict[str, Any]:
    """Load a checkpoint into a new model and torch's own optimizer, and take more steps.

    It is a store of ours, or what `beside_torch` has saved.

    Returns:
        Digests of all values, and the number of bytes that this rank has read and holds.
    """
    setting = Setting(kind=kind, dtype="float32", widths=WIDTHS)
    model = make_model(setting, calls.size if calls else 1, seed=99)
    made = stock(model, optimizer, **hyper)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = _into(model, made, options)
    reader = CheckpointReader(store, verify=verify) if is_ours else None
    where = {"storage_reader": reader} if is_ours else {"checkpoint_id": store}
    dcp.load(state, no_dist=calls is None, **where)  # type: ignore[arg-type]
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, made, state["optim"], options=options)
    arrays = [*model.state_dict().values(), *arrays_of(made)]
    own = sum(local(value).numel() * local(value).element_size() for value in arrays)
    stock_steps(model, made, 4, num, skip)
    read = reader.bytes_read if reader else 0
    return {"digest": digest(state_of(model, made)), "read": read, "own": own}


def arrays_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state that are as large as parameters."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [v for v in values if isinstance(v, torch.Tensor) and v.dim()]


def load_damaged(calls: Calls, store: str) -> dict[str, Any]:
    """Load a damaged checkpoint into tensors of NaN; return the errors, and what was loaded."""
    model = make_model(Setting(kind="fsdp2", dtype="float32", widths=WIDTHS), calls.size, seed=99)
    made = stock(model)
    state = _into(model, made)
    for value in arrays_of(made):
        local(value).fill_(torch.nan)
    errors = []
    try:
        dcp.load(state, storage_reader=CheckpointReader(store))
    except CheckpointException as error:
        errors = [[type(one[0]).__name__, str(one[0])] for one in error.failures.values()]
    loaded = {}
    for name, entry in state["optim"]["state"].items():
        for array, value in entry.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            loaded[f"{name}/{array}"] = whole.flatten().tolist()
    return {"errors": errors, "loaded": loaded}


def described(value: Any) -> Any:
    """Return a state dict with words in the place of tensors, which have this rank's bits."""
    if isinstance(value, Mapping):
        return {key: described(one) for key, one in value.items()}
    if isinstance(value, DTensor):
        where = f"{value.device_mesh} {value.placements} {value.shape} {value.stride()}"
        return [where, described(value.to_local())]
    if isinstance(value, torch.Tensor):
        return [f"{type(value)} {value.dtype} {value.shape}", digest({"": value})]
    return value


def beside_torch(
    calls: Calls,
    out: str = "",
    *,
    flat: bool = False,
    full: bool = False,
    optimizer: str = "AdamW",
    skip: str = "",
    **hyper: Any,
) -> dict[str, Any]:
    """Train with both optimizers, and compare what torch says of them; save that of ours.

    Returns:
        Where the two state dicts differ, whether nothing is held in memory afterwards, and the
        number of parameters that torch's optimizer has stepped.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
    open_optimizer(calls, optimizer, **hyper)
    steps(calls, 3, skip)
    with calls.optimizer.materialized():
        ours = get_optimizer_state_dict(calls.model, calls.optimizer, options=options)
    empty = not any(map(len, calls.optimizer.state.values()))
    if out:
        dcp.save({"model": get_model_state_dict(calls.model), "optim": ours}, checkpoint_id=out)
    calls.optimizer.close()
    model = make_model(calls.setting, calls.size)
    made = stock(model, optimizer, **hyper)
    stock_steps(model, made, 1, 3, skip)
    theirs = get_optimizer_state_dict(model, made, options=options)
    for group in (*ours.get("param_groups", ()), *theirs.get("param_groups", ())):
        group.pop("param_names", None)  # ours was given names
    ours = {key: value for key, value in ours.items() if not key.endswith(".param_names")}
    pairs = {key: (described(ours.get(key)), described(theirs.get(key))) for key in ours | theirs}
    different = [
        f"{key}: {one} is not {other}" for key, (one, other) in pairs.items() if one != other
    ]
    return {"different": different, "empty": empty, "stepped": len(made.state)}


def from_torch(calls: Calls, *, full: bool = False, num: int = 2) -> dict[str, str]:
    """Train with torch's optimizer, hand its state to ours, and go on; return the bits."""
    made = stock(calls.model, "AdamW")
    stock_steps(calls.model, made, 1, 3)
    given_by = StateDictOptions(full_state_dict=full)
    taken_by = replace(given_by, broadcast_from_rank0=full)
    found = get_optimizer_state_dict(calls.model, made, options=given_by)
    open_optimizer(calls)
    if full:  # then torch looks for names and shards in the state that there is
        kept = _copies(calls.model)
        steps(calls, 1)
        with calls.optimizer.materialized():
            set_optimizer_state_dict(calls.model, calls.optimizer, found, options=taken_by)
        _put(calls.model, kept)
    else:
        set_optimizer_state_dict(calls.model, calls.optimizer, found)
    calls.num_steps = 3
    steps(calls, num)
    assert calls.optimizer.position.step == 5
    with calls.optimizer.materialized():
        ours = digest(state_of(calls.model, calls.optimizer))
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
        found = digest(state_of(calls.model, calls.optimizer))
        masters = calls.optimizer.state_dict()["master"]
    return found | digest({"master": {str(n): value for n, value in masters.items()}})


def there_and_back(calls: Calls) -> dict[str, Any]:
    """Load the whole state of one optimizer into that of another store, and let both go on.

    Parameters of 16 bits are scrambled before, so that only the masters of the dict can mend them.
    """
    open_optimizer(calls)
    steps(calls, 3)
    full, values = calls.optimizer.full_state_dict(), _copies(calls.model)
    steps(calls, 2)
    expected = _all_bits(calls)
    calls.optimizer.close()
    for parameter, value in zip(calls.model.parameters(), values, strict=True):
        if parameter.requires_grad and parameter.dtype != torch.float32:
            value.fill_(7)
    _put(calls.model, values)
    calls.directory = calls.directory.with_name("other")
    open_optimizer(calls)
    calls.optimizer.load_state_dict(full)
    calls.num_steps = 3
    steps(calls, 2)
    found = _all_bits(calls)
    calls.optimizer.checkpoint({"step": 5}).result()
    calls.optimizer.close()
    return {"found": found, "expected": expected}


def held_after_restore(calls: Calls) -> dict[str, Any]:
    """Restore in another cut, and hold the state before any step; return its bits."""
    calls.model = make_model(calls.setting, calls.size, seed=99)
    open_optimizer(calls)
    calls.optimizer.restore()
    with calls.optimizer.materialized():
        found = digest(state_of(calls.model, calls.optimizer))
    set_gradients(calls.model, 4)
    calls.optimizer.step()
    calls.optimizer.close()
    return found


def other_shards(calls: Calls) -> list[str]:
    """Load state as whole tensors, state that is sharded in another way, and bad state on rank 0.

    Returns:
        The errors, and whether the state is still the same.
    """
    open_optimizer(calls)
    steps(calls, 2)
    full = calls.optimizer.full_state_dict()
    before = digest(full)
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
    said.append(str(digest(calls.optimizer.full_state_dict()) == before))
    calls.optimizer.close()
    return said
