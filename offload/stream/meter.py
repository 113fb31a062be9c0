"""Counters and clocks of one optimizer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.profiler import record_function

from offload.device.staging import Traffic
from offload.stream.trace import Trace

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
    seal_s: float = 0.0
    restore_s: float = 0.0
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
