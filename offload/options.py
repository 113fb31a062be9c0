"""Settings that belong to the machine, not to the model or to torch."""

from __future__ import annotations

from dataclasses import dataclass

from gds import ALIGNMENT, Backend
from offload.train_state import MAX_CAPACITY_BYTES

_MIN_CHUNK_BYTES = ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How state is streamed and stored; every default is right for most machines.

    None of these changes a result by a single bit.
    """

    chunk_bytes: int = 32 << 20
    """Bytes of one FP32 state array that are streamed at a time. Rounded down to 4 KiB. Fixed when
    a store is made: a resume keeps the store's own value."""

    ring_chunks: int = 4
    """Chunks in memory at once: those being read, updated and written. At least 2. Host memory
    for state is ``ring_chunks * chunk_bytes * number of state arrays`` and nothing more."""

    direct: bool | None = None
    """Bypass the page cache: True insists, False never does, None does wherever it works."""

    allow_volatile: bool = False
    """Accept a directory whose content is lost at power-off (tmpfs). Meant for tests."""

    train_state_bytes: int = 256 << 10
    """Bytes reserved in every checkpoint for `train_state`."""

    reader_timeout_s: float = 60.0
    """Seconds to wait, after a warning, for readers to let go of an expired checkpoint."""

    backend: Backend | None = None
    """Storage backend to use instead of the built-in choice. The optimizer does not close it."""

    def __post_init__(self) -> None:
        """Refuse values that could not work, saying why."""
        if self.chunk_bytes < _MIN_CHUNK_BYTES:
            raise ValueError(
                f"chunk_bytes must be at least {_MIN_CHUNK_BYTES} (the alignment of direct I/O), "
                f"got {self.chunk_bytes}"
            )
        if self.ring_chunks < 2:
            raise ValueError(
                "ring_chunks must be at least 2, so that one chunk can be read while another is "
                f"written, got {self.ring_chunks}"
            )
        if (
            self.train_state_bytes % ALIGNMENT
            or not 2 * ALIGNMENT <= self.train_state_bytes <= MAX_CAPACITY_BYTES
        ):
            raise ValueError(
                f"train_state_bytes must be a multiple of {ALIGNMENT} from {2 * ALIGNMENT} to "
                f"{MAX_CAPACITY_BYTES}, got {self.train_state_bytes}"
            )
        if self.reader_timeout_s < 0:
            raise ValueError(f"reader_timeout_s must not be negative, got {self.reader_timeout_s}")
        if self.backend is not None and self.direct is not None:
            raise ValueError("direct has no effect on a backend that is passed in: set one of them")

    @property
    def chunk_elements(self) -> int:
        """Elements of element space in one chunk; a multiple of 1024."""
        return self.chunk_bytes // ALIGNMENT * (ALIGNMENT // 4)
