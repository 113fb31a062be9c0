"""Ranks that are killed or stopped at every step of their protocol, and at random moments.

After each fault the job restarts. All ranks must continue from one step, no older than the newest
checkpoint that any rank knew to be durable; with the bits of a run that nobody disturbed, to the
end; and every checkpoint must verify. Nothing is timed, so the machine may be busy.

- ``steps``: every message of the ranks, and every operation on files, of a job that begins a store
  and of one that resumes, seals and recycles: rank 0, another rank, or all are killed before it.
- ``random``: ranks of trainings on 2, 3 and 4 ranks are killed at random moments.
- ``stopped``: rank 0 is stopped at each step from the last report of a seal to the rename, until
  the other ranks have given up; then it goes on.
- ``reshape``: every message and operation on files of ranks that go on from a store of another
  number of ranks (4 to 2, 1 to 3), until no former checkpoint is left: rank 0, another rank, or all
  are killed before it. The former or the new number of ranks then goes on.
- ``elastic``: ranks of one run under torchrun are killed at random moments; torchrun restarts them
  by itself, and the run ends with the bits of one without kills.
- ``files``: the model files of many seals on 3 ranks, with rows from 2 to 4,094 bytes, have the
  bytes that the safetensors library writes.

    python -m bench.ranks_campaign --parts steps --directory DIR
"""

from __future__ import annotations

import argparse
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench._harness import BenchError, Parser, Result, run, say, scratch, words
from bench._ranks_elastic import kill_elastic
from bench._ranks_files import compare_files
from bench._ranks_jobs import KilledJobs, Tally
from bench._ranks_reshape import CHANGES, KilledRecuts
from tests.ranks_training.rank_server import Jobs

PARTS = ("steps", "random", "stopped", "reshape", "elastic", "files")
_KINDS = ("ddp", "fsdp2")
_SPAN_S = 0.8
_STEPS_PER_KILL = 12
"""Steps of the undisturbed run for each random kill; a job takes fewer between two kills."""

Work = Callable[[Jobs, Path], Tally]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the campaign, print and write the counts.

    Raises:
        BenchError: Something was not as it must be. The counts have been written.
    """
    args = _arguments(arguments)
    started = time.monotonic()
    with scratch(args.directory) as directory:
        result = Result("ranks_campaign", args, directory)
        tallies: dict[str, Tally] = {}
        for part in words(args.parts):
            works = _WORKS[part](args)
            tallies[part] = tally = Tally()
            for found in _in_parallel(works, Path(directory) / part, args.workers):
                tally.add(found)
            for name, number in sorted(tally.counts.items()):
                result.fact(f"{part}: {name}", number)
            result.fact(f"{part}: problems", tally.problems)
            say(f"{part}: {dict(sorted(tally.counts.items()))}")
            for problem in tally.problems:
                say(f"  {problem}")
        result.fact("seconds", round(time.monotonic() - started, 1))
        result.write()
    problems = [problem for tally in tallies.values() for problem in tally.problems]
    if problems:
        raise BenchError(f"{len(problems)} problems, the first: {problems[0]}")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("ranks_campaign", __doc__ or "")
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="with commas (default: %(default)s)")
    add("--times", type=int, default=3, help="times of each step and victim")
    add("--first-time", type=int, default=0, help="number of the first of these times")
    add("--every", type=int, default=1, help="one of so many steps only (default: all)")
    add("--seconds", type=float, default=0.0, help="begin no kill at a step later (default: all)")
    add("--kills", type=int, default=200, help="random kills on each number of ranks")
    add("--elastic-kills", type=int, default=20, help="kills of ranks under torchrun")
    add("--ranks", default="2,3,4", help="numbers of ranks of random kills, with commas")
    add("--seals", type=int, default=50, help="seals whose files are compared")
    add("--seed", type=int, default=20261123, help="of random moments and rows")
    add("--timeout-s", type=float, default=3.0, help="without a sign of a rank until it is lost")
    add("--workers", type=int, default=2, help="jobs at the same time (default: %(default)s)")
    quick = {
        "times": 1,
        "every": 40,
        "kills": 2,
        "elastic_kills": 1,
        "ranks": "2",
        "seals": 2,
        "workers": 1,
    }
    args = parser.read(arguments, quick=quick)
    unknown = {*words(args.parts)} - {*PARTS}
    if unknown:
        raise BenchError(f"--parts {args.parts}: give some of {', '.join(PARTS)}")
    args.what = args.what or "-".join(words(args.parts))
    return args


def _in_parallel(works: Sequence[Work], folder: Path, num_workers: int) -> list[Tally]:
    """Do works on several threads, each with a server of ranks of its own."""
    waiting: queue.SimpleQueue[tuple[int, Work]] = queue.SimpleQueue()
    for numbered in enumerate(works):
        waiting.put(numbered)
    found: list[Tally] = []

    def serve() -> None:
        jobs = Jobs()
        try:
            while True:
                number, work = waiting.get_nowait()
                try:
                    tally = work(jobs, folder / str(number))
                except Exception as error:  # noqa: BLE001  (a problem like any other)
                    tally = Tally(problems=[f"failed: {error!r}"])
                found.append(tally)
                say(f"  {len(found)}/{len(works)} done, {len(tally.problems)} problems")
        except queue.Empty:
            jobs.close()

    threads = [threading.Thread(target=serve) for _ in range(min(num_workers, len(works)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _steps(args: argparse.Namespace) -> list[Work]:
    """Return works that each take their part of the steps of the protocol."""

    started = time.monotonic()

    def work_on(time_: int, share: int) -> Work:
        def work(jobs: Jobs, folder: Path) -> Tally:
            # The third time, the key-value store outlives the ranks, as torchrun's does.
            kind = _KINDS[time_ % len(_KINDS)]
            killed = KilledJobs(jobs, folder, kind, 2, 12, args.timeout_s)
            resumes = [(False, *step) for step in killed.labels(begins=False)]
            known = {label for _, _, label in resumes}
            begins = [(True, *s) for s in killed.labels(begins=True) if s[1] not in known]
            steps = (resumes + begins)[:: args.every]
            killed.tally.counts["steps of the protocol"] = len(steps) if share == time_ == 0 else 0
            trials = [*itertools.product(steps, ((0,), (1,), (0, 1)))]
            for (is_begin, rank, label), victims in trials[share :: args.workers]:
                if 0 < args.seconds < time.monotonic() - started:
                    killed.tally.counts["left out, as there was no time"] += 1
                    continue
                killed.kill_at(rank, label, victims, begins=is_begin, outlives=time_ % 3 == 2)
            return killed.tally

        return work

    times = range(args.first_time, args.first_time + args.times)
    return [work_on(time_, share) for time_ in times for share in range(args.workers)]


def _random(args: argparse.Namespace) -> list[Work]:
    def work_on(num_ranks: int, kind: str) -> Work:
        def work(jobs: Jobs, folder: Path) -> Tally:
            num_kills = -(-args.kills // len(_KINDS))
            num_steps = num_kills * _STEPS_PER_KILL + 40
            killed = KilledJobs(jobs, folder, kind, num_ranks, num_steps, args.timeout_s)
            killed.kill_randomly(num_kills, args.seed, _SPAN_S)
            return killed.tally

        return work

    return [work_on(int(ranks), kind) for ranks in words(args.ranks) for kind in _KINDS]


def _stopped(args: argparse.Namespace) -> list[Work]:
    def work_on(num_ranks: int, kind: str) -> Work:
        def work(jobs: Jobs, folder: Path) -> Tally:
            killed = KilledJobs(jobs, folder, kind, num_ranks, 12, args.timeout_s)
            labels = [label for rank, label in killed.labels(begins=False) if rank == 0]
            first = labels.index("seal: put seal/all-written")
            last = labels.index("seal: rename run/.slot-N")
            for label in labels[first + 1 : last + 1][:: args.every]:
                killed.stop_at(label)
            return killed.tally

        return work

    return [work_on(num_ranks, kind) for num_ranks in (2, 3) for kind in _KINDS]


def _reshape(args: argparse.Namespace) -> list[Work]:
    def work_on(change: int, share: int) -> Work:
        def work(jobs: Jobs, folder: Path) -> Tally:
            killed = KilledRecuts(jobs, folder, CHANGES[change], args.timeout_s)
            steps = killed.labels()[:: args.every]
            killed.tally.counts["steps of re-cuts"] = 0 if share else len(steps)
            trials = [*itertools.product(steps, killed.victims())]
            for number in range(share, len(trials), args.workers):
                (rank, label), victims = trials[number]
                killed.kill_at(rank, label, victims, goes_back=number // args.workers % 2 == 1)
            return killed.tally

        return work

    shares = range(args.workers)
    return [work_on(change, share) for change in range(len(CHANGES)) for share in shares]


def _elastic(args: argparse.Namespace) -> list[Work]:
    def work(jobs: Jobs, folder: Path) -> Tally:
        del jobs  # torchrun starts these ranks
        return kill_elastic(folder, args.elastic_kills, args.seed)

    return [work]


def _files(args: argparse.Namespace) -> list[Work]:
    def work_on(kind: str) -> Work:
        return lambda jobs, folder: Tally(
            *compare_files(jobs, folder, kind, -(-args.seals // len(_KINDS)), args.seed)
        )

    return [work_on(kind) for kind in _KINDS]


_WORKS = {
    "steps": _steps,
    "random": _random,
    "stopped": _stopped,
    "reshape": _reshape,
    "elastic": _elastic,
    "files": _files,
}


if __name__ == "__main__":
    run(main)
