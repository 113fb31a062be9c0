"""Classes that somebody writes for a program of their own: the bits of the class, or a refusal.

Each row is a class with one habit: what it counts and where it keeps the count, what it looks at
besides the gradient, what it replaces, and what it does late. `EXACT` says that a refusal would be
wrong, `NEVER` that the class needs more than one element, or more than state; otherwise both the
bits of the class and a refusal are right. `UNSEEN` are limits: the warning that a class is untested
is all that one is told. See `tests.torch_contract.itself` for the oracle.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.torch_contract.itself import ITS_BITS, REFUSED, USUAL, Case, outcome

Tensor = torch.Tensor
USED_IN_TEXTS = (SimpleNamespace, deque, np, os, random, time)


class Base(torch.optim.Optimizer):
    """Momentum, whose parts rows replace."""

    def __init__(self, params: Any, lr: float = 0.05, wd: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, "wd": wd, **more})
        self.kept = self.keep([p for g in self.param_groups for p in g["params"]])

    def keep(self, parameters: list[Tensor]) -> Any:
        """Return what the constructor keeps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.begin()
        for g in self.param_groups:
            self.group(g)
            for p in g["params"]:
                if p.grad is not None:
                    self.one(g, p, self.state[p])

    def begin(self) -> None:
        """Do what comes first in a step."""

    def group(self, g: dict[str, Any]) -> None:
        """Do what comes first in a group."""

    def one(self, g: dict[str, Any], p: Tensor, s: dict[str, Any]) -> None:
        s["step"] = s.get("step", 0) + 1
        m = s.setdefault("m", zeros(p))
        m.lerp_(p.grad, 0.1)
        p.add_(m, alpha=-g["lr"] * self.scale(g, p, s))

    def scale(self, g: dict[str, Any], p: Tensor, s: dict[str, Any]) -> float:
        return 1.0


EXACT, EITHER, NEVER = {ITS_BITS}, {ITS_BITS, REFUSED}, {REFUSED}
UNSEEN: set[str] = set()
ROWS: list[Any] = []


def row(name: str, right: set[str], case: Case = USUAL, keep: str = "", **habits: Any) -> None:
    """Add a class that has some methods of its own, given as text.

    Args:
        name: Name of the row.
        right: Outcomes that are right.
        case: The training program.
        keep: What the constructor keeps, given the parameters as ``ps``.
        habits: Methods, given ``o`` (the optimizer), ``g`` (a group), ``p`` and ``s`` (its state).
    """
    signatures = {"begin": "o", "group": "o, g", "one": "o, g, p, s", "scale": "o, g, p, s"}
    for method, given in signatures.items():
        if method in habits:
            parts = habits[method].replace("; ", ", ")
            habits[method] = eval(f"lambda {given}: ({parts})", globals())
    cls = type(name.title().replace(" ", ""), (Base,), habits)
    if keep:
        cls.keep = eval(f"lambda o, ps: {keep}", globals())
    limit = pytest.mark.xfail(strict=True, reason="a trial with shapes of its own cannot see it")
    marks = () if right else limit
    ROWS.append(pytest.param(cls, right or NEVER, case, id=name, marks=marks))


def add(d: Any, key: Any, more: Any = 1) -> Any:
    """Add to an entry of a dictionary, and return it."""
    d[key] = d.get(key, 0) + more
    return d[key]


def grow(o: Any, name: str) -> Any:
    """Count in an attribute, and return it."""
    setattr(o, name, getattr(o, name, 0) + 1)
    return getattr(o, name)


def done(*_: Any) -> float:
    """Return the factor 1, when something has been done."""
    return 1.0


def zeros(p: Tensor, **options: Any) -> Tensor:
    return torch.zeros_like(p, **options)


def bias(count: float) -> float:
    return 1 / (1 - 0.9**count)


def alive(g: dict[str, Any]) -> list[Tensor]:
    return [p for p in g["params"] if p.grad is not None]


def grads(g: dict[str, Any]) -> list[Tensor]:
    return [p.grad for p in alive(g)]


def everything(o: torch.optim.Optimizer) -> list[Tensor]:
    return [p for g in o.param_groups for p in alive(g)]


def norm(parameters: list[Tensor], order: float = 2.0) -> float:
    norms = [p.grad.norm(order) for p in parameters]
    return max(1e-20, float(torch.stack(norms).norm(order))) if norms else 1e-20


def mark(net: torch.nn.Module) -> None:
    """Give an attribute to a parameter, as muP does."""
    net[0].weight.lr_mult = 0.1
    COUNTS.clear()


def transpose(net: torch.nn.Module) -> None:
    """Lay out a parameter by columns."""
    net[0].weight = torch.nn.Parameter(net[0].weight.detach().t().contiguous().t())


COUNTS: dict[str, int] = {}
MARKED = Case(prepare=mark)
LONG = Case(steps=70)

# fmt: off
# What a class has at its first step, and may keep as state
row("weight decay", EXACT, group="[p.mul_(1 - g['lr'] * g['wd']) for p in alive(g)]")
row("step as a tensor", EXACT, scale="bias(float(s.setdefault('t', torch.tensor(0.0)).add_(1)))")
row("step as a float", EXACT, scale="bias(add(s, 't', 1.0))")
row("one tensor for the step of all", EITHER,
    scale="bias(float(s.setdefault('t', vars(o).setdefault('t', torch.tensor(0.0))).add_(1)))")
row("a list", EITHER, scale="s.setdefault('l', [0]).append(1) or len(s['l'])")
row("a key that is no text", EITHER, scale="bias(add(s, 7))")
for _dtype in (torch.bfloat16, torch.bool):
    row(f"state in {_dtype}", EITHER,
        scale=f"done(p.add_(s.setdefault('x', zeros(p, dtype={_dtype})).add_(1), alpha=1e-3))")
row("state under a key of its own", EITHER, group="add(o.state['all'], 'n')",
    scale="bias(o.state['all']['n'])")
row("the gradient itself as state", EITHER,
    scale="done(p.add_(s.get('last', p.grad), alpha=-0.01), s.update(last=p.grad))")
row("the parameter itself as state", EITHER,
    scale="done(p.add_(s.get('me', p), alpha=-0.01).sub_(s.setdefault('me', p), alpha=0.02))")
row("the initial parameter", EITHER, scale="done(p.lerp_(s.setdefault('anchor', p.clone()), 0.1))")
row("the norm of the first step", NEVER,
    scale="1 / (1 + s.setdefault('norm', float(p.grad.norm())))")
row("means of rows", NEVER, scale="float(s.setdefault('rows', p.grad.mean(-1)).abs().sum())")

# State that is replaced, deleted, or made late
row("state that is replaced", EITHER,
    one="o.state.update({p: {'m': s.get('m', zeros(p)) * 0.9 + p.grad}});"
        " p.add_(o.state[p]['m'], alpha=-g['lr'])")
row("a tensor that is bound anew", EXACT,
    one="s.update(m=s.get('m', zeros(p)) * 0.9 + p.grad); p.add_(s['m'], alpha=-g['lr'])")
row("all state replaced", EITHER, begin="setattr(o, 'state', o.state.copy())")
row("state deleted every ten steps", EITHER, scale="done(s['step'] % 10 or s.pop('m'))")
row("all state cleared", EITHER, begin="grow(o, 'n') % 10 or o.state.clear()")
for _late in (5, 60):
    row(f"state from step {_late}", EITHER, case=LONG,
        scale=f"done(s['step'] < {_late} or p.lerp_(s.setdefault('slow', p.clone()), 0.3))")
row("slow weights every sixth step", EITHER,
    scale="done(s.setdefault('lag', p.clone()), s['step'] % 6 or p.copy_(s['lag'].lerp_(p, 0.5)))")

# Counters elsewhere
row("a counter of the group", EXACT, group="add(g, 'step')", scale="bias(g['step'])")
row("a counter of the group as a tensor", EITHER,
    group="g.setdefault('step', torch.tensor(0.0)).add_(1)", scale="bias(float(g['step']))")
row("a counter of parameters in the group", NEVER, scale="1 / add(g, 'n')")
row("a list of the group, changed in place", EITHER, case=Case(arguments={"b": [0.5, [0.9]]}),
    group="g['b'][1].__setitem__(0, g['b'][1][0] * 0.99)", scale="g['b'][1][0]")
row("a history of the group", EITHER, group="g.setdefault('h', []).append(g['lr'])",
    scale="sum(g['h'][-3:]) / g['lr'] / 3")
row("a learning rate that decays", EITHER, group="g.update(lr=g['lr'] * 0.97)")
row("a counter on itself", EITHER, begin="grow(o, 'n')", scale="bias(o.n)")
row("a counter of parameters on itself", NEVER, scale="bias(grow(o, 'n'))")
row("a counter on itself that shows after days", NEVER, begin="grow(o, 'n')",
    scale="0.5 if o.n > 1_000_000 else 1.0")
row("a counter in an object of its own", EITHER,
    begin="grow(vars(o).setdefault('its', SimpleNamespace()), 'n')", scale="bias(o.its.n)")
row("the first step is another", EITHER,
    begin="setattr(o, 'warm', 0.1 if vars(o).setdefault('warm', None) is None else 1.0)",
    scale="o.warm")
row("a flag for the first step", EITHER, keep="[True]", begin="o.kept.pop() if o.kept else 0",
    group="len(o.kept)", scale="1.0")
row("a counter on the class", NEVER, case=MARKED, begin="grow(type(o), 'n')", scale="bias(o.n)")
row("a counter in a global", NEVER, case=MARKED, begin="add(COUNTS, 'n')",
    scale="bias(COUNTS['n'])")
row("a dictionary by id", EITHER, begin="vars(o).setdefault('mine', {})",
    scale="bias(add(o.mine, id(p)))")
row("tensors in a dictionary of its own", EITHER, begin="vars(o).setdefault('t', {})",
    scale="done(p.sub_(o.t.setdefault(p, zeros(p)).add_(p.grad), alpha=1e-3))")
row("a tensor as attribute of the parameter", NEVER,
    scale="done(p.sub_(vars(p).setdefault('buffer', zeros(p)).add_(p.grad), alpha=1e-3))")
row("the last five norms", NEVER,
    begin="vars(o).setdefault('d', deque(maxlen=5)).append(norm(everything(o)))",
    scale="1 / (1 + max(o.d))")

# What else it looks at
row("an attribute of parameters", EITHER, case=MARKED, scale="getattr(p, 'lr_mult', 1.0)")
row("the attributes of parameters", UNSEEN, case=MARKED, scale="1.0 + len(vars(p))")
row("whether it is a Parameter", EITHER, scale="1.0 if isinstance(p, torch.nn.Parameter) else 2.0")
row("an option of the user's", EITHER, case=Case(options={"lr_scale": 0.5}),
    scale="g.get('lr_scale', 1.0)")
row("whether the gradient is sparse", EXACT,
    scale="2.0 if p.grad.is_sparse or p.grad.is_complex() else 1.0")
row("more than a million elements", NEVER, case=Case(width=25_000, steps=4),
    scale="0.5 if p.numel() > 1_000_000 else 1.0")
row("a product of the shape", NEVER, scale="1.0 if np.prod(p.shape) > 1500 else 0.5")
row("the shape's own count", UNSEEN, scale="1.0 if p.shape.numel() > 15_000 else 0.5",
    case=Case(width=400, steps=20))
row("more than five thousand columns", UNSEEN, scale="1.0 if max([1, *p.shape]) > 5000 else 0.5",
    case=Case(width=6000, steps=4))
row("the number of dimensions", NEVER, scale="1.0 / p.dim()")
row("the strides", NEVER, case=Case(prepare=transpose), scale="0.5 if p.stride(-1) > 1 else 1.0")
row("the number in the group", NEVER, group="g.update(o=[id(p) for p in g['params']])",
    scale="1.0 / (1 + g['o'].index(id(p)))")
row("the first group", NEVER, scale="0.5 if g is o.param_groups[0] else 1.0")
row("the learning rate of its defaults", EITHER, scale="o.defaults['lr']")
row("an element by its place", NEVER, scale="done(p.view(-1)[0].mul_(0.99))")

# What looks at more than one element, perhaps only late or at large norms
row("clips each", NEVER, scale="min(1.0, 1e8 / norm([p]))")
row("clips groups", NEVER, group="g.update(c=min(1.0, 1e-3 / norm(alive(g))))", scale="g['c']")
row("clips all", NEVER, begin="setattr(o, 'c', min(1.0, 1e4 / norm(everything(o))))", scale="o.c")
row("clips values", EXACT, scale="done(p.sub_(p.grad.clamp(-1e3, 1e3)))")
row("skips steps with spikes", NEVER, scale="float(p.grad.abs().max() < 1e7)")
row("skips what is not finite", NEVER, case=Case(spoiled=44),
    one="p.grad.isfinite().all() and p.sub_(p.grad, alpha=g['lr'])")
for _late in (4, 60):
    row(f"a trust ratio after step {_late}", NEVER,
        scale=f"1.0 if s['step'] <= {_late} else float(p.norm() / (1e-09 + p.grad.norm()))")
row("the mean gradient is taken off", NEVER, scale="done(p.add_(p.grad.mean(), alpha=0.01))")

# Random numbers and clocks
row("noise", NEVER, scale="done(p.add_(torch.randn_like(p), alpha=1e-4))")
row("late noise", NEVER, scale="done(s['step'] < 20 or p.add_(torch.randn_like(p), alpha=1e-4))")
row("noise of its own generator", NEVER,
    begin="vars(o).setdefault('r', torch.Generator().manual_seed(3))",
    scale="done(p.add_(torch.randn(p.shape, generator=o.r), alpha=1e-4))")
row("a coin of Python", NEVER, scale="1.0 if random.random() > 0.05 else 2.0")
row("a draw that is not used", NEVER, scale="done(torch.rand(1))")
row("a coin of the system", NEVER, scale="1.0 + os.urandom(1)[0] // 128")
row("the time since it was made", NEVER,
    scale="1.0 + (time.monotonic() - vars(o).setdefault('t0', time.monotonic()))")

# What it does with parameters and gradients
row("gradients that it clears", EITHER, case=Case(clears=False),
    one="p.sub_(p.grad, alpha=g['lr']); p.grad.zero_()")
row("gradients that it takes away", EITHER, case=Case(clears=False),
    one="p.sub_(p.grad, alpha=g['lr']); setattr(p, 'grad', None)")
row("a gradient that is bound anew", EITHER,
    one="setattr(p, 'grad', p.grad * 2); p.sub_(p.grad, alpha=g['lr'])")
row("data that is bound anew", EITHER, one="setattr(p, 'data', p.data - g['lr'] * p.grad)")
row("memory that is set", EITHER, one="p.set_(p - g['lr'] * p.grad)")
row("through NumPy", EITHER, one="np.subtract(p.numpy(), 0.5 * p.grad.numpy(), out=p.numpy())")
row("through a list in groups", EITHER, group="g.update(ps=alive(g))",
    scale="float(any(p is q for q in g['ps']))")
row("foreach", EXACT, one="None",
    group="alive(g) and torch._foreach_sub_(alive(g), grads(g), alpha=g['lr'])")
row("the numbers of gradients", NEVER, scale="1.0 / len(everything(o))")

# Constructors and other methods
for _overlap in ("forward", "backward"):
    row(f"a counter of the group beside the {_overlap}", EXACT, group="add(g, 'step')",
        scale="bias(g['step'])", case=Case(settings={"overlap": _overlap}, missing=False))
row("a counter of a group that joins", EITHER, group="add(g, 'step')", scale="bias(g['step'])",
    case=Case(joins=30))
row("the loss of a closure", NEVER, case=Case(closure=True),
    step=lambda o, closure=None: Base.step(setattr(o, "kept", closure and float(closure())) or o),
    scale="o.kept or 1.0")
row("the number of all elements", NEVER, keep="sum(p.numel() for p in ps)", scale="100 / o.kept")
row("its learning rate on itself", EITHER, keep="o.defaults['lr']", scale="o.kept / g['lr']")
row("initial parameters as state", EITHER,
    keep="[o.state[p].update(a=p.detach().clone()) for p in ps]",
    scale="done(p.lerp_(s['a'], 0.1))")
row("a hook that counts", EITHER, keep="o.register_step_post_hook(lambda *_: grow(o, 'n'))",
    scale="1 / (1 + getattr(o, 'n', 0))")
row("a zero_grad that keeps a part", EITHER,
    zero_grad=lambda o, **_: [p.grad.mul_(0.5) for p in everything(o)])
row("a state dict with more", EITHER, begin="grow(o, 'n')", scale="bias(o.n)",
    state_dict=lambda o: {**Base.state_dict(o), "n": o.n},
    load_state_dict=lambda o, d: (setattr(o, "n", d["n"]), Base.load_state_dict(o, d)))
row("another method after nine steps", EITHER,
    begin="None if grow(o, 'n') < 9 else setattr(o, 'scale', lambda g, p, s: 0.5)")
# fmt: on


@pytest.mark.parametrize(("cls", "right", "case"), ROWS)
def test_its_bits_or_a_refusal(cls: type[Base], right: set[str], case: Case) -> None:
    found = outcome(cls, case)
    assert found.kind in right, found
