"""The lines of ``offload top``: a status in words, for a terminal or a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.units import duration, many, rate, size

if TYPE_CHECKING:
    from offload.record.status import Drive, SealedCheckpoint, Status

STALE_S = 10.0
"""Age in seconds from which on a status says that the process does not run."""

_PARTS = {
    "compute_s": ("update", "updating"),
    "wait_read_s": ("reads", "waiting for reads"),
    "wait_write_s": ("writes", "waiting for writes"),
    "wait_seal_s": ("seals", "waiting for seals"),
    "wait_device_s": ("device", "waiting for device"),
}
"""Parts of a step: the word for what it waits for, and the label, as in `Stats.summary`."""

_SHOWN_CHECKPOINTS = 4

_LABEL_WIDTH = 13


@dataclass(frozen=True, slots=True)
class Row:
    """One line, with a label in front of it."""

    label: str
    text: str
    style: str = ""
    """Style of the text on a terminal that follows the run."""


def is_running(status: Status, now: float) -> bool:
    """Return whether a status is so fresh that its process runs; `now` is in seconds since 1970."""
    return not status.ended and abs(now - status.at) <= STALE_S


def waits_for(status: Status) -> str:
    """Return in one word what the recent steps waited for most; empty without steps."""
    longest = max(_PARTS, key=lambda name: status.recent.get(name, 0.0))
    return _PARTS[longest][0] if status.recent.get(longest, 0.0) > 0 else ""


def rows(directory: str, status: Status, now: float) -> Iterator[Row]:
    """Yield what there is to say of a run, for people.

    Args:
        directory: Directory of the store.
        status: Status that was read there.
        now: Present time, in seconds since 1970.
    """
    yield Row("run", directory)
    yield _state(status, now)
    yield from _steps(status)
    yield from _drives(status)
    yield Row("written", _written(status))
    yield from _checkpoints(status)
    if status.tier:
        yield from _uploads(status.tier)
    for warning in status.warnings:
        yield Row("warning", warning, "red")


def plain(found: Iterator[Row], width: int) -> str:
    """Return rows as text of at most `width` columns, without anything but text."""
    from rich.cells import cell_len, set_cell_size

    lines = []
    for row in found:
        line = f"{row.label:<{_LABEL_WIDTH}}{row.text}".rstrip()
        if cell_len(line) > width:
            line = set_cell_size(line, width - 3) + "..."
        lines.append(line)
    return "\n".join(lines)


def _state(status: Status, now: float) -> Row:
    step = f"step {status.step:,}"
    where = f"process {status.pid} on {status.host}"
    if status.ranks > 1:
        where += f", rank 0 of {status.ranks}"
    if status.ended:
        return Row("state", f"ended at {_moment(status.at)}, {step}; {where}", "bold")
    if now - status.at > STALE_S:
        return Row("state", f"not running since {_moment(status.at)}, {step}; {where}", "bold red")
    if status.at - now > STALE_S:
        return Row(
            "state",
            f"not known: written {_span(status.at - now)} ahead of this clock, {step}; {where}",
            "bold red",
        )
    running = f"running for {_span(now - status.started)}, {step}; {where}"
    return Row("state", running, "bold green")


def _steps(status: Status) -> Iterator[Row]:
    recent, steps, span_s = status.recent, status.recent.get("steps", 0.0), status.recent_s
    if steps <= 0 or span_s <= 0:
        yield Row("steps", f"none in the last {_span(span_s)}")
        return
    # A step beside the model has its own thread: the model then waits for some of it only.
    beside_s, inside_s = recent.get("beside_s", 0.0), recent.get("step_s", 0.0)
    whole_s = max(beside_s or inside_s, sum(recent.get(name, 0.0) for name in _PARTS))
    yield Row("steps", f"{_figure(steps / span_s)} a second, over the last {_span(span_s)}")
    yield Row("waits for", waits_for(status) or "nothing", "bold")
    text = f"{duration(whole_s / steps)}, {_share(whole_s, span_s)} of the time"
    if beside_s:
        waited_s = recent.get("wait_update_s", 0.0)
        text += f", beside the model, which waits {duration(waited_s / steps)}"
    yield Row("each step", text)
    seconds = {label: recent.get(name, 0.0) for name, (_, label) in _PARTS.items()}
    seconds["everything else"] = whole_s - sum(seconds.values())
    for label, part_s in seconds.items():
        if part_s > 0:
            share = _share(part_s, whole_s)
            yield Row("", f"{label:<19}{duration(part_s / steps):>10}{share:>9}")


def _drives(status: Status) -> Iterator[Row]:
    """Yield the rates of reading and writing beside those that the drives have shown."""
    reads, writes = _rates(status)
    both = status.totals.get("drive_mixed_gbps", 0.0)
    more = f"; both at once {rate(both * 1e9)}" if both > 0 else ""
    yield Row("drives", f"reads {_of(*reads, rate)}, writes {_of(*writes, rate)}{more}")
    for drive in status.drives:
        reads, writes = _rates(drive)
        text = f"reads {_of(*reads, _gbps)}, writes {_of(*writes, _gbps)} GB/s"
        yield Row("", f"{text}  {drive.directory}")


def _rates(of: Status | Drive) -> Iterator[tuple[float, float]]:
    """Yield the recent and the measured rate of reads, then of writes; 0 if not known."""
    for name, nbytes in (("read", "bytes_read"), ("write", "bytes_written")):
        seconds = of.recent.get(f"{name}_s", 0.0)
        recent = of.recent.get(nbytes, 0.0) / seconds if seconds > 0 else 0.0
        yield recent, of.totals.get(f"drive_{name}_gbps", 0.0) * 1e9


def _of(recent: float, measured: float, show: Callable[[float], str]) -> str:
    return show(recent) + (f" of {show(measured)}" if measured > 0 else "")


def _gbps(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g}"


def _written(status: Status) -> str:
    totals = status.totals
    text = f"{size(totals.get('bytes_written', 0.0))}, {size(totals.get('bytes_read', 0.0))} read"
    writes = totals.get("drive_writes", 0.0)
    return f"{text}; {_figure(writes)} full drive writes" if writes >= 1e-4 else text


def _checkpoints(status: Status) -> Iterator[Row]:
    yield Row("checkpoints", f"{status.totals.get('seals', 0.0):,.0f} sealed by this process")
    for one in status.checkpoints[-_SHOWN_CHECKPOINTS:]:
        yield Row("", _checkpoint(one))


def _checkpoint(one: SealedCheckpoint) -> str:
    metrics = ", ".join(f"{name}={value:.4g}" for name, value in one.metrics.items())
    written, stalled = size(one.bytes_written), f"stalled {duration(one.stall_s)}"
    return f"step {one.step:<8}{_moment(one.at)[11:]}{written:>11}  {stalled:<16} {metrics}"


def _uploads(tier: Mapping[str, object]) -> Iterator[Row]:
    number, sent = tier.get("num_complete"), tier.get("bytes_sent")
    text = f"{number or 0} complete, {size(sent if isinstance(sent, int) else 0)} sent"
    if isinstance(link := tier.get("bytes_per_s"), float):
        text += f", {rate(link)}"
    if "newest_step" in tier:
        text += f", newest step {tier['newest_step']}"
    if isinstance(slowdown := tier.get("slowdown"), float):
        text += f", steps take {slowdown:.1%} longer"
    yield Row("uploads", f"{tier.get('url', '')}: {text}")
    if "choice" in tier:
        outcome = tier.get("outcome") or "going on"
        choice = f"step {tier.get('last_step', '?')}: {tier['choice']}, {outcome}"
        yield Row("", f"{choice}: {tier.get('reason', '')}")


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole > 0 else 0.0:.1%}"


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _span(seconds: float) -> str:
    """Return a length of time in whole units: ``42 s``, ``3 min 05 s``, ``2 h 07 min``."""
    minutes, rest = divmod(max(seconds, 0.0), 60)
    if minutes < 1:
        return f"{rest:.0f} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 1:
        return f"{minutes:.0f} min {rest:02.0f} s"
    days, hours = divmod(hours, 24)
    if days < 1:
        return f"{hours:.0f} h {minutes:02.0f} min"
    return f"{many(int(days), 'day')} {hours:.0f} h"
