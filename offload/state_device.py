"""Where state is while it is updated: in host memory, or on the parameters' device."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gds import Backend, PosixBackend
from offload.device import is_on_device
from offload.device_compute import COMPUTES, Compute, compute_on
from offload.device_update import require_steps
from offload.errors import UnsupportedParameterError
from offload.options import Options
from offload.parameters import Trainable
from offload.rules import UpdateRule

Groups = Sequence[Mapping[str, Any]]


def new_backend(options: Options, device: torch.device | None) -> Backend:
    """Return a backend that moves host memory, and device memory where state may be there.

    Args:
        options: The user's.
        device: That the parameters are on now; None for host memory.

    Raises:
        gds.RefusedError: State is to be on a device, and a library or the driver is missing; names
            the remedy.
    """
    if options.placement == "device" or (options.placement == "auto" and _may_be_on(device)):
        from gds.kvikio import KvikioBackend  # needs a driver and libraries that few have

        number = device.index if device is not None else None
        return KvikioBackend(memory="host", device=number, direct=options.direct)
    return PosixBackend(direct=options.direct)


def device_of(groups: Groups) -> torch.device | None:
    """Return the device that a parameter is on, or None if all are in host memory."""
    parameters = (p for group in groups for p in group["params"])
    return next((p.device for p in parameters if is_on_device(p)), None)


def choose_compute(
    options: Options,
    rule: UpdateRule,
    groups: Groups,
    trainables: Sequence[Trainable],
) -> Compute | None:
    """Return what updates state on the parameters' device; None if the CPU does, in host memory.

    Raises:
        UnsupportedParameterError: ``placement="device"``, and a parameter is elsewhere; names it.
        UnsupportedOptimizerError: ``placement="device"``, and the step is not possible there.
    """
    if options.placement == "host" or not trainables:
        return None
    if options.placement == "device":
        require_steps(rule, groups, options.state_dtype, split=options.master == "split")
        if reason := why_not_there(trainables):
            raise UnsupportedParameterError(
                f'placement="device" updates parameters on the device that they are on, and '
                f'{reason}: move the model to one device, or use placement="host"'
            )
        return compute_on(trainables[0].tensor.device)
    return None


def why_not_there(trainables: Sequence[Trainable]) -> str:
    """Return why parameters are not all on one device that computes, or an empty string."""
    first = trainables[0]
    for trainable in trainables:
        name, device = trainable.spec.name, trainable.tensor.device
        if not is_on_device(trainable.tensor):
            return f"parameter {name!r} is in host memory"
        if device != first.tensor.device:
            return f"{name!r} is on {device}, but {first.spec.name!r} on {first.tensor.device}"
        if device.type not in COMPUTES:
            return f"parameter {name!r} is on {device}, which has no kernels"
    return ""


def _may_be_on(device: torch.device | None) -> bool:
    """Return whether a device can be given state, as far as that is known without trying."""
    if device is None or device.type not in COMPUTES:
        return False
    missing = [name for name in ("kvikio", "cupy") if importlib.util.find_spec(name) is None]
    if missing:
        logging.getLogger("offload").info(
            "state is updated on the CPU: without %s it cannot be in device memory "
            "(pip install 'ssd-offload[gpu]')",
            " and ".join(missing),
        )
    return not missing
