"""Counters and clocks of one optimizer, and a Chrome trace, to be opened in Perfetto.

Separate lanes of the trace show the training thread, updates, reads, writes and seals. Transfers
are shown from their submission to their end, and beside each other if they overlap.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.profiler import record_function

from gds import Backend, Buffer, File, IOFuture, StorageError, WrapperBackend
from gds.backends.wrapper import WrapperFile
from offload.device.staging import Traffic
from offload.errors import SealError, reason_of

MAX_EVENTS = 1_000_000
"""Maximal number of events in a trace; later ones are dropped. Each takes some 200 bytes."""

_LANES = ("training", "update", "read", "write", "seal")


@dataclass(frozen=True, slots=True)
class Event:
    """An interval of time in one lane."""

    lane: str
    name: str
    start_s: float
    """Start in seconds since the trace began."""

    stop_s: float
    """End in seconds since the trace began."""

    details: dict[str, Any]


class Trace:
    """Collects events from any thread, and writes them to a file.

    Args:
        path: Path of the file. Its directory is checked now; `write` writes the file.

    Raises:
        StorageError: The directory does not exist or is not writable.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        folder = os.path.dirname(os.path.abspath(path))
        if not os.access(folder, os.W_OK):
            raise StorageError(
                errno.EACCES, "trace: no directory to write to; make it, or change trace=", folder
            )
        self.num_dropped = 0
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._began = time.perf_counter()

    def add(self, lane: str, name: str, start: float, stop: float, **details: Any) -> None:
        """Record an event. `start` and `stop` are readings of `time.perf_counter`, in seconds.

        Events beyond `MAX_EVENTS` are only counted, in `num_dropped`.
        """
        event = Event(lane, name, start - self._began, stop - self._began, details)
        with self._lock:
            if len(self._events) < MAX_EVENTS:
                self._events.append(event)
            else:
                self.num_dropped += 1

    def write(self) -> None:
        """Write all events so far, replacing an earlier file."""
        with self._lock:
            events = sorted(self._events, key=lambda event: event.start_s)
        document = {
            "traceEvents": [*_lane_metadata(), *_chrome_events(events)],
            "displayTimeUnit": "ms",
            "otherData": {"dropped_events": self.num_dropped},
        }
        temporary = f"{self.path}.new"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(document, file, separators=(",", ":"))
            os.replace(temporary, self.path)
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, "writing the trace", self.path) from error


class TracedBackend(WrapperBackend):
    """Backend that records every transfer in a trace."""

    def __init__(self, inner: Backend, trace: Trace) -> None:
        super().__init__(inner)
        self._trace = trace

    def wrap_file(self, file: File) -> File:
        """Return a file whose transfers are recorded."""
        return _TracedFile(file, self._trace)


class _TracedFile(WrapperFile):
    """File whose transfers are recorded in a trace."""

    def __init__(self, inner: File, trace: Trace) -> None:
        super().__init__(inner)
        self._trace = trace

    def read(self, into: Buffer, offset: int) -> IOFuture:
        """Start a read and record it."""
        started = time.perf_counter()
        return self._watched("read", started, self.inner.read(into, offset), offset, into.nbytes)

    def read_again(self, into: Buffer, offset: int, *, direct: bool) -> IOFuture:
        """Start another read of the same range and record it."""
        started = time.perf_counter()
        future = self.inner.read_again(into, offset, direct=direct)
        return self._watched("read", started, future, offset, into.nbytes)

    def write(self, source: Buffer, offset: int) -> IOFuture:
        """Start a write and record it."""
        started = time.perf_counter()
        future = self.inner.write(source, offset)
        return self._watched("write", started, future, offset, source.nbytes)

    def _watched(
        self, lane: str, started: float, future: IOFuture, offset: int, nbytes: int
    ) -> IOFuture:
        name = os.path.basename(self.path).removesuffix(".safetensors")

        def ended(_: object) -> None:
            """Record the transfer, which has ended."""
            self._trace.add(lane, name, started, time.perf_counter(), offset=offset, nbytes=nbytes)

        future.add_done_callback(ended)
        return future


def _lane_metadata() -> Iterator[dict[str, Any]]:
    for number, lane in enumerate(_LANES):
        yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": lane}}
        yield {
            "ph": "M",
            "pid": number,
            "name": "process_sort_index",
            "args": {"sort_index": number},
        }


def _chrome_events(events: list[Event]) -> Iterator[dict[str, Any]]:
    """Yield events in Chrome's format; simultaneous events of a lane are in different rows."""
    rows: dict[str, list[float]] = {}
    for event in events:
        ends = rows.setdefault(event.lane, [])
        nested = event.lane == "training"  # waits are parts of a step and are drawn inside it
        row = next((i for i, end in enumerate(ends) if nested or end <= event.start_s), len(ends))
        if row == len(ends):
            ends.append(0.0)
        ends[row] = event.stop_s
        yield {
            "ph": "X",
            "pid": _LANES.index(event.lane),
            "tid": row,
            "name": event.name,
            "ts": round(event.start_s * 1e6, 1),
            "dur": round((event.stop_s - event.start_s) * 1e6, 1),
            "args": event.details,
        }


_STEP_CLOCKS = ("compute_s", "wait_read_s", "wait_write_s", "wait_seal_s", "wait_device_s")
"""Clocks that make up the time of a step. Outside of steps, they all add to `Meter.outside_s`."""


@dataclass(slots=True)
class Meter:
    """Counters of the engine. The other counters of `Stats` belong to the backend and the ring."""

    steps: int = 0
    seals: int = 0
    seal_bytes: int = 0
    restore_bytes: int = 0
    step_s: float = 0.0
    beside_s: float = 0.0
    outside_s: float = 0.0
    compute_s: float = 0.0
    wait_read_s: float = 0.0
    wait_write_s: float = 0.0
    wait_seal_s: float = 0.0
    wait_update_s: float = 0.0
    wait_device_s: float = 0.0
    moved_gradient_bytes: int = 0
    copied_gradient_bytes: int = 0
    block_loads: int = 0
    block_loads_ahead: int = 0
    block_loads_waited: int = 0
    block_loads_unused: int = 0
    block_bytes: int = 0
    block_buffers: int = 0
    wait_blocks_s: float = 0.0
    seal_s: float = 0.0
    restore_s: float = 0.0
    failed_seal: str = ""
    """In words, why the newest seal has failed; empty if it has not."""
    traffic: Traffic = field(default_factory=Traffic)
    trace: Trace | None = None
    of_thread: threading.local = field(default_factory=threading.local)
    """Per-thread flag ``in_step``: whether the thread is in a step."""

    def count_seal(self, nbytes: int, seconds: float) -> None:
        """Record a seal that has succeeded. The seal's thread calls this."""
        if self.trace is not None:
            now = time.perf_counter()
            self.trace.add("seal", "seal", now - seconds, now, nbytes=nbytes)
        self.seals += 1
        self.seal_bytes = nbytes
        self.seal_s = seconds
        self.failed_seal = ""

    def note_failed_seal(self, step: int, error: SealError) -> None:
        """Record why there is no checkpoint of a step, until another seal succeeds."""
        why = error.__cause__
        self.failed_seal = f"sealing step {step} failed: {reason_of(why)}" if why else str(error)

    @contextmanager
    def timed(self, name: str, **details: object) -> Iterator[None]:
        """Add the seconds that the block takes to the total called `name`.

        The block also becomes a range in the trace, if there is one, and in `torch.profiler`. If
        the thread is not in a step, clocks that make up a step are added to `Stats.outside_s`
        instead. A thread is in a step within ``"step_s"`` (the training thread) or ``"beside_s"``
        (another thread).

        Args:
            name: Name of an attribute with a total in seconds.
            details: Details of the event in the trace.
        """
        what = name.removesuffix("_s")
        in_step = getattr(self.of_thread, "in_step", False)
        total = "outside_s" if name in _STEP_CLOCKS and not in_step else name
        started = time.perf_counter()
        try:
            self.of_thread.in_step = in_step or name in ("step_s", "beside_s")
            with record_function(f"offload.{what}"):
                yield
        finally:
            self.of_thread.in_step = in_step
            stopped = time.perf_counter()
            setattr(self, total, getattr(self, total) + stopped - started)
            if self.trace is not None:
                lane = "update" if what == "compute" else "training"
                self.trace.add(lane, what, started, stopped, **details)
