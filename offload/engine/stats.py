"""Statistics of an optimizer: its transfers and waiting times since construction."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from offload.interactive import html_table
from offload.stream.meter import Meter
from offload.units import count, duration, many, rate, size

if TYPE_CHECKING:
    from offload.format.layout import Layout
    from offload.stream.drives import Drives
    from offload.stream.streamer import Streamer
    from offload.tiers.upload_thread import TierStats


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Stats:
    """Totals since construction. Bytes are bytes transferred; times are in seconds."""

    steps: int
    """Number of calls of ``step()`` that updated parameters."""

    num_parameters: int
    """Number of trainable elements."""

    bytes_read: int
    """Bytes read from storage: state, parameters at a restore, and data in a slot that a seal
    compares with the model: what an earlier process has left, or chunks have in common."""

    bytes_written: int
    """Bytes written to storage: state, and parameters at seals, or, with
    ``Options(parameters="drive")``, in steps."""

    read_s: float
    """Seconds during which at least one read was in progress."""

    write_s: float
    """Seconds during which at least one write was in progress."""

    step_s: float
    """Seconds inside ``step()``."""

    beside_s: float
    """Seconds that steps took on their own thread beside the model, with ``Options(overlap=...)``.
    The computing and waiting times below are parts of this time and of `step_s` only."""

    compute_s: float
    """Seconds of updating: gathering gradients, torch's step, casting back."""

    wait_read_s: float
    """Seconds that the update waited for reads."""

    wait_write_s: float
    """Seconds that the update waited for a free frame of the ring while writes held all frames."""

    wait_seal_s: float
    """Seconds that the update waited for a seal to copy parameters or to free a slot."""

    outside_s: float
    """Seconds of computing and waiting outside of steps: `checkpoint` and `synchronize` wait for
    seals, and other methods read or replace the state."""

    wait_update_s: float
    """Seconds that the training thread waited for the step that runs beside it, with
    ``Options(overlap=...)``."""

    wait_device_s: float
    """Seconds that the update waited for gradients and parameters that are on a device. Most of
    this is the time of the backward pass, which has only been queued when ``step()`` is called."""

    moved_gradient_bytes: int
    """Most bytes of gradients that one step beside the model has held at once, with
    ``Options(overlap=...)``."""

    copied_gradient_bytes: int
    """Most bytes of gradients that one ``step()`` has copied, with ``Options(overlap="forward")``.
    A gradient is copied if other code could have written into it: it is in a buffer of yours, or
    you have kept the tensor."""

    seals: int
    """Number of checkpoints sealed."""

    seal_bytes: int
    """Bytes that the newest seal wrote: parameters and buffers that were not in the slot already,
    train state, and manifest."""

    seal_s: float
    """Seconds that the newest seal took, behind training."""

    restore_bytes: int
    """Bytes that the last restore read."""

    restore_s: float
    """Seconds that the last restore took."""

    ring_bytes: int
    """Bytes of memory that state passes through, on the host or on the device that updates it."""

    resident_bytes: int
    """Bytes of memory in which state is kept between steps, on the host or device that updates
    it."""

    to_host_bytes: int
    """Bytes copied from devices to the host: gradients and parameters, for steps and seals."""

    to_device_bytes: int
    """Bytes copied from the host to devices: parameters, by steps and restores."""

    crossing_bytes: int
    """Most bytes of page-locked host memory that gradients and parameters have passed through at
    once."""

    state_bytes: int
    """Bytes of optimizer state on storage in one slot."""

    drive_read_gbps: float
    """Measured read rate of the drives, in gigabytes (1e9 bytes) per second; 0 if it was not
    measured."""

    drive_write_gbps: float
    """Measured write rate of the drives, in gigabytes (1e9 bytes) per second; 0 if it was not
    measured."""

    drive_mixed_gbps: float
    """Measured rate of reading and writing equal amounts at the same time, as the sum of both, in
    gigabytes (1e9 bytes) per second; 0 if it was not measured."""

    drive_bytes: int
    """Size in bytes of the file systems that hold the state; 0 if it is not known."""

    update_code: str
    """Code that updates state: the kernel, with the processor's instructions that it uses, or
    torch's own, with the reason. Both give the same bits. With state in device memory, the
    kernels of the device."""

    to_server_bytes: int = 0
    """Bytes sent to the server that updates: gradients, train states and edits; 0 without one."""

    from_server_bytes: int = 0
    """Bytes received from the server that updates: parameters; 0 without one."""

    spilled_gradient_bytes: int = 0
    """Most bytes of gradients that have been on the drives at once, with
    ``Options(gradients="drive")``."""

    block_loads: int = 0
    """Number of times that a block's parameters were loaded, with ``Options(parameters=...)``."""

    block_loads_ahead: int = 0
    """Those of `block_loads` that had been begun before the block was needed."""

    block_loads_waited: int = 0
    """Those of `block_loads_ahead` that had not ended when the block was needed."""

    block_loads_unused: int = 0
    """Loads that were begun ahead, and then not needed."""

    block_bytes: int = 0
    """Bytes of parameters that these loads have moved into buffers."""

    block_buffers: int = 0
    """Most buffers that parameters of blocks have been in at once."""

    wait_blocks_s: float = 0.0
    """Seconds that the training thread waited for parameters of blocks."""

    tier: TierStats | None = None
    """Uploads to the tier, with the last decisions; None without ``Options(tier=...)``."""

    @property
    def read_gbps(self) -> float:
        """Gigabytes (1e9 bytes) read per second of reading; 0 before the first read."""
        return self.bytes_read / self.read_s / 1e9 if self.read_s else 0.0

    @property
    def write_gbps(self) -> float:
        """Gigabytes (1e9 bytes) written per second of writing; 0 before the first write."""
        return self.bytes_written / self.write_s / 1e9 if self.write_s else 0.0

    @property
    def drive_writes(self) -> float:
        """Number of times that the drive's size has been written; 0 if its size is not known.

        Vendors of flash drives state how many such writes a drive endures: some hundreds for
        consumer drives (a 1 TB drive rated at 600 TBW endures 600), thousands for data centre
        drives.
        """
        return self.bytes_written / self.drive_bytes if self.drive_bytes else 0.0

    def scalars(
        self,
        prefix: str = "offload/",
        *,
        since: Stats | None = None,
        all: bool = False,  # noqa: A002
    ) -> dict[str, float]:
        """Return the numbers worth a plot as a flat dict of finite floats, for loggers of metrics.

        - ``step_seconds``: seconds that one optimizer step holds up training.
        - ``read_gb_per_s``, ``write_gb_per_s``: gigabytes (1e9 bytes) per second of reading and of
          writing.
        - ``io_wait_fraction``: part of the update's time in which it waits for drives.
        - ``bytes_written``: bytes written to storage since construction.

        The first four are left out if there was nothing to measure.

        Args:
            prefix: Beginning of every name. Loggers group names by the text before a slash.
            since: Earlier statistics of the same optimizer: the first four are about the time since
                then. None for the time since construction.
            all: Whether to add every other number: each field and each property of this class.
                Nearly all of them are totals since construction.
        """

        def grown(*names: str) -> float:
            """Return by how much a sum of totals has grown."""
            now = sum(getattr(self, name) for name in names)
            return float(now - sum(getattr(since, name) for name in names) if since else now)

        waited_s = grown("wait_read_s", "wait_write_s", "wait_seal_s")
        few = {
            "step_seconds": _ratio(grown("step_s", "wait_update_s"), grown("steps")),
            "read_gb_per_s": _ratio(grown("bytes_read") / 1e9, grown("read_s")) or None,
            "write_gb_per_s": _ratio(grown("bytes_written") / 1e9, grown("write_s")) or None,
            "io_wait_fraction": _ratio(waited_s, grown("step_s", "beside_s")),
            "bytes_written": float(self.bytes_written),
        }
        found = {prefix + name: value for name, value in few.items() if value is not None}
        if all:
            names = [field.name for field in fields(self)]
            names += ["read_gbps", "write_gbps", "drive_writes"]
            words = ("update_code", "tier")
            found |= {prefix + n: float(getattr(self, n)) for n in names if n not in words}
        return found

    def summary(self) -> str:
        """Say in a few lines, for people, how the time of the steps was spent."""
        steps = max(self.steps, 1)
        parts = {
            "updating": self.compute_s,
            "waiting for reads": self.wait_read_s,
            "waiting for writes": self.wait_write_s,
            "waiting for seals": self.wait_seal_s,
        }
        if self.wait_device_s:
            parts["waiting for device"] = self.wait_device_s
        total = max(self.beside_s or self.step_s, sum(parts.values()))
        parts["everything else"] = total - sum(parts.values())
        first = f"{self._steps_taken()}, {duration(total / steps)} each"
        if self.beside_s:
            first += f" beside the model, which waited {duration(self.wait_update_s / steps)}"
        lines = [first]
        lines += [
            f"  {name:<19}{duration(seconds / steps):>10} {seconds / max(total, 1e-9):6.1%}"
            for name, seconds in parts.items()
        ]
        if self.outside_s:
            lines.append(
                f"outside steps: {duration(self.outside_s)} waiting for seals, and reading or "
                "replacing the state"
            )
        rates = {"read": self.read_gbps, "written": self.write_gbps}
        moved = ", ".join(f"{name} {rate(gbps * 1e9)}" for name, gbps in rates.items() if gbps)
        measured = (
            f"(the drive, measured: {self.drive_read_gbps:.2f}, {self.drive_write_gbps:.2f}, "
            f"and {self.drive_mixed_gbps:.2f} GB/s both at once)"
            if self.drive_mixed_gbps
            else ""
        )
        # The first step reads nothing, and its writes may still be in progress.
        lines += [line] if (line := f"{moved} {measured}".strip()) else []
        lines.append(f"updated by: {self.update_code}")
        lines.append(f"{size(self.bytes_written)} written")
        if self.drive_writes >= _MIN_SHOWN_WRITES:
            digits = ",.0f" if self.drive_writes >= 10 else ".2g"
            lines[-1] += f", {self.drive_writes:{digits}} full drive writes"
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Say in one short line how much work was done; `summary` says more."""
        return (
            f"<Stats: {self._steps_taken()}, {many(self.seals, 'seal')}, "
            f"{size(self.bytes_read)} read, {size(self.bytes_written)} written>"
        )

    def _repr_html_(self) -> str:
        """Return a table for notebooks: the lines of `summary` that matter most."""
        num_steps = max(self.steps, 1)
        written = size(self.bytes_written)
        if self.drive_writes >= _MIN_SHOWN_WRITES:
            written += f", {self.drive_writes:.2g} full drive writes"
        return html_table(
            "Statistics since the optimizer was made",
            {
                "steps": self._steps_taken(),
                "time of a step": duration((self.beside_s or self.step_s) / num_steps),
                "of it updating": duration(self.compute_s / num_steps),
                "waiting for reads": duration(self.wait_read_s / num_steps),
                "waiting for writes": duration(self.wait_write_s / num_steps),
                "read at": rate(self.read_gbps * 1e9) if self.read_gbps else "",
                "written at": rate(self.write_gbps * 1e9) if self.write_gbps else "",
                "written": written,
                "checkpoints": f"{self.seals} sealed" if self.seals else "",
            },
        )

    def _steps_taken(self) -> str:
        return f"{many(self.steps, 'step')} of {count(self.num_parameters)} parameters"


def _ratio(amount: float, of: float) -> float | None:
    """Return the quotient; None if there is nothing to divide by."""
    return amount / of if of > 0 else None


_MIN_SHOWN_WRITES = 1e-4
"""Smallest number of full drive writes that `summary` shows."""


def collect_stats(
    meter: Meter,
    drives: Drives,
    streamer: Streamer | None,
    layout: Layout | None,
    update_code: str,
) -> Stats:
    """Return the totals, collected from the objects that count them."""
    traffic = meter.traffic
    own = {f.name for f in fields(meter)} & {f.name for f in fields(Stats)}
    totals = {name: getattr(meter, name) for name in own}
    counters = drives.counters()
    read_gbps, write_gbps, mixed_gbps = drives.rates()
    return Stats(
        **totals,
        num_parameters=layout.num_elements if layout else 0,
        bytes_read=counters.bytes_read,
        bytes_written=counters.bytes_written,
        read_s=counters.read_s,
        write_s=counters.write_s,
        ring_bytes=streamer.ring_bytes if streamer else 0,
        resident_bytes=streamer.resident_bytes if streamer else 0,
        state_bytes=layout.state_bytes if layout else 0,
        to_host_bytes=traffic.to_host_bytes,
        to_device_bytes=traffic.to_device_bytes,
        crossing_bytes=traffic.peak_bytes,
        drive_read_gbps=read_gbps,
        drive_write_gbps=write_gbps,
        drive_mixed_gbps=mixed_gbps,
        drive_bytes=drives.size_bytes(),
        update_code=update_code,
    )
