"""Time of hybrid I/O, beside the better of its two parts: direct, or through the page cache.

Each scenario runs in turns through a backend that is direct, a backend that is buffered, and a
backend that chooses for each request; everything else is equal. The medians over the run decide
which of the two fixed ways is better, and the hybrid is compared with that way, pair by pair.
Writes include the sync that makes them durable. Before each sample of a cold scenario the files are
dropped from the page cache.

    python -m bench.hybrid --directory DIR                 # hybrid / the better fixed way
    python -m bench.hybrid --directory DIR --scenarios small-read,hot-read
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bench._harness import BenchError, Parser, Result, require_space, run, say, scratch, words
from bench._statistics import alternate, median, ratios
from gds import ALIGNMENT, Backend, Buffer, File, IOFuture, PosixBackend

_LIMIT = 1.05
"""Largest ratio of the hybrid's time to the time of the better fixed way."""

_WAYS = ("direct", "hybrid", "buffered")
"""Names of the ways, in an order in which the hybrid is a neighbour of both others."""

_KIB, _MIB = 1 << 10, 1 << 20

Cache = Literal["cold", "hot"]


@dataclass(frozen=True)
class Piece:
    """A request for a range of bytes in a file."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Scenario:
    """Files, and the requests to them."""

    title: str
    sizes: tuple[int, ...]
    """Bytes of each file."""
    pieces: tuple[Piece, ...]
    writes: bool = False
    cache: Cache = "cold"
    opens: bool = False
    """Whether opening and closing each file is part of the scenario, and of its time."""
    passes: int = 1
    promised: bool = True
    """Whether the ratio has a limit."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that a sample moves."""
        return self.passes * sum(piece.nbytes for piece in self.pieces)


def scenarios(args: argparse.Namespace) -> dict[str, Scenario]:
    """Return all scenarios, by name."""
    draw = random.Random(args.seed)
    large = (args.file_mib * _MIB,)
    stream = tuple(
        Piece(0, offset, min(args.request_mib * _MIB, large[0] - offset))
        for offset in range(0, large[0], args.request_mib * _MIB)
    )
    small = tuple(draw.randint(1 * _KIB, 64 * _KIB) for _ in range(args.files))
    whole = tuple(Piece(number, 0, size) for number, size in enumerate(small))
    tails = _unaligned(draw, large[0], args.tails)
    cached = (min(args.hot_mib, args.file_mib) * _MIB,)
    again = tuple(Piece(0, offset, _MIB) for offset in range(0, cached[0] - _MIB + 1, _MIB))
    return {
        "stream-read": Scenario("large streaming reads", large, stream),
        "stream-write": Scenario("large streaming writes, synced", large, stream, writes=True),
        "small-read": Scenario("small files, read whole", small, whole, opens=True),
        "small-write": Scenario(
            "small files, overwritten and synced", small, whole, writes=True, opens=True
        ),
        "tails-read": Scenario("unaligned reads", large, tails),
        "tails-write": Scenario("unaligned writes, synced", large, tails, writes=True),
        "hot-read": Scenario("reads of what the page cache holds", cached, again, cache="hot"),
        # The hybrid reads data directly the first time, and into the page cache the second time.
        # The better of the fixed ways knows beforehand that data will be read again.
        "again-read": Scenario(
            "cold reads, six times over", cached, again, passes=6, promised=False
        ),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    known = scenarios(args)
    if unknown := [name for name in args.scenarios if name not in known]:
        raise BenchError(f"--scenarios {unknown[0]}: there are {', '.join(known)}")
    with scratch(args.directory) as directory:
        require_space(directory, sum(sum(known[name].sizes) for name in args.scenarios))
        result = Result("hybrid", args, directory)
        for name in args.scenarios:
            _compare(args, result, name, known[name], directory)
        result.write()


def _compare(
    args: argparse.Namespace, result: Result, name: str, scenario: Scenario, directory: str
) -> None:
    say(f"{name}: {scenario.title}")
    with contextlib.ExitStack() as stack:
        backends = {way: stack.enter_context(_backend(way, args.threads)) for way in _WAYS}
        paths = _files(backends["direct"], scenario, directory)
        measure: dict[str, Callable[[], float]] = {
            way: _sampler(backend, scenario, paths, args.threads)
            for way, backend in backends.items()
        }
        for sample in measure.values():
            sample()
        samples = alternate(measure, args.rounds, report=say)
        chosen = backends["hybrid"].hybrid
    for path in paths:
        os.unlink(path)
    better = min(("direct", "buffered"), key=lambda way: median(samples[way]))
    result.add_samples({f"{name}_{way}_s": values for way, values in samples.items()})
    result.fact(f"{name}_bytes", scenario.nbytes)
    result.fact(f"{name}_choices", chosen.counts() if chosen else {})
    result.claim(
        f"{scenario.title}: hybrid beside {better}",
        ratios(samples["hybrid"], samples[better]),
        numerator=f"{name}_hybrid_s",
        denominator=f"{name}_{better}_s",
        limit=args.limit if scenario.promised else None,
        against_the_other=median(
            ratios(samples["hybrid"], samples["buffered" if better == "direct" else "direct"])
        ),
    )


def _unaligned(draw: random.Random, size: int, count: int) -> tuple[Piece, ...]:
    """Return unaligned requests of up to 2 MiB, in random order, that do not overlap."""
    room = size // count
    pieces = []
    for number in range(count):
        nbytes = min(draw.choice([20 * _KIB, 100 * _KIB, 300 * _KIB, _MIB, 2 * _MIB]), room // 2)
        nbytes += draw.randrange(1, ALIGNMENT)
        pieces.append(Piece(0, number * room + draw.randrange(1, room - nbytes), nbytes))
    draw.shuffle(pieces)
    return tuple(pieces)


@contextlib.contextmanager
def _backend(way: str, threads: int) -> Iterator[PosixBackend]:
    backend = PosixBackend(
        read_threads=threads,
        write_threads=threads,
        direct=way != "buffered",
        hybrid=way == "hybrid",
    )
    try:
        yield backend
    finally:
        backend.close()


def _files(backend: Backend, scenario: Scenario, directory: str) -> list[str]:
    """Make the files and write them completely, since reads of unwritten space are not real."""
    paths = []
    memory = backend.allocate(4 * _MIB)
    memory.memoryview()[:] = random.Random(0).randbytes(memory.nbytes)
    for number, size in enumerate(scenario.sizes):
        paths.append(os.path.join(directory, f"file-{number}"))
        with contextlib.closing(backend.create(paths[-1], size)) as file:
            for offset in range(0, size, memory.nbytes):
                nbytes = min(memory.nbytes, size - offset)
                file.write(memory.slice(0, nbytes), offset).result()
            file.sync()
    return paths


def _sampler(
    backend: Backend, scenario: Scenario, paths: list[str], threads: int
) -> Callable[[], float]:
    """Return a function that runs the scenario once through a backend, and returns its seconds."""
    longest = max(piece.nbytes for piece in scenario.pieces)
    room = -(-longest // ALIGNMENT) * ALIGNMENT + ALIGNMENT
    memory = backend.allocate(2 * threads * room)
    memory.memoryview()[:] = b"\1" * memory.nbytes  # touched
    slots = [memory.slice(n * room, room) for n in range(2 * threads)]

    def sample() -> float:
        """Run the scenario once, and return its seconds."""
        _prepare(paths, scenario.cache)
        started = time.perf_counter()
        _move(backend, scenario, paths, slots)
        return time.perf_counter() - started

    return sample


def _move(backend: Backend, scenario: Scenario, paths: list[str], slots: list[Buffer]) -> None:
    opened: dict[int, File] = {}
    free = deque(slots)
    pending: deque[tuple[IOFuture, Buffer]] = deque()

    def wait() -> None:
        """Wait for the oldest transfer in flight, and free its memory."""
        future, slot = pending.popleft()
        future.result()
        free.append(slot)

    for _ in range(scenario.passes):
        for piece in scenario.pieces:
            if piece.file not in opened:
                opened[piece.file] = backend.open(paths[piece.file], writable=scenario.writes)
            if not free:
                wait()
            slot = free.popleft()
            # As far from alignment in memory as in the file, as a caller would do it.
            part = slot.slice(piece.offset % ALIGNMENT, piece.nbytes)
            file = opened[piece.file]
            move = file.write if scenario.writes else file.read
            pending.append((move(part, piece.offset), slot))
        while pending:
            wait()
    for file in opened.values():
        if scenario.writes:
            file.sync()
        file.close()


def _prepare(paths: list[str], cache: Cache) -> None:
    """Bring the page cache into the same state before each sample."""
    for path in paths:
        fd = os.open(path, os.O_RDWR)
        try:
            os.fsync(fd)
            if cache == "cold":
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while os.read(fd, 4 * _MIB):
                    pass
        finally:
            os.close(fd)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("hybrid", __doc__ or "")
    add = parser.add_argument
    add("--scenarios", type=words, default=None, help="names, with commas (default: all)")
    add("--file-mib", type=int, default=512, help="of the large file (default: %(default)s)")
    add("--hot-mib", type=int, default=256, help="read repeatedly (default: %(default)s)")
    add("--request-mib", type=int, default=32, help="of a stream (default: %(default)s)")
    add("--files", type=int, default=400, help="small files (default: %(default)s)")
    add("--tails", type=int, default=128, help="unaligned requests (default: %(default)s)")
    add("--threads", type=int, default=2, help="of reads, and of writes (default: %(default)s)")
    add("--seed", type=int, default=0, help="of sizes and places (default: %(default)s)")
    add("--limit", type=float, default=_LIMIT, help="of each ratio (default: %(default)s)")
    quick = {"file_mib": 8, "hot_mib": 4, "request_mib": 2, "files": 8, "tails": 4}
    args = parser.read(arguments, quick=quick)
    args.scenarios = args.scenarios or list(scenarios(args))
    args.what = args.what or f"{args.file_mib}MiB"
    return args


if __name__ == "__main__":
    run(main)
