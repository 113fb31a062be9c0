"""Forward, backward and step: the same code for both sides.

Each takes a side and an operation, and returns what is to be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import readers
from tests.fuzz.program import Operation
from tests.fuzz.sides import Side, ambient


class PlannedError(Exception):
    """Raised by a program on purpose."""


def loss_of(side: Side, args: dict[str, Any], seed: int) -> Tensor:
    """Compute a loss in training mode, on one of the ways through the model."""
    model = side.model
    x, target = model.batch(seed)
    if args["path"] == "loss":
        loss = model.loss(x, target)
    elif args["path"] == "encode":
        loss = model.encode(x).square().mean()
    else:
        loss = (model(x, args.get("recompute")) - target).square().mean()
    return loss * args.get("scale", 1.0)


def _fail_in(side: Side, where: str) -> Any:
    def stop(*_: Any) -> None:
        raise PlannedError(where)

    if where == "forward":
        return side.model.blocks[-1].register_forward_hook(stop)
    return side.model.blocks[0].register_full_backward_hook(stop)


def backward(side: Side, args: dict[str, Any], seed: int) -> Tensor:
    """Take one forward and backward."""
    loss = loss_of(side, args, seed)
    (side.scaler.scale(loss) if side.scaler else loss).backward()
    return loss.detach().clone()


def _clip(side: Side, kind: str, optimizer: Any) -> Any:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if kind == "value":
        torch.nn.utils.clip_grad_value_(parameters, 0.01)
        return None
    return torch.nn.utils.clip_grad_norm_(parameters, 0.1)


def _scaled_step(side: Side, i: int, clip: str | None) -> Any:
    """Step with a scaler; the oracle unscales FP32 gradients of the masters where one is fp16."""
    optimizer, scaler = side.optimizers[i], side.scaler
    live = side.parameters(i)
    half = any(p.grad is not None and p.grad.dtype == torch.float16 for p in live)
    if all(p.grad is None for p in live):
        return None  # torch's scaler asserts that it has seen a gradient
    norm = None
    if side.ours:
        if clip == "norm":
            norm = scaler.clip_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
    elif half:
        untouched = [master.detach().clone() for master in optimizer.masters.values()]
        inner = optimizer.prepare()
        kept = {p: p.grad.clone() for p in live if p.dtype == torch.float32 and p.grad is not None}

        def announce(*_: Any) -> None:
            for hook in optimizer._optimizer_step_pre_hooks.values():
                hook(optimizer, (), {})

        before = inner.register_step_pre_hook(announce)
        if clip == "norm":
            scaler.unscale_(inner)
            masters = [p for group in inner.param_groups for p in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(masters, 0.1)
        taken: list[int] = []
        handle = inner.register_step_post_hook(lambda *_: taken.append(1))
        scaler.step(inner)
        handle.remove()
        before.remove()
        if not taken:  # a step that is skipped takes no edits in
            with torch.no_grad():
                for master, value in zip(optimizer.masters.values(), untouched, strict=True):
                    master.copy_(value)
        if taken:
            optimizer.publish()
        for parameter, gradient in kept.items():  # unscaled in place: ours stay scaled
            parameter.grad = gradient
        for hook in optimizer._optimizer_step_post_hooks.values() if taken else ():
            hook(optimizer, (), {})
        side.steps[i] += len(taken)  # type: ignore[attr-defined]
        if taken:
            side.after_step(i)
        scaler.update()
        return norm
    else:
        if clip == "norm":
            scaler.unscale_(optimizer)
            norm = _clip(side, clip, optimizer)
        taken = []
        handle = optimizer.register_step_post_hook(lambda *_: taken.append(1))
        scaler.step(optimizer)
        handle.remove()
        side.steps[i] += len(taken)  # type: ignore[attr-defined]
        if taken:
            side.after_step(i)
    scaler.update()
    return norm


def steps(side: Side, args: dict[str, Any], closure: Callable[[], Tensor] | None = None) -> Any:
    """Step every optimizer, clipping before it."""
    seen = []
    if len(side.optimizers) > 1:
        side.settle()  # the step of one changes what the other's checkpoint is copying: refused
    for i, optimizer in enumerate(side.optimizers):
        clip = args.get("clip") if side.overlap != "backward" else None
        if side.scaler:
            seen.append(_scaled_step(side, i, clip))
            continue
        if clip and closure is None:
            seen.append(_clip(side, clip, optimizer))
        with ambient(args.get("ambient") if side.ours and closure is None else None):
            result = optimizer.step(closure) if closure and i == 0 else optimizer.step()
        seen.append(result.detach().clone() if isinstance(result, Tensor) else result)
        if not side.ours:
            side.steps[i] += 1  # type: ignore[attr-defined]
            side.after_step(i)
    return seen


def zero(side: Side, how: str) -> None:
    """Clear gradients, in one of the ways that people do it."""
    if how == "skip":
        return
    if how == "model":
        side.model.zero_grad()
        return
    for optimizer in side.optimizers:
        optimizer.zero_grad(set_to_none=how == "none")


def train(side: Side, op: Operation) -> Any:
    """Forward, backward and step; or a part of that, and an error."""
    args = dict(op.args)
    if side.overlap == "backward":
        args.update(micro=1, closure=False)
        args["fails"] = args["fails"] if args["fails"] == "forward" else None
    side.model.train()
    fails = args["fails"]
    if fails == "closure" and not args["closure"]:
        fails = None
    hook = _fail_in(side, fails) if fails in ("forward", "backward") else None
    seen: list[Any] = []
    try:
        if args["closure"] and len(side.optimizers) == 1 and not side.scaler:

            def closure() -> Tensor:
                side.optimizers[0].zero_grad()
                if fails == "closure":
                    raise PlannedError("closure")
                return backward(side, args, op.seed)

            seen.append(steps(side, args, closure))
        else:
            seen += [backward(side, args, op.seed + n) for n in range(args["micro"])]
            seen.append(steps(side, args))
    except PlannedError:
        seen.append("planned")
    finally:
        if hook is not None:
            hook.remove()
    if "planned" in seen:
        zero(side, "none")
        return seen
    for scheduler in side.schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(float(op.seed % 7))
        else:
            scheduler.step()
    zero(side, args["zero"])
    return seen


def accumulate(side: Side, op: Operation) -> Any:
    """Forward and backward, and no step."""
    if side.overlap == "backward":
        return None
    side.model.train()
    return backward(side, op.args, op.seed)


def step(side: Side, op: Operation) -> Any:
    """Step with whatever gradients there are."""
    return steps(side, op.args)


def zero_grad(side: Side, op: Operation) -> None:
    """Clear gradients."""
    zero(side, "none" if op.args["to_none"] else "zero")


def grad(side: Side, op: Operation) -> Any:
    """Ask for gradients without `backward`."""
    side.model.train()
    loss = loss_of(side, {"path": "call"}, op.seed)
    wanted = [p for p in side.model.parameters() if p.requires_grad]
    if not wanted:
        return None
    found = torch.autograd.grad(loss, wanted, create_graph=op.args["create"], allow_unused=True)
    return [None if g is None else g.detach().clone() for g in found]


def saliency(side: Side, op: Operation) -> Any:
    """Take a backward for the gradient of the input, and throw those of parameters away."""
    if side.model.shape["tokens"] or (side.model.shape["dtype"] == "fp16" and side.scaler):
        return None
    zero(side, "none")
    side.model.train(op.args["training"])
    x, target = side.model.batch(op.seed)
    x.requires_grad_(True)
    (side.model(x) - target).square().mean().backward()
    zero(side, "none")
    side.model.zero_grad()
    return x.grad


LOOPS: dict[str, Callable[[Side, Operation], Any]] = {
    function.__name__: function
    for function in (
        *(train, accumulate, step, zero_grad, grad, saliency),
        *(readers.evaluate, readers.look, readers.edit, readers.freeze, readers.unfreeze),
        *(readers.hyper, readers.add_group, readers.fork, readers.threads),
    )
}
