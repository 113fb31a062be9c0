"""Work on the GPU's default stream beside the transfers of a step, by each path of device memory.

A training runs on torch's default stream. Chunks of state are read into device memory and written
from it meanwhile, as `bench.replay` does it. Three samples alternate: the work alone, the transfers
alone, and both at once. If the transfers wait for the default stream, or it for them, both become
slower at once.

    python -m bench.beside_training --directory DIR
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from bench._device import describe_device, needing_libraries, require_device
from bench._harness import Parser, Result, count, mebi, require_space, run, say, scratch
from bench._statistics import alternate, ratios
from bench._streamed import STATE_ARRAYS, exact_state_bytes
from bench.replay import Plan, Replay
from gds import StorageError
from gds.kvikio import KvikioBackend
from gds.paths import DevicePath

PATHS: tuple[DevicePath, ...] = ("gds", "bounce", "compat")
_LIMIT = 1.10
"""Largest ratio of the work's time beside the transfers to its time alone, but for KvikIO's
compatibility mode, which is ordered with the default stream and not used in training."""

_AHEAD = 3
"""Number of marks that the host is ahead of the device, as a training loop is."""

_BETWEEN_MARKS = 20

_FEW = 20
"""Pieces of work in the shortest sample."""

Work = Callable[[int], None]
"""Function that does a number of pieces of work on the default stream, and waits for the last."""


class Products:
    """Products of matrices on the default stream, like the layers of a model.

    Args:
        width: Rows and columns of a matrix.
    """

    def __init__(self, width: int) -> None:
        self._matrix = torch.randn(width, width, device="cuda", dtype=torch.bfloat16)
        self._out = torch.empty_like(self._matrix)

    def __call__(self, num: int) -> None:
        """Compute `num` products; the host is some dozens of them ahead."""
        stream = torch.cuda.default_stream()
        marks: deque[torch.cuda.Event] = deque()
        with torch.cuda.stream(stream):
            for number in range(num):
                torch.mm(self._matrix, self._matrix, out=self._out)
                if number % _BETWEEN_MARKS == _BETWEEN_MARKS - 1:
                    marks.append(stream.record_event())
                if len(marks) > _AHEAD:
                    marks.popleft().synchronize()
        stream.synchronize()


class Beside:
    """Transfers that go on while something else runs.

    Args:
        replay: Transfers of one step.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self.pass_s: list[float] = []
        """Seconds of each pass that was made beside the work."""

    def __call__(self, work: Callable[[], object]) -> float:
        """Run `work` beside at least one pass of the transfers.

        Returns:
            Seconds that the work took.
        """
        begun, stop = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def transfer() -> None:
            try:
                while True:
                    begun.set()
                    self.pass_s.append(self._replay.run(1))
                    if stop.is_set():
                        return
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                errors.append(error)

        thread = threading.Thread(target=transfer, name="transfers")
        thread.start()
        try:
            begun.wait()
            seconds = _seconds(work)
        finally:
            stop.set()
            thread.join()
        if errors:
            raise errors[0]
        return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    require_device()
    with scratch(args.directory) as directory:
        result = Result("beside_training", args, directory)
        describe_device(result)
        measure(args, result, directory, Products(args.width))
        result.write()


def measure(args: argparse.Namespace, result: Result, directory: str, work: Work) -> None:
    """Measure all paths, and add samples and claims to the result."""
    require_space(directory, exact_state_bytes(args.parameters))
    work(_FEW)  # which loads libraries
    pieces = max(_FEW, int(args.seconds * _FEW / _seconds(lambda: work(_FEW))))
    result.fact("pieces_of_work", pieces)
    for path in PATHS:
        folder = os.path.join(directory, path)
        os.mkdir(folder)
        try:
            _measure_path(args, result, folder, path, lambda: work(pieces))
        except StorageError as error:
            result.skip(f"{path}: {error.strerror}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _measure_path(
    args: argparse.Namespace,
    result: Result,
    directory: str,
    path: DevicePath,
    work: Callable[[], object],
) -> None:
    plan = Plan(
        num_files=STATE_ARRAYS, array_bytes=args.parameters * 4, chunk_bytes=args.chunk_mib << 20
    )
    with ExitStack() as stack:
        with needing_libraries():
            backend = KvikioBackend(
                path=path, read_threads=args.threads, write_threads=args.threads
            )
        stack.callback(backend.close)
        replay = Replay(backend, directory, plan, args.ring)
        stack.callback(replay.close)
        beside = Beside(replay)
        names = [f"{path}_{what}_s" for what in ("work", "work_beside", "transfers")]
        samples = alternate(
            {
                names[0]: lambda: _seconds(work),
                names[1]: lambda: beside(work),
                names[2]: lambda: replay.run(1),
            },
            args.rounds,
            report=say,
        )
        for direction, moved in backend.moved().items():
            result.fact(f"{path}_{direction}_bytes", moved[path])
    result.add_samples({**samples, f"{path}_transfers_beside_s": beside.pass_s})
    result.claim(
        f"work on the default stream beside transfers by the path {path}, and alone",
        ratios(samples[names[1]], samples[names[0]]),
        numerator=names[1],
        denominator=names[0],
        limit=None if path == "compat" else _LIMIT,
    )


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("beside_training", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default="32Mi", help="of the state (default: %(default)s)")
    add("--seconds", type=float, default=0.5, help="of work in a sample (default: %(default)s)")
    add("--width", type=int, default=8192, help="of matrices (default: %(default)s)")
    add("--chunk-mib", type=int, default=16, help="of one FP32 array (default: %(default)s)")
    add("--ring", type=int, default=6, help="chunks in memory (default: %(default)s)")
    add("--threads", type=int, default=3, help="of reads, and of writes (default: %(default)s)")
    quick = {"parameters": "1Mi", "seconds": 0.0, "width": 256, "chunk_mib": 1}
    args = parser.read(arguments, quick=quick)
    args.what = args.what or mebi(args.parameters)
    return args


if __name__ == "__main__":
    run(main)
