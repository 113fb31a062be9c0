"""Python's time for each piece of a parameter that a device steps, beside a plain call of torch.

A chunk of many small tensors (LoRA adapters, norms, biases) is stepped by the code that prepares
launches of the update kernel. Nothing is launched, so no device is needed, and nothing is said of
one. The time of a chunk of one tensor of the same size is subtracted, and the rest is divided by
the number of tensors. A plain call is an addition in place of tensors of one element.

    python -m bench.device_calls                     # microseconds and plain calls for each piece
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from bench._harness import Parser, Result, run, say
from bench._statistics import alternate, median
from offload.device.kernels.update import launches
from offload.format.arrays import StateFormat
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.update import device_step
from offload.update.dtypes import DTYPE_CODES, DTYPES
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_keys import StepInputs
from offload.update.updater import DeviceUpdater

_BF16 = torch.bfloat16


class NoLaunches:
    """A `Compute` that prepares launches, and launches nothing."""

    device = torch.device("cpu")

    @contextmanager
    def queue(self, after: object) -> Iterator[None]:  # noqa: ARG002
        yield

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype)

    def prepare(self, form: object) -> None:
        pass

    def update(self, *arguments: Any, **options: Any) -> None:
        for _ in launches(*arguments, **options):
            pass

    def mark(self) -> None:
        pass

    def wait(self, event: None) -> None:
        pass


class Chunk:
    """A chunk of tensors of one length, and steps of it."""

    def __init__(self, num_tensors: int, length: int, state: Any) -> None:
        self._rule = UpdateRule(torch.optim.AdamW, {})
        self._group = {**self._rule.defaults}
        found = self._rule.rule(self._group)
        form = StateFormat("float32", state)
        code = DTYPE_CODES[_BF16]
        arrays = form.stored_arrays(code, found.arrays)
        specs = tuple(
            ParameterSpec(f"layers.{n}.weight", code, (length,), 0, arrays)
            for n in range(num_tensors)
        )
        model = tuple(ModelTensor(spec.name, spec.dtype, spec.shape) for spec in specs)
        self._layout = Layout(specs, model, num_tensors * length, state)
        self._parameters = [torch.zeros(length, dtype=_BF16) for _ in specs]
        self._gradients = [torch.zeros(length, dtype=_BF16) for _ in specs]
        scalars = tuple((name, kind, 7.0) for name, kind in found.scalars.items())
        self._scalars = [scalars] * num_tensors
        self._arrays: Mapping[str, torch.Tensor] = {
            name: torch.zeros(share.nbytes, dtype=torch.uint8).view(
                DTYPES[self._layout.formats[name].dtype]
            )
            for name, share in self._layout.plans[0].arrays.items()
        }
        self._pool = UpdatePool(self._rule)

    def step(self) -> None:
        """Prepare all launches of a step."""
        inputs = StepInputs(
            layout=self._layout,
            groups=[self._group],
            parameters=self._parameters,
            gradients=list(self._gradients),
            scalars=self._scalars,
            step=8,
            seed=1,
        )
        compute: Any = NoLaunches()
        updater = DeviceUpdater(self._rule, self._pool, inputs, compute=compute)
        updater.update(0, self._arrays)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    result = Result("device_calls", args, args.directory)
    one, other = torch.zeros(1), torch.zeros(1)
    # There is no kernel to compare with torch's step.
    with mock.patch.object(device_step, "why_not_trusted", return_value=""):
        for state in ("float32", "bfloat16", "int8"):
            many = Chunk(args.tensors, args.elements, state)
            single = Chunk(1, args.tensors * args.elements, state)
            samples = alternate(
                {
                    "many_s": partial(_seconds, many.step, args.steps),
                    "single_s": partial(_seconds, single.step, args.steps),
                    "plain_s": partial(_seconds, partial(one.add_, other), 1000 * args.steps),
                },
                args.rounds,
                report=say,
            )
            chunks = zip(samples["many_s"], samples["single_s"], strict=True)
            pieces = [(m - s) / args.tensors for m, s in chunks]
            names = f"{state}_piece_s", f"{state}_plain_s"
            result.add_samples({names[0]: pieces, names[1]: samples["plain_s"]})
            result.fact(f"{state}_piece_us", median(pieces) * 1e6)
            result.claim(
                f"a piece with {state} state, beside a plain call",
                [p / s for p, s in zip(pieces, samples["plain_s"], strict=True)],
                numerator=names[0],
                denominator=names[1],
                limit=None,
            )
    result.write()


def _seconds(work: Callable[[], object], num: int) -> float:
    """Return the seconds of one of many calls."""
    work()
    began = time.perf_counter()
    for _ in range(num):
        work()
    return (time.perf_counter() - began) / num


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("device_calls", __doc__ or "")
    add = parser.add_argument
    add("--tensors", type=int, default=128, help="of a chunk (default: %(default)s)")
    add("--elements", type=int, default=1024, help="of a tensor (default: %(default)s)")
    add("--steps", type=int, default=20, help="in one sample (default: %(default)s)")
    args = parser.read(arguments, quick={"tensors": 8, "steps": 2})
    args.what = args.what or f"{args.tensors} tensors"
    return args


if __name__ == "__main__":
    run(main)
