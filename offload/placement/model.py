"""Choice between updating on the parameters' device and on the CPU, from a model of their times.

The model is in `offload.sizing.step_time`; `rates` measures its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypeAlias

from offload.sizing.step_time import StepBytes, device_parts, host_parts

Place: TypeAlias = Literal["host", "device"]

_MAX_TIME_RATIO = 0.95
"""Largest ratio of a step's time on the device to its time on the CPU at which state is placed in
device memory. It is below 1 because the ring takes device memory that the model could use."""

_MAX_GBPS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured rates, in gigabytes (1e9 bytes) per second."""

    drive_gbps: float
    """Rate of the drives: reads and writes of equal size at the same time, both added up."""

    update_gbps: float
    """Rate of updates on the CPU's cores: bytes of state read and written, both added up."""

    to_host_gbps: float
    """Rate of the link from the device."""

    to_device_gbps: float
    """Rate of the link to the device."""

    memory_gbps: float
    """Rate of the host's memory: bytes read and written, both added up."""

    direct: bool
    """Whether state moves between drive and device without passing through host memory: by
    GPUDirect Storage, not by its compatibility mode."""

    def __post_init__(self) -> None:
        """Check that every value is a rate."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "direct":
                if not isinstance(value, bool):
                    raise ValueError(f"direct must be True or False, got {value!r}")
            elif type(value) not in (int, float) or not 0 < value <= _MAX_GBPS:
                raise ValueError(f"{field.name} must be a rate in GB/s, got {value!r}")


class Decision(NamedTuple):
    """Placement of steps."""

    place: Place

    reason: str
    """Reason, as text for people."""


def decide(step: StepBytes, rates: Rates | str) -> Decision:
    """Return the choice of `choose_placement`, with a reason.

    Args:
        step: Bytes that a step moves.
        rates: Measured rates; or the reason why there are none, in which case the host is chosen.
    """
    if isinstance(rates, str):
        return Decision("host", f"steps are taken on the CPU, because {rates}")
    host, device = _host_parts(step, rates), _device_parts(step, rates)
    place = choose_placement(step, rates)
    on_device, on_host = _slowest(device, "on the device"), _slowest(host, "on the CPU")
    expected = f"a step is expected to take {on_device}, and {on_host}"
    if place == "device":
        return Decision(place, f"steps are taken on the device: {expected}")
    return Decision(
        place,
        f"steps are taken on the CPU rather than on the device: {expected}; state is kept in "
        f"device memory only if a step then takes at most {_MAX_TIME_RATIO:.0%} of the time",
    )


def choose_placement(step: StepBytes, rates: Rates) -> Place:
    """Return the device if its steps are clearly faster; otherwise return the host.

    All parts of a step happen at the same time, so a step takes as long as its slowest part. On a
    device the arithmetic is never the slowest part.
    """
    return "device" if device_s(step, rates) <= _MAX_TIME_RATIO * host_s(step, rates) else "host"


def host_s(step: StepBytes, rates: Rates) -> float:
    """Return the seconds of a step on the CPU: only gradients and parameters cross the link."""
    return max(_host_parts(step, rates).values())


def device_s(step: StepBytes, rates: Rates) -> float:
    """Return the seconds of a step on the device: state crosses the link in both directions."""
    return max(_device_parts(step, rates).values())


def _host_parts(step: StepBytes, rates: Rates) -> dict[str, float]:
    return host_parts(
        step,
        drive_gbps=rates.drive_gbps,
        update_gbps=rates.update_gbps,
        to_host_gbps=rates.to_host_gbps,
        to_device_gbps=rates.to_device_gbps,
        memory_gbps=rates.memory_gbps,
    )


def _device_parts(step: StepBytes, rates: Rates) -> dict[str, float]:
    return device_parts(
        step,
        drive_gbps=rates.drive_gbps,
        to_host_gbps=rates.to_host_gbps,
        to_device_gbps=rates.to_device_gbps,
        memory_gbps=None if rates.direct else rates.memory_gbps,
    )


def _slowest(parts: dict[str, float], where: str) -> str:
    name = max(parts, key=parts.__getitem__)
    return f"{parts[name]:.3g} s {where} (limited by {name})"
