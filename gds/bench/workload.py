"""Workloads to measure, and sweeps over several workloads. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from gds.contract import ALIGNMENT
from gds.errors import RefusedError
from gds.paths import PATHS, PathName

Pattern = Literal["read", "write", "mixed", "randread", "randwrite", "randmixed"]
Cache = Literal["cold", "warm", "as-is"]

PATTERNS: Final[tuple[Pattern, ...]] = get_args(Pattern)
CACHES: Final[tuple[Cache, ...]] = get_args(Cache)

LEAST_INTERVAL_S: Final = 0.001
_MOST_BUFFER_BYTES: Final = 4 << 30
_MOST_THREADS: Final = 256
_MOST_POINTS: Final = 1000
_MOST_OPEN_FILES: Final = 64
_MOST_FILES: Final = 20_000
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload: one request of a fixed size to every block of a file in each pass.

    The options of `gds bench` describe it. The values are checked when the object is made.
    """

    rw: Pattern = "read"
    """Pattern of the requests: reads, writes or both, in the order of the file or in random order.
    The names are those of fio, except ``mixed`` and ``randmixed``."""

    path: PathName = "direct"
    size: int = 1 << 20
    """Length of a request in bytes; a multiple of 4096."""

    threads: int = 2
    """Number of requests that the backend runs at once, in each direction."""

    depth: int | None = None
    """Largest number of requests that are started and not yet finished; None takes `threads`."""

    mix: int = 50
    cache: Cache = "cold"
    """Preparation of the page cache before each pass. ``cold`` drops the file's pages, ``warm``
    reads the file into the cache, and ``as-is`` does nothing."""

    passes: int = 1
    seconds: float = 0.0
    """Least time of all passes in seconds; the work between passes, such as syncs, does not count.
    Further passes are added until it is reached."""

    ramp_s: float = 0.0
    """Seconds of requests before each run that do not count, so that a drive that starts fast or
    slow has settled. With the cache ``as-is`` there are none, since they would change its state."""

    interval_s: float = 1.0
    file_bytes: int = 1 << 30
    """Length of each file in bytes; a remainder shorter than a request is not touched."""

    files: int = 1
    """Number of files in each directory. The requests go round them."""

    reopen: bool = False
    staged: bool = False
    """Whether one thread copies each block between ordinary memory and the buffer of its request,
    and digests it, while the other buffers are in flight; see `gds.bench.passes.StagedPass`."""

    def __post_init__(self) -> None:
        """Raise `RefusedError` if the workload cannot be measured."""
        for name, value, known in (
            ("rw", self.rw, PATTERNS),
            ("path", self.path, tuple(PATHS)),
            ("cache", self.cache, CACHES),
        ):
            if value not in known:
                raise RefusedError(f"{name} is {value!r}, not one of {', '.join(known)}")
        if self.size < ALIGNMENT or self.size % ALIGNMENT:
            raise RefusedError(
                f"size is {self.size} bytes, not a multiple of {ALIGNMENT}, which direct I/O "
                "requires"
            )
        if self.size > self.file_bytes:
            raise RefusedError(
                f"size is {self.size} bytes, more than the file has ({self.file_bytes})"
            )
        for name, count in (("threads", self.threads), ("depth", self.in_flight)):
            if not 1 <= count <= _MOST_THREADS:
                raise RefusedError(f"{name} is {count}, not 1 to {_MOST_THREADS}")
        if self.in_flight * self.size > _MOST_BUFFER_BYTES:
            raise RefusedError(
                f"{self.in_flight} requests of {self.size} bytes need buffers of more than "
                f"{_MOST_BUFFER_BYTES >> 30} GiB: use a smaller size or depth"
            )
        most = _MOST_FILES if self.reopen else _MOST_OPEN_FILES
        if not 1 <= self.files <= most:
            hint = "" if self.reopen else f", or up to {_MOST_FILES} with --reopen"
            raise RefusedError(f"files is {self.files}, not 1 to {most}{hint}")
        if not 1 <= self.mix <= 99:
            raise RefusedError(f"mix is {self.mix} per cent of reads, not 1 to 99")
        if self.passes < 1 or not 0 <= self.seconds < math.inf:
            raise RefusedError("passes must be at least 1, and seconds a number of 0 or more")
        if not 0 <= self.ramp_s < math.inf:
            raise RefusedError(
                f"ramp is {self.ramp_s:g} seconds, but must be a number of 0 or more"
            )
        if self.staged:
            self._require_stageable()
        if not self.interval_s >= LEAST_INTERVAL_S:
            raise RefusedError(
                f"interval is {self.interval_s:g} seconds, but must be at least "
                f"{LEAST_INTERVAL_S:g}"
            )

    def _require_stageable(self) -> None:
        if self.rw not in ("read", "write"):
            raise RefusedError(f"--staged measures read or write, not {self.rw}")
        if PATHS[self.path].memory != "host":
            raise RefusedError(f"--staged measures paths of host memory, not {self.path}")
        if self.reopen:
            raise RefusedError("--staged keeps its files open: leave --reopen out")
        if self.in_flight < 2:
            raise RefusedError(
                "--staged needs two buffers or more, one to copy and one in flight: pass "
                "--threads or --depth 2"
            )

    @property
    def in_flight(self) -> int:
        """Largest number of requests that are started and not yet finished."""
        return self.threads if self.depth is None else self.depth

    @property
    def num_requests(self) -> int:
        """Number of requests in one pass, to all files of one directory."""
        return self.file_bytes // self.size * self.files

    @property
    def reads(self) -> bool:
        """Whether the pattern has reads."""
        return not self.rw.endswith("write")

    @property
    def writes(self) -> bool:
        """Whether the pattern has writes."""
        return not self.rw.endswith("read")

    @property
    def num_reads(self) -> int:
        """Number of reads in one pass, in one directory; the other requests are writes."""
        if not self.writes:
            return self.num_requests
        return round(self.num_requests * self.mix / 100) if self.reads else 0

    @property
    def num_writes(self) -> int:
        """Number of writes in one pass, in one directory."""
        return self.num_requests - self.num_reads


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``4096``, ``64K``, ``1M``, ``1MiB`` or ``2G``.

    The units are powers of 1024.

    Raises:
        RefusedError: The text is not a size.
    """
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise RefusedError(f"{text!r} is not a size: write 4096, 64K, 1M or 1G")
    return int(found[1]) * _UNITS[found[2].upper()]


def size_text(nbytes: int) -> str:
    """Return a size as text, such as ``64K`` or ``1M``; a size without such a unit in bytes."""
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """Return the property that a sweep varies, and its values.

    ``size=64K..16M`` doubles from the first value to the last; ``threads=1,3,4`` lists the values.

    Raises:
        RefusedError: The text names no property that can be varied, or no valid values.
    """
    name, separator, values = text.partition("=")
    if not separator or name not in (*_NUMBERS, *_WORDS):
        raise RefusedError(
            f"--sweep {text}: write one of {', '.join((*_NUMBERS, *_WORDS))}, '=', and values such "
            "as 64K..16M or 1,2,4"
        )
    first, dots, last = values.partition("..")
    if name in _WORDS:
        if dots:
            raise RefusedError(
                f"--sweep {text}: {name} takes no range: list its values with commas"
            )
        return name, [value.strip() for value in values.split(",")]
    parse = _NUMBERS[name]
    if not dots:
        return name, [parse(value) for value in values.split(",")]
    value, end = parse(first), parse(last)
    if not 0 < value <= end:
        raise RefusedError(f"--sweep {text}: the range is empty")
    doubled = []
    while value <= end:
        doubled.append(value)
        value *= 2
    return name, doubled


def expand(base: Workload, sweeps: Sequence[tuple[str, list[Any]]]) -> list[Workload]:
    """Return a workload for every combination of the swept values; the last sweep varies fastest.

    Raises:
        RefusedError: A property is swept twice, there are too many combinations, or a workload
            cannot be measured.
    """
    names = [name for name, _ in sweeps]
    if len(set(names)) < len(names):
        raise RefusedError("--sweep is given twice for the same setting")
    points = list(itertools.product(*(values for _, values in sweeps)))
    if len(points) > _MOST_POINTS:
        raise RefusedError(f"the sweeps have {len(points)} points, more than {_MOST_POINTS}")
    return [dataclasses.replace(base, **dict(zip(names, point, strict=True))) for point in points]


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise RefusedError(f"{text!r} is not a whole number")
    return int(text)


_NUMBERS: Final = {"size": parse_size, "threads": _count, "depth": _count, "mix": _count}
_WORDS: Final = ("rw", "path", "cache")
