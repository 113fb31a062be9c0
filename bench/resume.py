"""Time of a resume, from the call until parameters are in place, with imports warm, caches cold.

This project reads 2 bytes per parameter, since it uses the optimizer's state in its place on the
drive. `torch.load` (without the time of ``load_state_dict``) and ``distributed.checkpoint.load``
read 14. For each way, the time from the start of a process to the end of its first forward is
measured as well.

    python -m bench.resume --directory DIR
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import offload
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
)
from bench._machine import io_bytes
from bench._model import make_gradients, make_parameters
from bench._savers import Savers, make_state
from bench._statistics import alternate, ratios
from bench._streamed import Streamed, exact_state_bytes

_CHILD_TIMEOUT_S = 600


class Resumes:
    """One saved state in three formats, with a timed load of each.

    Args:
        args: Arguments of the script.
        directory: Directory for the three formats.
    """

    def __init__(self, args: argparse.Namespace, directory: str) -> None:
        self._args = args
        self.store = os.path.join(directory, "store")
        self.file = os.path.join(directory, "state.pt")
        self.dcp = os.path.join(directory, "state.dcp")
        self.parameters = make_parameters(args.parameters, args.tensors)
        settings = {"chunk_bytes": int(args.chunk_mib * (1 << 20))}
        gradients = make_gradients(self.parameters)
        with Streamed(self.store, self.parameters, gradients, "", settings) as trained:
            trained.optimizer.checkpoint().result()
        for parameter in self.parameters:
            parameter.grad = None
        state = make_state(self.parameters)
        savers = Savers(directory)
        savers.write_torch(state, self.file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP says that there is one process: it is meant
            writer = FileSystemWriter(self.dcp, sync_files=True)
            save(state, storage_writer=writer, no_dist=True)
        savers.close()
        self.read_bytes: dict[str, int] = {}

    def offload_s(self) -> float:
        """Return the seconds of ``restore()`` of an optimizer that has just been made."""
        with offload.AdamW(
            self.parameters, lr=1e-4, weight_decay=0.1, directory=self.store, keep=1
        ) as optimizer:
            forget(self.store)
            return self._timed("offload", optimizer.restore)

    def torch_load_s(self) -> float:
        """Return the seconds of ``torch.load``, into new tensors."""
        forget(self.file)
        return self._timed(
            "torch_load", lambda: torch.load(self.file, weights_only=True, mmap=False)
        )

    def dcp_load_s(self) -> float:
        """Return the seconds of ``distributed.checkpoint.load``, into existing tensors."""
        state = make_state(self.parameters)
        forget(self.dcp)

        def load_in_place() -> None:
            """Load into the existing tensors."""
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(state, checkpoint_id=self.dcp, no_dist=True)

        return self._timed("dcp_load", load_in_place)

    def process_s(self, way: str) -> float:
        """Return the seconds from the start of a process to the end of its first forward."""
        place = {"offload": self.store, "torch_load": self.file, "dcp_load": self.dcp}[way]
        forget(place)
        command = [sys.executable, "-m", "bench._resume_child", way, place]
        command += [str(self._args.parameters), str(self._args.tensors)]
        started = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=_CHILD_TIMEOUT_S,
        )
        if done.returncode != 0:
            raise BenchError(f"the process that resumes by {way} failed:\n{done.stderr[-2000:]}")
        # The child says when its forward had ended, on the clock of the whole system.
        return float(done.stdout.split()[-1]) - started

    def _timed(self, name: str, load: Callable[[], object]) -> float:
        before = io_bytes()[0]
        started = time.perf_counter()
        loaded = load()
        seconds = time.perf_counter() - started
        self.read_bytes[name] = io_bytes()[0] - before
        del loaded
        return seconds


def forget(path: str) -> None:
    """Drop the pages of a file, or of all files below a directory, from the page cache."""
    paths = [path]
    if os.path.isdir(path):
        paths = [os.path.join(top, name) for top, _, names in os.walk(path) for name in names]
    for name in paths:
        fd = os.open(name, os.O_RDONLY)
        try:
            os.fsync(fd)  # a page that is still to be written is not dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    with scratch(args.directory) as directory:
        require_space(directory, 5 * exact_state_bytes(args.parameters))
        result = Result("resume", args, directory)
        say(f"preparing {mebi(args.parameters)}")
        resumes = Resumes(args, directory)
        ways: dict[str, Callable[[], float]] = {
            "torch_load": resumes.torch_load_s,
            "offload": resumes.offload_s,
            "dcp_load": resumes.dcp_load_s,
        }
        for measure in ways.values():
            measure()  # once untimed: code that loads itself at its first call
        samples = alternate({f"{n}_s": f for n, f in ways.items()}, args.rounds, report=say)
        result.add_samples(samples)
        for name, nbytes in resumes.read_bytes.items():
            result.fact(f"{name}_read_bytes_per_parameter", nbytes / args.parameters)
        resumes.parameters.clear()
        processes = alternate(
            {f"{name}_process_s": partial(resumes.process_s, name) for name in ways},
            args.rounds,
            report=say,
        )
        result.add_samples(processes)
        samples |= processes
        _claims(args, result, samples)
        result.write()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("resume", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default="128Mi", help="bf16 parameters (default: %(default)s)")
    add("--tensors", type=int, default=8, help="parameter tensors (default: %(default)s)")
    add("--chunk-mib", type=float, default=32, help="of one FP32 array (default: %(default)s)")
    add("--limit", type=float, default=0.2, help="of restore / torch.load (default: %(default)s)")
    quick = {"parameters": "512Ki", "tensors": 3, "chunk_mib": 0.25, "rounds": 1}
    args = parser.read(arguments, quick=quick)
    args.what = args.what or mebi(args.parameters)
    return args


def _claims(args: argparse.Namespace, result: Result, samples: dict[str, list[float]]) -> None:
    titles = {"torch_load": "torch.load", "dcp_load": "distributed.checkpoint.load"}
    for name, title in titles.items():
        result.claim(
            f"resuming: until parameters are in place, beside {title}",
            ratios(samples["offload_s"], samples[f"{name}_s"]),
            numerator="offload_s",
            denominator=f"{name}_s",
            limit=args.limit if name == "torch_load" else None,
        )
    for name, title in titles.items():
        result.claim(
            f"from the start of a process to its first forward, beside {title}",
            ratios(samples["offload_process_s"], samples[f"{name}_process_s"]),
            numerator="offload_process_s",
            denominator=f"{name}_process_s",
            limit=None,
        )


if __name__ == "__main__":
    run(main)
