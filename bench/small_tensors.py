"""A step of many small parameters, beside one flat parameter of the same size.

LoRA adapters, biases and norms are thousands of small tensors. What each of them costs beyond its
bytes is the library's own overhead. Both models are in bf16, on the same drive, and are stepped in
turns. A sample is several steps back to back, with nothing in flight before and after.

    python -m bench.small_tensors --directory DIR          # many small / one flat
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from bench._harness import Parser, Result, count, require_space, run, say, scratch
from bench._model import make_gradients
from bench._statistics import alternate, ratios
from bench._streamed import Streamed, exact_state_bytes

_LIMIT = 1.3
_SMALLEST, _LARGEST = 64, 4096


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    generator = random.Random(1)
    lengths = [generator.randint(_SMALLEST, _LARGEST) for _ in range(args.tensors)]
    with scratch(args.directory) as directory, ExitStack() as opened:
        require_space(directory, 6 * exact_state_bytes(sum(lengths)))
        result = Result("small_tensors", args, directory)
        result.fact("parameters", sum(lengths))
        steps = {}
        for name, shapes in (("small", lengths), ("flat", [sum(lengths)])):
            say(f"preparing {len(shapes)} tensors of {sum(shapes)} elements together")
            parameters = [torch.nn.Parameter(torch.randn(length).bfloat16()) for length in shapes]
            streamed = Streamed(
                os.path.join(directory, name), parameters, make_gradients(parameters), name, {}
            )
            opened.enter_context(streamed)
            steps[f"{name}_step_s"] = partial(streamed.sample, args.steps)
        samples = alternate(steps, args.rounds, report=say)
        result.add_samples(samples)
        result.claim(
            f"a step of {args.tensors} small tensors beside one flat tensor of the same size",
            ratios(samples["small_step_s"], samples["flat_step_s"]),
            numerator="small_step_s",
            denominator="flat_step_s",
            limit=_LIMIT,
        )
        result.write()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("small_tensors", __doc__ or "")
    add = parser.add_argument
    add("--tensors", type=count, default=20_000, help="small ones (default: %(default)s)")
    add("--steps", type=int, default=3, help="steps in one sample (default: %(default)s)")
    args = parser.read(arguments, quick={"tensors": 50, "steps": 2})
    args.what = args.what or str(args.tensors)
    return args


if __name__ == "__main__":
    run(main)
