"""Interrupts; and the table of operations on both sides."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.fuzz import loops, readers, stores
from tests.fuzz.compare import FindingError, require_same
from tests.fuzz.interrupts import interrupted
from tests.fuzz.program import Operation
from tests.fuzz.sides import Ours, Plain
from tests.fuzz.stores import Pair, bring_back


def interrupt(pair: Pair, op: Operation) -> None:
    """Ctrl-C at a counted moment of something, after a checkpoint; then `restore`."""
    for side in (pair.plain, pair.ours):
        side.settle()
    if any(pair.plain.steps[i] in pair.plain.pins[i].values() for i in pair.numbers()):
        return  # sealing that step anew is refused
    for side in (pair.plain, pair.ours):
        for i in pair.numbers():
            side.checkpoint(i, None, True)
    action = op.args["action"]
    plain_train = Operation(
        "train",
        op.seed,
        {
            "micro": 1,
            "clip": None,
            "zero": "none",
            "path": "call",
            "recompute": None,
            "closure": False,
            "fails": None,
            "ambient": None,
            "scale": 1.0,
        },
    )

    def act(side: Plain | Ours) -> None:
        torch.manual_seed(op.seed)
        if action == "train":
            loops.train(side, plain_train)
        elif action == "evaluate":
            readers.evaluate(
                side,
                Operation("evaluate", op.seed, {"mode": "eval", "grad": "no_grad", "path": "call"}),
            )
        for i in pair.numbers():
            if action in ("train", "checkpoint"):
                side.checkpoint(i, None, True)
            elif action == "restore":
                side.restore(i, None)
            elif action == "state":
                side.state(i)

    fired: list[int] = []
    log = len(pair.ours.log)
    try:
        with interrupted(op.args["at"]) as fired:
            act(pair.ours)
    except KeyboardInterrupt:
        pass
    torch.set_grad_enabled(True)
    before = [dict(snapshots) for snapshots in pair.plain.snapshots]
    act(pair.plain)
    if not fired:
        return
    for side in (pair.plain, pair.ours):
        del side.log[log:]
        loops.zero(side, "none")
        side.model.zero_grad()
        if side.scaler:  # one that was left between unscale_() and update() is torch's own trap
            side.scaler = side.make_scaler()
    for i in pair.numbers():
        bring_back(pair, i, None, None, interrupted=True)
        step = pair.plain.newest[i]
        if step in before[i] and not (same_model(pair) and same_extra(pair)):
            # The second seal of this step (its update was skipped) had not ended.
            pair.plain.snapshots[i][step] = before[i][step]
            pair.plain.restore(i, step)


def same_model(pair: Pair) -> bool:
    """Return whether parameters and buffers are the same on both sides."""
    try:
        require_same("model", pair.plain.look(), pair.ours.look())
    except FindingError:
        return False
    return True


def same_extra(pair: Pair) -> bool:
    """Return whether schedulers and scaler are the same on both sides."""
    try:
        require_same("extra", pair.plain.extra(), pair.ours.extra())
    except FindingError:
        return False
    return True


STORES: dict[str, Callable[[Pair, Operation], None]] = {
    function.__name__: function
    for function in (
        *(stores.checkpoint, stores.restore, stores.reopen, stores.pin, stores.unpin),
        *(stores.reference, stores.load_full, stores.materialized, stores.state, stores.read),
        interrupt,
    )
}
