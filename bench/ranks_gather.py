"""New bf16 values from the rank that updated them to the others, beside torch's own all-gather.

Several processes on this machine are the ranks of a group of gloo. Each of them has updated the
same share of the parameters, and needs the shares of the others. A gathering sends them chunk by
chunk, into the live parameters. It is compared with one call of torch's all-gather of the same
bytes, into flat memory; and with one broadcast of each rank's whole share, from live memory into
live memory, which is the least that a gathering by broadcasts can take. All run in turns.

    python -m bench.ranks_gather                    # 256 MiB of values on 2 ranks
    python -m bench.ranks_gather --ranks 4
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from bench._harness import BenchError, Parser, Result, count, mebi, run, say, scratch, size
from bench._statistics import alternate, ratios
from offload.distributed.gathering.gather import BounceBuffer, Gathering
from offload.distributed.gathering.gather_plan import BoxPiece, GatherPlan, RankChunk
from offload.distributed.gathering.holder_groups import HolderGroups
from offload.format.boxes import Box
from tests.dying import die_with_parent

_LIMIT = 1.0
_TIMEOUT_S = 300
_KINDS = ("gather", "all_gather", "broadcast")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    args = _arguments(arguments)
    num_tensors = args.tensors // args.ranks * args.ranks
    length = args.parameters // max(1, num_tensors)
    if num_tensors < args.ranks or not length:
        raise BenchError(
            f"--tensors {args.tensors} of --parameters {args.parameters} cannot be dealt to "
            f"--ranks {args.ranks}: give each rank a tensor with elements"
        )
    with scratch(args.directory) as directory:
        result = Result("ranks_gather", args, directory)
        value_bytes = 2 * num_tensors * length
        result.fact("value_bytes", value_bytes)
        say(f"{size(value_bytes)} of values in {num_tensors} tensors on {args.ranks} ranks")
        settings = (args.ranks, os.path.join(directory, "ranks"), num_tensors, length, args.chunk)
        with _Ranks(settings) as ranks:
            works = {f"{kind}_s": partial(ranks.sample, kind) for kind in _KINDS}
            for work in works.values():
                work()  # the first use connects, and makes memory resident
            samples = alternate(works, args.rounds, report=say)
        result.add_samples(samples)
        what = f"{size(value_bytes)} of bf16 values on {args.ranks} ranks"
        result.claim(
            f"a gathering of {what}, beside torch's all-gather of the same bytes",
            ratios(samples["gather_s"], samples["all_gather_s"]),
            numerator="gather_s",
            denominator="all_gather_s",
            limit=_LIMIT,
        )
        result.claim(
            f"a gathering of {what}, beside one broadcast of each rank's share",
            ratios(samples["gather_s"], samples["broadcast_s"]),
            numerator="gather_s",
            denominator="broadcast_s",
            limit=None,
        )
        result.write()


class _Ranks:
    """Processes that take a sample together."""

    def __init__(self, settings: tuple[int, str, int, int, int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(settings[0]):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, *settings), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def sample(self, kind: str) -> float:
        """Return the seconds that the slowest rank takes for a kind of work.

        Raises:
            BenchError: A rank has ended.
        """
        try:
            for pipe in self._pipes:
                pipe.send(kind)
            return max(float(pipe.recv()) for pipe in self._pipes)
        except (EOFError, OSError):
            raise BenchError("a rank has ended; its error is above") from None


def _serve(
    rank: int,
    pipe: Connection,
    num_ranks: int,
    path: str,
    num_tensors: int,
    length: int,
    chunk: int,
) -> None:
    """Run one rank until the pipe is closed."""
    parent = multiprocessing.parent_process()
    die_with_parent(parent.pid if parent else 0)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.path.abspath(path)}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    everyone = tuple(range(num_ranks))
    values = torch.full((num_tensors, length), float(rank), dtype=torch.bfloat16)
    box = Box.whole((length,))
    per_rank = num_tensors // num_ranks
    chunks = [_chunks(owner * per_rank, per_rank, box, chunk) for owner in everyone]
    plan = GatherPlan(chunks, {(str(n), box): everyone for n in range(num_tensors)})
    groups = HolderGroups({t.holders for t in plan.transfers}, timeout_s=_TIMEOUT_S)
    buffer = BounceBuffer(plan.slice_bytes)
    gathered = torch.empty(num_tensors * length, dtype=torch.bfloat16)
    # Newer versions of torch call it `all_gather_single`, and warn of the old name.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    shares = values.view(num_ranks, -1)

    def gather() -> None:
        gathering = Gathering(plan, groups, lambda name, _: values[int(name)], buffer)
        for own in chunks[rank]:
            gathering.updated(own.number)
        gathering.finish()

    def broadcast() -> None:
        for owner in everyone:
            dist.broadcast(shares[owner], owner)

    works: dict[str, Callable[[], Any]] = {
        "gather": gather,
        "all_gather": lambda: all_gather(gathered, shares[rank]),
        "broadcast": broadcast,
    }
    while True:
        try:
            kind = pipe.recv()
        except EOFError:
            return
        dist.barrier()
        started = time.perf_counter()
        works[kind]()
        pipe.send(time.perf_counter() - started)


def _chunks(first: int, num_tensors: int, box: Box, chunk_elements: int) -> list[RankChunk]:
    """Return chunks of neighbouring tensors; a tensor may lie in several chunks."""
    chunks: list[list[BoxPiece]] = [[]]
    room = chunk_elements
    for number in range(first, first + num_tensors):
        start = 0
        while start < box.num_elements:
            if not room:
                chunks.append([])
                room = chunk_elements
            stop = min(box.num_elements, start + room)
            chunks[-1].append(BoxPiece(str(number), box, "BF16", start, stop))
            room -= stop - start
            start = stop
    return [RankChunk(number, tuple(pieces)) for number, pieces in enumerate(chunks)]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("ranks_gather", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default=128 << 20, help="values (default: 128Mi)")
    add("--tensors", type=count, default=16, help="tensors they are in (default: %(default)s)")
    add("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    add("--chunk", type=count, default=8 << 20, help="values in a chunk (default: 8Mi)")
    quick = {"parameters": 1 << 20, "tensors": 4, "chunk": 1 << 18}
    args = parser.read(arguments, quick=quick)
    args.what = args.what or f"{mebi(args.parameters)}-{args.tensors}-{args.ranks}"
    return args


if __name__ == "__main__":
    run(main)
