"""Beginning of a training by several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from offload.distributed.rank_group import RankGroup
from offload.distributed.terms import terms_of
from offload.format.arrays import BLOCK_ELEMENTS
from offload.model.buffer_watch import BufferWatch
from offload.model.parameters import all_parameters
from offload.model.process_groups import ProcessGroup
from offload.options import Options
from offload.retention.policy import Retention


def join_ranks(
    process_group: ProcessGroup,
    param_groups: Sequence[Mapping[str, Any]],
    model: torch.nn.Module | None,
    options: Options,
    *,
    optimizer: str,
    keep: Retention,
) -> RankGroup:
    """Return the ranks that train a model. Collective.

    Args:
        process_group: Group of the ranks; None for the default group.
        param_groups: Parameter groups of the optimizer.
        model: Model that is trained; None if it was not given.
        options: Settings of the optimizer.
        optimizer: Name of the optimizer's class.
        keep: Policy that selects the checkpoints to keep.

    Raises the errors of `RankGroup`, and ValueError for an option that ranks do not have.
    """
    if options.drives.shares is not None:
        raise ValueError(
            "DriveTuning(shares=...) is not supported with several ranks: each of them keeps its "
            "share of the state in one of the directories. Leave it out"
        )
    group = process_group if isinstance(process_group, dist.ProcessGroup) else None
    named = all_parameters(param_groups, model)
    has_fused = any(one.get("fused") for one in param_groups)
    multiple = BLOCK_ELEMENTS if options.state_dtype == "int8" or has_fused else 1
    if options.overlap is not None:
        require_beside_forward(named)
    return RankGroup(
        group,
        named,
        terms_of(optimizer, param_groups, model, keep, options),
        BufferWatch(model),
        multiple=multiple,
        timeout_s=options.agreement_timeout_s,
    )


def require_beside_forward(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse steps beside the forward where it was not shown that they have the same bits."""
    for name, tensor in named:
        if tensor.device.type not in ("cpu", "meta"):  # the latter is refused with its own remedy
            raise ValueError(
                'overlap="forward" is not supported with several ranks on a device, with NCCL for '
                f"example: {name!r} is on {tensor.device}, and this was tried in host memory with "
                "gloo only. Leave it out"
            )
