"""The update kernel for CPUs, beside the bytes that it moves and beside torch's own code.

A chunk far larger than the caches is stepped in memory, without a drive. *Bytes only* is a loop
that moves the same bytes without arithmetic. Ratios are of processor time, which other work on the
machine changes less than it changes wall time; with two threads, of wall time as well.

    python -m bench.update_cpu            # kernel / bytes only, kernel / torch, 2 threads / 1
    python -m bench.update_cpu --deepspeed-python PYTHON          # beside DeepSpeed's CPUAdam, too

`python -m bench.peers --help` says how to set up DeepSpeed's environment.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from bench._chunk_update import FORMS, ChunkUpdate
from bench._deepspeed import add_deepspeed_arguments, deepspeed_peer, deepspeed_version
from bench._harness import BenchError, Parser, Result, count, mebi, run
from bench._peer_protocol import PeerError
from bench._statistics import alternate, median, ratios
from offload.update.kernel import UpdateKernel
from offload.update.kernel_check import choose_kernel

_LIMITS = {"AVX512": (1.3, 1.6), "AVX2": (2.1, None)}
"""Largest ratios to the time of the bytes alone, without and with digests."""

_BESIDE_TORCH = {"exact": 0.5, "split": None, "int8": 0.3, "split-int8": None}
"""Largest ratios of the kernel to torch's code, both with digests, by form of the state."""

_BESIDE_DEEPSPEED = 1.0
_TWO_THREADS = 1.1
_LOADING_S = 0.1
"""Most seconds to load the kernel and to compare it with torch, once in a process."""

_OPTIONS = ("-O3", "-march=native", "-shared", "-fPIC")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    result = Result("update_cpu", args, args.directory)
    result.fact("instructions", torch.backends.cpu.get_cpu_capability())
    for name, form in FORMS.items():
        kernel = _kernel(form.state_dtype)
        with closing(ChunkUpdate(form, args.parameters)) as chunk:
            if name == "exact":
                _beside_bytes(args, result, chunk, kernel)
                if args.deepspeed_python:
                    _beside_deepspeed(args, result, chunk, kernel)
            _beside_torch(args, result, name, chunk, kernel)
    _loading(args, result)
    result.write()


_LOADED = """
import time
import torch
from offload.update.kernel_check import choose_kernel
value = torch.nn.Parameter(torch.ones(10))
optimizer = torch.optim.AdamW([value])  # the first optimizer of a process imports parts of torch
value.grad = torch.ones(10)
optimizer.step()
started = time.perf_counter()
chosen = choose_kernel(torch.optim.AdamW, "float32")
print(time.perf_counter() - started)
assert chosen.kernel is not None, chosen.code
"""


def _loading(args: argparse.Namespace, result: Result) -> None:
    """Measure what the kernel costs a process once: it is loaded, and compared with torch."""
    command = [sys.executable, "-c", _LOADED]

    def loaded() -> float:
        """Return the seconds in a new process."""
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    samples = alternate({"loading_s": loaded}, args.rounds)
    result.add_samples(samples)
    result.claim(
        f"the kernel is loaded and compared with torch, beside {_LOADING_S:g} s",
        [seconds / _LOADING_S for seconds in samples["loading_s"]],
        numerator="loading_s",
        denominator=f"{_LOADING_S:g} s",
        limit=1.0,
    )


def _kernel(state_dtype: str) -> UpdateKernel:
    chosen = choose_kernel(torch.optim.AdamW, state_dtype)
    if chosen.kernel is None:
        raise BenchError(f"the kernel is not used here: {chosen.code}")
    return chosen.kernel


def _beside_bytes(
    args: argparse.Namespace, result: Result, chunk: ChunkUpdate, kernel: UpdateKernel
) -> None:
    move = _bytes_only(chunk)
    num: int = args.parameters

    def updated(index: int, *, digests: bool, threads: int) -> Callable[[], float]:
        """Return a function that takes a step and returns its wall or processor time per value."""
        return lambda: chunk.seconds(kernel, digests=digests, threads=threads)[index] / num * 1e9

    def moved(index: int, threads: int) -> float:
        """Return the same of moving the bytes."""
        return move(threads)[index] / num * 1e9

    cpu: dict[str, Callable[[], float]] = {
        "bytes_cpu_ns": partial(moved, 1, 1),
        "exact_kernel_cpu_ns": updated(1, digests=False, threads=1),
        "exact_kernel_digests_cpu_ns": updated(1, digests=True, threads=1),
        "exact_kernel_2_threads_cpu_ns": updated(1, digests=False, threads=2),
        "exact_kernel_2_threads_wall_ns": updated(0, digests=False, threads=2),
        "bytes_2_threads_cpu_ns": partial(moved, 1, 2),
        "bytes_2_threads_wall_ns": partial(moved, 0, 2),
    }
    samples = alternate(cpu, args.rounds)
    result.add_samples(samples)
    limits = _LIMITS.get(torch.backends.cpu.get_cpu_capability(), (None, None))
    claims = [
        ("the update beside moving its bytes", "exact_kernel_cpu_ns", "bytes_cpu_ns", limits[0]),
        (
            "the update with digests beside moving its bytes",
            "exact_kernel_digests_cpu_ns",
            "bytes_cpu_ns",
            limits[1],
        ),
        (
            "processor time of two threads beside one",
            "exact_kernel_2_threads_cpu_ns",
            "exact_kernel_cpu_ns",
            _TWO_THREADS,
        ),
        # Threads that wait for memory take processor time, too: this is what the machine allows.
        (
            "processor time of two threads that move the bytes beside one",
            "bytes_2_threads_cpu_ns",
            "bytes_cpu_ns",
            None,
        ),
        (
            "processor time of two threads beside moving the bytes on two",
            "exact_kernel_2_threads_cpu_ns",
            "bytes_2_threads_cpu_ns",
            None,
        ),
        (
            "wall time of two threads beside moving the bytes on two",
            "exact_kernel_2_threads_wall_ns",
            "bytes_2_threads_wall_ns",
            _TWO_THREADS,
        ),
    ]
    for text, numerator, denominator, limit in claims:
        result.claim(
            text,
            ratios(samples[numerator], samples[denominator]),
            numerator=numerator,
            denominator=denominator,
            limit=limit,
        )


def _beside_deepspeed(
    args: argparse.Namespace, result: Result, chunk: ChunkUpdate, kernel: UpdateKernel
) -> None:
    num: int = args.parameters
    result.versions["deepspeed"] = deepspeed_version(args.deepspeed_python)
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "deepspeed.log")
        try:
            with deepspeed_peer("bench._peer_cpu_adam", args, log=log, environment=threads) as peer:
                hyper = {"lr": 1e-4, "weight_decay": 0.1}
                peer.ask("make", timeout_s=1800, parameters=num, hyper=hyper)
                samples = alternate(
                    {
                        "exact_kernel_beside_deepspeed_cpu_ns": lambda: (
                            chunk.seconds(kernel)[1] / num * 1e9
                        ),
                        "deepspeed_cpu_ns": lambda: (
                            peer.ask("iterate", iterations=1)["cpu_seconds"] / num * 1e9
                        ),
                    },
                    args.rounds,
                )
        except PeerError as error:
            raise BenchError(str(error)) from None
    result.add_samples(samples)
    numerator, denominator = samples
    result.claim(
        "the update beside DeepSpeed's CPUAdam with the casts that it needs",
        ratios(samples[numerator], samples[denominator]),
        numerator=numerator,
        denominator=denominator,
        limit=_BESIDE_DEEPSPEED,
    )


def _beside_torch(
    args: argparse.Namespace,
    result: Result,
    name: str,
    chunk: ChunkUpdate,
    kernel: UpdateKernel,
) -> None:
    num: int = args.parameters

    def cpu_ns(used: UpdateKernel | None) -> float:
        """Return the processor time of a step with digests, per element."""
        return chunk.seconds(used, digests=True)[1] / num * 1e9

    codes = {"kernel": kernel, "torch": None}
    samples = alternate(
        {f"{name}_{code}_step_cpu_ns": partial(cpu_ns, used) for code, used in codes.items()},
        args.rounds,
    )
    result.add_samples(samples)
    numerator, denominator = samples
    bytes_per_element = 2 * chunk.layout.state_bytes / num
    result.fact(f"{name}_gbps_of_one_core", bytes_per_element / median(samples[numerator]))
    result.claim(
        f"{name}: the update with digests, by the kernel beside torch's code",
        ratios(samples[numerator], samples[denominator]),
        numerator=numerator,
        denominator=denominator,
        limit=_BESIDE_TORCH[name],
    )


def _bytes_only(chunk: ChunkUpdate) -> Callable[[int], tuple[float, float]]:
    """Return a function that moves a chunk's bytes on some threads: wall and processor seconds.

    Raises:
        BenchError: There is no C++ compiler, or it fails.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise BenchError("a C++ compiler is needed: c++ or g++ on PATH")
    source = Path(__file__).with_name("bytes_only.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "bytes_only.so")
        command = [compiler, *_OPTIONS, str(source), "-o", library]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"{compiler} failed: {done.stderr[-500:]}")
        function = ctypes.CDLL(library).bytes_only
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_uint64]
    # Copies: what the loop leaves in them is no state.
    tensors = [
        tensor.clone()
        for tensor in (
            chunk.gradient,
            chunk.parameter,
            *(chunk.arrays[n] for n in ("master", "exp_avg", "exp_avg_sq")),
        )
    ]
    num = len(chunk.parameter)

    def move(threads: int) -> tuple[float, float]:
        """Move the bytes, an equal part on each thread."""
        starts = [number * num // threads for number in range(threads + 1)]
        parts = pairwise(starts)
        calls = [
            ([t.data_ptr() + begin * t.itemsize for t in tensors], end - begin)
            for begin, end in parts
        ]
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        workers = [threading.Thread(target=function, args=(*at, n)) for at, n in calls[1:]]
        for worker in workers:
            worker.start()
        function(*calls[0][0], calls[0][1])
        for worker in workers:
            worker.join()
        return time.perf_counter() - wall_s, time.process_time() - cpu_s

    return move


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("update_cpu", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default=count("32Mi"), help="in bf16 (default: 32Mi)")
    add_deepspeed_arguments(parser)
    args = parser.read(arguments, quick={"parameters": count("256Ki")})
    args.what = args.what or mebi(args.parameters)
    return args


if __name__ == "__main__":
    run(main)
