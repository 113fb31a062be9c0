"""Ranks that are killed at every step of a re-cut, and the job that goes on after them.

A re-cut begins when a store is opened by another number of ranks than have written it, and ends
when the first checkpoint of the new ranks is sealed and the one before it is withdrawn. Gradients
are given, so the bits of every step are those of one process that nobody disturbs.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import offload
from bench._ranks_jobs import Tally
from tests.ranks_training.rank_server import Job, Jobs, Rank

Calls = list[list[Any]]

WIDTHS: Final = (40, 60, 50, 30)
"""Layers of about 7,000 elements together, so that there are several chunks of 4 KiB."""

_WAIT_S: Final = 150.0
_TRIES: Final = 5
_GROUP_TIMEOUT_S: Final = 15.0
_SEAL: Final[Calls] = [["step"], ["checkpoint"], ["result"]]
_GO_ON: Final[Calls] = [["restore"], ["whole"], ["step"], ["whole"]]
_FIRST: Final = 3
"""Step of the newest checkpoint that the former ranks have made."""

_LAST: Final = _FIRST + 2
"""Last step of the ranks that are killed."""


@dataclass(frozen=True)
class Change:
    """Former and new ranks."""

    before: int
    before_kind: str
    after: int
    after_kind: str
    directories: tuple[str, ...] = ("run",)
    """Names of the store's directories, the first one first."""

    @property
    def label(self) -> str:
        """The change in words."""
        where = f", in {len(self.directories)} directories" if self.directories[1:] else ""
        return f"{self.before} {self.before_kind} -> {self.after} {self.after_kind}{where}"

    @property
    def opening(self) -> list[Any]:
        """The call that opens the store."""
        several = {"directory": [*self.directories]}
        return ["open", several] if self.directories[1:] else ["open"]


CHANGES: Final = (
    Change(4, "ddp", 2, "ddp"),
    Change(1, "one", 3, "fsdp2"),
)


class KilledRecuts:
    """One change of ranks, with what parameters are after each step.

    Args:
        jobs: Server of ranks.
        folder: New folder for everything.
        change: The change.
        timeout_s: Seconds without a sign of progress after which a rank counts as lost.
    """

    def __init__(self, jobs: Jobs, folder: Path, change: Change, timeout_s: float) -> None:
        self.tally = Tally()
        self.change = change
        self._jobs, self._folder, self._timeout_s = jobs, folder, timeout_s
        plain = folder / "undisturbed"
        plain.mkdir(parents=True)
        calls: Calls = [["open"], ["whole"], *[["step"], ["whole"]] * (_LAST + 1)]
        (rank,) = self._succeed(plain, 1, "one", calls, is_plain=True)
        self._values = [one["value"] for one in rank.outcomes if one["call"] == "whole"]
        self._prepared = folder / "prepared"
        self._prepared.mkdir()
        self._succeed(
            self._prepared, change.before, change.before_kind, [change.opening, *_SEAL * _FIRST]
        )

    def labels(self) -> list[tuple[int, str]]:
        """Return the steps of a re-cut that nobody disturbs, as ranks and labels."""
        calls: Calls = [["at_step", "", "kill"], *self._calls(), ["steps_seen"]]
        folder = self._new()
        ended = self._succeed(folder, self.change.after, self.change.after_kind, calls)
        found = [
            (rank, label)
            for rank, one in enumerate(ended)
            for label in one.of("steps_seen")["value"]
        ]
        shutil.rmtree(folder)
        return found

    def victims(self) -> list[tuple[int, ...]]:
        """Return the sets of ranks to kill: rank 0, another one, and all."""
        if self.change.after == 1:
            return [(0,)]
        return [(0,), (1,), tuple(range(self.change.after))]

    def kill_at(self, rank: int, label: str, victims: Sequence[int], *, goes_back: bool) -> None:
        """Kill ranks before a rank takes a step of the re-cut, and start a job that goes on.

        Args:
            rank: The rank that takes the step.
            label: The step.
            victims: Ranks that are killed.
            goes_back: Whether the former number of ranks goes on, instead of the new one.
        """
        what = f"{self.change.label}, {victims} killed before rank {rank} takes {label!r}"
        for _ in range(_TRIES):
            folder = self._new()
            ended = self._start(folder, rank, label, victims).wait(_WAIT_S)
            killed = [number for number, one in enumerate(ended) if one.status == -signal.SIGKILL]
            if killed:
                break
            # Some steps are not taken by every job, such as signs of progress in a quick exchange.
            self.tally.counts["jobs without the step"] += 1
        self.tally.counts["trials"] += 1
        self.tally.require(killed == [*victims], "not reached", f"{what}: {killed} were killed")
        hung = [number for number, one in enumerate(ended) if one.status is None]
        self.tally.require(not hung, "hung", f"{what}: ranks {hung}")
        durable = max(_FIRST, *map(_acknowledged, ended))
        for one in ended:
            self._compare(one, what)
        change = self.change
        if goes_back:
            self._go_on(folder, change.before, change.before_kind, durable, what)
        else:
            self._go_on(folder, change.after, change.after_kind, durable, what)
        shutil.rmtree(folder)

    def _go_on(self, folder: Path, num: int, kind: str, durable: int, what: str) -> None:
        """Go on after the kill, with the former number of ranks or with the new one."""
        calls = [self.change.opening, *_GO_ON, ["checkpoint"], ["result"], ["close"]]
        again = self._run(folder, num, kind, calls)
        self.tally.counts["restarts"] += 1
        for number, one in enumerate(again):
            failed = [o["message"] for o in one.outcomes if o["error"]]
            self.tally.require(
                one.status == 0 and not failed,
                "restarts that failed",
                f"{what}: rank {number} of {num} ended with {one.status}, {failed}",
            )
        if any(one.status or one.failed() for one in again):
            return
        steps = [(one.of("restore")["value"] or [0])[0] for one in again]
        self.tally.counts["resumed"] += 1
        self.tally.require(len({*steps}) == 1, "different steps", f"{what}: {steps}")
        self.tally.require(
            min(steps) >= durable, "lost", f"{what}: step {durable} was durable, not {steps}"
        )
        for one in again:
            self._compare(one, what)
        first, *others = (folder / name for name in self.change.directories)
        for path in sorted(first.glob("step-*")):
            with offload.open_checkpoint(path, parts=others or None) as checkpoint:
                report = checkpoint.verify()
            self.tally.counts["checkpoints verified"] += 1
            self.tally.require(report.ok, "damaged", f"{what}: {path.name}: {report}")

    def _compare(self, rank: Rank, what: str) -> None:
        """Compare what parameters were after each step with the run that nobody disturbed."""
        step = 0
        for outcome in rank.outcomes:
            if outcome["error"]:
                return
            if outcome["call"] == "restore":
                step = (outcome["value"] or [0])[0]
            elif outcome["call"] == "step":
                step += 1
            elif outcome["call"] == "whole":
                self.tally.counts["bits compared"] += 1
                same = outcome["value"] == self._values[step]
                self.tally.require(same, "other bits", f"{what}: after step {step}")

    def _calls(self) -> Calls:
        """Return the calls of a re-cut, in which all former checkpoints are withdrawn."""
        return [self.change.opening, ["restore"], *_SEAL * (_LAST - _FIRST)]

    def _new(self) -> Path:
        folder = self._folder / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in self.change.directories:
            shutil.copytree(self._prepared / name, folder / name)
        return folder

    def _start(self, folder: Path, rank: int, label: str, victims: Sequence[int]) -> Job:
        calls = [
            [
                ["say_pid"],
                ["at_step", label if number == rank else "", "kill", [*victims]],
                *self._calls(),
            ]
            for number in range(self.change.after)
        ]
        case = {"timeout_s": self._timeout_s, "group_timeout_s": _GROUP_TIMEOUT_S}
        return self._jobs.start(folder, calls, **_case(self.change.after_kind), **case)

    def _run(self, folder: Path, num: int, kind: str, calls: Calls, **more: Any) -> list[Rank]:
        limits = {"timeout_s": _WAIT_S, "group_timeout_s": _WAIT_S}
        ended: list[Rank] = self._jobs.run(folder, [calls] * num, **_case(kind), **limits, **more)
        return ended

    def _succeed(self, folder: Path, num: int, kind: str, calls: Calls, **more: Any) -> list[Rank]:
        ended = self._run(folder, num, kind, calls, **more)
        if any(rank.status or rank.failed() for rank in ended):
            raise RuntimeError(f"{self.change.label}: an undisturbed job failed: {ended}")
        return ended


def _case(kind: str) -> dict[str, Any]:
    return {"given": True, "kind": kind, "widths": WIDTHS}


def _acknowledged(rank: Rank) -> int:
    """Return the newest step that a rank knew to be durable; 0 if there was none."""
    known = [one["value"] for one in rank.outcomes if one["call"] == "result"]
    return max((step for step in known if step is not None), default=0)
