"""Counters and clocks of one optimizer, added to where the work is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.profiler import record_function

from offload.device.staging import Traffic
from offload.stream.trace import Trace

_OF_STEPS = ("compute_s", "wait_read_s", "wait_write_s", "wait_seal_s", "wait_device_s")
"""What a step is made of. The same outside of steps is a total of its own."""


@dataclass(slots=True)
class Meter:
    """What only the engine can count; the rest of `Stats` comes from the backend and the ring."""

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
    """Has ``in_step`` where the thread is in a step."""

    def count_seal(self, nbytes: int, seconds: float) -> None:
        """Note a seal that has succeeded; called on the seal's thread."""
        if self.trace is not None:
            now = time.perf_counter()
            self.trace.add("seal", "seal", now - seconds, now, nbytes=nbytes)
        self.seals += 1
        self.seal_bytes = nbytes
        self.seal_s = seconds

    @contextmanager
    def timed(self, name: str, **details: object) -> Iterator[None]:
        """Add the seconds that the block takes to the total called `name`.

        It also is a range in the trace, if there is one, and in `torch.profiler`. What a step is
        made of is added to `Stats.outside_s` where the thread is in none: within ``"step_s"`` of
        the training thread, or ``"beside_s"`` of another.
        """
        what = name.removesuffix("_s")
        in_step = getattr(self.of_thread, "in_step", False)
        total = "outside_s" if name in _OF_STEPS and not in_step else name
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
