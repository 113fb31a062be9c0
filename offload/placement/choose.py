"""Choice of the memory for state during updates: host memory, or the parameters' device.

The choice follows from measured rates and the model of a step's time in `offload.sizing.step_time`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from gds.errors import RefusedError
from offload.device.boundary import is_on_device
from offload.device.compute import COMPUTES, Compute, compute_on
from offload.errors import UnsupportedParameterError
from offload.format.layout import Layout
from offload.model.parameters import Trainable
from offload.options import Options
from offload.placement.rates import MeasurementSetup, Rates, find_rates, step_bytes
from offload.sizing.step_time import StepBytes, device_parts, host_parts
from offload.stream.drives import Drives
from offload.stream.memory import host_memory_bytes
from offload.update.device_step import require_steppable, why_not_steppable
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule

Groups = Sequence[Mapping[str, Any]]

_MAX_TIME_RATIO = 0.95
"""Largest ratio of a step's time on the device to its time on the CPU at which state is placed in
device memory. It is below 1 because the ring takes device memory that the model could use."""


class Decision(NamedTuple):
    """Placement of steps."""

    place: Literal["host", "device"]

    reason: str
    """Reason, as text for people."""


def decide(step: StepBytes, rates: Rates | str) -> Decision:
    """Choose the device if its steps are clearly faster; otherwise the host.

    All parts of a step happen at the same time, so a step takes as long as its slowest part. On a
    device the arithmetic is never the slowest part.

    Args:
        step: Bytes that a step moves.
        rates: Measured rates; or the reason why there are none, in which case the host is chosen.
    """
    if isinstance(rates, str):
        return Decision("host", f"steps are taken on the CPU, because {rates}")
    host = host_parts(
        step,
        drive_gbps=rates.drive_gbps,
        update_gbps=rates.update_gbps,
        to_host_gbps=rates.to_host_gbps,
        to_device_gbps=rates.to_device_gbps,
        memory_gbps=rates.memory_gbps,
    )
    device = device_parts(
        step,
        drive_gbps=rates.drive_gbps,
        to_host_gbps=rates.to_host_gbps,
        to_device_gbps=rates.to_device_gbps,
        memory_gbps=None if rates.direct else rates.memory_gbps,
    )
    on_device, on_host = _slowest(device, "on the device"), _slowest(host, "on the CPU")
    expected = f"a step is expected to take {on_device}, and {on_host}"
    if max(device.values()) <= _MAX_TIME_RATIO * max(host.values()):
        return Decision("device", f"steps are taken on the device: {expected}")
    return Decision(
        "host",
        f"steps are taken on the CPU rather than on the device: {expected}; state is kept in "
        f"device memory only if a step then takes at most {_MAX_TIME_RATIO:.0%} of the time",
    )


def _slowest(parts: dict[str, float], where: str) -> str:
    name = max(parts, key=parts.__getitem__)
    return f"{parts[name]:.3g} s {where} (limited by {name})"


class PlacementChooser:
    """Chooses the placement for one optimizer. With ``placement="auto"`` it decides only once."""

    def __init__(
        self, options: Options, rule: UpdateRule, pool: UpdatePool, drives: Drives
    ) -> None:
        self._options = options
        self._rule = rule
        self._pool = pool
        self._drives = drives
        self._chosen: str | None = None

    def choose(
        self, groups: Groups, layout: Layout, trainables: Sequence[Trainable]
    ) -> Compute | None:
        """Return the `Compute` of the parameters' device, or None if the CPU updates the state.

        Raises:
            UnsupportedParameterError: ``placement="device"`` is set, and the parameters are not all
                on one device with kernels.
            UnsupportedOptimizerError: ``placement="device"`` is set, and the step is not possible
                on a device.
            gds.errors.RefusedError: ``placement="device"`` is set, and no kernel can be compiled
                for the device; names the remedy.
        """
        options = self._options
        is_outside = options.gradients is not None or options.parameters is not None
        placement = "host" if is_outside else options.placement
        if placement == "host" or not trainables:
            return None
        split = self._options.master == "split"
        if placement == "device":
            require_steppable(self._rule, groups, layout.state_dtype, split=split)
            if reason := why_not_on_one_device(trainables):
                raise UnsupportedParameterError(
                    'placement="device" updates parameters on the device that holds them, but '
                    f'{reason}: move the model to one device, or use placement="host"'
                )
        elif (
            why_not_on_one_device(trainables)
            or why_not_steppable(self._rule, groups, layout.state_dtype, split=split)
            or self._choose(groups, layout, trainables[0].parameter.device) == "host"
        ):
            return None
        try:
            return compute_on(trainables[0].parameter.device)
        except RefusedError as error:
            if placement == "device":
                raise
            self._chosen = "host"
            logging.getLogger("offload").info("state is updated on the CPU: %s", error)
            return None

    def _choose(self, groups: Groups, layout: Layout, device: torch.device) -> str:
        if self._chosen is None:
            options, drives = self._options, self._drives
            drives.calibrate(layout.state_bytes)
            setup = MeasurementSetup(
                backends=drives.untraced_backends,
                directories=drives.directories,
                drive_gbps=drives.rates()[2],
                device=device,
                pool=self._pool,
                rule=self._rule,
                groups=groups,
                layout=layout,
            )
            step = step_bytes(
                layout,
                kept_on_host=host_memory_bytes(options),
                kept_on_device=options.device_memory_bytes,
            )
            self._chosen, reason = decide(step, find_rates(setup))
            logging.getLogger("offload").info("%s", reason)
        return self._chosen


def device_of(groups: Groups) -> torch.device | None:
    """Return the device of the first parameter in device memory; None if all are in host memory."""
    parameters = (p for group in groups for p in group["params"])
    return next((p.device for p in parameters if is_on_device(p)), None)


def why_not_on_one_device(trainables: Sequence[Trainable]) -> str:
    """Return why the parameters are not all on one device that has kernels; empty if they are."""
    first = trainables[0]
    for trainable in trainables:
        name, device = trainable.spec.name, trainable.parameter.device
        if not is_on_device(trainable.parameter):
            return f"parameter {name!r} is in host memory"
        if device != first.parameter.device:
            return f"{name!r} is on {device}, but {first.spec.name!r} on {first.parameter.device}"
        if device.type not in COMPUTES:
            return f"parameter {name!r} is on {device}, which has no kernels"
    return ""
