"""Time of reading and writing whole files with hybrid I/O, beside direct I/O.

Hybrid I/O (`PosixBackend(hybrid=True)`) chooses for each request between the drive and the page
cache. `offload` moves whole files in four places: a seal writes ``model.safetensors``, a restore
reads it, an export reads a checkpoint, and an import writes a store. Each is timed with a direct
backend and with a hybrid one, in alternating order, with cold caches.

    python -m bench.whole_files --directory DIR
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import offload
from bench._harness import Parser, Result, count, mebi, require_space, run, scratch
from bench._model import make_gradients, make_parameters
from bench._statistics import alternate, ratios
from bench._streamed import Streamed, exact_state_bytes
from bench.resume import forget
from gds import PosixBackend

_WAYS = ("direct", "hybrid")


class Way:
    """One way to move files: its backend, a store, and what is exported from the store.

    Args:
        name: Name of the way, ``direct`` or ``hybrid``.
        directory: Scratch directory of this way.
        parameters: Number of parameters of the model.
        tensors: Number of tensors that the parameters are in.
    """

    def __init__(self, name: str, directory: str, parameters: int, tensors: int) -> None:
        os.mkdir(directory)
        self._store = os.path.join(directory, "store")
        self._exported = os.path.join(directory, "exported.pt")
        self._scratch = os.path.join(directory, "scratch")
        self._parameters = make_parameters(parameters, tensors)
        self._hybrid = name == "hybrid"
        gradients = make_gradients(self._parameters)
        self._trained = Streamed(
            self._store, self._parameters, gradients, "", {"backend": self._backend()}
        )
        self.seal_s()
        with offload.open_checkpoint(self._store) as checkpoint:
            offload.export_checkpoint(checkpoint, self._exported, "pt")

    def close(self) -> None:
        """Close the optimizer and its backend."""
        self._trained.__exit__(None, None, None)

    def seal_s(self) -> float:
        """Return the seconds of a checkpoint of a new step."""
        self._trained.sample(1)
        started = time.perf_counter()
        self._trained.optimizer.checkpoint().result()
        return time.perf_counter() - started

    def restore_s(self) -> float:
        """Return the seconds of a restore of the newest checkpoint."""
        forget(self._store)
        started = time.perf_counter()
        self._trained.optimizer.restore()
        return time.perf_counter() - started

    def export_s(self) -> float:
        """Return the seconds of an export of the newest checkpoint."""
        with self._opened() as checkpoint:
            forget(self._store)
            started = time.perf_counter()
            offload.export_checkpoint(checkpoint, self._scratch, "pt")
            seconds = time.perf_counter() - started
        os.remove(self._scratch)
        return seconds

    def import_s(self) -> float:
        """Return the seconds of an import of the exported file into a new store."""
        forget(self._exported)
        backend = self._backend()
        try:
            started = time.perf_counter()
            offload.import_checkpoint(
                self._exported, self._scratch, options=offload.Options(backend=backend)
            )
            seconds = time.perf_counter() - started
        finally:
            backend.close()
        shutil.rmtree(self._scratch)
        return seconds

    def _backend(self) -> PosixBackend:
        return PosixBackend(hybrid=self._hybrid)

    @contextmanager
    def _opened(self) -> Iterator[offload.Checkpoint]:
        backend = self._backend()
        try:
            with offload.open_checkpoint(self._store, backend=backend) as checkpoint:
                yield checkpoint
        finally:
            backend.close()


_OPERATIONS: dict[str, tuple[str, Callable[[Way], float]]] = {
    "seal": ("a seal, which writes the model file", Way.seal_s),
    "restore": ("a restore, which reads the model file", Way.restore_s),
    "export": ("an export, which reads all files", Way.export_s),
    "import": ("an import, which writes all files", Way.import_s),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    with scratch(args.directory) as directory, ExitStack() as opened:
        # Two stores with three slots each, an exported file for each, and one more of either.
        require_space(directory, 9 * exact_state_bytes(args.parameters))
        result = Result("whole_files", args, directory)
        ways = {}
        for name in _WAYS:
            way = Way(name, os.path.join(directory, name), args.parameters, args.tensors)
            ways[name] = way
            opened.callback(way.close)
        for operation, (title, measure) in _OPERATIONS.items():
            samples = alternate(
                {f"{operation}_{name}_s": partial(measure, way) for name, way in ways.items()},
                args.rounds,
            )
            result.add_samples(samples)
            numerator, denominator = (f"{operation}_{name}_s" for name in ("hybrid", "direct"))
            result.claim(
                f"{title}: hybrid beside direct",
                ratios(samples[numerator], samples[denominator]),
                numerator=numerator,
                denominator=denominator,
                limit=None,
            )
        result.write()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("whole_files", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default=count("32Mi"), help="in bf16 (default: 32Mi)")
    add("--tensors", type=int, default=16, help="that they are in (default: %(default)s)")
    args = parser.read(arguments, quick={"parameters": count("256Ki"), "tensors": 4})
    args.what = args.what or mebi(args.parameters)
    return args


if __name__ == "__main__":
    run(main)
