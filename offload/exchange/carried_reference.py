"""References in the form of torch's own state dicts, as `torch.distributed.checkpoint` takes them.

Libraries save and load FSDP2 models by functions that take only dicts with ``state`` and
``param_groups``, and drop all else. So the reference is a text in each group, and ``state`` has one
small tensor for each parameter, which says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

CARRIED_KEY = "offload_reference"
"""Key of the reference in a parameter group, and of the tensor of each parameter."""


def carry(reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reference in the form of a torch state dict.

    Args:
        reference: Reference, as `offload.engine.reference.reference_to` makes it.
    """
    named = {key: value for key, value in reference.items() if isinstance(value, str | int)}
    text = json.dumps(named)
    groups = [{**group, CARRIED_KEY: text} for group in reference["param_groups"]]
    numbers = [number for group in groups for number in group["params"]]
    state = {n: {CARRIED_KEY: torch.zeros(1, dtype=torch.uint8, device="cpu")} for n in numbers}
    return {"state": state, "param_groups": groups}


def uncarried(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reference that a torch state dict carries; the dict itself if it carries none.

    Args:
        state_dict: State dict of any kind.
    """
    groups = state_dict.get("param_groups")
    texts = [g.get(CARRIED_KEY) for g in groups if isinstance(g, Mapping)] if groups else []
    if not texts or not isinstance(texts[0], str):
        return state_dict
    bare = [{key: value for key, value in g.items() if key != CARRIED_KEY} for g in groups or ()]
    return {**json.loads(texts[0]), "param_groups": bare}
