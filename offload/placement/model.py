"""Where the parameters of a device are best updated: there, or on the CPU next to the drive.

Arithmetic alone; `rates` measures what it starts from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypeAlias

Place: TypeAlias = Literal["host", "device"]

_WORTH = 0.95
"""State goes into device memory only where a step takes at most this part of its time on the CPU:
the ring takes memory there that the model could use."""

_MOST_GBPS = 1e6


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
            if field.name == "direct":
                if not isinstance(value, bool):
                    raise ValueError(f"direct must be True or False, got {value!r}")
            elif type(value) not in (int, float) or not 0 < value <= _MOST_GBPS:
                raise ValueError(f"{field.name} must be a rate in GB/s, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What one step of a model moves."""

    state: int
    """Bytes of optimizer state, which are read and written."""

    gradients: int
    parameters: int

    kept_on_host: int = 0
    """Of the state: what would stay in host memory between steps if they were taken there."""

    kept_on_device: int = 0
    """Of the state: what would stay in device memory if they were taken there."""


class Decision(NamedTuple):
    """Where steps are taken."""

    place: Place

    reason: str
    """Why, in a sentence for people."""


def decide(step: StepBytes, rates: Rates | str) -> Decision:
    """Choose as `choose_placement` does, and say why.

    Args:
        step: What it moves.
        rates: What was measured; or why nothing was, and then steps are taken on the host.
    """
    if isinstance(rates, str):
        return Decision("host", f"steps are taken on the CPU, because {rates}")
    host, device = _host_parts(step, rates), _device_parts(step, rates)
    place = choose_placement(step, rates)
    there, here = _slowest(device, "there"), _slowest(host, "on the CPU")
    expected = f"a step is expected to take {there}, and {here}"
    if place == "device":
        return Decision(place, f"steps are taken on the device: {expected}")
    return Decision(
        place,
        f"steps are taken on the CPU rather than on the device: {expected}; state goes into device "
        f"memory only where that takes at most {_WORTH:.0%} of the time",
    )


def choose_placement(step: StepBytes, rates: Rates) -> Place:
    """Return where a step takes less time; on the host if that makes no great difference.

    All that a step does it does at the same time, so its time is that of the slowest part. On a
    device the arithmetic is never that.
    """
    return "device" if device_s(step, rates) <= _WORTH * host_s(step, rates) else "host"


def host_s(step: StepBytes, rates: Rates) -> float:
    """Return the seconds of a step on the CPU: gradients and parameters cross, state does not."""
    return max(_host_parts(step, rates).values())


def device_s(step: StepBytes, rates: Rates) -> float:
    """Return the seconds of a step on the device: state crosses the link, however it does that."""
    return max(_device_parts(step, rates).values())


def _host_parts(step: StepBytes, rates: Rates) -> dict[str, float]:
    """Return the seconds of everything that a step on the CPU does at the same time."""
    return {
        "the drives": 2 * (step.state - step.kept_on_host) / 1e9 / rates.drive_gbps,
        "the CPU": 2 * step.state / 1e9 / rates.update_gbps,
        "the link to the host": (step.gradients + step.parameters) / 1e9 / rates.to_host_gbps,
        "the link to the device": step.parameters / 1e9 / rates.to_device_gbps,
    }


def _device_parts(step: StepBytes, rates: Rates) -> dict[str, float]:
    crossing = (step.state - step.kept_on_device) / 1e9
    parts = {
        "the drives": 2 * crossing / rates.drive_gbps,
        "the link to the host": crossing / rates.to_host_gbps,
        "the link to the device": crossing / rates.to_device_gbps,
    }
    if not rates.direct:
        # A copy reads and writes host memory once more, where a CPU's update would be.
        parts["copies through host memory"] = 2 * crossing / rates.update_gbps
    return parts


def _slowest(parts: dict[str, float], where: str) -> str:
    name = max(parts, key=parts.__getitem__)
    return f"{parts[name]:.3g} s {where} ({name})"
