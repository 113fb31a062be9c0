"""Times of the kernels for update and digests, beside copies within the same device's memory.

A copy of as many bytes, half of them read and half written, is the fastest possible pass over the
memory. The ratio shows how near a kernel comes to it. Times are taken by the device, between events
on the stream of the kernels. A sample is many launches back to back, over buffers far larger than
the caches.

    python -m bench.kernel                    # kernel / copy, per byte, for each form of state
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bench._device import describe_device, require_device
from bench._harness import Parser, Result, count, mebi, run, say
from bench._statistics import alternate, ratios
from offload.device.kernels import digest
from offload.device.kernels.update import DeviceRun, form_of_run, update_run
from offload.format.arrays import BLOCK_ELEMENTS

Numbers = np.ndarray[Any, Any]

_LIMIT = 1 / 0.9
"""Largest ratio to the time of a copy: nine tenths of a copy's bandwidth. It is larger for a form
whose instructions take longer than that."""

_INSTRUCTIONS_PER_CYCLE = 2.5
"""Instructions of warps that a multiprocessor issues in a cycle. It can issue 4, and kernels of
dependent arithmetic rarely reach more than this."""

INSTRUCTIONS = {
    "exact": 66,
    "exact fused": 62,
    "split": 73,
    "split fused": 70,
    "bf16-state": 89,
    "bf16-state fused": 85,
    "split-int8": 122,
    "split-int8 fused": 120,
}
"""Machine instructions for each element of each form: the most of sm_80, sm_90, sm_100, as counted
on 2026-11-24 in the disassembled main loops. A form that needs many cannot be as fast as a copy,
however fast the memory is."""

_FORMS = {
    "exact": ("float32", torch.float32),
    "split": ("split", torch.float32),
    "bf16-state": ("float32", torch.bfloat16),
    "split-int8": ("split", torch.int8),
}
"""Format of the master and dtype of the state for each form; parameters and gradients are bf16."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    require_device()
    result = Result("kernel", args, args.directory)
    describe_device(result)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        measure(
            args,
            result,
            Bench(
                device=torch.device("cuda"),
                update=partial(update_run, stream=stream.cuda_stream),
                digests=partial(digest.leaf_digests, stream=stream.cuda_stream),
                instructions_per_s=_instructions_per_s(),
                seconds=_seconds,
            ),
        )
    result.write()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Device of the kernels, with functions that launch and time them."""

    device: torch.device

    update: Callable[..., None]
    """The function `update_run` on the stream that is measured."""

    digests: Callable[..., None]
    """The function `digest.leaf_digests` on the stream that is measured."""

    instructions_per_s: float
    """Instructions of threads that the device executes in a second, at the rate that is expected of
    these kernels."""

    seconds: Callable[[Callable[[], object], int], float]
    """Function that launches work a number of times, and returns the seconds of one launch."""


def measure(args: argparse.Namespace, result: Result, bench: Bench) -> None:
    """Compare every kernel with copies, and add samples and claims to `result`."""
    for name in _FORMS:
        for fused in (False, True):
            _measure_update(args, result, bench, name, fused)
    _measure_digests(args, result, bench)


def _measure_update(
    args: argparse.Namespace, result: Result, bench: Bench, name: str, fused: bool
) -> None:
    block = _block(args.parameters, *_FORMS[name], bench.device)
    # Unset is torch's foreach step; False would be its single-tensor step, which has no kernel.
    optimizer = torch.optim.AdamW([torch.zeros(1)], fused=fused or None)
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}

    def update() -> None:
        """Launch the update kernel once."""
        bench.update(torch.optim.AdamW, group, block, step=10)

    label = f"{name}{' fused' if fused else ''}"
    nbytes = form_of_run(torch.optim.AdamW, group, block).traffic_bytes * args.parameters
    result.fact(f"{label}_bytes_per_parameter", nbytes / args.parameters)
    computing_s = args.parameters * INSTRUCTIONS[label] / bench.instructions_per_s
    result.fact(f"{label}_computing_s", computing_s)
    _compare(args, result, bench, label, update, nbytes, at_least_s=computing_s)


def _measure_digests(args: argparse.Namespace, result: Result, bench: Bench) -> None:
    device = bench.device
    data = torch.randn(args.parameters, device=device)
    workspace = torch.empty(digest.workspace_bytes(data.nbytes), dtype=torch.uint8, device=device)
    out = torch.empty(digest.num_leaves(data.nbytes), dtype=torch.int64, device=device)

    def digests() -> None:
        """Launch the digest kernels once."""
        bench.digests(data, workspace, out)

    _compare(args, result, bench, "digests", digests, data.nbytes)


def _compare(
    args: argparse.Namespace,
    result: Result,
    bench: Bench,
    label: str,
    kernel: Callable[[], None],
    nbytes: float,
    at_least_s: float | None = None,
) -> None:
    """Compare a kernel that moves `nbytes` with a copy that moves as many, in turns.

    Args:
        args: Arguments of the script.
        result: Result that samples and the claim are added to.
        bench: Device of the kernel.
        label: Name of the kernel.
        kernel: Function that launches it.
        nbytes: Bytes that it moves.
        at_least_s: Seconds that its arithmetic takes, on which its limit depends; None if it has no
            limit.
    """
    source = torch.ones(int(nbytes) // 2, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    names = (f"{label}_s", f"{label}_copy_s")
    samples = alternate(
        {
            names[0]: lambda: bench.seconds(kernel, args.launches),
            names[1]: lambda: bench.seconds(lambda: target.copy_(source), args.launches),
        },
        args.rounds,
        report=say,
    )
    result.add_samples(samples)
    copy_s = min(samples[names[1]])
    limit = None if at_least_s is None else max(_LIMIT, at_least_s / copy_s)
    result.claim(
        f"{label}, beside a copy of as many bytes within the device",
        ratios(samples[names[0]], samples[names[1]]),
        numerator=names[0],
        denominator=names[1],
        limit=limit,
        gbps=nbytes / min(samples[names[0]]) / 1e9,
        copy_gbps=nbytes / copy_s / 1e9,
    )


def _instructions_per_s() -> float:
    found = torch.cuda.get_device_properties(0)
    cycles_per_s = found.multi_processor_count * found.clock_rate * 1e3
    return float(cycles_per_s * 32 * _INSTRUCTIONS_PER_CYCLE)


def _seconds(work: Callable[[], object], num_launches: int) -> float:
    """Return the device's seconds for one of many launches, after one launch as a warm-up."""
    work()
    began, ended = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    began.record()
    for _ in range(num_launches):
        work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3 / num_launches


def _block(num: int, master: str, state: torch.dtype, device: torch.device) -> DeviceRun:
    live = torch.randn(num, device=device).bfloat16()
    arrays: dict[str, torch.Tensor] = {}
    if master == "split":
        arrays["master_low"] = torch.zeros(num, dtype=torch.int16, device=device)
    else:
        arrays["master"] = live.float()
    for name in ("exp_avg", "exp_avg_sq"):
        dtype = torch.uint8 if state == torch.int8 and name == "exp_avg_sq" else state
        arrays[name] = torch.zeros(num, dtype=dtype, device=device)
        if state == torch.int8:
            num_blocks = -(-num // BLOCK_ELEMENTS)
            arrays[f"{name}_scale"] = torch.zeros(num_blocks, dtype=torch.bfloat16, device=device)
    gradient = torch.randn(num, device=device).bfloat16()
    return DeviceRun(
        live=[live], gradients=[gradient], arrays=arrays, first_elements=[0], keys=_keys
    )


def _keys(pieces: Numbers, firsts: Numbers) -> list[Numbers]:
    """Return any keys of stochastic rounding: what they are makes no difference to the time."""
    return [pieces.astype(np.uint64) + firsts.astype(np.uint64) for _ in range(2)]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("kernel", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default="128Mi", help="of a block (default: %(default)s)")
    add("--launches", type=int, default=20, help="in one sample (default: %(default)s)")
    args = parser.read(arguments, quick={"parameters": "1Mi", "launches": 2})
    args.what = args.what or mebi(args.parameters)
    return args


if __name__ == "__main__":
    run(main)
