"""Where the parameters of a device are best updated: there, or on the CPU next to the drive."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

_WORTH = 0.95
"""State goes into device memory only where a step takes at most this part of its time on the CPU:
the ring takes memory there that the model could use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured, in gigabytes (1e9 bytes) per second."""

    drive_gbps: float
    """Of the drives, of as many bytes read as written at the same time, both together."""

    update_gbps: float
    """At which the CPU's cores read and write state as they update it, both together."""

    to_host_gbps: float
    """Of the link from the device."""

    to_device_gbps: float
    """Of the link to it."""

    direct: bool
    """Whether state goes between drive and device without passing through host memory: GPUDirect
    Storage, not its compatibility mode."""

    def __post_init__(self) -> None:
        """Refuse what is no rate."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "direct" and not 0 < value < float("inf"):
                raise ValueError(f"{field.name} must be a rate in GB/s, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What one step of a model moves."""

    state: int
    """Bytes of optimizer state, which are read and written."""

    gradients: int
    parameters: int


def choose_placement(step: StepBytes, rates: Rates) -> Literal["host", "device"]:
    """Return where a step takes less time; on the host if that makes no great difference.

    All that a step does it does at the same time, so its time is that of the slowest part. On a
    device the arithmetic is never that.
    """
    return "device" if device_s(step, rates) <= _WORTH * host_s(step, rates) else "host"


def host_s(step: StepBytes, rates: Rates) -> float:
    """Return the seconds of a step on the CPU: gradients and parameters cross, state does not."""
    moved = 2 * step.state / 1e9
    return max(
        moved / rates.drive_gbps,
        moved / rates.update_gbps,
        (step.gradients + step.parameters) / 1e9 / rates.to_host_gbps,
        step.parameters / 1e9 / rates.to_device_gbps,
    )


def device_s(step: StepBytes, rates: Rates) -> float:
    """Return the seconds of a step on the device: state crosses the link, however it does that."""
    crossing = step.state / 1e9
    through_host = 0.0
    if not rates.direct:
        # A copy reads and writes host memory once more, where a CPU's update would be.
        through_host = 2 * crossing / rates.update_gbps
    return max(
        2 * crossing / rates.drive_gbps,
        crossing / rates.to_host_gbps,
        crossing / rates.to_device_gbps,
        through_host,
    )
