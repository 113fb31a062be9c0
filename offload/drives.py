"""The directories of a store on several drives, and how much of the state each of them takes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TypeAlias

from gds import Backend, PosixBackend
from gds._backend import Counters
from offload.trace import Trace, TracedBackend

_MAX_SUM = 64
"""Of measured shares: finer ones would say more than a measurement does."""

Directory: TypeAlias = str | os.PathLike[str]


def as_directories(directory: Directory | Sequence[Directory]) -> tuple[str, ...]:
    """Return the absolute paths that a ``directory=`` argument means, the first one first.

    Raises:
        ValueError: There is none, or two are the same directory.
    """
    given = [directory] if isinstance(directory, str | os.PathLike) else list(directory)
    paths = tuple(os.path.abspath(os.fspath(path)) for path in given)
    if not paths:
        raise ValueError("directory must be a path, or a list of at least one")
    seen: dict[str, str] = {}
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise ValueError(
                f"directory names the same directory twice, {seen[real]!r} and {path!r}: give one "
                "on each drive, or only one"
            )
        seen[real] = path
    return paths


def make_backends(
    num: int, *, given: Backend | None, direct: bool | None, trace: Trace | None = None
) -> list[Backend]:
    """Return a backend for each directory; a given one serves them all.

    Each has threads of its own, so that a slow drive does not keep the others waiting.
    """
    made: list[Backend] = [given] if given else [PosixBackend(direct=direct) for _ in range(num)]
    if trace is not None:
        made = [TracedBackend(backend, trace) for backend in made]
    return made * num if given else made


def check_shares(shares: Sequence[int] | None, directories: Sequence[str]) -> None:
    """Check that shares are one for each directory; raises `ValueError`."""
    if shares is not None and len(shares) != len(directories):
        raise ValueError(
            f"Options(shares=...) needs one number for each directory, got {len(shares)} for "
            f"{len(directories)}: {', '.join(directories)}"
        )


def measured_shares(directories: Sequence[str]) -> tuple[int, ...]:
    """Return how much of the state each directory of a new store should hold.

    Nothing is measured yet: drives are taken to be equally fast.
    """
    return proportional_shares([1.0] * len(directories))


def proportional_shares(speeds: Sequence[float]) -> tuple[int, ...]:
    """Turn bandwidths into small whole numbers in nearly the same proportion, each at least 1.

    Args:
        speeds: Positive, in any unit.
    """
    if min(speeds) <= 0:
        raise ValueError(f"speeds must be positive, got {list(speeds)}")
    total = sum(speeds)
    # The first sum at which no share is off by more than a twentieth, or the best there is.
    best = math.inf, (1,) * len(speeds)
    for size in range(len(speeds), max(_MAX_SUM, len(speeds)) + 1):
        shares = tuple(max(1, round(speed * size / total)) for speed in speeds)
        error = max(
            abs(share / sum(shares) * total / speed - 1)
            for share, speed in zip(shares, speeds, strict=True)
        )
        if error < best[0]:
            best = error, shares
        if error <= 0.05:
            break
    divisor = math.gcd(*best[1])
    return tuple(share // divisor for share in best[1])


def total_counters(backends: Sequence[Backend]) -> Counters:
    """Add up what several backends have moved; seconds are those of the busiest one."""
    found = [backend.counters() for backend in dict.fromkeys(backends)]
    return Counters(
        bytes_read=sum(c.bytes_read for c in found),
        bytes_written=sum(c.bytes_written for c in found),
        num_reads=sum(c.num_reads for c in found),
        num_writes=sum(c.num_writes for c in found),
        num_syncs=sum(c.num_syncs for c in found),
        read_s=max(c.read_s for c in found),
        write_s=max(c.write_s for c in found),
    )
