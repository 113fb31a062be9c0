"""One step of an optimizer by the kernels of a device: one launch for many pieces of parameters.

All pieces of a chunk that share hyper-parameters and dtypes are one run. A group without a kernel
is stepped by torch's own step, if its state is stored as FP32. A form of the kernel is compared
with torch's own step, on the device, when a process first needs it: no table says for which
versions of torch, of the compiler and of the driver it is right. Compressed state is represented by
FP32 state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.autograd.graph import increment_version

from offload.ambient import in_neutral
from offload.device.compute import Compute
from offload.device.kernels.forms import (
    KERNEL_DTYPES,
    MAX_FACTORS,
    Form,
    form_for,
    moment_names,
    why_no_kernel,
)
from offload.device.kernels.update import DeviceRun
from offload.device.staging import FlatTensors
from offload.errors import UnsupportedOptimizerError
from offload.format.arrays import MASTER, MASTER_LOW
from offload.format.chunk_plan import Piece
from offload.update.dtypes import DTYPES
from offload.update.pool import BlockContext
from offload.update.probe import wide_values
from offload.update.rules import UpdateRule
from offload.update.step_code import Block, Call, LoadedChunk, PieceNumbers, StepCode, blocks, runs
from offload.update.step_keys import StepInputs, StepKeys

_Numbers = np.ndarray[Any, Any]


class DeviceStep(StepCode):
    """The part of one step that the kernels of a device take."""

    def __init__(
        self,
        compute: Compute,
        rule: UpdateRule,
        keys: StepKeys,
        inputs: StepInputs,
        live: FlatTensors,
        gradients: FlatTensors,
    ) -> None:
        self._compute = compute
        self._class = rule.optimizer_class
        self._keys = keys
        self._layout = layout = inputs.layout
        self._parameters = inputs.parameters
        self._live = live
        self._gradients = gradients
        self._reasons = [why_not_by_kernel(rule, group, inputs.factors) for group in keys.groups]
        self.doubts: list[str] = []  # of kernels that torch's own step cannot replace
        self._prepare(rule, inputs)
        self._factors = inputs.factors
        self._is_rounded = layout.state_dtype == "bfloat16"
        moments = [n for n in moment_names(self._class) if n in layout.array_names]
        self._parameter_keys = inputs.rounding_keys(moments) if self._is_rounded else []

    def _prepare(self, rule: UpdateRule, inputs: StepInputs) -> None:
        """Compile all forms that the step needs, and compare them with torch's own step."""
        needed = {
            (
                spec.group,
                parameter.dtype,
                (parameter if gradient is None else gradient).dtype,
                tuple(spec.arrays),
            )
            for spec, parameter, gradient in zip(
                self._layout.parameters, inputs.parameters, inputs.gradients, strict=True
            )
        }
        split = MASTER_LOW in self._layout.array_names
        for group, live, gradient, names in sorted(needed, key=str):
            if self._reasons[group]:
                continue
            form = form_for(
                self._class,
                self._keys.groups[group],
                live=live,
                gradient=gradient if gradient in KERNEL_DTYPES else torch.float32,
                arrays={name: DTYPES[self._layout.formats[name].dtype] for name in names},
            )
            self._compute.prepare(form)
            doubt = why_not_trusted(self._compute, rule, form)
            options, dtype = self._keys.groups[group], self._layout.state_dtype
            if doubt and not why_not_by_torch(rule, options, dtype, split=split):
                self._reasons[group] = doubt
            elif doubt and doubt not in self.doubts:
                self.doubts.append(doubt)

    def why_not(self, group: int) -> str:
        """Return why no kernel can step a group; empty if one can."""
        return self._reasons[group]

    def calls(
        self, chunk: LoadedChunk, numbers: PieceNumbers
    ) -> tuple[Sequence[Call], PieceNumbers]:
        """Take the pieces with a gradient whose group has a kernel."""
        calls: list[Call] = []
        others: list[int] = []
        for key, run in runs(self._layout, chunk.number, self._keys.of, numbers):
            if key.has_gradient and not self._reasons[key.group]:
                calls += [partial(self._launch, b) for b in blocks(self._layout, chunk, key, run)]
            else:
                others += run
        return calls, np.array(others, dtype=np.int64)

    def _launch(self, block: Block, _: BlockContext) -> None:
        """Queue the step of one block."""
        key, pieces = block.key, block.pieces
        after = self._keys.scalars_after(key)
        count = next((int(value) for name, _, value in after if name == "step"), 1)
        for run in self._runs(block):
            self._compute.update(
                self._class,
                self._keys.groups[key.group],
                run,
                step=count,
                factors=self._factors,
            )
        increment_version([self._parameters[piece.parameter] for piece in pieces])
        self._live.finish(pieces)
        self._gradients.finish(pieces)

    def _runs(self, block: Block) -> Iterator[DeviceRun]:
        """Yield the pieces of a block, cut where the dtype of the gradients changes."""
        pieces, is_new = block.pieces, block.key.is_new
        live = self._live.views(pieces)
        gradients = [_for_kernel(gradient) for gradient in self._gradients.views(pieces)]
        origins = self._layout.rounding_starts
        firsts = [origins[piece.parameter] + piece.start for piece in pieces]
        ends = dict.fromkeys(block.stored, 0)
        for _, numbers in groupby(range(len(pieces)), lambda number: gradients[number].dtype):
            some = list(numbers)
            first, last = some[0], some[-1] + 1
            yield DeviceRun(
                live=live[first:last],
                gradients=gradients[first:last],
                arrays=self._cut(block, pieces[first:last], ends),
                first_elements=firsts[first:last],
                keys=partial(self._rounding_keys, pieces[first:last]) if self._is_rounded else None,
                is_new=is_new,
            )

    def _cut(
        self, block: Block, pieces: Sequence[Piece], ends: dict[str, int]
    ) -> dict[str, torch.Tensor]:
        """Return the stored values of some pieces, which come after the `ends` of those before."""
        if len(pieces) == len(block.pieces):
            return block.stored
        arrays = {}
        for name, stored in block.stored.items():
            # If a value stands for several elements, they are counted anew in each piece.
            of = self._layout.formats[name].block
            start = ends[name]
            ends[name] += sum(-(-(piece.stop - piece.start) // of) for piece in pieces)
            arrays[name] = stored[start : ends[name]]
        return arrays

    def _rounding_keys(
        self, pieces: Sequence[Piece], numbers: _Numbers, firsts: _Numbers
    ) -> list[_Numbers]:
        """Return the keys that the CPU would use for each moment; see `DeviceRun.keys`."""
        parameters = np.array([piece.parameter for piece in pieces], np.int64)[numbers]
        runs = np.stack([parameters, firsts, firsts + 1], axis=1)
        return [keys.of_runs(runs) for keys in self._parameter_keys]


def _for_kernel(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in a form that the kernels read; the same one if it has such a form."""
    if gradient.dtype not in KERNEL_DTYPES:
        gradient = gradient.to(torch.float32)
    return gradient.contiguous()


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

    It waits for the device, so it must be called outside of `Compute.queue`.
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
        """Return FP32 values of such magnitudes, some of them zeros."""
        values = wide_values(_ELEMENTS, generator, least, most)
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


def require_steppable(
    rule: UpdateRule, groups: Sequence[Mapping[str, Any]], state_dtype: str, *, split: bool
) -> None:
    """Check that every parameter group can be stepped on a device.

    Args:
        rule: Update rule of the optimizer.
        groups: ``param_groups``.
        state_dtype: Stored form of the state, as `Options.state_dtype`.
        split: Whether masters are split.

    Raises:
        UnsupportedOptimizerError: A group cannot be stepped; says why, and names the remedy.
    """
    if reason := why_not_steppable(rule, groups, state_dtype, split=split):
        raise UnsupportedOptimizerError(
            f'placement="device" is not possible: {reason}. Use placement="host"'
        )


def why_not_steppable(
    rule: UpdateRule, groups: Sequence[Mapping[str, Any]], state_dtype: str, *, split: bool
) -> str:
    """Return why a parameter group cannot be stepped on a device; empty if all can be.

    The arguments are those of `require_steppable`.
    """
    for given in groups:
        # The updater, too, copies tensor hyper-parameters into host memory.
        group = {k: _host_like(v) for k, v in given.items()}
        reason = why_not_by_kernel(rule, group)
        refusal = why_not_by_torch(rule, group, state_dtype, split=split) if reason else ""
        if refusal:
            return f"{reason}, and {refusal}"
    return ""


def why_not_by_kernel(
    rule: UpdateRule, group: Mapping[str, Any], factors: Sequence[float] = ()
) -> str:
    """Return why no kernel can step a parameter group; empty if one can."""
    if len(factors) > MAX_FACTORS:
        return f"gradients are multiplied {len(factors)} times"
    return why_no_kernel(rule.optimizer_class, group)


def why_not_by_torch(
    rule: UpdateRule, group: Mapping[str, Any], state_dtype: str, *, split: bool
) -> str:
    """Return why torch's own step cannot update a group's state on a device; empty if it can."""
    if issubclass(rule.optimizer_class, torch.optim.ASGD):
        return "torch's own step keeps its scalar state on the device"
    if state_dtype != "float32":
        return f"torch's own step needs FP32 state, and it is stored as {state_dtype}"
    if split:
        return "torch's own step needs FP32 masters, and they are split"
    if group.get("fused"):
        return "torch's own fused step keeps its count on the device"
    return ""


def _host_like(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return torch.empty((), dtype=torch.float32, device="cpu")
    return value
