"""What the digests of the state cost in a step.

Every chunk that a step writes is digested on its way to the drive. The functions that do it are
wrapped, here only, to add up the CPU time of the threads that run them; the rest of the step is as
it is for anybody. A sample is several steps back to back, with nothing in flight before and after.

    python -m bench.digests --directory DIR                # digests / step, digests / CPU of it
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from bench._harness import (
    BenchError,
    Parser,
    Result,
    count,
    mebi,
    require_space,
    run,
    say,
    scratch,
    size,
)
from bench._model import make_gradients, make_parameters
from bench._statistics import median, ratios
from bench._streamed import Streamed, exact_state_bytes
from gds import PosixBackend
from offload import digests

_LIMIT = 0.05
"""Of the time of a step on the CPU path."""


@dataclass
class DigestClock:
    """CPU seconds that threads have spent in digests, and what they digested."""

    cpu_s: float = 0.0
    digested_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def timed(self, digest: Callable[[memoryview], bytes]) -> Callable[[memoryview], bytes]:
        """Return the function with its time added up here, whichever thread calls it."""

        @wraps(digest)
        def wrapper(data: memoryview) -> bytes:
            started = time.thread_time()
            found = digest(data)
            spent = time.thread_time() - started
            with self._lock:
                self.cpu_s += spent
                self.digested_bytes += len(data)
            return found

        return wrapper


@contextmanager
def clock_on_digests() -> Iterator[DigestClock]:
    """Yield a clock that runs while state is digested, in any thread of this process."""
    clock = DigestClock()
    original = digests.leaf_digests
    digests.leaf_digests = clock.timed(original)  # type: ignore[assignment]
    try:
        yield clock
    finally:
        digests.leaf_digests = original


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    with scratch(args.directory) as directory:
        require_space(directory, 2 * exact_state_bytes(args.parameters))
        result = Result("digests", args, directory)
        result.fact("state_bytes", exact_state_bytes(args.parameters))
        with _streamed(args, directory) as step, clock_on_digests() as clock:
            _measure(args, result, step, clock)
        result.write()


def _measure(args: argparse.Namespace, result: Result, step: Streamed, clock: DigestClock) -> None:
    samples: dict[str, list[float]] = {"digest_cpu_s": [], "step_s": [], "step_cpu_s": []}
    step.sample(args.steps)
    clock.cpu_s, clock.digested_bytes = 0.0, 0
    for number in range(args.rounds):
        cpu_before, digest_before = time.process_time(), clock.cpu_s
        samples["step_s"].append(step.sample(args.steps))
        samples["step_cpu_s"].append((time.process_time() - cpu_before) / args.steps)
        samples["digest_cpu_s"].append((clock.cpu_s - digest_before) / args.steps)
        values = ", ".join(f"{name} {found[-1]:.4g}" for name, found in samples.items())
        say(f"  round {number + 1}/{args.rounds}: {values}")
    digested = clock.digested_bytes // (args.rounds * args.steps)
    step_bytes = exact_state_bytes(args.parameters)
    if digested != step_bytes:
        raise BenchError(
            f"{size(digested)} were digested in a step that has {size(step_bytes)} of state: the "
            "wrapper of this script no longer sits where state is digested"
        )
    result.add_samples(samples)
    result.fact("step_digested_bytes", digested)
    result.fact("digest_gbps_of_one_thread", digested / median(samples["digest_cpu_s"]) / 1e9)
    result.claim(
        "digests of a step, in CPU seconds, beside the step",
        ratios(samples["digest_cpu_s"], samples["step_s"]),
        numerator="digest_cpu_s",
        denominator="step_s",
        limit=args.limit,
    )
    result.claim(
        "digests of a step, in CPU seconds, beside all CPU seconds of the step",
        ratios(samples["digest_cpu_s"], samples["step_cpu_s"]),
        numerator="digest_cpu_s",
        denominator="step_cpu_s",
        limit=None,
    )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("digests", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default="128Mi", help="bf16 parameters (default: %(default)s)")
    add("--tensors", type=int, default=8, help="parameter tensors (default: %(default)s)")
    add("--chunk-mib", type=float, default=32, help="of one FP32 array (default: %(default)s)")
    add("--ring", type=int, default=6, help="chunks in memory (default: %(default)s)")
    add("--threads", type=int, default=3, help="of reads, and of writes (default: %(default)s)")
    add("--steps", type=int, default=3, help="steps in one sample (default: %(default)s)")
    add("--limit", type=float, default=_LIMIT, help="of the first ratio (default: %(default)s)")
    quick = {"parameters": "128Ki", "tensors": 3, "chunk_mib": 0.125, "steps": 2}
    args = parser.read(arguments, quick=quick)
    args.what = args.what or mebi(args.parameters)
    return args


def _streamed(args: argparse.Namespace, directory: str) -> Streamed:
    parameters = make_parameters(args.parameters, args.tensors)
    settings: dict[str, Any] = {
        "chunk_bytes": int(args.chunk_mib * (1 << 20)),
        "ring_chunks": args.ring,
        "backend": PosixBackend(read_threads=args.threads, write_threads=args.threads),
    }
    say(f"preparing {size(exact_state_bytes(args.parameters))} of FP32 state")
    return Streamed(
        os.path.join(directory, "store"), parameters, make_gradients(parameters), "exact", settings
    )


if __name__ == "__main__":
    run(main)
