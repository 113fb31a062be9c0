"""Whether the kernels give the bits of torch's own step on a device, found by trying both there.

No table says for which versions of torch, of the compiler and of the driver the kernels are right.
When a form is first needed in a process, some thousand elements are stepped by its kernel and by
torch's code, on the device. A form with compressed state is represented by the form that stores the
same state as FP32, because torch's step has no other: what is compared is the arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from offload.ambient import in_neutral
from offload.device.compute import Compute
from offload.device.kernels.forms import Form
from offload.device.kernels.launches import DeviceRun
from offload.format.arrays import MASTER
from offload.update.pool import BlockContext
from offload.update.rules import UpdateRule

_ELEMENTS = 16 << 10
_STEP = 8

_ADAM: tuple[dict[str, Any], ...] = (
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    {"lr": 3e-2, "betas": (0.3, 0.95), "eps": 1e-6, "weight_decay": 0.0, "maximize": True},
)
_SGD: tuple[dict[str, Any], ...] = (
    {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"lr": 1e-1, "momentum": 0.8, "dampening": 0.3, "maximize": True},
)
_PLAIN_SGD: tuple[dict[str, Any], ...] = (
    {"lr": 1e-1, "weight_decay": 0.01},
    {"lr": 1e-1, "maximize": True},
)

_found: WeakKeyDictionary[Compute, dict[tuple[Any, ...], str]] = WeakKeyDictionary()
"""Result for each form, class and step function, by device."""


def why_not_trusted(compute: Compute, rule: UpdateRule, form: Form) -> str:
    """Return how a form of the kernel differs from torch's own step; empty if it does not.

    The first call for a form compiles it and waits for the device. It must be called outside of
    `Compute.queue`.
    """
    master = "own" if form.live == torch.float32 else "float32"
    checked = replace(form, master=master, state="float32")
    found = _found.setdefault(compute, {})
    # A program may replace the step function of a class, and the replacement is checked anew.
    key = (checked, rule.optimizer_class, rule.optimizer_class.step)
    if key not in found:
        found[key] = _difference(compute, rule, checked)
        if found[key]:
            logging.getLogger("offload").warning("%s", found[key])
    return found[key]


def step_by_torch(
    context: BlockContext,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    group: Mapping[str, Any],
) -> None:
    """Run torch's step number `_STEP` on FP32 tensors of the device, in place."""
    # torch's fused step keeps its count on the device, and all others keep it on the host.
    device = parameter.device if group["fused"] else torch.device("cpu")
    count = torch.full((), _STEP - 1.0, dtype=torch.float32, device=device)
    given = {**state, "step": count} if "exp_avg" in state else dict(state)
    context.stepper.apply(parameter, gradient, given, group)


@in_neutral
def _difference(compute: Compute, rule: UpdateRule, form: Form) -> str:
    compute.prepare(form)
    differ = 0
    for group in _groups(rule, form):
        differ += _num_different(compute, rule, form, group)
    if not differ:
        return ""
    return (
        f"the kernel of {rule.optimizer_class.__name__}"
        f"{' with fused=True' if form.arithmetic == 'fused' else ''} does not give the bits of "
        f"torch {torch.__version__} on {compute.device}"
    )


def _groups(rule: UpdateRule, form: Form) -> list[dict[str, Any]]:
    given = _ADAM if form.rule != "sgd" else _SGD if form.num_moments else _PLAIN_SGD
    fused = form.arithmetic == "fused"
    flags: dict[str, Any] = {"fused": True if fused else None, "foreach": None if fused else True}
    if form.rule != "sgd":
        flags["amsgrad"] = form.num_moments == 3
        flags["decoupled_weight_decay"] = form.rule == "adamw"
    return [{**rule.defaults, **group, **flags} for group in given]


def _num_different(compute: Compute, rule: UpdateRule, form: Form, group: Mapping[str, Any]) -> int:
    """Step the same values by the kernel and by torch, and return how many results differ."""
    generator = torch.Generator("cpu").manual_seed(20260101)

    def random(least: float, most: float) -> torch.Tensor:
        """Return FP32 values of both signs with such logarithms, some of them zeros."""
        out = torch.empty(2, _ELEMENTS, dtype=torch.float32, device="cpu")
        size = out[0].uniform_(least, most, generator=generator).exp_()
        values = out[1].normal_(generator=generator).mul_(size)
        values[::7] = 0
        return values

    master = random(-6, 2)
    gradient = random(-12, 2).to(form.gradient)
    moments = {name: random(-12, 0) for name in form.moments}
    for name in form.moments[1:]:
        moments[name].abs_()
    sources = [master, master.to(form.live), gradient, gradient.float(), *moments.values()]
    with compute.queue(()):
        given = [_sent(compute, source) for source in sources]
        ours = [_sent(compute, source) for source in (master, *moments.values())]
        parameter, live, gradient_there, gradient_32, *state = given
        arrays = dict(zip(form.moments, ours[1:], strict=True))
        if form.master == "own":
            live = ours[0]
        else:
            arrays[MASTER] = ours[0]
        run = DeviceRun(live=[live], gradients=[gradient_there], arrays=arrays, first_elements=[0])
        compute.update(rule.optimizer_class, group, run, step=_STEP, factors=())
        context = BlockContext(rule, compute.empty)
        named = dict(zip(form.moments, state, strict=True))
        step_by_torch(context, parameter, gradient_32, named, group)
        pairs = list(zip(ours, (parameter, *state), strict=True))
        fetched = [(compute.fetch(one), compute.fetch(other)) for one, other in pairs]
        fetched_live = compute.fetch(live)
        done = compute.mark()
        compute.wait(done)
    fetched.append((fetched_live.float(), fetched[0][1].to(form.live).float()))
    return sum(
        int((one.view(torch.int32) != other.view(torch.int32)).sum()) for one, other in fetched
    )


def _sent(compute: Compute, source: torch.Tensor) -> torch.Tensor:
    """Queue a copy of a host tensor to new memory of the device."""
    into = compute.empty(source.numel(), source.dtype)
    compute.send(source, into)
    return into
