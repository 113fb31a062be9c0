"""Time of forward and backward of blocks whose parameters are streamed, beside those in memory.

Both kinds alternate, with the same model and batch, and steps in between are not measured. A block
is a feed-forward layer: its work grows with the number of tokens, and its bytes do not. So the
ratio of the time that a block computes to the time that its bytes take says what can be hidden.
First, both kinds train for some steps, and the parameters are compared bit by bit.

    python -m bench.blocks --directory DIR
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import offload
from bench._harness import BenchError, Parser, Result, mebi, require_space, run, say, scratch
from bench._statistics import alternate, median, ratios
from bench._streamed import exact_state_bytes

_WARM_UP = 2


class _Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return found


class _Model(torch.nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Trainer:
    """A model with an optimizer."""

    def __init__(self, args: argparse.Namespace, directory: str, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = _Model(args.layers, args.width)
        self.x = torch.randn(args.tokens, args.width)
        self.optimizer = offload.AdamW(
            self.model.parameters(),
            lr=1e-4,
            directory=directory,
            model=self.model,
            keep=1,
            options=offload.Options(chunk_bytes=int(args.chunk_mib * (1 << 20)), **settings),
        )

    def train(self, steps: int) -> None:
        """Take steps, as a training loop does."""
        for _ in range(steps):
            self.model(self.x).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def sample(self, iterations: int) -> float:
        """Return the seconds of one forward and backward, of several back to back."""
        started = time.perf_counter()
        for _ in range(iterations):
            self.model(self.x).backward()
        return (time.perf_counter() - started) / iterations

    def digest(self) -> str:
        """Return a digest of all parameters; every bit counts."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            found.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    torch.set_num_threads(args.threads)
    parameters = args.layers * (8 * args.width**2 + 5 * args.width)
    args.what = args.what or f"{mebi(parameters)}-{args.tokens}"
    with scratch(args.directory) as directory:
        require_space(directory, 5 * exact_state_bytes(parameters))
        result = Result("blocks", args, directory)
        kept = Trainer(args, os.path.join(directory, "kept"))
        streamed = Trainer(args, os.path.join(directory, "streamed"), parameters="host")
        for trainer in (kept, streamed):
            trainer.train(args.compare_steps)
        equal = kept.digest() == streamed.digest()
        result.fact("bit_identical", equal)
        say(f"after {args.compare_steps} steps parameters are {'' if equal else 'NOT '}identical")
        if equal:
            _measure(args, result, kept, streamed, parameters)
        for trainer in (kept, streamed):
            trainer.optimizer.close()
        result.write()
    if not equal:
        raise BenchError("streamed blocks and blocks in memory gave different parameters")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("blocks", __doc__ or "")
    add = parser.add_argument
    add("--layers", type=int, default=12, help="number of blocks (default: %(default)s)")
    add("--width", type=int, default=512, help="of the blocks (default: %(default)s)")
    add("--tokens", type=int, default=512, help="in a batch (default: %(default)s)")
    add("--threads", type=int, default=1, help="of torch; one more reads (default: %(default)s)")
    add("--chunk-mib", type=float, default=16, help="of one FP32 array (default: %(default)s)")
    add("--iterations", type=int, default=2, help="in one sample (default: %(default)s)")
    add("--compare-steps", type=int, default=2, help="steps that are compared bit by bit")
    add("--limit", type=float, default=1.25, help="of streamed / in memory")
    quick = {"layers": 5, "width": 32, "tokens": 16, "chunk_mib": 0.0625, "iterations": 1}
    return parser.read(arguments, quick=quick)


def _measure(
    args: argparse.Namespace, result: Result, kept: Trainer, streamed: Trainer, parameters: int
) -> None:
    for trainer in (kept, streamed):
        trainer.sample(_WARM_UP)
    block_bytes = parameters * 4 // args.layers
    source, into = torch.ones(block_bytes // 4), torch.empty(block_bytes // 4)
    copies = []
    for _ in range(5):
        started = time.perf_counter()
        into.copy_(source)
        copies.append(time.perf_counter() - started)
    compute_s = kept.sample(args.iterations) / (3 * args.layers)  # a backward is two forwards
    result.fact("compute_per_read", compute_s / median(copies))
    say(f"a block computes {compute_s / median(copies):.1f} times as long as its bytes are copied")
    before = streamed.optimizer.stats()
    measure: dict[str, Callable[[], float]] = {
        "streamed_s": partial(streamed.sample, args.iterations),
        "kept_s": partial(kept.sample, args.iterations),
    }
    samples = alternate(measure, args.rounds, report=say)
    after = streamed.optimizer.stats()
    result.add_samples(samples)
    result.claim(
        "forward and backward of streamed blocks, beside those in memory",
        ratios(samples["streamed_s"], samples["kept_s"]),
        numerator="streamed_s",
        denominator="kept_s",
        limit=args.limit,
    )
    loads, ahead, waited, unused = (
        getattr(after, name) - getattr(before, name)
        for name in (
            "block_loads",
            "block_loads_ahead",
            "block_loads_waited",
            "block_loads_unused",
        )
    )
    result.fact("block_loads", loads)
    result.fact("block_loads_ahead", ahead)
    result.fact("block_loads_waited", waited)
    result.fact("block_loads_unused", unused)
    say(f"{loads} loads: {ahead} ahead, of which {waited} were waited for; {unused} in vain")


if __name__ == "__main__":
    run(main)
