"""Time that offloading adds to an iteration, beside DeepSpeed's ZeRO-Infinity on the same disk.

Each system trains the same model in a process of its own. They take turns iteration by iteration:
pairs next to each other in time, in alternating order. A sample is some iterations back to back,
which begin and end with nothing in flight. The model's compute is small and equal for all systems,
and a third process without an optimizer measures it. The time that a system *adds* is its iteration
minus this compute. Every element has a gradient in every iteration.

DeepSpeed needs an environment of its own (and root, or a large ``ulimit -l``, for locked memory):

    apt-get install libaio-dev g++
    python3 -m venv dsvenv
    dsvenv/bin/pip install torch==2.13.0
    dsvenv/bin/pip install numpy ninja psutil py-cpuinfo einops pydantic msgpack hjson tqdm \\
        packaging wheel safetensors setuptools
    DS_ACCELERATOR=cpu dsvenv/bin/pip install deepspeed==0.19.8 --no-build-isolation

The first run compiles DeepSpeed's extensions, which takes up to ten minutes. They are kept in
``--deepspeed-extensions``.

    python -m bench.peers --directory DIR --deepspeed-python dsvenv/bin/python
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench._deepspeed import add_deepspeed_arguments, deepspeed_peer, deepspeed_version
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
    words,
)
from bench._peer_protocol import Peer, PeerError
from bench._statistics import alternate, median, ratios

_VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "exact": ({}, 0.31),
    "split": ({"master": "split"}, 0.28),
    "int8": ({"state_dtype": "int8"}, 0.19),
    "split+int8": ({"master": "split", "state_dtype": "int8"}, 0.14),
}
"""Options of each variant of this project, and the limit of the ratio of added times."""

_HYPER = {"lr": 1e-4, "weight_decay": 0.1}
_WARM_UP = 2
_START_S = 1800
"""Seconds to wait for a start, in which DeepSpeed may have to compile its extensions."""

_BYTES_PER_PARAMETER = 80
"""Disk bytes of both systems: two slots of 14 each, DeepSpeed's swap files, and a reserve."""


class System:
    """A training process of one kind, with its measurements."""

    def __init__(self, peer: Peer, iterations: int) -> None:
        self.peer = peer
        self._iterations = iterations
        self.moved = (0, 0)
        self.first_peak_bytes = 0

    def start(self, settings: dict[str, Any]) -> None:
        """Build model and optimizer, and take the first iterations, which differ from others."""
        self.peer.ask("make", timeout_s=_START_S, **settings)
        for _ in range(_WARM_UP):
            reply = self.peer.ask("iterate", iterations=1)
        self.first_peak_bytes = reply["peak_bytes"]
        self.peer.ask("reset_peak")

    def sample(self) -> float:
        """Return the seconds of one iteration."""
        reply = self.peer.ask("iterate", iterations=self._iterations)
        self.moved = (
            reply["read_bytes"] // self._iterations,
            reply["written_bytes"] // self._iterations,
        )
        return float(reply["seconds"])

    def record(self, result: Result, name: str) -> int:
        """Record bytes and memory as facts, and return the peak memory in steady state (bytes)."""
        peak = int(self.peer.ask("peak")["peak_bytes"])
        result.fact(f"{name}_read_bytes", self.moved[0])
        result.fact(f"{name}_written_bytes", self.moved[1])
        result.fact(f"{name}_peak_bytes", peak)
        result.fact(f"{name}_peak_with_first_step_bytes", max(self.first_peak_bytes, peak))
        read, written = map(size, self.moved)
        say(f"  {name}: {read} read, {written} written an iteration; peak memory {size(peak)}")
        return peak


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    version = deepspeed_version(args.deepspeed_python)
    with scratch(args.directory) as directory, ExitStack() as stack:
        require_space(directory, _BYTES_PER_PARAMETER * args.parameters)
        result = Result("peers", args, directory)
        result.versions["deepspeed"] = version
        try:
            _measure(args, result, directory, stack)
        except PeerError as error:
            raise BenchError(str(error)) from None
        result.write()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("peers", __doc__ or "")
    add = parser.add_argument
    add_deepspeed_arguments(parser)
    add("--parameters", type=count, default="128Mi", help="bf16 parameters (default: %(default)s)")
    add("--layers", type=int, default=8, help="of equal size; one is DeepSpeed's sub-group")
    add("--variants", type=words, default=",".join(_VARIANTS), help="which of ours, with commas")
    add("--iterations", type=int, default=3, help="in one sample (default: %(default)s)")
    add("--chunk-mib", type=float, default=32, help="of one FP32 array (default: %(default)s)")
    add("--ring", type=int, default=6, help="chunks in memory (default: %(default)s)")
    add("--aio-block-bytes", type=int, default=1 << 20, help="DeepSpeed's aio.block_size")
    add("--aio-depth", type=int, default=16, help="DeepSpeed's aio.queue_depth")
    add("--aio-threads", type=int, default=2, help="DeepSpeed's aio.intra_op_parallelism")
    add(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="of torch, in each process (default: all cores)",
    )
    quick = {
        "parameters": "4Mi",
        "layers": 4,
        "variants": "exact",
        "iterations": 1,
        "chunk_mib": 1,
        "rounds": 2,
        "aio_block_bytes": 1 << 18,
    }
    args = parser.read(arguments, quick=quick)
    unknown = [name for name in args.variants if name not in _VARIANTS]
    if unknown:
        parser.error(f"--variants: no {', '.join(unknown)}; there are {', '.join(_VARIANTS)}")
    args.what = args.what or f"deepspeed-{mebi(args.parameters)}"
    return args


def _measure(args: argparse.Namespace, result: Result, directory: str, stack: ExitStack) -> None:
    """Start DeepSpeed and the plain model once, and our variants one after another."""
    common = {
        "layers": args.layers,
        "layer_parameters": args.parameters // args.layers,
        "threads": args.threads,
        "hyper": _HYPER,
    }
    compute = _start(args, stack, directory, "compute")
    compute.start({**common, "directory": None})
    say("starting DeepSpeed")
    swap = os.path.join(directory, "swap")
    os.mkdir(swap)
    deepspeed = _start(args, stack, directory, "deepspeed")
    aio = {
        "block_size": args.aio_block_bytes,
        "queue_depth": args.aio_depth,
        "intra_op_parallelism": args.aio_threads,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    }
    # Its processes rendezvous through a port of this machine, although there is only one.
    port = random.randint(20000, 40000)
    deepspeed.start({**common, "directory": swap, "aio": aio, "port": port})
    for name in args.variants:
        _compare(args, result, directory, common, (name, compute, deepspeed))
    deepspeed.record(result, "deepspeed")
    result.fact("deepspeed_zero_config_aio", aio)


def _compare(
    args: argparse.Namespace,
    result: Result,
    directory: str,
    common: dict[str, Any],
    systems: tuple[str, System, System],
) -> None:
    """Measure one of our variants in pairs with DeepSpeed."""
    name, compute, deepspeed = systems
    options, limit = _VARIANTS[name]
    say(f"starting offload, {name}")
    with ExitStack() as stack:
        ours = _start(args, stack, directory, "offload")
        settings: dict[str, Any] = {
            "chunk_bytes": int(args.chunk_mib * (1 << 20)),
            "ring_chunks": args.ring,
            **options,
        }
        store = os.path.join(directory, f"store-{name}")
        ours.start({**common, "directory": store, "options": settings})
        samples = alternate(
            {
                "compute_s": compute.sample,
                "offload_s": ours.sample,
                "deepspeed_s": deepspeed.sample,
            },
            args.rounds,
            report=say,
        )
        peak = ours.record(result, f"offload_{name}")
        ours.peer.close()
    result.add_samples({f"{name}_{key}": values for key, values in samples.items()})
    plain = samples["compute_s"]
    added = {
        key: [a - b for a, b in zip(samples[key], plain, strict=True)]
        for key in ("offload_s", "deepspeed_s")
    }
    result.claim(
        f"what offloading adds to an iteration ({name}), beside DeepSpeed ZeRO-Infinity",
        ratios(added["offload_s"], added["deepspeed_s"]),
        numerator=f"{name}_offload_s - {name}_compute_s",
        denominator=f"{name}_deepspeed_s - {name}_compute_s",
        limit=limit,
        iteration_ratio=median(ratios(samples["offload_s"], samples["deepspeed_s"])),
        memory_ratio=peak / int(deepspeed.peer.ask("peak")["peak_bytes"]),
    )


def _start(args: argparse.Namespace, stack: ExitStack, directory: str, kind: str) -> System:
    """Start a process of a kind: ``compute``, ``offload`` or ``deepspeed``."""
    # Threads that spin while they wait would take cores from the system that is measured.
    environment = {"OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    log = os.path.join(directory, f"{kind}.log")
    if kind == "deepspeed":
        peer = deepspeed_peer("bench._peer_deepspeed", args, log=log, environment=environment)
    else:
        command = [sys.executable, "-m", "bench._peer_offload"]
        peer = Peer(kind, command, log=log, environment=environment)
    return System(stack.enter_context(peer), args.iterations)


if __name__ == "__main__":
    run(partial(main))
