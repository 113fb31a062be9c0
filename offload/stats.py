"""What an optimizer has moved and waited for since it was made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Totals since construction. Bytes are what was transferred; times are seconds."""

    steps: int
    """Calls of ``step()`` that updated parameters."""

    num_parameters: int
    """Trainable elements."""

    bytes_read: int
    """Bytes read from storage: state, and parameters at a restore."""

    bytes_written: int
    """Bytes written to storage: state, and parameters at seals."""

    read_s: float
    """Seconds during which at least one read was in progress."""

    write_s: float
    """Seconds during which at least one write was in progress."""

    step_s: float
    """Seconds inside ``step()``; the waits and the computing below are parts of it."""

    compute_s: float
    """Seconds of updating: gathering gradients, torch's step, casting back."""

    wait_read_s: float
    """Seconds that the update waited for reads."""

    wait_write_s: float
    """Seconds that it waited for a free frame of the ring, which writes were holding."""

    wait_seal_s: float
    """Seconds that it waited for a seal to copy parameters or to free a slot."""

    wait_update_s: float
    """With ``Options(overlap=...)``: seconds that the training thread waited for the step that runs
    beside it. All other waits and the computing are then that step's own."""

    moved_gradient_bytes: int
    """With ``Options(overlap=...)``: most bytes of gradients that such a step has held at once."""

    seals: int
    """Checkpoints sealed."""

    seal_bytes: int
    """Bytes that the newest seal accounts for: parameters, buffers, train state, manifest."""

    seal_s: float
    """Seconds that the newest seal took, behind training."""

    restore_bytes: int
    """Bytes that the last restore read."""

    restore_s: float
    """Seconds that the last restore took."""

    ring_bytes: int
    """Host memory that state passes through."""

    resident_bytes: int
    """Host memory in which state is kept between steps."""

    state_bytes: int
    """Bytes of optimizer state on storage in one slot."""

    @property
    def read_gbps(self) -> float:
        """Gigabytes (1e9) read per second of reading; 0 before the first read."""
        return self.bytes_read / self.read_s / 1e9 if self.read_s else 0.0

    @property
    def write_gbps(self) -> float:
        """Gigabytes (1e9) written per second of writing; 0 before the first write."""
        return self.bytes_written / self.write_s / 1e9 if self.write_s else 0.0


@dataclass(slots=True)
class Meter:
    """What only the engine can count; the rest of `Stats` comes from the backend and the ring."""

    steps: int = 0
    seals: int = 0
    seal_bytes: int = 0
    restore_bytes: int = 0
    step_s: float = 0.0
    compute_s: float = 0.0
    wait_read_s: float = 0.0
    """Of rings that have been replaced."""
    wait_write_s: float = 0.0
    """Likewise."""
    wait_seal_s: float = 0.0
    wait_update_s: float = 0.0
    moved_gradient_bytes: int = 0
    seal_s: float = 0.0
    restore_s: float = 0.0

    def count_seal(self, nbytes: int, seconds: float) -> None:
        """Note a seal that has succeeded; called on the seal's thread."""
        self.seals += 1
        self.seal_bytes = nbytes
        self.seal_s = seconds

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to the total called `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - started)
