"""Calls of ranks that load a checkpoint with `dcp.load` into torch's own optimizers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from offload.integrations.dcp import CheckpointReader
from tests.numerics.reference import bits
from tests.ranks_training.calls import Calls
from tests.ranks_training.given import model_of, plain_name, set_gradients


def stock(
    model: torch.nn.Module, optimizer: str, *, named: bool = False, **hyper: Any
) -> torch.optim.Optimizer:
    """Return torch's own optimizer, with the groups of `given.open_optimizer`."""
    trained = [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    weights = [one for one in trained if one[1].dim() > 1]
    others = [one for one in trained if one[1].dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": weights if named else [p for _, p in weights], "weight_decay": 0.1},
        {"params": others if named else [p for _, p in others]},
    ]
    return getattr(torch.optim, optimizer)(groups, **{"lr": 1e-2, **hyper})


def steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    first: int,
    num: int,
    skip: str = "",
) -> None:
    """Take steps with the given gradients."""
    for step in range(first, first + num):
        set_gradients(model, step, skip)
        optimizer.step()
        model.zero_grad()


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


def load(
    calls: Calls | None,
    store: str,
    widths: Sequence[int],
    *,
    dtype: str = "float32",
    layout: str = "fsdp2",
    optimizer: str = "AdamW",
    first: int = 4,
    num: int = 0,
    skip: str = "",
    flat: bool = False,
    verify: bool = True,
    **hyper: Any,
) -> dict[str, Any]:
    """Load a checkpoint into a new model and torch's own optimizer, and take more steps.

    Returns:
        Digests of all values, and the number of bytes that this rank has read and holds.
    """
    model = model_of(widths, dtype, layout, seed=99)
    made = stock(model, optimizer, **hyper)
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, made, options=options),
    }
    reader = CheckpointReader(store, verify=verify)
    dcp.load(state, storage_reader=reader, no_dist=calls is None)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, made, state["optim"], options=options)
    own = sum(
        local.numel() * local.element_size()
        for value in (*model.state_dict().values(), *arrays_of(made))
        for local in [value.to_local() if isinstance(value, DTensor) else value]
    )
    steps(model, made, first, num, skip)
    return {"digest": digest(state_of(model, made)), "read": reader.bytes_read, "own": own}


def arrays_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state that are as large as parameters."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [v for v in values if isinstance(v, torch.Tensor) and v.dim()]


def load_damaged(calls: Calls, store: str, widths: Sequence[int]) -> dict[str, Any]:
    """Load a damaged checkpoint into tensors of NaN; return the errors, and what was loaded."""
    model = model_of(widths, "float32", "fsdp2", seed=99)
    made = stock(model, "AdamW")
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, made)}
    for value in arrays_of(made):
        (value.to_local() if isinstance(value, DTensor) else value).fill_(torch.nan)
    errors = {}
    try:
        dcp.load(state, storage_reader=CheckpointReader(store))
    except CheckpointException as error:
        errors = {
            str(rank): [type(one[0]).__name__, str(one[0])] for rank, one in error.failures.items()
        }
    loaded = {}
    for name, entry in state["optim"]["state"].items():
        for array, value in entry.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            loaded[f"{name}/{array}"] = whole.flatten().tolist()
    return {"errors": errors, "loaded": loaded}


def newest(store: Path) -> Path:
    """Return the newest checkpoint of a store."""
    return max(store.glob("step-*"))


def ask_for_the_state(calls: Calls) -> None:
    """Ask torch for the state of an optimizer that holds none in memory."""
    get_optimizer_state_dict(calls.model, calls.optimizer)


def listed_while_pins_move(calls: Calls, steps: int) -> list[list[int]]:
    """Seal and pin some steps, and unpin older ones; return what this rank lists after each step.

    A checkpoint that is unpinned is withdrawn only by the step that writes into its slot.
    """
    found = []
    for number in range(1, steps + 1):
        calls.step()
        found.append([info.step for info in calls.optimizer.checkpoints()])
        calls.checkpoint()
        calls.result()
        calls.optimizer.pin(f"pin-{number}")
        if number > 2:
            calls.optimizer.unpin(f"pin-{number - 2}")
    return found
