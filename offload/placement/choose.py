"""Choice of the memory for state during updates: host memory, or the parameters' device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gds.errors import RefusedError
from offload.device.boundary import is_on_device
from offload.device.compute import COMPUTES, Compute, compute_on
from offload.errors import UnsupportedParameterError
from offload.format.layout import Layout
from offload.model.parameters import Trainable
from offload.options import Options
from offload.placement.model import decide
from offload.placement.rates import MeasurementSetup, find_rates, step_bytes
from offload.stream.drives import Drives
from offload.stream.memory import host_memory_bytes
from offload.update.device_step import require_steppable, why_not_steppable
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule

Groups = Sequence[Mapping[str, Any]]


class PlacementChooser:
    """Chooses the placement for one optimizer. With ``placement="auto"`` it decides only once.

    Args:
        options: Options of the user.
        rule: Update rule of the optimizer.
        pool: Pool that updates state on the CPU; its rate is measured.
        drives: Drives of the store; their rates are measured.
    """

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

        Args:
            groups: ``param_groups``.
            layout: Layout of the state.
            trainables: Trainable parameters of the layout.

        Raises:
            UnsupportedParameterError: ``placement="device"`` is set, and the parameters are not all
                on one device with kernels.
            UnsupportedOptimizerError: ``placement="device"`` is set, and the step is not possible
                on a device.
            gds.errors.RefusedError: ``placement="device"`` is set, and no kernel can be compiled
                for the device; names the remedy.
        """
        placement = self._options.placement
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
