"""Calls in which the N-th operation of one rank fails once, for every N; for `Calls.do`.

All ranks say what came of a call before the next one begins, so each of them knows whether all have
failed, or none.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch.distributed as dist

from tests.crash.fault_backend import Kind
from tests.ranks_training.calls import Calls

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
    if time.monotonic() - started > limit_s / 2:
        said = f"WAITED {said}"
    return said


def everyone(said: Any) -> list[Any]:
    """Return what each rank says."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    return found


def trials(
    calls: Calls, kind: Kind, victim: int, call: Callable[[], Any]
) -> Iterator[tuple[int, list[str], bool]]:
    """Make a call again and again, with the next operation of a kind failing each time.

    Args:
        calls: The rank.
        kind: Kind of the operations.
        victim: Rank on which they fail.
        call: The call.

    Yields:
        Number of the operation, what came of the call on each rank, and whether it has failed on
        some ranks only, or none has waited.
    """
    for nth in range(1, MOST):
        if calls.rank == victim:
            calls.backend.num_failed = 0
            calls.backend.fail(kind, nth, forever=False)
        said = everyone(tried(call, calls.setting.timeout_s))
        fired = everyone(calls.backend.num_failed)[victim]
        calls.backend.repair()
        if not fired:
            return
        agree = all(said) or not any(said)
        yield nth, said, agree and not any("WAITED" in one for one in said)
    raise RuntimeError(f"{kind} never ended")


def opening(calls: Calls, victim: int, *, looks: bool) -> list[Any]:
    """Open the store; return the trials that went wrong, and the number of all.

    Args:
        calls: The rank.
        victim: Rank on which an operation fails.
        looks: Whether it is one that looks for a file; there are many. Otherwise it is another one.
    """
    wrong: list[Any] = []
    num = 0
    for kind in [kind for kind in get_args(Kind) if looks is (kind == "stat")]:
        for nth, said, is_right in trials(calls, kind, victim, calls.open):
            num += 1
            if not is_right:
                wrong.append([kind, nth, said])
            if calls.optimizer is not None:
                calls.optimizer.close()
                calls.optimizer = None
        if calls.optimizer is not None:
            calls.optimizer.close()
            calls.optimizer = None
    return [wrong, num]


def restoring(calls: Calls, victim: int, step: int) -> list[Any]:
    """Restore; return the trials that went wrong, and the number of all."""
    wrong: list[Any] = []
    num = 0
    for kind in get_args(Kind):
        for nth, said, is_right in trials(calls, kind, victim, calls.restore):
            num += 1
            after = everyone(tried(calls.restore, calls.setting.timeout_s))
            steps = everyone(calls.num_steps)
            if not is_right or any(after) or set(steps) != {step}:
                wrong.append([kind, nth, said, after, steps])
    return [wrong, num]
