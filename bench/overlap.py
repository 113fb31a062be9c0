"""Time of an iteration whose step runs beside the next forward.

The forward of each layer sleeps as long as its share of the step's transfers takes, as if an
accelerator computed it. Then an iteration with ``overlap="forward"`` should take hardly longer than
an iteration without an optimizer. Three kinds of iterations alternate: compute alone, overlapped,
synchronous.

Before that, both kinds of steps run a few times from the same seed, and the parameters are compared
bit by bit.

    python -m bench.overlap --directory DIR
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import offload
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
from bench._model import Stack
from bench._statistics import alternate, median, ratios
from bench._streamed import exact_state_bytes

_WARM_UP = 2


class Trainer:
    """A model whose forward lasts a given time, with or without an optimizer."""

    def __init__(self, args: argparse.Namespace, directory: str, **settings: Any) -> None:
        self.model = Stack(args.layers, args.parameters // args.layers)
        self.optimizer: offload.AdamW | None = None
        if directory:
            self.optimizer = offload.AdamW(
                self.model.parameters(),
                lr=1e-4,
                directory=directory,
                model=self.model,
                keep=1,
                options=offload.Options(
                    chunk_bytes=int(args.chunk_mib * (1 << 20)), ring_chunks=args.ring, **settings
                ),
            )

    def iterate(self, iterations: int) -> None:
        """Forward, backward and step, as a training loop does."""
        x = torch.zeros(1)
        for _ in range(iterations):
            self.model(x).backward()
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()
            else:
                self.model.zero_grad()

    def sample(self, iterations: int) -> float:
        """Return the seconds of one iteration, as the mean of several iterations back to back.

        One more iteration runs before the time begins. So a step is under way at the beginning, as
        at the end, and the result is that of an iteration amid training.
        """
        self.synchronize()
        self.iterate(1)
        started = time.perf_counter()
        self.iterate(iterations)
        return (time.perf_counter() - started) / iterations

    def synchronize(self) -> None:
        """Wait until nothing is in flight."""
        if self.optimizer is not None:
            self.optimizer.synchronize()

    def digest(self) -> str:
        """Return a digest of all parameters; every bit counts."""
        self.synchronize()
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            found.update(parameter.detach().reshape(-1).view(torch.int16).numpy().tobytes())
        return found.hexdigest()

    def close(self) -> None:
        """Close the optimizer, and so its store."""
        if self.optimizer is not None:
            self.optimizer.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    with scratch(args.directory) as directory:
        require_space(directory, 5 * exact_state_bytes(args.parameters))
        result = Result("overlap", args, directory)
        mode = {} if args.overlap == "none" else {"overlap": args.overlap}
        synchronous = Trainer(args, os.path.join(directory, "synchronous"))
        overlapped = Trainer(args, os.path.join(directory, "overlapped"), **mode)
        plain = Trainer(args, "")
        for trainer in (synchronous, overlapped):
            trainer.iterate(args.compare_steps)
        equal = synchronous.digest() == overlapped.digest() != plain.digest()
        result.fact("bit_identical", equal)
        result.fact("bit_identical_steps", args.compare_steps)
        say(f"after {args.compare_steps} steps parameters are {'' if equal else 'NOT '}identical")
        if not equal:
            result.skip("no times: overlapped parameters differ from those of the synchronous step")
        else:
            _measure(args, result, plain, synchronous, overlapped)
        for trainer in (synchronous, overlapped):
            trainer.close()
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        result.write()
    if not equal:
        raise BenchError("overlapped and synchronous steps gave different parameters")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("overlap", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default="128Mi", help="bf16 parameters (default: %(default)s)")
    add("--layers", type=int, default=16, help="of equal size (default: %(default)s)")
    add("--chunk-mib", type=float, default=16, help="of one FP32 array (default: %(default)s)")
    add("--ring", type=int, default=6, help="chunks in memory (default: %(default)s)")
    add("--iterations", type=int, default=4, help="in one sample (default: %(default)s)")
    add("--compare-steps", type=int, default=5, help="steps that are compared bit by bit")
    add("--forward", type=float, default=1.0, help="forward / time of the step's transfers")
    add("--limit", type=float, default=1.15, help="of iteration / compute alone")
    add(
        "--overlap",
        default="forward",
        choices=("none", "forward", "backward"),
        help="what the step runs beside; none shows what the other two save",
    )
    quick = {
        "parameters": "128Ki",
        "layers": 4,
        "chunk_mib": 0.0625,
        "iterations": 2,
        "compare_steps": 2,
    }
    args = parser.read(arguments, quick=quick)
    args.what = args.what or f"{mebi(args.parameters)}-{args.overlap}"
    return args


def _measure(
    args: argparse.Namespace,
    result: Result,
    plain: Trainer,
    synchronous: Trainer,
    overlapped: Trainer,
) -> None:
    """Make the forward as long as the transfers, and measure the time of an iteration."""
    for trainer in (synchronous, overlapped, plain):
        trainer.iterate(_WARM_UP)
    transfer_s = median(
        [
            synchronous.sample(args.iterations) - plain.sample(args.iterations)
            for _ in range(min(5, args.rounds))
        ]
    )
    forward_s = max(transfer_s * args.forward, 1e-3)
    for trainer in (synchronous, overlapped, plain):
        trainer.model.set_forward_s(forward_s)
    result.fact("transfer_s", transfer_s)
    result.fact("forward_s", forward_s)
    state = size(exact_state_bytes(args.parameters))
    say(f"a step of {state} takes {transfer_s:.3f} s; forward {forward_s:.3f} s")
    measure: dict[str, Callable[[], float]] = {
        "synchronous_s": partial(synchronous.sample, args.iterations),
        "compute_s": partial(plain.sample, args.iterations),
        "overlapped_s": partial(overlapped.sample, args.iterations),
    }
    samples = alternate(measure, args.rounds, report=say)
    result.add_samples(samples)
    result.claim(
        f"an iteration whose step runs beside the {args.overlap}, beside its compute alone"
        if args.overlap != "none"
        else "an iteration with a second synchronous step (control), beside its compute alone",
        ratios(samples["overlapped_s"], samples["compute_s"]),
        numerator="overlapped_s",
        denominator="compute_s",
        limit=args.limit if args.overlap != "none" else None,
    )
    result.claim(
        "an iteration with a synchronous step, beside its compute alone",
        ratios(samples["synchronous_s"], samples["compute_s"]),
        numerator="synchronous_s",
        denominator="compute_s",
        limit=None,
    )


if __name__ == "__main__":
    run(main)
