"""Cost of a checkpoint, beside torch's own ways of saving the same state to the same disk.

The state is 14 bytes per parameter: bf16 parameters, FP32 masters, two moments. The stall of our
checkpoint is the time inside ``checkpoint()`` plus the time that the next step waits for the seal.
Forward and backward are assumed to last at least as long as the seal: the thread sleeps until the
seal has ended. The stall of another way is the time until its call returns; synchronous ways are
followed by fsync.

    python -m bench.checkpoint --directory DIR
    python -m bench.checkpoint --directory DIR --parts cost --parameters 32Mi    # part of it
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import offload
from bench._harness import (
    Parser,
    Result,
    count,
    mebi,
    require_space,
    run,
    say,
    scratch,
    words,
)
from bench._machine import io_bytes, peak_bytes, reset_peak, resident_bytes
from bench._model import make_gradients, make_parameters
from bench._replayed_seals import ReplayedSeals
from bench._savers import Savers, State, make_state
from bench._statistics import alternate, median, ratios
from bench._streamed import STATE_ARRAYS, Streamed, exact_state_bytes
from bench.replay import Plan, fill_random
from gds import IOFuture, PosixBackend

_PARTS = ("stalls", "cost")
"""What is measured: how long training stands still for a checkpoint, beside other ways of saving,
and what a checkpoint after every step adds to steps back to back."""

_PARAMETER_BYTES = 2
_POLL_S = 0.0005
_TITLES = {
    "torch_save": "torch.save without CRC-32",
    "torch_save_crc32": "torch.save",
    "safetensors": "safetensors.save_file",
    "dcp_save": "distributed.checkpoint.save",
    "dcp_async": "async_save",
    "dcp_async_reused": "async_save, stager reused",
}


class Checkpointed:
    """A streamed optimizer that makes checkpoints, with measurements of their cost."""

    def __init__(self, args: argparse.Namespace, directory: str, num_parameters: int) -> None:
        parameters = make_parameters(num_parameters, args.tensors)
        settings = {"chunk_bytes": int(args.chunk_mib * (1 << 20)), "ring_chunks": args.ring}
        store = os.path.join(directory, f"store-{num_parameters}")
        label = mebi(num_parameters)
        self.trained = Streamed(
            store, parameters, make_gradients(parameters), label, settings, keep=2
        )
        self.num_parameters = num_parameters
        self.seal_s: list[float] = []
        self.call_s: list[float] = []
        for _ in range(3):  # until every slot has been written once
            self.stall(1)

    @property
    def optimizer(self) -> offload.AdamW:
        """The optimizer that is measured."""
        return self.trained.optimizer

    def stall(self, every: int) -> float:
        """Take `every` steps and a checkpoint, and return the seconds that training stood still."""
        optimizer = self.optimizer
        for _ in range(every):
            optimizer.step()
        waited = optimizer.stats().wait_seal_s
        started = time.perf_counter()
        handle = optimizer.checkpoint({"step": every})
        called = time.perf_counter() - started
        while not handle.done():  # forward and backward
            time.sleep(_POLL_S)
        optimizer.step()
        stats = optimizer.stats()
        self.call_s.append(called)
        self.seal_s.append(stats.seal_s)
        optimizer.synchronize()  # so that nothing is in flight during the next measurement
        return called + stats.wait_seal_s - waited

    def cost(self) -> tuple[int, int]:
        """Make one checkpoint beside nothing else, and return its cost.

        Returns:
            Bytes written, and peak of additional memory in bytes (-1 if the kernel does not tell).
        """
        optimizer = self.optimizer
        optimizer.step()
        optimizer.synchronize()
        before, written = resident_bytes(), io_bytes()[1]
        can_reset = reset_peak()
        optimizer.checkpoint({"step": 0}).result()
        written = io_bytes()[1] - written
        memory = max(0, peak_bytes() - before) if can_reset else -1
        optimizer.step()
        optimizer.synchronize()
        return written, memory

    def steps(self, steps: int, *, checkpoints: bool) -> float:
        """Return the mean seconds of steps back to back, with or without checkpoints after them."""
        optimizer = self.optimizer
        optimizer.step()  # the first step after a checkpoint writes all state, and is not timed
        optimizer.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            optimizer.step()
            if checkpoints:
                optimizer.checkpoint({"step": 0})
        optimizer.synchronize()
        return (time.perf_counter() - started) / steps


class RawSeal:
    """Least work of a durable checkpoint: 2 bytes per parameter written, and the syncs of a seal.

    It follows a step's writes of 12 bytes per parameter. These are not timed, but a sync must flush
    them from the drive's cache, which is part of its cost. Files are reused, as in a store. The
    order is that of `docs/evidence.md`: withdraw the old checkpoint, write, sync all files, write
    and sync the manifest, rename.

    Args:
        directory: Directory for the files.
        num_parameters: Number of parameters.
        request_bytes: Bytes of one transfer.
    """

    def __init__(self, directory: str, num_parameters: int, request_bytes: int = 16 << 20) -> None:
        self._backend = PosixBackend()
        self._directory = directory
        self._path = os.path.join(directory, f"raw-{num_parameters}")
        self._other = self._path + "-renamed"
        self._backend.make_dir(self._path)
        per_array = -(-num_parameters // 1024) * 4096
        sizes = {"model": -(-num_parameters * _PARAMETER_BYTES // 4096) * 4096}
        sizes |= {f"state-{i}": per_array for i in range(STATE_ARRAYS)}
        self._data = {
            name: self._backend.create(os.path.join(self._path, name), size)
            for name, size in sizes.items()
        }
        self._small = {
            name: self._backend.create(os.path.join(self._path, name), 4096)
            for name in ("train_state", "manifest")
        }
        self._buffers = [self._backend.allocate(request_bytes) for _ in range(4)]
        for buffer in self._buffers:
            fill_random(buffer)
        self.sample()

    def sample(self) -> float:
        """Do the work once, and return its seconds."""
        for name in self._data:
            if name != "model":
                self._write(name)
        backend, small = self._backend, self._small
        started = time.perf_counter()
        backend.rename(self._path, self._other)
        backend.sync_dir(self._directory)
        small["manifest"].write_bytes(b"0" * 4096, 0)
        small["manifest"].sync()

        self._write("model")
        small["train_state"].write_bytes(b"1" * 4096, 0)
        for file in (*self._data.values(), small["train_state"]):
            file.sync()
        backend.sync_dir(self._other)
        small["manifest"].write_bytes(b"1" * 4096, 0)
        small["manifest"].sync()
        backend.sync_dir(self._other)
        backend.rename(self._other, self._path)
        backend.sync_dir(self._directory)
        return time.perf_counter() - started

    def _write(self, name: str) -> None:
        file = self._data[name]
        futures: list[IOFuture] = []
        for number, offset in enumerate(range(0, file.size_bytes, self._buffers[0].nbytes)):
            buffer = self._buffers[number % len(self._buffers)]
            length = min(buffer.nbytes, file.size_bytes - offset)
            futures.append(file.write(buffer.slice(0, length), offset))
        for future in futures:
            future.result()

    def close(self) -> None:
        """Close the files."""
        self._backend.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    sizes: list[int] = args.parameters
    with scratch(args.directory) as directory:
        require_space(directory, 8 * exact_state_bytes(sum(sizes)))
        result = Result("checkpoint", args, directory)
        ours = {n: _one_size(args, result, directory, n) for n in sizes}
        if "stalls" in args.parts and len(sizes) == 2:
            _beside_the_other_size(args, result, ours)
        for one in ours.values():
            one.optimizer.close()
        result.write()


def _beside_the_other_size(
    args: argparse.Namespace, result: Result, ours: dict[int, Checkpointed]
) -> None:
    """Measure the stalls of both sizes in turns."""
    small, large = ours
    names = {n: f"offload_{mebi(n)}_beside_the_other_size_stall_s" for n in ours}
    samples = alternate(
        {names[n]: partial(ours[n].stall, 1) for n in ours}, args.rounds, report=say
    )
    result.add_samples(samples)
    result.claim(
        f"training stands still for a checkpoint at {mebi(large)}, beside {mebi(small)}",
        ratios(samples[names[large]], samples[names[small]]),
        numerator=names[large],
        denominator=names[small],
        limit=args.size_limit,
        size_ratio=large / small,
    )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("checkpoint", __doc__ or "")
    add = parser.add_argument
    add(
        "--parameters",
        type=lambda text: [count(word) for word in words(text)],
        default="64Mi,128Mi",
        help="one or two model sizes, with a comma (default: %(default)s)",
    )
    add("--parts", default=",".join(_PARTS), help="what to measure (default: %(default)s)")
    add("--tensors", type=int, default=8, help="parameter tensors (default: %(default)s)")
    add("--chunk-mib", type=float, default=32, help="of one FP32 array (default: %(default)s)")
    add("--ring", type=int, default=6, help="chunks in memory (default: %(default)s)")
    add("--every", type=int, default=4, help="steps between checkpoints, besides 1")
    add("--steps", type=int, default=3, help="least number back to back, in one turn of the cost")
    add("--turn-s", type=float, default=2, help="least seconds of such steps without checkpoints")
    add("--pair-s", type=float, default=30, help="least seconds of a pair of a checkpoint's cost")
    add("--peers", default=",".join(_TITLES), help="which to measure, with commas")
    add("--limit", type=float, default=0.01, help="of stall / torch.save without CRC-32")
    add("--size-limit", type=float, default=1.25, help="of the stalls at the two sizes")
    add("--write-limit", type=float, default=1.1, help="of a checkpoint's cost / the replay's")
    quick = {
        "parameters": "128Ki,256Ki",
        "tensors": 3,
        "chunk_mib": 0.25,
        "every": 2,
        "steps": 2,
        "turn_s": 0,
        "pair_s": 0,
    }
    args = parser.read(arguments, quick=quick)
    if len(args.parameters) not in (1, 2) or sorted({*args.parameters}) != args.parameters:
        parser.error("--parameters takes one size, or two, the smaller one first")
    args.parts = words(args.parts)
    if not args.parts or not {*args.parts} <= {*_PARTS}:
        parser.error(f"--parts takes {', '.join(_PARTS)}, or one of them")
    unknown = set(words(args.peers)) - _TITLES.keys()
    if unknown:
        parser.error(f"--peers: no {', '.join(sorted(unknown))}; there are {', '.join(_TITLES)}")
    parts = () if {*args.parts} == {*_PARTS} else args.parts
    args.what = args.what or "-".join((*parts, *map(mebi, args.parameters)))
    return args


def _one_size(
    args: argparse.Namespace, result: Result, directory: str, num_parameters: int
) -> Checkpointed:
    """Measure what was asked for at one size, and return our optimizer, still open."""
    label = mebi(num_parameters)
    say(f"preparing {label}")
    ours = Checkpointed(args, directory, num_parameters)
    if "stalls" in args.parts:
        _beside_other_ways(args, result, ours, directory)
    if "cost" in args.parts:
        _back_to_back(args, result, ours, directory, label)
    return ours


def _beside_other_ways(
    args: argparse.Namespace, result: Result, ours: Checkpointed, directory: str
) -> None:
    """Measure how long training stands still, what is written and which memory is taken."""
    num_parameters = ours.num_parameters
    label = mebi(num_parameters)
    savers = Savers(directory)
    state = make_state(ours.trained.parameters)
    peers = words(args.peers)
    more: dict[str, list[float]] = {}
    measure: dict[str, Callable[[], float]] = {
        "offload_stall_s": partial(ours.stall, 1),
        # torch.save next to ours, because these two are the claim.
        **{f"{name}_stall_s": partial(_peer, savers, name, state, more) for name in peers},
        f"offload_every_{args.every}_stall_s": partial(ours.stall, args.every),
    }
    ours.call_s.clear()
    ours.seal_s.clear()
    samples = alternate(measure, args.rounds, report=say)
    savers.close()
    state.clear()
    stalls = samples["offload_stall_s"]
    for name, values in (samples | more).items():
        if name.endswith("_s"):
            way, kind = name.rsplit("_", 2)[0], name.rsplit("_", 2)[1]
            result.samples.setdefault(f"{way}_{label}_{kind}_s", values)
    result.add_samples(
        {f"offload_{label}_call_s": ours.call_s, f"offload_{label}_seal_s": ours.seal_s}
    )
    _bytes_and_memory(result, ours, more, num_parameters)
    for name in peers:
        result.claim(
            f"training stands still for a checkpoint at {label}, beside {_TITLES[name]}",
            ratios(stalls, samples[f"{name}_stall_s"]),
            numerator=f"offload_{label}_stall_s",
            denominator=f"{name}_{label}_stall_s",
            limit=args.limit if name == "torch_save" else None,
        )


def _peer(savers: Savers, name: str, state: State, more: dict[str, list[float]]) -> float:
    saved = savers.save(name, state)
    for key, value in asdict(saved).items():
        more.setdefault(f"{name}_{key}", []).append(float(value))
    return saved.stall_s


def _bytes_and_memory(
    result: Result, ours: Checkpointed, more: dict[str, list[float]], num_parameters: int
) -> None:
    """Record the bytes written and the additional memory per parameter, for every way."""
    label = mebi(num_parameters)
    found = {"offload": [ours.cost() for _ in range(3)]}
    names = {key.removesuffix("_written_bytes") for key in more if key.endswith("_written_bytes")}
    for name in sorted(names):
        pairs = zip(more[f"{name}_written_bytes"], more[f"{name}_memory_bytes"], strict=True)
        found[name] = [(int(written), int(memory)) for written, memory in pairs]
    for name, values in found.items():
        written = median([value[0] for value in values]) / num_parameters
        # The most: a copy that is kept is paid for once, and held from then on.
        memory = max(value[1] for value in values) / num_parameters
        result.fact(f"{name}_{label}_written_bytes_per_parameter", written)
        result.fact(f"{name}_{label}_memory_bytes_per_parameter", memory)
        say(f"  {name}: {written:.2f} B/param written, {memory:.2f} B/param of extra memory")


def _back_to_back(
    args: argparse.Namespace, result: Result, ours: Checkpointed, directory: str, label: str
) -> None:
    """Measure the time that a checkpoint after every step adds if nothing else is computed.

    The added time is a small difference of two long ones, and the drive's speed changes. So they
    are measured in short turns, and a pair is the means of as many turns as last long enough. The
    last checkpoint of a turn has no step beside it, as no other has in a run that goes on. So steps
    of every size are repeated for the same time in a turn, and not the same number of times.

    In the same turns, the same transfers and syncs are replayed beside the transfers of steps, with
    which they share the drive. A checkpoint's writes and syncs by themselves are measured as well.
    """
    raw = RawSeal(directory, ours.num_parameters)
    backend = PosixBackend()
    plan = Plan(
        num_files=STATE_ARRAYS,
        array_bytes=4 * ours.num_parameters,
        chunk_bytes=int(args.chunk_mib * (1 << 20)),
    )
    replayed = ReplayedSeals(backend, directory, plan, ours.num_parameters, args.ring)
    ours.steps(args.steps, checkpoints=False)
    num_steps = max(args.steps, math.ceil(args.turn_s / ours.steps(args.steps, checkpoints=False)))
    ways: dict[str, Callable[[], float]] = {
        "step_s": partial(ours.steps, num_steps, checkpoints=False),
        "step_and_checkpoint_s": partial(ours.steps, num_steps, checkpoints=True),
        "replayed_step_and_checkpoint_s": partial(replayed.run, num_steps, seals=True),
        "replayed_step_s": partial(replayed.run, num_steps, seals=False),
        "raw_seal_s": raw.sample,
    }
    first = {name: way() for name, way in ways.items()}
    turns = max(1, math.ceil(args.pair_s / (num_steps * sum(first.values()))))
    say(f"pairs of {turns} turns, each of {num_steps} steps with checkpoints and without")
    found = alternate(ways, args.rounds * turns)
    raw.close()
    backend.close()
    samples = {name: _means(values, turns) for name, values in found.items()}
    result.add_samples({f"back_to_back_{label}_{name}": v for name, v in samples.items()})
    added = _differences(samples["step_and_checkpoint_s"], samples["step_s"])
    result.claim(
        f"time that a checkpoint after every step at {label} adds, beside that in a replay",
        ratios(
            added,
            _differences(samples["replayed_step_and_checkpoint_s"], samples["replayed_step_s"]),
        ),
        numerator=f"back_to_back_{label}_step_and_checkpoint_s - back_to_back_{label}_step_s",
        denominator=f"back_to_back_{label}_replayed_step_and_checkpoint_s - "
        f"back_to_back_{label}_replayed_step_s",
        limit=args.write_limit,
        step_ratio=median(ratios(samples["step_and_checkpoint_s"], samples["step_s"])),
        turns_in_a_pair=turns,
        steps_in_a_turn=num_steps,
    )
    result.claim(
        f"time that a checkpoint after every step at {label} adds, beside its writes and syncs",
        ratios(added, samples["raw_seal_s"]),
        numerator=f"back_to_back_{label}_step_and_checkpoint_s - back_to_back_{label}_step_s",
        denominator=f"back_to_back_{label}_raw_seal_s",
        limit=None,
    )


def _differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(first, second, strict=True)]


def _means(values: Sequence[float], num: int) -> list[float]:
    """Return the mean of each run of `num` values."""
    return [sum(values[start : start + num]) / num for start in range(0, len(values), num)]


if __name__ == "__main__":
    run(main)
