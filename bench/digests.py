"""Cost of the state's digests in a step.

Every chunk that a step writes is digested while it is updated. This script takes the processor time
of updates in memory with digests and without, in turns; the difference, for as many elements as the
step has, is the time of the digests. It stands beside the time of the step on the drive, measured
in the same rounds. A sample of the step is several steps back to back, with nothing in flight
before and after.

    python -m bench.digests --directory DIR                # digests / step, digests / CPU of it
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from bench._chunk_update import FORMS, ChunkUpdate
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
from offload.format import digests
from offload.format.digests import ChunkDigests
from offload.update.kernel_check import choose_kernel

_LIMIT = 0.05
"""Largest ratio of the digests' CPU time to the time of a step on the CPU path."""

_MOST_IN_MEMORY = 32 << 20
"""Largest number of elements that are updated in memory; their times are scaled up."""


@contextmanager
def count_of_digested() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of bytes digested in the block so far."""
    found: list[int] = []  # one number for each leaf: appending is safe from any thread
    by_python, by_kernel = digests.leaf_digest, ChunkDigests.digested

    def counted(leaf: memoryview) -> bytes:
        """Digest a leaf, and record its length."""
        found.append(len(leaf))
        return by_python(leaf)

    def reported(self: ChunkDigests, array: str, number: int, digest: bytes) -> None:
        """Take the digest of a leaf, and record the leaf's length."""
        found.append(len(self.leaf(array, number)))
        by_kernel(self, array, number, digest)

    digests.leaf_digest = counted
    ChunkDigests.digested = reported  # type: ignore[method-assign]
    try:
        yield lambda: sum(found)
    finally:
        digests.leaf_digest = by_python
        ChunkDigests.digested = by_kernel  # type: ignore[method-assign]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    with scratch(args.directory) as directory:
        require_space(directory, 2 * exact_state_bytes(args.parameters))
        result = Result("digests", args, directory)
        result.fact("state_bytes", exact_state_bytes(args.parameters))
        with _streamed(args, directory) as step:
            _require_all_digested(args, result, step)
            num = min(args.parameters, _MOST_IN_MEMORY)
            with closing(ChunkUpdate(FORMS["exact"], num)) as chunk:
                _measure(args, result, step, chunk)
        result.write()


def _require_all_digested(args: argparse.Namespace, result: Result, step: Streamed) -> None:
    """Check that a step digests all of its state by the function that this script wraps."""
    with count_of_digested() as num_bytes:
        step.sample(args.steps)
        digested = num_bytes() // args.steps
    step_bytes = exact_state_bytes(args.parameters)
    if digested != step_bytes:
        raise BenchError(
            f"{size(digested)} were digested in a step that has {size(step_bytes)} of state: the "
            "wrappers of this script no longer sit where state is digested"
        )
    result.fact("step_digested_bytes", digested)


def _measure(args: argparse.Namespace, result: Result, step: Streamed, chunk: ChunkUpdate) -> None:
    kernel = choose_kernel(torch.optim.AdamW, "float32")
    result.fact("update_code", kernel.code)
    scale = args.parameters / len(chunk.parameter)
    samples: dict[str, list[float]] = {"digest_cpu_s": [], "step_s": [], "step_cpu_s": []}
    step.sample(args.steps)
    for number in range(args.rounds):
        cpu_before = time.process_time()
        samples["step_s"].append(step.sample(args.steps))
        samples["step_cpu_s"].append((time.process_time() - cpu_before) / args.steps)
        chunk.seconds(kernel.kernel)  # after the step, caches hold other things
        spent = {}
        for has_digests in (False, True) if number % 2 else (True, False):
            spent[has_digests] = chunk.seconds(kernel.kernel, digests=has_digests)[1]
        samples["digest_cpu_s"].append((spent[True] - spent[False]) * scale)
        values = ", ".join(f"{name} {found[-1]:.4g}" for name, found in samples.items())
        say(f"  round {number + 1}/{args.rounds}: {values}")
    result.add_samples(samples)
    step_bytes = exact_state_bytes(args.parameters)
    result.fact("digest_gbps_of_one_thread", step_bytes / median(samples["digest_cpu_s"]) / 1e9)
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
