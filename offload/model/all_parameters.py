"""Names of all parameters of a training by several ranks, before it is known who steps what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.model.parameters import group_names


def all_parameters(
    param_groups: Sequence[Mapping[str, Any]], model: torch.nn.Module | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of an optimizer and of its model, with their names in files.

    Args:
        param_groups: Parameter groups of the optimizer.
        model: Model that is trained; None if it was not given.
    """
    named = dict(group_names(param_groups, model, _no_shards))
    if model is not None:
        models = [{"params": list(model.parameters())}]
        named |= dict(group_names(models, model, _no_shards))
    return list(named.items())


def _no_shards(name: str, tensor: torch.Tensor) -> None:
    """Stand for shards that are not known yet, so that names lack the prefixes of wrappers."""
    del name, tensor
