"""Time of a step with state in device memory, beside the raw path and the step on the CPU.

Three measurements alternate: the same transfers between files and device memory without kernels
(`bench.replay`, through a `KvikioBackend` as well), the step with ``placement="device"``, and the
step with ``placement="host"``. All begin and end with nothing in flight and the device idle.

The bytes that cross between host and device are recorded, too, by the library's own counters. A
step should move no state, and a checkpoint should move only the parameters.

    python -m bench.device --directory DIR
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench._device import describe_device, needing_libraries, require_device
from bench._harness import (
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
from bench._statistics import alternate, median, ratios
from bench._streamed import STATE_ARRAYS, Streamed, exact_state_bytes
from bench.replay import Plan, Replay
from gds import PosixBackend
from gds.kvikio import KvikioBackend
from offload.options import Placement

_PARAMETER_BYTES = 2
_DIGESTS = 1e-4
"""Largest share of the state's bytes that a step may copy between host and device. It allows the
digests, which are 8 bytes for each MiB of state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Device of the parameters, with the functions that the script needs for it."""

    put: Callable[[torch.Tensor], torch.Tensor]
    """Function that returns a copy of a tensor on the device."""

    placement: Placement
    """Placement of the step that is measured."""

    settle: Callable[[], None]
    """Function that waits until the device is idle."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    require_device()
    place = Place(
        put=lambda tensor: tensor.to("cuda"),
        placement="device",
        settle=torch.cuda.synchronize,
    )
    with scratch(args.directory) as directory:
        result = Result("device", args, directory)
        describe_device(result)
        measure(args, result, directory, place)
        result.write()


def measure(args: argparse.Namespace, result: Result, directory: str, place: Place) -> None:
    """Measure one size, and add samples and claims to the result."""
    # Two stores, each of two slots, and the files of the replay.
    require_space(directory, 5 * exact_state_bytes(args.parameters))
    result.fact("state_bytes", exact_state_bytes(args.parameters))
    with ExitStack() as stack:
        with needing_libraries():
            backend = KvikioBackend(
                memory="host", read_threads=args.threads, write_threads=args.threads
            )
            raw = KvikioBackend(read_threads=args.threads, write_threads=args.threads)
        stack.callback(raw.close)
        _describe_paths(result, raw, directory)
        # The step closes its backend.
        step = stack.enter_context(
            _streamed(args, directory, place, place.placement, backend, "in device memory")
        )
        stats = step.optimizer.stats()
        result.fact("ring_bytes", stats.ring_bytes)
        result.fact("crossing_bytes", stats.crossing_bytes)
        _times(args, result, directory, place, step, raw)
        _bytes_of_steps(args, result, step, backend)
        _bytes_of_checkpoints(args, result, step, backend)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("device", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default="256Mi", help="bf16 parameters (default: %(default)s)")
    add("--tensors", type=int, default=8, help="parameter tensors (default: %(default)s)")
    add("--chunk-mib", type=float, default=32, help="of one FP32 array (default: %(default)s)")
    add("--ring", type=int, default=6, help="chunks in memory (default: %(default)s)")
    add("--threads", type=int, default=3, help="of reads, and of writes (default: %(default)s)")
    add("--steps", type=int, default=3, help="steps in one sample (default: %(default)s)")
    add("--limit", type=float, default=1.10, help="of step / raw path (default: %(default)s)")
    quick = {"parameters": "128Ki", "tensors": 3, "chunk_mib": 0.125, "steps": 2}
    args = parser.read(arguments, quick=quick)
    args.what = args.what or mebi(args.parameters)
    return args


def _chunk_bytes(args: argparse.Namespace) -> int:
    return int(args.chunk_mib * (1 << 20)) // 4096 * 4096


def _streamed(
    args: argparse.Namespace,
    directory: str,
    place: Place,
    placement: Placement,
    backend: PosixBackend,
    label: str,
) -> Streamed:
    parameters = [
        torch.nn.Parameter(place.put(parameter.detach()))
        for parameter in make_parameters(args.parameters, args.tensors)
    ]
    gradients = [place.put(gradient) for gradient in make_gradients(parameters)]
    settings: dict[str, Any] = {
        "chunk_bytes": _chunk_bytes(args),
        "ring_chunks": args.ring,
        "backend": backend,
        "placement": placement,
    }
    say(f"preparing the step {label}: {size(exact_state_bytes(args.parameters))} of FP32 state")
    path = os.path.join(directory, f"store-{label.replace(' ', '-')}")
    return Streamed(path, parameters, gradients, label, settings, settle=place.settle)


def _describe_paths(result: Result, backend: KvikioBackend, directory: str) -> None:
    """Record the path of transfers to device memory; the raw path and the step use the same."""
    for direction, used in backend.paths_in(directory).items():
        result.fact(f"{direction}_path", used.path)
        if used.path != "gds":
            result.skip(
                f"GPUDirect Storage, {direction}s: {used.reason}; state is copied "
                "through page-locked host memory, in the raw path as well"
            )


def _times(
    args: argparse.Namespace,
    result: Result,
    directory: str,
    place: Place,
    step: Streamed,
    raw: KvikioBackend,
) -> None:
    plan = Plan(
        num_files=STATE_ARRAYS, array_bytes=args.parameters * 4, chunk_bytes=_chunk_bytes(args)
    )
    backend = PosixBackend(read_threads=args.threads, write_threads=args.threads)
    with _streamed(args, directory, place, "host", backend, "on the CPU") as host:
        replay = Replay(raw, directory, plan, args.ring)
        replay.run(1)
        # The step stands in the middle, so that it is next to either of the others in every round.
        before = step.optimizer.stats()
        samples = alternate(
            {
                "raw_s": partial(replay.run, args.steps),
                "device_s": partial(step.sample, args.steps),
                "host_s": partial(host.sample, args.steps),
            },
            args.rounds,
            report=say,
        )
        after = step.optimizer.stats()
        replay.close()
    for name in ("step_s", "compute_s", "wait_read_s", "wait_write_s", "wait_device_s"):
        seconds = getattr(after, name) - getattr(before, name)
        result.fact(f"mean_inside_step_{name}", seconds / (after.steps - before.steps))
    result.add_samples(samples)
    moved = 2 * exact_state_bytes(args.parameters)
    result.fact("state_gbps", moved / median(samples["device_s"]) / 1e9)
    result.claim(
        "a step in device memory, beside its transfers without the kernels",
        ratios(samples["device_s"], samples["raw_s"]),
        numerator="device_s",
        denominator="raw_s",
        limit=args.limit,
    )
    result.claim(
        "a step in device memory, beside the step on the CPU",
        ratios(samples["device_s"], samples["host_s"]),
        numerator="device_s",
        denominator="host_s",
        limit=None,
    )


class Crossing:
    """Counter of bytes between host and device, from the counters of step and backend."""

    def __init__(self, step: Streamed, backend: KvikioBackend) -> None:
        self._step = step
        self._backend = backend
        self._before = self._totals()

    def take(self) -> dict[str, int]:
        """Return the bytes since the last call, by direction or path: ``to_host``, ``read_gds``."""
        now = self._totals()
        found = {name: total - self._before[name] for name, total in now.items()}
        self._before = now
        return found

    def _totals(self) -> dict[str, int]:
        stats = self._step.optimizer.stats()
        totals = {"to_host": stats.to_host_bytes, "to_device": stats.to_device_bytes}
        for direction, paths in self._backend.moved().items():
            totals |= {f"{direction}_{path}": nbytes for path, nbytes in paths.items()}
        return totals


def _bytes_of_steps(
    args: argparse.Namespace, result: Result, step: Streamed, backend: KvikioBackend
) -> None:
    crossing = Crossing(step, backend)
    step.optimizer.synchronize()
    crossing.take()
    shares, read, written = [], [], []
    for _ in range(args.rounds):
        stats = step.optimizer.stats()
        step.sample(1)
        after = step.optimizer.stats()
        found = crossing.take()
        # This library copies the bytes that neither GPUDirect Storage nor KvikIO moves.
        copied = sum(found[n] for n in ("to_host", "to_device", "read_bounce", "write_bounce"))
        shares.append(copied / exact_state_bytes(args.parameters))
        read.append(after.bytes_read - stats.bytes_read)
        written.append(after.bytes_written - stats.bytes_written)
    for name, nbytes in found.items():
        result.fact(f"step_{name}_bytes", nbytes)
    result.fact("step_read_bytes", median(read))
    result.fact("step_written_bytes", median(written))
    result.claim(
        "bytes that this library copies between host and device in a step, beside the state",
        shares,
        numerator="bytes copied, state and all else",
        denominator="bytes of state",
        limit=_DIGESTS,
    )


def _bytes_of_checkpoints(
    args: argparse.Namespace, result: Result, step: Streamed, backend: KvikioBackend
) -> None:
    shares = []
    crossing = Crossing(step, backend)
    for number in range(args.rounds):
        step.sample(1)
        crossing.take()
        step.optimizer.checkpoint({"number": number}).result()
        # The next step's reads, which a checkpoint starts, are not the checkpoint's.
        found = {n: b for n, b in crossing.take().items() if not n.startswith("read_")}
        shares.append(sum(found.values()) / (_PARAMETER_BYTES * args.parameters))
    for name, nbytes in found.items():
        result.fact(f"checkpoint_{name}_bytes", nbytes)
    result.claim(
        "bytes that a checkpoint moves over the link, beside the parameters",
        shares,
        numerator="bytes to the host, to the device, and from the device to files",
        denominator="bytes of parameters",
        limit=1.0,
    )


if __name__ == "__main__":
    run(main)
