"""What tests ask ranks to do, and what they look at afterwards.

One set of ranks plays many cases, one after the other, each in a folder and with a model of its
own: see `run_cases`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.limits import UNREACHED_AGREEMENT_S
from tests.ranks_training.rank_server import Jobs, Rank

Calls = list[list[Any]]

SEAL: Calls = [["checkpoint"], ["result"]]
ROUND: Calls = [["step"], *SEAL]
BEGIN: Calls = [["open"], *ROUND]
AGAIN: Calls = [["open"], ["restore"], *ROUND]

Case = tuple[Sequence[Calls], dict[str, Any]]
"""Calls of each rank, and what is special about their setting."""


def do(where: str, *arguments: Any) -> list[Any]:
    """Return the call of a function ``module:name`` of this folder on a rank."""
    return ["do", f"tests.ranks_training.{where}", *arguments]


def on(host: str, *directories: str, **how: Any) -> Calls:
    """Return the calls with which a rank on a host opens its directories."""
    return [["host", host], ["open", {"directory": list(directories or [host]), **how}]]


def opened(*directories: str, **how: Any) -> list[Any]:
    """Return the call that opens directories beside each other."""
    return ["open", {"directory": list(directories), **how}]


def run_all(jobs: Jobs, folder: Path, calls: Sequence[Calls], **case: Any) -> list[Rank]:
    """Run ranks, which must all succeed."""
    folder.mkdir(exist_ok=True)
    ranks = jobs.run(folder, calls, **case)
    require_success(ranks)
    return ranks


def require_success(ranks: Sequence[Rank]) -> None:
    """Check that no call has failed on any rank."""
    failed = [
        (number, one["call"], one["message"])
        for number, rank in enumerate(ranks)
        for one in rank.outcomes
        if one["error"]
    ]
    assert not failed, failed
    for rank in ranks:
        assert rank.has_come_to_its_end, rank.errors[-3000:]


def run_cases(
    jobs: Jobs, folder: Path, cases: Mapping[str, Case], **case: Any
) -> dict[str, list[Rank]]:
    """Let one set of ranks play cases, in none of which a rank waits for the agreement limit.

    Args:
        jobs: Server of ranks.
        folder: Folder of the test; each case has the folder of its name in it.
        cases: Calls of each rank by the name of the case. A name like ``x/2`` goes on in the
            folder of ``x``, with new models.
        case: Setting of all cases.

    Returns:
        By case what each rank has done in it.
    """
    folder.mkdir(exist_ok=True)
    size = len(next(iter(cases.values()))[0])
    made: list[Calls] = [[] for _ in range(size)]
    for name, (calls, setting) in cases.items():
        for own, played in zip(made, calls, strict=True):
            own += [["begin", name.partition("/")[0], setting], *played]
    ranks = jobs.run(folder, made, **{"timeout_s": UNREACHED_AGREEMENT_S, **case})
    found: dict[str, list[Rank]] = {name: [] for name in cases}
    for rank in ranks:
        assert rank.has_come_to_its_end, (rank.outcomes[-3:], rank.errors[-3000:])
        starts = [n for n, one in enumerate(rank.outcomes) if one["call"] == "begin"]
        parts = zip(starts, [*starts[1:], len(rank.outcomes)], strict=True)
        for name, (start, stop) in zip(cases, parts, strict=True):
            assert not rank.outcomes[start]["error"], rank.outcomes[start]
            part = rank.outcomes[start + 1 : stop]
            found[name].append(Rank(rank.status, part, rank.errors))
    return found


def in_memory(num_steps: int, size: int = 2, **setting: Any) -> Case:
    """Return the case of the same training in memory, which says the bits after each step."""
    return [[["open"], *[["step"]] * num_steps]] * size, {**setting, "is_plain": True}


def of_each(ranks: Sequence[Rank], call: str) -> list[Any]:
    """Return the last value of a call on each rank."""
    return [rank.of(call)["value"] for rank in ranks]


def values(rank: Rank, call: str) -> list[Any]:
    """Return all values of a call."""
    return [one["value"] for one in rank.outcomes if one["call"] == call]


def errors(rank: Rank) -> list[dict[str, Any]]:
    """Return the calls of a rank that failed."""
    return [one for one in rank.outcomes if one["error"]]


def refused(jobs: Jobs, folder: Path, calls: Sequence[Calls], **case: Any) -> list[str]:
    """Run ranks whose last call must fail on all of them; return the messages."""
    ranks = jobs.run(folder, calls, **case)
    assert all(rank.has_come_to_its_end for rank in ranks), [rank.errors for rank in ranks]
    assert all(rank.outcomes[-1]["error"] for rank in ranks), [rank.outcomes for rank in ranks]
    return [rank.outcomes[-1]["message"] for rank in ranks]


def names(folder: Path) -> list[str]:
    """Return the owners and checkpoints in all directories of a test."""
    found = [*folder.glob("*/owner-*"), *folder.glob("*/step-*")]
    return sorted(str(path.relative_to(folder)) for path in found)


def contents(folder: Path) -> dict[Path, bytes]:
    """Return all files of checkpoints and parts."""
    return {path: path.read_bytes() for path in folder.rglob("*/*.*") if path.is_file()}


def newest(store: Path) -> Path:
    """Return the newest checkpoint of a store."""
    return max(store.glob("step-*"))


def durable(ranks: Sequence[Rank]) -> int:
    """Return the newest step that a rank has seen sealed in `train`; at least 1."""
    return max((step for rank in ranks for step in values(rank, "sealed")), default=1)


def compare(
    jobs: Jobs, folder: Path, trainings: Sequence[str], size: int, *, beside: bool = False
) -> None:
    """Let ranks do trainings in memory and with state on storage; fail if they differ.

    Args:
        jobs: Server of ranks.
        folder: Folder of the test.
        trainings: Trainings as ``module:class``; see `tests.ranks_training.trainings`.
        size: Number of ranks.
        beside: Whether steps run beside the forward.
    """
    cases: dict[str, Case] = {
        name: ([[[*do("trainings:compare_here", name), {"beside": beside}]]] * size, {})
        for name in trainings
    }
    for name, ranks in run_cases(jobs, folder, cases, kind="").items():
        require_success(ranks)
        assert of_each(ranks, "do") == [[]] * size, name
