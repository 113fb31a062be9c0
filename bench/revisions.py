"""Time of a step of this checkout, beside that of another checkout of the project.

The state is in memory, so the processor's part of a step is measured: one model of a few large
parameters, and one of many small ones. Each sample is a process of its own, and the two checkouts
alternate.

    git worktree add ../before COMMIT
    python -m bench.revisions --before ../before
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench._harness import BenchError, Parser, Result, run
from bench._statistics import alternate, ratios
from tests.dying import dying

_HERE = Path(__file__).parent.parent
_CHILD = Path(__file__).with_name("_revision_child.py")
_MODELS = {"large": (48, 256 << 10), "small": (4096, 1024)}
"""Number of parameters, and elements of each, by the name of a model."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    result = Result("revisions", args, args.directory)
    for name, (num_tensors, elements) in _MODELS.items():
        sizes = (num_tensors // 16, elements) if args.quick else (num_tensors, elements)
        samples = alternate(
            {
                f"{name}_after_s": partial(_step_s, _HERE, sizes),
                f"{name}_before_s": partial(_step_s, Path(args.before), sizes),
            },
            args.rounds,
        )
        result.add_samples(samples)
        result.claim(
            f"a step of {sizes[0]} parameters of {elements} elements, beside the checkout before",
            ratios(samples[f"{name}_after_s"], samples[f"{name}_before_s"]),
            numerator=f"{name}_after_s",
            denominator=f"{name}_before_s",
            limit=None,
        )
    result.write()


def _step_s(checkout: Path, sizes: tuple[int, int]) -> float:
    """Return the seconds of a step, in a process that imports from a checkout."""
    done = subprocess.run(
        dying([sys.executable, str(_CHILD), *map(str, sizes)]),
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BenchError(f"the step of {checkout} failed:\n{done.stderr[-2000:]}")
    return float(done.stdout)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("revisions", __doc__ or "")
    parser.add_argument("--before", default=str(_HERE), help="the other checkout")
    args = parser.read(arguments, quick={})
    args.what = args.what or "step"
    return args


if __name__ == "__main__":
    run(main)
