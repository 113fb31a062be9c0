"""Parameter groups that can be stepped on a device, by its kernels or by torch's own code.

A group without a kernel is stepped by torch's own step, on flat views of whole runs. Its state must
be stored as FP32, because the codecs are exact on a CPU only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.device.kernels.forms import MAX_FACTORS, why_no_kernel
from offload.errors import UnsupportedOptimizerError
from offload.update.rules import UpdateRule


def require_steppable(
    rule: UpdateRule, groups: Sequence[Mapping[str, Any]], state_dtype: str, *, split: bool
) -> None:
    """Check that every parameter group can be stepped on a device.

    Args:
        rule: Update rule of the optimizer.
        groups: ``param_groups``.
        state_dtype: Stored form of the state, as `Options.state_dtype`.
        split: Whether masters are split.

    Raises:
        UnsupportedOptimizerError: A group cannot be stepped; says why, and names the remedy.
    """
    if reason := why_not_steppable(rule, groups, state_dtype, split=split):
        raise UnsupportedOptimizerError(
            f'placement="device" is not possible: {reason}. Use placement="host"'
        )


def why_not_steppable(
    rule: UpdateRule, groups: Sequence[Mapping[str, Any]], state_dtype: str, *, split: bool
) -> str:
    """Return why a parameter group cannot be stepped on a device; empty if all can be.

    The arguments are those of `require_steppable`.
    """
    for given in groups:
        # The updater, too, copies tensor hyper-parameters into host memory.
        group = {k: _host_like(v) for k, v in given.items()}
        reason = why_not_by_kernel(rule, group)
        refusal = why_not_by_torch(rule, group, state_dtype, split=split) if reason else ""
        if refusal:
            return f"{reason}, and {refusal}"
    return ""


def why_not_by_kernel(
    rule: UpdateRule, group: Mapping[str, Any], factors: Sequence[float] = ()
) -> str:
    """Return why no kernel can step a parameter group; empty if one can."""
    if len(factors) > MAX_FACTORS:
        return f"gradients are multiplied {len(factors)} times"
    return why_no_kernel(rule.optimizer_class, group)


def why_not_by_torch(
    rule: UpdateRule, group: Mapping[str, Any], state_dtype: str, *, split: bool
) -> str:
    """Return why torch's own step cannot update a group's state on a device; empty if it can."""
    if issubclass(rule.optimizer_class, torch.optim.ASGD):
        return "torch's own step keeps its scalar state on the device"
    if state_dtype != "float32":
        return f"torch's own step needs FP32 state, and it is stored as {state_dtype}"
    if split:
        return "torch's own step needs FP32 masters, and they are split"
    if group.get("fused"):
        return "torch's own fused step keeps its count on the device"
    return ""


def _host_like(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return torch.empty((), dtype=torch.float32, device="cpu")
    return value
