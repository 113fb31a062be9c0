"""Operations of a training loop: the same code for both sides.

Each takes a side and an operation, and returns what is to be compared.
"""

from __future__ import annotations

import copy
import ctypes
import io
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.fuzz.program import Operation
from tests.fuzz.sides import Side, ambient


class Planned(Exception):
    """Raised by a program on purpose."""


def loss_of(side: Side, args: dict[str, Any], seed: int) -> Tensor:
    """Compute a loss in training mode, on one of the ways through the model."""
    model = side.model
    x, target = model.batch(seed)
    fails = args.get("fails")
    if args["path"] == "loss":
        loss = model.loss(x, target)
    elif args["path"] == "encode":
        loss = model.encode(x).square().mean()
    else:
        loss = (model(x, args.get("recompute")) - target).square().mean()
    return loss * args.get("scale", 1.0) if fails != "scaled" else loss


def _fail_in(side: Side, where: str) -> Any:
    def stop(*_: Any) -> None:
        raise Planned(where)

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
                    raise Planned("closure")
                return backward(side, args, op.seed)

            seen.append(steps(side, args, closure))
        else:
            for n in range(args["micro"]):
                seen.append(backward(side, args, op.seed + n))
            seen.append(steps(side, args))
    except Planned:
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


def way(side: Side, path: str, seed: int) -> Tensor:
    """Compute something with the model, on one of many ways through it."""
    model = side.model
    x, target = model.batch(seed)
    if path == "encode":
        return model.encode(x)
    if path == "loss":
        return model.loss(x, target)
    if path == "block":
        kind = model.shape["blocks"][-1][1]
        hidden = torch.randn(2, 3, model.shape["width"], generator=torch.Generator().manual_seed(seed))
        return model.blocks[-1](hidden.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind)))
    if path == "penalty":
        return model.penalty()
    if path == "head":
        width = model.shape["width"]
        return functional.linear(torch.ones(2, width, dtype=model.head.weight.dtype), model.head.weight)
    if path == "functional":
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        return torch.func.functional_call(model, values, (x,), tie_weights=True)
    if path == "tail":
        return model.late(torch.ones(1, model.late.in_features, dtype=model.late.weight.dtype))
    return model(x)


def evaluate(side: Side, op: Operation) -> Any:
    """Compute something without a backward."""
    modes: dict[str, Any] = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    side.model.train(op.args["mode"] == "train")
    with modes[op.args["grad"]]():
        return way(side, op.args["path"], op.seed).detach().clone()


def look(side: Side, op: Operation) -> Any:
    """Read parameters in one of the ways that people do it."""
    how, model = op.args["how"], side.model
    if how == "state_dict":
        return {name: value.clone() for name, value in model.state_dict().items()}
    if how == "numpy":
        return [torch.from_numpy(p.detach().float().numpy().copy()) for p in model.parameters()]
    if how == "dlpack":
        return [torch.utils.dlpack.from_dlpack(p.detach()).clone() for p in model.parameters()]
    if how == "data":
        return [p.data.clone() for p in model.parameters()]
    if how == "norm":
        return torch.stack([p.detach().float().norm() for p in model.parameters()])
    if how == "vector":
        return torch.nn.utils.parameters_to_vector(p.float() for p in model.parameters()).detach()
    if how == "deepcopy" and "parametrised" not in {name for name, _ in model.shape["blocks"]}:
        twin = copy.deepcopy(model).eval()
        with torch.no_grad():
            return twin(model.batch(op.seed)[0])
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return dict(torch.load(buffer, weights_only=True))


@torch.no_grad()
def edit(side: Side, op: Operation) -> None:
    """Change parameters, as people do between steps."""
    side.settle()
    how, model = op.args["how"], side.model
    some = [p for n, p in enumerate(model.parameters()) if (n + op.seed) % 3 == 0]
    if how == "add":
        for parameter in some:
            parameter.add_(0.01)
    elif how == "data":
        for parameter in some:
            parameter.data = parameter.data * 1.01 if op.seed % 2 else parameter.data.clone()
    elif how == "clamp":
        for parameter in model.parameters():
            parameter.clamp_(-0.05, 0.05)
    elif how == "load":
        state = {k: v * 0.99 if v.is_floating_point() else v for k, v in model.state_dict().items()}
        model.load_state_dict(state, assign=False)
    elif how == "assign":
        for parameter in some:
            if parameter.numel():
                parameter.view(-1)[0:1].fill_(0.125) if parameter.is_contiguous() else None
    elif how == "negative_zero":
        for parameter in some:
            parameter.mul_(-0.0)
    elif how == "nan" and some and some[0].numel() and op.seed % 5 == 0:
        some[0].fill_(float("nan"))


def freeze(side: Side, op: Operation) -> None:
    """Freeze a block, with or without a gradient left behind."""
    side.settle()
    for parameter in side.model.blocks[op.args["block"] % len(side.model.blocks)].parameters():
        parameter.requires_grad_(False)
        if op.args["gradient"] is None:
            parameter.grad = None
        elif op.args["gradient"] == "ones" and side.overlap != "backward":
            parameter.grad = torch.ones_like(parameter)


def unfreeze(side: Side, op: Operation) -> None:
    """Unfreeze a block."""
    side.settle()
    for parameter in side.model.blocks[op.args["block"] % len(side.model.blocks)].parameters():
        parameter.requires_grad_(True)


def hyper(side: Side, op: Operation) -> Any:
    """Change a hyper-parameter by hand."""
    for optimizer in side.optimizers:
        for group in optimizer.param_groups:
            if op.args["key"] in group:
                group[op.args["key"]] = group[op.args["key"]] * op.args["factor"]
    return side.hyper()


def add_group(side: Side, op: Operation) -> None:
    """Give the late layer to the first optimizer, if it has not been given yet."""
    if side.config["late"] and not side.late[0]:
        side.settle()
        with ambient(op.args["ambient"] if side.ours else None):
            side.optimizers[0].add_param_group(side.late_group())
        side.late[0] = True


def fork(side: Side, op: Operation) -> Any:
    """Evaluate in a forked process."""
    if torch.get_num_threads() > 1:
        return None
    side.synchronize()
    side.model.eval()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with torch.no_grad():
                result = way(side, op.args["path"], op.seed).float().contiguous()
            os.write(writing, ctypes.string_at(result.data_ptr(), result.numel() * 4))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    return answer, os.waitpid(child, 0)[1]


def loader(side: Side, op: Operation) -> Any:
    """Read batches from workers that are forked."""
    batches = [side.model.batch(n) for n in range(3)]
    loaded = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=1)  # type: ignore[arg-type]
    side.model.eval()
    with torch.no_grad():
        return [side.model(x) for x, _ in loaded]


def threads(side: Side, op: Operation) -> Any:
    """Call the model on two threads at once, only to read."""
    side.model.eval()
    results: list[Any] = [None, None]

    def call(n: int) -> None:
        try:
            with torch.no_grad():
                results[n] = way(side, op.args["path"], op.seed + n)
        except BaseException as error:  # noqa: BLE001 - is compared
            results[n] = repr(error)

    running = [threading.Thread(target=call, args=(n,)) for n in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return results


def average(side: Side, op: Operation) -> Any:
    """Keep an exponential average of the model, or go on from it."""
    if "parametrised" in {name for name, _ in side.model.shape["blocks"]}:
        return None
    side.settle()
    if side.average is None:
        function = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        side.average = torch.optim.swa_utils.AveragedModel(side.model, multi_avg_fn=function)
    side.average.update_parameters(side.model)
    if op.args["what"] == "swap":
        with torch.no_grad():
            pairs = zip(side.model.parameters(), side.average.module.parameters(), strict=True)
            for parameter, mean in pairs:
                parameter.copy_(mean)
    return [p.detach().clone() for p in side.average.module.parameters()]


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
        *(train, accumulate, step, zero_grad, evaluate, look, edit, freeze, unfreeze, hyper),
        *(add_group, fork, loader, threads, average, grad, saliency),
    )
}
