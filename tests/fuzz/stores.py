"""Operations on checkpoints and state, of which each side has a way of its own.

Each takes both sides and an operation, and compares by itself.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import offload
from offload import errors
from tests.fuzz import loops, readers
from tests.fuzz.compare import FindingError, require_same
from tests.fuzz.program import Operation
from tests.fuzz.sides import Ours, Plain, ambient


class Pair:
    """Both sides of a program."""

    def __init__(self, plain: Plain, ours: Ours) -> None:
        self.plain = plain
        self.ours = ours

    def numbers(self) -> range:
        """Return the numbers of the optimizers."""
        return range(len(self.ours.optimizers))

    def listed(self, i: int) -> list[int]:
        """Return the steps of the usable checkpoints of store `i`, newest first."""
        found = offload.list_checkpoints(self.ours.directories(i)[0])
        bad = [c for c in found if not c.valid]
        if bad:
            raise FindingError(f"not usable: {bad}")
        return [c.step for c in found][::-1]


def checkpoint(pair: Pair, op: Operation) -> None:
    """Seal, perhaps once more at the same step, and look at what the store then has."""
    args = op.args
    metrics = None if args["metric"] is None else {"loss": args["metric"]}
    for side in (pair.plain, pair.ours):
        for again in (None, args["again"])[: 2 if args["again"] else 1]:
            if again == "edited":
                readers.edit(side, Operation("edit", op.seed, {"how": "add"}))
            elif again == "forward":
                side.settle()
                side.model.train()
                torch.manual_seed(op.seed)
                with torch.no_grad():
                    side.model(side.model.batch(op.seed)[0])
            for i in pair.numbers():
                if pair.plain.steps[i] in pair.plain.pins[i].values():
                    continue  # if anything has changed, this is refused
                with ambient(args["ambient"] if side.ours else None):
                    side.checkpoint(i, metrics, args["wait"])
    if args["wait"]:
        for i in pair.numbers():
            listed, made = pair.listed(i), sorted(pair.plain.snapshots[i])[::-1]
            require_same("the newest checkpoint", made[0], listed[0])
            if set(listed) - set(made):
                raise FindingError(f"listed {listed}, made {made}")
            if pair.plain.alive[i] - set(listed):
                raise FindingError(f"listed {listed}, to be kept {pair.plain.alive[i]}")


def restore(pair: Pair, op: Operation) -> None:
    """Go back to one of the checkpoints that are there."""
    for side in (pair.plain, pair.ours):
        side.settle()
        loops.zero(side, "none" if op.args["zero"] else "skip")
    for i in pair.numbers():
        available = pair.listed(i)
        newest = pair.plain.newest[i]
        if newest is None:
            with ambient(op.args["ambient"]):
                require_same("restore() of an empty store", None, pair.ours.restore(i, None))
            continue
        wanted = available[op.args["back"] % len(available)]
        pins = {step for step in pair.plain.pins[i].values() if step > wanted}
        number = None if wanted == available[0] else wanted
        if pair.plain.snapshots[i][wanted]["late"] != pair.plain.late[i] or pins:
            kind = errors.PinError if pins else errors.MismatchError
            again = partial(pair.ours.restore, i, number)
            refused(again, kind, ambient=op.args["ambient"])
            continue
        bring_back(pair, i, number, op.args["ambient"])


def bring_back(
    pair: Pair, i: int, number: int | None, mode: str | None, *, interrupted: bool = False
) -> None:
    """Restore on both sides, whatever is frozen now."""
    newest = pair.plain.newest[i] if number is None else number
    with ambient(mode):
        step = pair.ours.restore(i, number)
    if step is not None and step not in pair.plain.snapshots[i]:
        raise FindingError(f"restore() gave {step}, made {sorted(pair.plain.snapshots[i])}")
    if number is not None:
        require_same("the step restored", number, step)
    elif not interrupted:
        require_same("the step restored", newest, step)
    pair.plain.restore(i, step)


def refused(call: Callable[[], Any], *kinds: type[BaseException], **args: Any) -> None:
    """Call, and require one of these errors, with words in it."""
    try:
        with ambient(args.get("ambient")):
            call()
    except kinds as error:
        if not str(error):
            raise FindingError(f"{type(error).__name__} without a word") from error
    else:
        raise FindingError(f"not refused: expected {[kind.__name__ for kind in kinds]}")


def reopen(pair: Pair, op: Operation) -> None:
    """Close, and construct everything anew, as another process would; with other options."""
    if op.args.get("close", True):
        pair.ours.close()
    else:  # closed by nobody: the store is let go of with the object, or with the process
        pair.ours.settle()
        pair.ours.close()
    pair.ours.options = dict(op.args["options"])
    for side in (pair.plain, pair.ours):
        side.overlap = op.args["options"]["overlap"]
        for i in pair.numbers():
            newest = pair.plain.newest[i]
            side.late[i] = newest is not None and pair.plain.snapshots[i][newest]["late"]
            if i == 0:
                side.frozen = side.config["frozen"]
                if newest is not None and op.args.get("close", True):
                    side.frozen = pair.plain.snapshots[i][newest]["frozen"]
        side.build()
    pair.ours.handles = [None for _ in pair.numbers()]
    for i in pair.numbers():
        bring_back(pair, i, None, op.args.get("ambient"))


def pin(pair: Pair, op: Operation) -> None:
    """Pin the newest checkpoint."""
    for i in pair.numbers():
        newest = pair.plain.newest[i]
        if newest is None:
            refused(partial(pair.ours.optimizers[i].pin, "a"), offload.OffloadError)
            continue
        with ambient(op.args.get("ambient")):
            pair.ours.optimizers[i].pin(op.args["name"])
        pair.plain.pins[i][op.args["name"]] = newest


def unpin(pair: Pair, op: Operation) -> None:
    """Remove a pin."""
    for i in pair.numbers():
        call = pair.ours.optimizers[i].unpin
        if pair.plain.pins[i].pop(op.args["name"], None) is None:
            refused(partial(call, op.args["name"]), offload.OffloadError)
        else:
            call(op.args["name"])


def reference(pair: Pair, op: Operation) -> None:
    """Save the reference, and load it where the optimizer is."""
    for optimizer in pair.ours.optimizers:
        with ambient(op.args["ambient"]):
            saved = optimizer.state_dict()
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        with ambient(op.args["ambient"]):
            optimizer.load_state_dict(loaded)


def load_full(pair: Pair, op: Operation) -> None:
    """Load a torch state dict: our own, or the one of plain torch with its masters."""
    if pair.ours.config["master"] == "split":
        return
    for side in (pair.plain, pair.ours):
        side.settle()
    for i, optimizer in enumerate(pair.ours.optimizers):
        if op.args["source"] == "ours":
            full = optimizer.full_state_dict()
        else:
            oracle = pair.plain.optimizers[i]
            full = copy.deepcopy(oracle.inner.state_dict())
            groups = zip(full["param_groups"], oracle.hyper(), strict=True)
            full["param_groups"] = [{**saved, **mine} for saved, mine in groups]
            full["num_steps"] = pair.plain.steps[i]
            full["master"] = {
                n: value
                for n, (p, value) in enumerate(zip(oracle.live(), oracle.effective(), strict=True))
                if p is not oracle.masters[p]
            }
        with ambient(op.args["ambient"]):
            optimizer.load_state_dict(full)
        pair.plain.optimizers[i].take_effective()


def materialized(pair: Pair, op: Operation) -> None:
    """Hold the state in memory for a while."""
    for i, optimizer in enumerate(pair.ours.optimizers):
        with ambient(op.args.get("ambient")), optimizer.materialized():
            held = {
                n: dict(optimizer.state[p])
                for n, p in enumerate(pair.ours.parameters(i))
                if p in optimizer.state
            }
        require_state("materialized()", pair.plain.state(i)["state"], held)


def require_state(what: str, plain: dict[Any, Any], ours: dict[Any, Any]) -> None:
    """Compare ``state`` of two state dicts; what torch has not made yet may be zeros."""
    for number in sorted({*plain, *ours}):
        if not ours.get(number) and plain[number].get("step", 1) == 0:
            continue  # torch makes it before the first step (Adagrad)
        for key in sorted({*plain.get(number, {}), *ours.get(number, {})}):
            a, b = plain.get(number, {}).get(key), ours.get(number, {}).get(key)
            if a is None and isinstance(b, torch.Tensor) and not b.any():
                continue
            if isinstance(a, torch.Tensor) and a.ndim == 0 and isinstance(b, (int, float)):
                a = a.item()
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.ndim == 0:
                b = b.to(a.dtype)  # torch makes it of the default dtype of that moment
            require_same(f"{what}: {key} of parameter {number}", a, b)


def state(pair: Pair, op: Operation) -> None:
    """Compare all FP32 state."""
    for i in pair.numbers():
        with ambient(op.args.get("ambient")):
            ours = pair.ours.state(i)
        plain = pair.plain.state(i)
        require_state("state", plain["state"], ours["state"])
        require_same("master", plain["master"], ours["master"])


def read(pair: Pair, op: Operation) -> None:
    """Read the newest checkpoint as another program would."""
    pair.ours.settle()
    for i in pair.numbers():
        newest = pair.plain.newest[i]
        if newest is None:
            continue
        snapshot = pair.plain.snapshots[i][newest]
        parameters = pair.plain.parameters(i)
        names = {p: name for name, p in pair.plain.model.named_parameters(remove_duplicate=True)}
        with offload.open_checkpoint(pair.ours.directories(i)[0]) as found:
            require_same("the step of the newest checkpoint", newest, found.step)
            if op.args["verify"] and not found.verify().ok:
                raise FindingError("verify() of a good checkpoint finds damage")
            if not pair.ours.config["model"] or snapshot["late"] != pair.plain.late[i]:
                continue
            for n, parameter in enumerate(parameters):
                if not parameter.requires_grad or random.Random(op.seed + n).random() < 0.5:
                    continue
                try:
                    arrays = offload.read_state(found, names[parameter])
                except offload.OffloadError:
                    continue  # it was frozen when that was sealed
                require_same("read_state", snapshot["optimizer"]["effective"][n], arrays["master"])
