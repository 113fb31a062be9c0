"""Any operation of one rank fails once while ranks open a store, or restore: all raise, or none.

All ranks say what came of a call before the next one begins, so each of them knows whether all have
failed, or none.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch.distributed as dist

from tests.crash.fault_backend import Kind
from tests.limits import UNREACHED_AGREEMENT_S
from tests.ranks_training.calls import Calls
from tests.ranks_training.cases import BEGIN, do, run_all
from tests.ranks_training.rank_server import Jobs

MOST = 300
"""Number of trials of a kind after which something must be wrong."""


def tried(call: Callable[[], Any], limit_s: float) -> str:
    """Return the error of a call in words; empty if it succeeds. It must not wait for the limit."""
    started = time.monotonic()
    said = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as error:  # noqa: BLE001  (all ranks look at it)
            said = f"{type(error).__name__}: {error}"
    return f"WAITED {said}" if time.monotonic() - started > limit_s / 2 else said


def everyone(said: Any) -> list[Any]:
    """Return what each rank says."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    return found


def trials(
    calls: Calls, victim: int, kinds: list[Kind], call: Callable[[], Any], after: Callable[[], Any]
) -> Iterator[tuple[Any, bool]]:
    """Make a call again and again; each time the next operation of a kind fails on one rank.

    Yields what came of the call on each rank, and whether all have failed, or none, and at once.
    """
    for kind in kinds:
        for nth in range(1, MOST):
            if calls.rank == victim:
                calls.backend.num_failed = 0
                calls.backend.fail(kind, nth, forever=False)
            said = everyone(tried(call, calls.setting.timeout_s))
            fired = everyone(calls.backend.num_failed)[victim]
            calls.backend.repair()
            after()
            if not fired:
                break
            agree = all(said) or not any(said)
            yield [kind, nth, said], agree and not any("WAITED" in one for one in said)
        else:
            raise RuntimeError(f"{kind} never ended")


def opening(calls: Calls, victim: int, looks: bool) -> list[Any]:
    """Open the store; return the trials that went wrong, and the number of all.

    There are many operations that look for a file; they fail if ``looks``, or all others do.
    """

    def close() -> None:
        if calls.optimizer is not None:
            calls.optimizer.close()
            calls.optimizer = None

    kinds = [kind for kind in get_args(Kind) if looks is (kind == "stat")]
    found = [*trials(calls, victim, kinds, calls.open, close)]
    return [[said for said, is_right in found if not is_right], len(found)]


def restoring(calls: Calls, victim: int) -> list[Any]:
    """Restore; return the trials that went wrong, and the number of all."""
    found: list[Any] = []

    def again() -> None:
        found.append([everyone(tried(calls.restore, calls.setting.timeout_s))])
        found[-1].append(everyone(calls.num_steps))

    made = [*trials(calls, victim, [*get_args(Kind)], calls.restore, again)]
    wrong = [said for said, is_right in made if not is_right]
    wrong += [one for one in found if any(one[0]) or {*one[1]} != {1}]
    return [wrong, len(made)]


def require_right(jobs: Jobs, folder: Path, kind: str, *calls: list[Any]) -> None:
    """Check what the calls of ranks say of their trials, and that all go on."""
    run_all(jobs, folder, [[*BEGIN, ["close"]]] * 3, kind=kind)
    then = [[*calls, ["restore"], ["step"]]] * 3
    for rank in run_all(jobs, folder, then, kind=kind, timeout_s=UNREACHED_AGREEMENT_S):
        wrong, num = rank.of("do")["value"]
        assert wrong == []
        assert num > 4
        assert rank.of("restore")["value"][0] == 1


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_opening(jobs: Jobs, tmp_path: Path, victim: int, *, looks: bool) -> None:
    require_right(
        jobs, tmp_path, "ddp", do("test_every_operation:opening", victim, looks), ["open"]
    )


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("victim", [0, 2])
def test_restoring(jobs: Jobs, tmp_path: Path, kind: str, victim: int) -> None:
    """What fails once in reading is no damage: the checkpoint is restored by the next call."""
    require_right(jobs, tmp_path, kind, ["open"], do("test_every_operation:restoring", victim))
