"""Ranks that upload to a tier and restore from it, each killed at every step.

A step is one object that the server has taken from a rank, or one range that it has given to one.
At each of them one of the ranks is killed (SIGKILL), and then the others, as torchrun does. Every
rank is the victim at every step. After every kill, whatever the tier or the store offers is read
completely. Then the job is started again. It must go on from the sealed checkpoint, send nothing
again that the server has acknowledged, and end with the bits of a run that nobody has killed.

The tier is moto's server of S3 on this machine, behind a proxy that counts what passes. The ranks
talk over gloo.

    python -m bench.tier_rank_kills --directory DIR
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import offload
from bench._harness import BenchError, Parser, Result, run, say, scratch
from offload.tiers import list_tier, verify_tier

if TYPE_CHECKING:
    from tests.ranks_training.rank_server import Job, Jobs
    from tests.tiers.proxy import Proxy, Request

_LAST = 2
"""Step of the one checkpoint that each training makes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill, count, print and write the result."""
    try:
        from tests.ranks_training.rank_server import Jobs
        from tests.tiers import servers
        from tests.tiers.proxy import Proxy
    except ImportError as error:
        raise BenchError(f"run this in a checkout with the extra `test`: {error}") from error
    args = _arguments(arguments)
    os.environ.update(servers.ENVIRONMENT)
    with scratch(args.directory) as directory, servers.moto() as place:
        result = Result("tier_rank_kills", args, directory)
        servers.make_bucket(*place, "bucket")
        proxy, jobs = Proxy(*place), Jobs()
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        campaign = _Campaign(jobs, proxy, Path(directory), args.most_steps)
        for num_ranks in args.ranks:
            for victim in range(num_ranks):
                campaign.kill_uploads(num_ranks, victim)
            campaign.kill_restores(num_ranks)
        jobs.close()
        proxy.close()
        for name, value in campaign.counts.items():
            result.fact(name, value)
        result.write()


class _Campaign:
    """Counts kills, and everything that must not be.

    Args:
        jobs: Server of ranks.
        proxy: Proxy before the server.
        directory: Directory for stores.
        most_steps: Largest number of steps at which each rank is killed.
    """

    def __init__(self, jobs: Jobs, proxy: Proxy, directory: Path, most_steps: int) -> None:
        self._jobs = jobs
        self._proxy = proxy
        self._directory = directory
        self._most_steps = most_steps
        self._tiers = 0
        self.counts = dict.fromkeys(
            (
                "kills_in_uploads",
                "kills_in_restores",
                "partial_checkpoints_offered",
                "sealed_checkpoints_lost",
                "finished_objects_sent_again",
                "other_bits",
                "copies_that_are_not_whole",
            ),
            0,
        )

    def kill_uploads(self, num_ranks: int, victim: int) -> None:
        """Kill a rank at every object that the tier takes from any rank, in one job for each."""
        for at in range(1, self._most_steps + 1):
            tier, folder = self._new_tier(), self._new_folder()
            self._proxy.requests.clear()
            job = self._start(folder, "run", num_ranks, tier)
            was_killed = self._kill_at(job, victim, at, lambda r: r.method == "PUT")
            if not was_killed:
                return
            self.counts["kills_in_uploads"] += 1
            self._count_partial(tier)
            found = self._finish(folder, "run", num_ranks, tier)
            self.counts["sealed_checkpoints_lost"] += {one["resumed"] for one in found} != {_LAST}
            sent = Counter(name for name in self._proxy.puts() if _is_part(name))
            self.counts["finished_objects_sent_again"] += sum(n - 1 for n in sent.values())
            copies = [copy for copy in list_tier(tier) if copy.marker is not None]
            self.counts["copies_that_are_not_whole"] += len(copies) != 1
            self._count_partial(tier)
            self._say(num_ranks, victim, at)

    def kill_restores(self, num_ranks: int) -> None:
        """Kill each rank at every range that the tier gives to any rank."""
        tier, folder = self._new_tier(), self._new_folder()
        expected = [one["bits"] for one in self._finish(folder, "run", num_ranks, tier)]
        for victim in range(num_ranks):
            for at in range(1, self._most_steps + 1):
                folder = self._new_folder()
                job = self._start(folder, "new", num_ranks, tier)
                if not self._kill_at(job, victim, at, _is_content):
                    break
                self.counts["kills_in_restores"] += 1
                for path in (folder / "new").glob("step-*"):
                    with offload.open_checkpoint(path) as checkpoint:
                        self.counts["partial_checkpoints_offered"] += not checkpoint.verify().ok
                found = self._finish(folder, "new", num_ranks, tier)
                self.counts["other_bits"] += [one["bits"] for one in found] != expected
                with offload.open_checkpoint(folder / "new") as checkpoint:
                    self.counts["copies_that_are_not_whole"] += not checkpoint.verify().ok
                self._say(num_ranks, victim, at)

    def _start(self, folder: Path, into: str, num_ranks: int, tier: str) -> Job:
        from tests.tiers import rank_jobs

        case = {"tier": tier, "last": _LAST, "seals": [_LAST]}
        return rank_jobs.start(self._jobs, folder, into, num_ranks, case)

    def _finish(self, folder: Path, into: str, num_ranks: int, tier: str) -> list[dict[str, Any]]:
        """Run a job that nobody kills; return what each rank says."""
        ranks = self._start(folder, into, num_ranks, tier).wait()
        failed = [rank.errors for rank in ranks if not rank.outcomes or rank.failed()]
        if failed:
            raise BenchError(f"a job after a kill has failed: {failed[0][-2000:]}")
        return [rank.of("main")["value"] for rank in ranks]

    def _kill_at(self, job: Job, victim: int, at: int, is_step: Callable[[Request], bool]) -> bool:
        """Kill a rank when the server has answered the request of a step, and then the others.

        Returns:
            Whether the job had so many steps.
        """
        lock, killed, number = threading.Lock(), threading.Event(), 0

        def look(request: Request) -> None:
            nonlocal number
            with lock:
                number += is_step(request)
                if number == at and not killed.is_set():
                    job.kill(victim)
                    killed.set()

        self._proxy.after = look
        while not killed.is_set() and not all(map(job.outcomes, range(len(job.pids)))):
            time.sleep(0.02)
        self._proxy.after = lambda _: None
        for rank in range(len(job.pids) if killed.is_set() else 0):
            job.kill(rank)
        job.wait()
        return killed.is_set()

    def _count_partial(self, tier: str) -> None:
        for copy in list_tier(tier):
            if copy.marker is not None and not verify_tier(copy.url)[0].ok:
                self.counts["partial_checkpoints_offered"] += 1

    def _new_tier(self) -> str:
        self._tiers += 1
        return f"s3://bucket/{self._tiers}"

    def _new_folder(self) -> Path:
        folder = self._directory / "job"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def _say(self, num_ranks: int, victim: int, at: int) -> None:
        kills = self.counts["kills_in_uploads"], self.counts["kills_in_restores"]
        bad = sum(self.counts.values()) - sum(kills)
        say(f"{num_ranks} ranks, rank {victim} at step {at}: kills {kills}, problems {bad}")


def _is_part(name: str) -> bool:
    return "state/" in name or name.endswith(("safetensors", "table.json", "manifest.json"))


def _is_content(request: Request) -> bool:
    """Whether a request has brought tensors."""
    has_tensors = "state/" in request.path or "model" in request.path
    return request.method == "GET" and bool(request.range) and has_tensors


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("tier_rank_kills", __doc__ or "")
    add = parser.add_argument
    add("--ranks", type=_counts, default=[2, 4], help="numbers of ranks (default: 2,4)")
    add("--most-steps", type=int, default=1000, help="at which each rank is killed (default: all)")
    args = parser.read(arguments, quick={"ranks": [2], "most_steps": 1})
    args.what = args.what or "-".join(map(str, args.ranks))
    return args


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    run(main)
