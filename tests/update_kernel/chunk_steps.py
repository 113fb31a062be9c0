"""Steps of whole layouts by `HostUpdater`: many parameters, in chunks, on one thread or several.

A layout steps twice from the same bytes, with the kernel and with torch's code. Nothing here knows
how either computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import offload.engine.training_state
import offload.update.pool
from bench._one_step import KINDS
from offload.ambient import on_thread
from offload.format.arrays import MASTER, MasterFormat, StateDtype, StateFormat
from offload.format.digests import ChunkDigests
from offload.format.layout import Layout, ModelTensor, ParameterSpec
from offload.update.dtypes import DTYPE_CODES, DTYPES
from offload.update.kept_state import Scalars
from offload.update.kernel import UpdateKernel
from offload.update.kernel_check import ChosenCode
from offload.update.pool import UpdatePool
from offload.update.rules import UpdateRule
from offload.update.step_keys import StepInputs
from offload.update.updater import HostUpdater


@contextlib.contextmanager
def may_use_kernel(*, allowed: bool) -> Iterator[None]:
    """Let optimizers that are made in the block use the kernel, or none."""
    module = offload.engine.training_state
    with pytest.MonkeyPatch.context() as patch:
        if not allowed:
            patch.setattr(module, "choose_kernel", lambda *_: ChosenCode(None, "torch (a test)"))
        yield


@dataclass(frozen=True)
class Parameter:
    """One parameter of a layout, and what it meets in the step."""

    num: int
    """Number of elements."""

    dtype: torch.dtype = torch.float32
    gradient: torch.dtype | None = torch.float32
    """Dtype of the gradient; None for a parameter without one."""

    group: int = 0
    is_new: bool = False
    """Whether the parameter has no state yet."""


@dataclass
class ChunkStep:
    """Everything that a step of a layout begins with."""

    optimizer: type[torch.optim.Optimizer]
    parameters: Sequence[Parameter]
    groups: Sequence[Mapping[str, Any]]
    """What each group overrides of the class's defaults."""

    master: MasterFormat = "float32"
    state_dtype: StateDtype = "float32"
    kind: str = "ordinary"
    """Kind of values, as in `values.KINDS`."""

    chunk_elements: int = 1 << 20
    step: int = 7
    """Number of steps that have been taken."""

    factors: tuple[float, ...] = ()
    seed: int = 0
    live: list[torch.Tensor] = field(init=False)
    gradients: list[torch.Tensor | None] = field(init=False)
    layout: Layout = field(init=False)
    stored: list[dict[str, torch.Tensor]] = field(init=False)
    """Stored values of each chunk, by array."""

    scalars: list[Scalars | None] = field(init=False)

    def __post_init__(self) -> None:
        self.rule = UpdateRule(self.optimizer, {})
        self.groups = [{**self.rule.defaults, **group} for group in self.groups]
        self._generator = torch.Generator().manual_seed(self.seed)
        specs = []
        self.live, self.gradients, self.scalars = [], [], []
        for number, parameter in enumerate(self.parameters):
            rule = self.rule.rule(self.groups[parameter.group])
            form = StateFormat(self.master, self.state_dtype)
            code = DTYPE_CODES[parameter.dtype]
            arrays = form.stored_arrays(code, rule.arrays)
            spec = ParameterSpec(f"p{number}", code, (parameter.num,), parameter.group, arrays)
            specs.append(spec)
            self.live.append(self._values(parameter.num).to(parameter.dtype))
            given = parameter.gradient
            self.gradients.append(None if given is None else self._values(parameter.num).to(given))
            scalars = tuple((n, k, float(self.step)) for n, k in rule.scalars.items())
            self.scalars.append(None if parameter.is_new else scalars)
        model = tuple(ModelTensor(spec.name, spec.dtype, spec.shape) for spec in specs)
        self.layout = Layout(tuple(specs), model, self.chunk_elements, self.state_dtype)
        self.stored = [
            {
                name: self._stored(name, share.nbytes, self.layout.formats[name].dtype)
                for name, share in plan.arrays.items()
            }
            for plan in self.layout.plans
        ]
        self._tie_masters()

    def taken(
        self, kernel: UpdateKernel | None, *, threads: int = 1, flushes: bool = False
    ) -> Taken:
        """Take the step from a copy of everything, and return what it leaves.

        Args:
            kernel: The kernel; None for torch's code.
            threads: Number of update threads.
            flushes: Whether denormal numbers are flushed to zero.
        """
        live = [tensor.clone() for tensor in self.live]
        stored = [{n: values.clone() for n, values in chunk.items()} for chunk in self.stored]
        inputs = self.inputs(live)
        before, name = offload.update.pool.default_num_threads, "default_num_threads"
        setattr(offload.update.pool, name, lambda: threads)
        pool = UpdatePool(self.rule)
        setattr(offload.update.pool, name, before)
        try:
            with on_thread(flushes=flushes):
                updater = HostUpdater(self.rule, pool, inputs, kernel=kernel)
                for chunk, arrays in enumerate(stored):
                    views = {n: memoryview(_as_bytes(a).numpy()) for n, a in arrays.items()}
                    updater.update(chunk, arrays, ChunkDigests(views))
                scalars = updater.finish()
        finally:
            torch.set_flush_denormal(False)
            pool.close()
        return Taken(live, stored, scalars)

    def inputs(self, live: Sequence[torch.Tensor]) -> StepInputs:
        """Return what the step computes with; `live` is updated in place."""
        return StepInputs(
            layout=self.layout,
            groups=self.groups,
            parameters=live,
            gradients=list(self.gradients),
            scalars=self.scalars,
            step=self.step + 1,
            seed=self.seed,
            factors=self.factors,
        )

    def _values(self, num: int) -> torch.Tensor:
        return KINDS[self.kind](num + 16, self._generator)[:num]

    def _stored(self, name: str, nbytes: int, code: str) -> torch.Tensor:
        dtype = DTYPES[code]
        num = nbytes // dtype.itemsize
        if not dtype.is_floating_point:
            bits = torch.randint(0, 256, (nbytes,), generator=self._generator, dtype=torch.uint8)
            if dtype == torch.int8:
                bits[bits == 128] = 7  # no code of int8 state
            return bits.view(dtype)
        values = self._values(num)
        if self.kind != "bits" and name.endswith(("_sq", "_scale")):
            values = values.abs()
        return values.to(dtype)

    def _tie_masters(self) -> None:
        """Let most masters be those of their parameters; the other parameters have been edited."""
        for plan, arrays in zip(self.layout.plans, self.stored, strict=True):
            for number, piece in enumerate(plan.pieces):
                live = self.live[piece.parameter][piece.start : piece.stop]
                if MASTER in plan.kept[number]:
                    start = plan.arrays[MASTER].starts[number]
                    master = arrays[MASTER][start : start + len(live)]
                    rounded = master.to(live.dtype)
                    live[1::5] = rounded[1::5]
                    live[2::5] = rounded[2::5]
                    live[4::5] = rounded[4::5]


@dataclass
class Taken:
    """What a step has left."""

    live: list[torch.Tensor]
    stored: list[dict[str, torch.Tensor]]
    scalars: list[Scalars | None]

    def differences(self, expected: Taken, *, any_nan: bool = False) -> list[str]:
        """Return a line for everything that has other bytes than `expected`.

        Args:
            expected: What it should be.
            any_nan: Whether any NaN equals any other.
        """
        found = [] if self.scalars == expected.scalars else ["scalars"]
        pairs = {
            f"parameter {n}": (a, b)
            for n, (a, b) in enumerate(zip(self.live, expected.live, strict=True))
        }
        for chunk, (mine, its) in enumerate(zip(self.stored, expected.stored, strict=True)):
            pairs |= {f"{name} of chunk {chunk}": (mine[name], its[name]) for name in its}
        for name, (a, b) in pairs.items():
            differ = _as_integers(a) != _as_integers(b)
            if any_nan and a.is_floating_point():
                differ &= ~(a.isnan() & b.isnan())
            if differ.any():
                at = int(differ.nonzero()[0])
                found.append(
                    f"{name}: {int(differ.sum())} of {len(a)}, at {at}: {a[at]} is not {b[at]}"
                )
        return found


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
