"""Jobs of ranks that are killed or stopped, and what is expected of the jobs that follow them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch.distributed.distributed_c10d import Store

import offload
from tests.ranks_training.rank_server import Job, Jobs, Rank

Calls = list[list[Any]]

_WAIT_S: Final = 150.0
"""Longest time for a job: what takes longer hangs. Most jobs take a second or two; if the key-value
store is lost while a rank connects to it, that rank gives up after a minute."""

_GROUP_TIMEOUT_S: Final = 15.0
"""Seconds for which torch waits for a rank that was killed, as in its own start."""

_POLL_S: Final = 0.005
_SEAL: Final[Calls] = [["step"], ["checkpoint"], ["result"]]
_RESUMED: Final[Calls] = [["open"], ["restore"], ["bits"]]


@dataclass
class Tally:
    """What a campaign has seen."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """Everything that was not as it must be, in words."""

    def add(self, other: Tally) -> None:
        """Add what another part of the campaign has seen."""
        self.counts.update(other.counts)
        self.problems += other.problems

    def require(self, found: bool, name: str, problem: str) -> None:
        """Count a problem, unless what must be is found."""
        if not found:
            self.counts[name] += 1
            self.problems.append(f"{name}: {problem}")


class KilledJobs:
    """Jobs of one kind and one number of ranks, with the bits of a run that nobody disturbs.

    Args:
        jobs: Server of ranks.
        folder: New folder for everything.
        kind: ``ddp`` or ``fsdp2``.
        num_ranks: Number of ranks.
        num_steps: Number of steps of the undisturbed run.
        timeout_s: Seconds without a sign of progress after which a rank counts as lost.
    """

    def __init__(
        self, jobs: Jobs, folder: Path, kind: str, num_ranks: int, num_steps: int, timeout_s: float
    ) -> None:
        self.num_ranks, self._jobs, self._folder = num_ranks, jobs, folder
        self.tally = Tally()
        # Without new buckets after the first backward, a sum over three ranks or more has the same
        # bits in a new process.
        self._case = {
            "kind": kind,
            "timeout_s": timeout_s,
            "group_timeout_s": _GROUP_TIMEOUT_S,
            "find_unused": kind == "ddp",
        }
        self._undisturbed = {**self._case, "timeout_s": _WAIT_S, "group_timeout_s": _WAIT_S}
        """The same for jobs that must succeed, also if the machine is busy."""
        self.label = f"{kind} on {num_ranks} ranks"
        plain: Calls = [["open"], ["bits"], *[["step"]] * num_steps]
        (folder / "undisturbed").mkdir(parents=True)
        ended = jobs.run(
            folder / "undisturbed", [plain] * num_ranks, **self._undisturbed, is_plain=True
        )
        self._bits = [[one["value"] for one in rank.outcomes[1:]] for rank in ended]
        if any(rank.status or len(rank.outcomes) != len(plain) for rank in ended):
            raise RuntimeError(f"the undisturbed run failed: {ended}")
        self._prepared = folder / "prepared"
        self._prepared.mkdir()
        ended = jobs.run(self._prepared, [[["open"], *_SEAL * 3]] * num_ranks, **self._undisturbed)
        if any(rank.status or rank.failed() for rank in ended):
            raise RuntimeError(f"no store could be prepared: {ended}")

    def labels(self, *, begins: bool) -> list[tuple[int, str]]:
        """Return the steps of the protocol in a job that nobody disturbs, as ranks and labels."""
        folder = self._new("labels", begins=begins)
        calls: Calls = [["at_step", "", "kill"], *self._calls(begins=begins), ["steps_seen"]]
        found = []
        for rank, ended in enumerate(
            self._jobs.run(folder, [calls] * self.num_ranks, **self._undisturbed)
        ):
            if ended.status or ended.failed():
                raise RuntimeError(f"a job that nobody disturbs failed: {ended}")
            found += [(rank, label) for label in ended.of("steps_seen")["value"]]
        return found

    def kill_at(
        self, rank: int, label: str, victims: Sequence[int], *, begins: bool, outlives: bool
    ) -> None:
        """Kill ranks before a rank takes a step of the protocol, and restart the job.

        Args:
            rank: The rank that takes the step.
            label: The step.
            victims: Ranks that are killed.
            begins: Whether the job begins without a store.
            outlives: Whether the key-value store of the job outlives its ranks.
        """
        what = f"{self.label}, {victims} killed before rank {rank} takes {label!r}"
        folder = self._new("killed", begins=begins)
        job = self._start(folder, rank, label, "kill", victims, begins=begins, outlives=outlives)
        ended = job.wait(_WAIT_S)
        self.tally.counts["trials"] += 1
        killed = [n for n, one in enumerate(ended) if one.status == -signal.SIGKILL]
        self.tally.require(killed == [*victims], "not reached", f"{what}: {killed} were killed")
        self._check_ended(ended, what)
        self.restart(folder, 0 if begins else 3, ended, what)
        shutil.rmtree(folder)

    def stop_at(self, label: str) -> None:
        """Stop rank 0 before a step of the protocol until the others have given up; go on then."""
        what = f"{self.label}, rank 0 stopped before {label!r}"
        folder = self._new("stopped", begins=False)
        job = self._start(folder, 0, label, "stop", (), begins=False, outlives=True)
        self.tally.counts["trials"] += 1
        deadline = time.monotonic() + _WAIT_S
        others = range(1, self.num_ranks)
        while time.monotonic() < deadline and not all(
            any(one["call"] == "result" for one in job.outcomes(rank)) for rank in others
        ):
            time.sleep(_POLL_S)
        stopped = Path(f"/proc/{job.pids[0]}/stat").read_text().rpartition(")")[2].split()[0]
        os.kill(job.pids[0], signal.SIGCONT)
        ended = job.wait(_WAIT_S)
        self.tally.require(stopped == "T", "not reached", f"{what}: it was in state {stopped}")
        for number in others:
            first = next(one for one in ended[number].outcomes if one["call"] == "result")
            self.tally.counts[f"others: {first['error']}"] += 1
            self.tally.require(
                first["error"] == "InDoubtError", "others not in doubt", f"{what}: {first}"
            )
        decided = next((one for one in ended[0].outcomes if one["call"] == "result"), None)
        self.tally.counts[f"rank 0: {(decided and decided['error']) or 'published'}"] += 1
        self._check_ended(ended, what)
        self.restart(folder, 3, ended, what)
        shutil.rmtree(folder)

    def kill_randomly(self, num_kills: int, seed: int, span_s: float) -> None:
        """Kill ranks of one training at random moments, and restart it after each."""
        chooser = random.Random(f"{seed} {self.label}")
        folder = self._new("random", begins=True)
        calls: Calls = [*_RESUMED, ["train", len(self._bits[0]) - 20, 2]]
        durable = 0
        is_checked = True
        kills = 0
        while kills < num_kills:
            what = f"{self.label}, random kill {kills + 1}"
            job = self._jobs.start(folder, [calls] * self.num_ranks, **self._case)
            late = is_checked is False or chooser.random() < 0.7
            if late:
                self._until_resumed(job)
            time.sleep(chooser.uniform(0, span_s))
            number = chooser.choice([1, 1, self.num_ranks, chooser.randint(1, self.num_ranks)])
            victims = sorted(chooser.sample(range(self.num_ranks), number))
            for rank in victims:
                job.kill(rank)
            ended = job.wait(_WAIT_S)
            killed = [n for n, one in enumerate(ended) if one.status == -signal.SIGKILL]
            if not killed:
                self.tally.counts["ended before the kill"] += 1
            else:
                kills += 1
                self.tally.counts["trials"] += 1
                self.tally.counts["kills while training" if late else "kills at any moment"] += 1
            self._check_ended(ended, what)
            is_checked = all(map(_has_resumed, ended))
            if is_checked:
                self._check_resumed(folder, ended, durable, what)
            durable = max(durable, *map(_acknowledged, ended))
        self.restart(folder, durable, [], f"{self.label}, after all random kills")
        self.tally.counts["steps"] += durable
        shutil.rmtree(folder)

    def restart(self, folder: Path, durable: int, ended: Sequence[Rank], what: str) -> None:
        """Restart a job, and check that it goes on as if nothing had happened.

        Args:
            folder: Folder of the job.
            durable: Newest step that was acknowledged before.
            ended: What became of the ranks of the last job.
            what: What was done to it, in words.
        """
        durable = max([durable, *map(_acknowledged, ended)])
        again = self._jobs.run(
            folder, [[*_RESUMED, *_SEAL, ["step"], ["close"]]] * self.num_ranks, **self._undisturbed
        )
        self.tally.counts["restarts"] += 1
        for number, one in enumerate(again):
            failed = [o["message"] for o in one.outcomes if o["error"]]
            self.tally.require(
                one.status == 0 and not failed,
                "restarts that failed",
                f"{what}: rank {number} ended with {one.status}, {failed}, {one.errors[-800:]}",
            )
        if all(one.status == 0 and not one.failed() for one in again):
            self._check_resumed(folder, again, durable, what)

    def _check_resumed(self, folder: Path, ended: Sequence[Rank], durable: int, what: str) -> None:
        """Check the ranks of a job that has resumed, and everything that it has left."""
        found = [one.of("restore")["value"] for one in ended]
        steps = [one[0] if one else 0 for one in found]
        self.tally.counts["resumed"] += 1
        self.tally.require(len({*steps}) == 1, "different steps", f"{what}: {steps}")
        self.tally.require(
            min(steps) >= durable, "lost", f"{what}: step {durable} was durable, not {steps}"
        )
        states = [one and one[1] for one in found]
        expected = [{"step": n, "rank": r} if n else None for r, n in enumerate(steps)]
        self.tally.require(states == expected, "train states", f"{what}: {states}")
        for rank, one in enumerate(ended):
            number = steps[rank]
            for outcome in one.outcomes:
                if outcome["call"] == "step":
                    number += 1
                if outcome["call"] in ("bits", "step") and not outcome["error"]:
                    self.tally.counts["bits compared"] += 1
                    self.tally.require(
                        outcome["value"] == self._bits[rank][number],
                        "other bits",
                        f"{what}: rank {rank} at step {number}",
                    )
        for path in sorted((folder / "run").glob("step-*")):
            with offload.open_checkpoint(path) as checkpoint:
                report = checkpoint.verify()
            self.tally.counts["checkpoints verified"] += 1
            self.tally.require(report.ok, "damaged", f"{what}: {path.name}: {report}")

    def _check_ended(self, ended: Sequence[Rank], what: str) -> None:
        for rank, one in enumerate(ended):
            self.tally.require(one.status is not None, "hung", f"{what}: rank {rank}")

    def _until_resumed(self, job: Job) -> None:
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline and not all(
            len(job.outcomes(rank)) >= len(_RESUMED) for rank in range(self.num_ranks)
        ):
            time.sleep(_POLL_S)

    def _new(self, name: str, *, begins: bool) -> Path:
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if not begins:
            shutil.copytree(self._prepared / "run", folder / "run")
        return folder

    def _calls(self, *, begins: bool) -> Calls:
        return [["open"], *([] if begins else [["restore"]]), ["step"], *_SEAL, *_SEAL]

    def _start(
        self,
        folder: Path,
        rank: int,
        label: str,
        action: str,
        victims: Sequence[int],
        *,
        begins: bool,
        outlives: bool,
    ) -> Job:
        calls = [
            [
                ["say_pid"],
                ["at_step", label if number == rank else "", action, [*victims]],
                *self._calls(begins=begins),
            ]
            for number in range(self.num_ranks)
        ]
        case = dict(self._case)
        if outlives:
            # It serves until it is collected, when the next job has one.
            self._store, case["store_port"] = _serve_keys()
        return self._jobs.start(folder, calls, **case)


def _has_resumed(rank: Rank) -> bool:
    first = rank.outcomes[: len(_RESUMED)]
    return len(first) == len(_RESUMED) and not any(one["error"] for one in first)


def _serve_keys() -> tuple[Store, int]:
    """Return a key-value store for one job, and its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in the stubs

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store.port


def _acknowledged(rank: Rank) -> int:
    """Return the newest step that a rank knew to be durable; 0 if there was none."""
    known = [one["value"] for one in rank.outcomes if one["call"] in ("result", "sealed")]
    return max((step for step in known if step is not None), default=0)
