"""Parameters of repeated blocks, which are on the device only while they are used.

This wing may know `engine` and every wing below it. It never imports the optimizer. A block's
parameters are kept in their home, which is host memory; the step and the checkpoints work there.
"""

from __future__ import annotations

import torch

from offload.engine.stepping import StepStrategy
from offload.engine.training_state import Groups, TrainingState
from offload.errors import UnsupportedParameterError
from offload.model.outside import is_outside
from offload.options import Options

__all__ = ["has_blocks", "require_streamable", "streaming_for"]


def require_streamable(
    options: Options, model: torch.nn.Module | None, *, several: bool, is_remote: bool
) -> None:
    """Check, before anything is opened, that the blocks of a model can be streamed.

    Args:
        options: Settings with `parameters`.
        model: The module that is called in training; None if the user has not given it.
        several: Whether several ranks train the model.
        is_remote: Whether a server has the store.

    Raises:
        ValueError: There is no model, no such block, or a setting does not work with the others.
        UnsupportedParameterError: A parameter in a block cannot be moved.
    """
    setting = f"parameters={options.parameters!r}"
    if not has_blocks(model, options):
        return
    if model is None:
        raise ValueError(f"{setting} needs model=, the module that is called in training")
    others = {
        "several ranks (DistributedDataParallel, FSDP)": several,
        "a server as directory=": is_remote,
        f"overlap={options.overlap!r}": options.overlap is not None,
        'placement="device"': options.placement == "device",
        "host_memory=": options.parameters == "drive" and _keeps_state(options),
    }
    for other, is_wanted in others.items():
        if is_wanted:
            raise ValueError(f"{setting} does not work with {other} yet: leave one of them out")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.jit.ScriptModule):
            raise UnsupportedParameterError(
                f"{setting} does not work with a {type(module).__name__} yet, and "
                f"{repr(name) if name else 'the model'} is one: pass a plain module"
            )
    from offload.blocks.units import find_units

    for unit in find_units(model, options.block_patterns):
        for member in unit.members:
            is_plain = is_outside(member.parameter) or member.parameter.is_contiguous()
            if options.parameters == "drive" and not is_plain:
                raise UnsupportedParameterError(
                    f"parameter {member.name!r} is not contiguous, which {setting} does not take: "
                    'make it contiguous, or use parameters="host"'
                )


def has_blocks(model: torch.nn.Module | None, options: Options) -> bool:
    """Return whether blocks are to be streamed.

    With ``parameters="drive"`` a model without blocks, and parameters without a model, are trained
    as well: steps write their parameters into the slot, and all of them stay in memory, too.
    """
    if options.parameters != "drive" or options.blocks is not None:
        return options.parameters is not None
    from offload.blocks.units import find_units

    try:
        return model is not None and bool(find_units(model, ()))
    except ValueError:
        return False


def _keeps_state(options: Options) -> bool:
    """Return whether state stays in memory, so that steps do not write all parameters."""
    return bool(options.host_memory_bytes or options.memory_directory)


def streaming_for(
    model: torch.nn.Module, options: Options, groups: Groups, state: TrainingState
) -> StepStrategy:
    """Return the strategy of steps of a model whose blocks are streamed; see `StreamedSteps`."""
    from offload.blocks.steps import FiledSteps, StreamedSteps

    if options.parameters == "drive":
        return FiledSteps(state, model, options.block_patterns, groups)
    return StreamedSteps(state, model, options.block_patterns)
