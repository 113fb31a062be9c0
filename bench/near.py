"""A step on a server of this machine, beside a local step; bytes on the link; the server's memory.

Both optimizers have the same parameters and gradients, and their states are on the same drive. They
are stepped in turns, through a unix socket and without one, after their parameters have been
compared bit by bit. Bytes are those that the kernel counts on a TCP connection. The server's memory
is that of models of several sizes, with chunks so small that the ring is full for each of them.

    python -m bench.near --directory DIR          # through a socket / local
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch

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
from bench._model import make_gradients, make_parameters
from bench._near_server import kernel_bytes, serving
from bench._statistics import alternate, ratios
from bench._streamed import Streamed, exact_state_bytes
from offload.format.train_state import encode, packed_bytes

_TENSORS = 16
_TRAIN_STATE = {"step": 1}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    sizes = [count(word) for word in words(args.memory_sizes)]
    with scratch(args.directory) as directory:
        needed = max(6 * exact_state_bytes(args.parameters), 3 * exact_state_bytes(max(sizes)))
        require_space(directory, needed)
        result = Result("near", args, directory)
        _times(args, result, directory)
        for parameters in sizes:
            _bytes_and_memory(args, result, os.path.join(directory, mebi(parameters)), parameters)
        small, *_, large = sizes
        grown = (
            result.facts[f"server_peak_{mebi(large)}_bytes"]
            / result.facts[f"server_peak_{mebi(small)}_bytes"]
        )
        result.fact("server_peak_ratio", grown)
        say(f"the server's memory for {mebi(large)}, beside that for {mebi(small)}: {grown:.3f}")
        result.write()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("near", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default="128Mi", help="bf16 parameters (default: %(default)s)")
    add("--chunk-mib", type=float, default=16, help="of one FP32 array (default: %(default)s)")
    add("--steps", type=int, default=1, help="steps in one sample (default: %(default)s)")
    add("--compare-steps", type=int, default=3, help="steps before bits are compared")
    add("--limit", type=float, default=1.35, help="of a step on the server / a local step")
    add("--memory-sizes", default="16Mi,64Mi", help="models for bytes and memory")
    add("--memory-chunk-kib", type=int, default=256, help="of one FP32 array there")
    quick = {
        "parameters": "128Ki",
        "chunk_mib": 0.0625,
        "compare_steps": 1,
        "memory_sizes": "128Ki,512Ki",
        "memory_chunk_kib": 4,
    }
    args = parser.read(arguments, quick=quick)
    args.what = args.what or mebi(args.parameters)
    return args


def _streamed(where: str, parameters: int, chunk_bytes: int) -> Streamed:
    model = make_parameters(parameters, _TENSORS)
    settings = {"chunk_bytes": chunk_bytes}
    return Streamed(where, model, make_gradients(model), where.rpartition("/")[2], settings)


def _times(args: argparse.Namespace, result: Result, directory: str) -> None:
    """Compare the bits and the time of steps through a unix socket with those of local steps."""
    chunk_bytes = int(args.chunk_mib * (1 << 20))
    with (
        serving(directory, f"unix:{directory}/s") as server,
        _streamed(f"{directory}/local", args.parameters, chunk_bytes) as local,
        _streamed(f"{server.address}/near", args.parameters, chunk_bytes) as near,
    ):
        for one in (local, near):
            one.sample(args.compare_steps)
        equal = all(map(torch.equal, near.parameters, local.parameters))
        result.fact("bit_identical", equal)
        if not equal:
            raise BenchError("steps on the server and local steps gave different parameters")
        samples = alternate(
            {
                "near_step_s": partial(near.sample, args.steps),
                "local_step_s": partial(local.sample, args.steps),
            },
            args.rounds,
            report=say,
        )
    result.add_samples(samples)
    result.claim(
        "a step on a server, through a unix socket, beside a local step",
        ratios(samples["near_step_s"], samples["local_step_s"]),
        numerator="near_step_s",
        denominator="local_step_s",
        limit=args.limit,
    )


def _bytes_and_memory(
    args: argparse.Namespace, result: Result, directory: str, parameters: int
) -> None:
    """Count the bytes of a step, a checkpoint and a restore, and the server's memory after them."""
    os.mkdir(directory)
    label = mebi(parameters)
    with serving(directory, "127.0.0.1:0") as server:
        port = int(server.address.rpartition(":")[2])
        result.fact(f"server_idle_{label}_bytes", server.peak_bytes())
        chunk_bytes = args.memory_chunk_kib << 10
        with _streamed(f"{server.address}/near", parameters, chunk_bytes) as near:
            at = [kernel_bytes(port)]
            near.optimizer.step()
            at.append(kernel_bytes(port))
            near.optimizer.checkpoint(_TRAIN_STATE).result()
            at.append(kernel_bytes(port))
            near.optimizer.restore()
            at.append(kernel_bytes(port))
            near.sample(2)
            result.fact(f"server_peak_{label}_bytes", server.peak_bytes())
    step, sealed, restored = (after - before for before, after in pairwise(at))
    result.fact(f"step_link_{label}_bytes_per_parameter", step / parameters)
    result.fact(f"checkpoint_link_{label}_bytes", sealed)
    result.fact("train_state_bytes", packed_bytes(encode(_TRAIN_STATE), {}))
    result.fact(f"restore_link_{label}_bytes_per_parameter", restored / parameters)
    say(
        f"{label}: over the link, bytes per parameter: a step {step / parameters:.4f}, a restore "
        f"{restored / parameters:.4f}; a checkpoint {size(sealed)}, of which its train state is "
        f"{size(result.facts['train_state_bytes'])}"
    )
    say(
        f"{label}: the server has had {size(result.facts[f'server_peak_{label}_bytes'])} of "
        f"memory, and {size(result.facts[f'server_idle_{label}_bytes'])} before its client came"
    )


if __name__ == "__main__":
    run(main)
