"""A status in the text format of Prometheus, for its collector of text files or a script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from offload.cli.top_lines import is_running

if TYPE_CHECKING:
    from offload.record.status import Status

_PHASES = {
    "step_s": "step",
    "beside_s": "beside",
    "compute_s": "update",
    "wait_read_s": "wait_reads",
    "wait_write_s": "wait_writes",
    "wait_seal_s": "wait_seals",
    "wait_device_s": "wait_device",
    "wait_update_s": "wait_update",
    "outside_s": "outside",
}

_COUNTERS = {
    "steps": ("steps_total", "Optimizer steps of this process."),
    "bytes_read": ("read_bytes_total", "Bytes read from storage."),
    "bytes_written": ("written_bytes_total", "Bytes written to storage."),
    "read_s": ("reading_seconds_total", "Seconds with at least one read in progress."),
    "write_s": ("writing_seconds_total", "Seconds with at least one write in progress."),
    "seals": ("checkpoints_total", "Checkpoints sealed by this process."),
}

_GAUGES = {
    "state_bytes": ("state_bytes", "Bytes of optimizer state in one slot."),
    "drive_bytes": ("drive_bytes", "Size of the file systems that hold the state."),
    "ring_bytes": ("ring_bytes", "Bytes of memory that state passes through."),
}


def exposition(directory: str, status: Status, now: float) -> str:
    """Return a status as metrics; each has the label ``directory``.

    Args:
        directory: Directory of the store.
        status: Status that was read there.
        now: Present time, in seconds since 1970.
    """
    return "".join(f"{line}\n" for line in _lines(directory, status, now))


def _lines(directory: str, status: Status, now: float) -> Iterator[str]:
    labels, totals = {"directory": directory}, status.totals

    def one(name: str, kind: str, text: str, value: float) -> Iterator[str]:
        """Yield a metric with a single value."""
        yield from _head(name, kind, text)
        yield _sample(name, labels, value)

    running = float(is_running(status, now))
    yield from one("up", "gauge", "1 if the process runs and writes its status.", running)
    yield from one("status_timestamp_seconds", "gauge", "Time of the status.", status.at)
    yield from one("step", "gauge", "Optimizer steps of the present state.", status.step)
    yield from one("ranks", "gauge", "Ranks that train together.", status.ranks)
    for key, (name, text) in _COUNTERS.items():
        yield from one(name, "counter", text, totals.get(key, 0.0))
    yield from _head("phase_seconds_total", "counter", "Seconds by phase; see Stats.")
    for key, phase in _PHASES.items():
        yield _sample("phase_seconds_total", {**labels, "phase": phase}, totals.get(key, 0.0))
    for key in status.drives[0].totals if status.drives else ():
        if key in _COUNTERS:
            name = f"drive_{_COUNTERS[key][0]}"
            yield from _head(name, "counter", f"{_COUNTERS[key][1][:-1]}, of each drive.")
            for drive in status.drives:
                of_drive = {**labels, "drive": drive.directory}
                yield _sample(name, of_drive, drive.totals.get(key, 0.0))
    for key, (name, text) in _GAUGES.items():
        yield from one(name, "gauge", text, totals.get(key, 0.0))
    name = "drive_bytes_per_second"
    yield from _head(name, "gauge", "Measured rates of the drives; 0 if not measured.")
    for key in ("read", "write", "mixed"):
        gbps = totals.get(f"drive_{key}_gbps", 0.0)
        yield _sample(name, {**labels, "operation": key}, gbps * 1e9)
    if status.checkpoints:
        newest = status.checkpoints[-1]
        yield from one("checkpoint_step", "gauge", "Step of the newest checkpoint.", newest.step)
        yield from one(
            "checkpoint_timestamp_seconds", "gauge", "Time at which it was sealed.", newest.at
        )
        yield from one(
            "checkpoint_stall_seconds", "gauge", "Time that training waited.", newest.stall_s
        )
        yield from one("checkpoint_seal_seconds", "gauge", "Time of its seal.", newest.seal_s)
        yield from one(
            "checkpoint_written_bytes", "gauge", "Bytes that it wrote.", newest.bytes_written
        )
        if newest.metrics:
            yield from _head("checkpoint_metric", "gauge", "Its metrics.")
        for metric, value in newest.metrics.items():
            yield _sample("checkpoint_metric", {**labels, "metric": metric}, value)
    sent, complete = status.tier.get("bytes_sent"), status.tier.get("num_complete")
    if sent is not None and complete is not None:
        yield from one("tier_sent_bytes_total", "counter", "Bytes sent to the tier.", sent)
        yield from one("tier_copies_total", "counter", "Complete copies in the tier.", complete)
    yield from one("warnings", "gauge", "Warnings that the run has.", len(status.warnings))


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP offload_{name} {text}"
    yield f"# TYPE offload_{name} {kind}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"offload_{name}{{{pairs}}} {_shown(value)}"


def _shown(value: float) -> str:
    """Return a number: whole ones, which most are, without a point."""
    return str(int(value)) if abs(value) < 2**53 and value == int(value) else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
