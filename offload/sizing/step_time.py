"""Time of a step where the state is updated on the device, on the host, or next to the storage.

All parts of a step happen at the same time, so a step takes as long as its slowest part. The module
is pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes that one step of a model moves."""

    state: int
    """Bytes of optimizer state, which are read and written."""

    gradients: int
    parameters: int

    kept_on_host: int = 0
    """Bytes of the state that would stay in host memory between steps on the host."""

    kept_on_device: int = 0
    """Bytes of the state that would stay in device memory between steps on the device."""


def host_parts(
    step: StepBytes,
    *,
    drive_gbps: float,
    update_gbps: float | None,
    to_host_gbps: float | None,
    to_device_gbps: float | None,
    memory_gbps: float | None = None,
) -> dict[str, float]:
    """Return the seconds of each part of a step on the host's CPU.

    Gradients and parameters cross the link to the host, and parameters cross back.

    Args:
        step: Bytes that the step moves.
        drive_gbps: Rate of the drives in GB/s: reads and writes of equal size at the same time,
            both added up.
        update_gbps: Rate of updates on the CPU's cores in GB/s: bytes of state read and written,
            both added up. None leaves the part out.
        to_host_gbps: Rate of the link from the device in GB/s; None if there is no device.
        to_device_gbps: Rate of the link to the device in GB/s; None if there is no device.
        memory_gbps: Rate of the host's memory in GB/s, bytes read and written added up. The drives
            write and read it once for each byte of state that they move, and the CPU reads and
            writes it once for each byte of state. None leaves the part out.
    """
    parts = {"the drives": 2 * (step.state - step.kept_on_host) / 1e9 / drive_gbps}
    if update_gbps is not None:
        parts["the CPU"] = 2 * step.state / 1e9 / update_gbps
    if memory_gbps is not None:
        touched = 2 * (step.state - step.kept_on_host) + 2 * step.state
        parts["the host's memory"] = touched / 1e9 / memory_gbps
    if to_host_gbps is not None:
        parts["the link to the host"] = (step.gradients + step.parameters) / 1e9 / to_host_gbps
    if to_device_gbps is not None:
        parts["the link to the device"] = step.parameters / 1e9 / to_device_gbps
    return parts


def device_parts(
    step: StepBytes,
    *,
    drive_gbps: float,
    to_host_gbps: float,
    to_device_gbps: float,
    memory_gbps: float | None = None,
) -> dict[str, float]:
    """Return the seconds of each part of a step on the device; state crosses the link both ways.

    On a device the arithmetic is never the slowest part.

    Args:
        step: Bytes that the step moves.
        drive_gbps: Rate of the drives in GB/s, as for `host_parts`.
        to_host_gbps: Rate of the link from the device in GB/s.
        to_device_gbps: Rate of the link to the device in GB/s.
        memory_gbps: Rate of the host's memory in GB/s, bytes read and written added up, through
            which the state passes: the drives and the link each write or read it once for each byte
            that they move, without the CPU. None if state moves between drive and device without
            it (GPUDirect Storage).
    """
    moved = (step.state - step.kept_on_device) / 1e9
    parts = {
        "the drives": 2 * moved / drive_gbps,
        "the link to the host": moved / to_host_gbps,
        "the link to the device": moved / to_device_gbps,
    }
    if memory_gbps is not None:
        parts["the host's memory"] = 4 * moved / memory_gbps
    return parts


def storage_parts(
    step: StepBytes, *, drive_gbps: float, update_gbps: float | None, network_gbps: float | None
) -> dict[str, float]:
    """Return the seconds of each part of a step on a server next to the storage.

    Only gradients go to the server, and only parameters come back.
    """
    parts = {"the drives": 2 * step.state / 1e9 / drive_gbps}
    if update_gbps is not None:
        parts["the CPU"] = 2 * step.state / 1e9 / update_gbps
    if network_gbps is not None:
        parts["the network"] = max(step.gradients, step.parameters) / 1e9 / network_gbps
    return parts
