"""Error about a parameter that has changed since its state was laid out."""

from __future__ import annotations

import torch

from offload.errors import MismatchError
from offload.format.layout import ParameterSpec


def changed_error(
    before: ParameterSpec,
    now: ParameterSpec,
    parameter: torch.Tensor,
    model: torch.nn.Module | None,
) -> MismatchError:
    """Return the error for a parameter that was changed in a way that its files cannot follow.

    Args:
        before: Description of the parameter when the state was laid out.
        now: Description of the parameter in the groups and the model at this moment.
        parameter: Live tensor.
        model: Module that was passed as ``model=``; None if there was none.
    """
    found: list[str] = []
    if now.name != before.name:
        gone = model is not None and all(p is not parameter for p in model.parameters())
        found.append(
            "is not in model= any more: its layer was replaced or removed"
            if gone
            else f"is called {now.name!r}"
        )
    if now.dtype != before.dtype:
        found.append(f"is {now.dtype} and was {before.dtype}")
    if now.shape != before.shape:
        found.append(f"has the shape {list(now.shape)} and had {list(before.shape)}")
    if now.cut != before.cut:
        found.append(f"is stepped as {now.stored_name} here and was as {before.stored_name}")
    if now.group != before.group:
        found.append(f"is in parameter group {now.group} and was in {before.group}")
    elif now.arrays != before.arrays and now.dtype == before.dtype:
        found.append(
            f"would keep the state {list(now.arrays)} with the settings of its group (momentum, "
            f"amsgrad, ...), and kept {list(before.arrays)}"
        )
    return MismatchError(
        f"parameter {before.name!r} has changed since the optimizer was made: it "
        f"{', and '.join(found)}. Its state on the drive cannot follow that in the middle of a "
        "run, and nothing was written. Undo the change; or change the model first, and construct "
        "the optimizer after that"
    )
