"""What people do with a model between steps: evaluate, look at parameters, change them, fork.

The same code for both sides. Each takes a side and an operation, and returns what to compare.
"""

from __future__ import annotations

import copy
import ctypes
import io
import os
import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.fuzz.program import Operation
from tests.fuzz.sides import Side, ambient


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
        hidden = torch.randn(
            2, 3, model.shape["width"], generator=torch.Generator().manual_seed(seed)
        )
        return model.blocks[-1](
            hidden.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind))
        )
    if path == "penalty":
        return model.penalty()
    if path == "head":
        width = model.shape["width"]
        return functional.linear(
            torch.ones(2, width, dtype=model.head.weight.dtype), model.head.weight
        )
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
