"""What one rank alone refuses beside the forward: a step, the content of a checkpoint, a seal.

`tests.ranks_training.rank_server` runs the functions of `CALLS` on every rank. All of them end
with a step, and say what differs from plain training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.numerics.test_overlap_forward_waits import when_waiting
from tests.ranks_training.beside import TwoTrainings, run_functions
from tests.ranks_training.program import local


def error_of(call: Callable[[], object]) -> str:
    """Return the class and the message of the error that a call raises; empty if it raises none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        return f"{type(error).__name__}: {error}"
    return ""


def train_on(run: TwoTrainings, step: int, rank: int) -> dict[str, Any]:
    """Take a step, seal it, and return what is sealed and what differs from plain training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a seal that failed
        run.both(step)
    sealed = run.optimizer.checkpoint({"step": step, "rank": rank}).result().step
    found = {"sealed": sealed, "different": run.different()}
    run.optimizer.close()
    return found


def refused_step(
    folder: Path, rank: int, *, victim: int, sealed: bool, what: str = "gradient", **changes: Any
) -> dict[str, Any]:
    """Let one rank refuse a step.

    Args:
        folder: Folder of the run.
        rank: Number of this rank.
        victim: Rank that refuses.
        sealed: Whether a checkpoint is made before, so that the ranks first agree on a slot.
        what: What the rank refuses: a ``gradient`` that is sparse.
        changes: Changes of the case.
    """
    run = TwoTrainings(folder, rank, 2, **changes)
    if sealed:
        run.optimizer.checkpoint({"step": 2}).result()
    for training in (run.plain, run.live):
        training.backward(3)
    if rank == victim:
        for parameter in run.live.model.parameters():
            gradient = parameter.grad
            if gradient is not None and gradient is local(gradient):
                parameter.grad = gradient.to_sparse()
            elif gradient is not None:
                gradient._local_tensor = gradient._local_tensor.to_sparse()
    found = {"error": error_of(run.optimizer.step)}
    for training in (run.plain, run.live):
        training.model.zero_grad()
    return found | train_on(run, 4, rank)


def refused_content(
    folder: Path, rank: int, *, victim: int, bad: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """Let one rank refuse the content of a checkpoint while the step still runs on all of them.

    The step moves the state to another slot, so the slot that it has is not written any more.
    """
    run = TwoTrainings(folder, rank, 2, **changes)
    run.optimizer.checkpoint({"step": 2}).result()
    run.step_held(3)
    if rank == victim:
        when_waiting(run, run.gate.release)  # type: ignore[arg-type]
        how = bad or {"train_state": {"step": 3}, "metrics": {"loss": "a text"}}
    else:
        how = {"train_state": {"step": 3}, "metrics": {"loss": 0.5}}

    def seal() -> None:
        handle = run.optimizer.checkpoint(**how)
        run.gate.release()
        handle.result()

    found = {"error": error_of(seal)}
    found["again"] = error_of(run.optimizer.synchronize)
    return found | train_on(run, 4, rank)


def refused_seal(folder: Path, rank: int, *, victim: int, **changes: Any) -> dict[str, Any]:
    """Let a seal that was asked for amid a step not begin on one rank when the step has ended."""
    run = TwoTrainings(folder, rank, 2, **changes)
    run.step_held(3)
    handle = run.optimizer.checkpoint({"step": 3})
    run.gate.fails_opening = rank == victim
    run.gate.release()
    found = {"error": error_of(handle.result)}
    run.gate.fails_opening = False
    found["then"] = [error_of(run.optimizer.synchronize) for _ in range(2)]
    return found | train_on(run, 4, rank)


CALLS: dict[str, Callable[..., dict[str, Any]]] = {
    "refused_step": refused_step,
    "refused_content": refused_content,
    "refused_seal": refused_seal,
}


def run_calls(
    folder: Path, rank: int, size: int, called: Sequence[Sequence[Any]], setting: dict[str, Any]
) -> None:
    """Make the calls of a rank, and record what came of each; see `calls.run_calls`."""
    del size, setting
    run_functions(CALLS, folder, rank, called)
