"""The arithmetic of one chunk, by the kernel or by torch's own step on flat views.

The kernel (`offload.update.kernel`) steps the parameters that it can, each thread in one call for
its part of the chunk. Torch's step does the rest, with the same bits: other classes, parameters
without state yet, groups with unusual flags.

For torch's step, a chunk is cut into runs: neighbouring parameters with the same hyper-parameters,
dtype and scalar state. A run is cut into blocks of `HOT_ELEMENTS`. For each block:

1. Take the master, or make it from the live parameter.
2. Gather the gradient, upcast it, and decode the state.
3. Run torch's step.
4. Encode the state, and cast the master back into the live parameter.
5. Digest the values to be stored.

There is one call of torch's step per block, never one per parameter. Blocks are independent and run
on several threads.

The live parameter wins. If it differs from its rounded master, it has been edited since the last
step (clamped, loaded, or replaced by an average). The edited elements then replace those of the
master, as if the parameter had been FP32 all along. If the live parameter *is* the upper half of
the master (``master="split"``), no comparison is needed. An edited value then keeps the lower half
of the old master, which is less than half a step of bf16.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from offload.device.boundary import HOST, is_on_device, to_host
from offload.device.flat_tensors import FlatTensors
from offload.device.staging import StagedTensors, Traffic, flat_tensors
from offload.format.arrays import BLOCK_ELEMENTS, MASTER, MASTER_LOW
from offload.format.chunk_plan import Piece
from offload.format.digests import LEAF_BYTES, Digests
from offload.update import codecs
from offload.update.coder import StateCoder
from offload.update.fused_step import step_fused
from offload.update.kernel import (
    MAX_FACTORS,
    KernelCall,
    KernelStep,
    UpdateKernel,
    group_values,
    why_not,
)
from offload.update.live_values import join, master_of, split_back
from offload.update.pool import BlockContext, UpdatePool
from offload.update.rules import Scalars, UpdateRule, read_scalars, write_scalars
from offload.update.step_inputs import StepInputs

HOT_ELEMENTS = 512 << 10
"""Maximal number of elements in one call of torch's step: about 15 MiB with temporary values.

Blocks of half this size would stay in a cache for longer. But several threads take turns with the
interpreter, so there must be few calls.
"""

HOT_ELEMENTS_ONE_THREAD = LEAF_BYTES // 4
"""Maximal number of elements in one call on one thread: a whole leaf of each FP32 array, so that
the leaf is digested at once."""


class Key(NamedTuple):
    """Properties that neighbouring parameters must share to be stepped in one call."""

    group: int
    dtype: torch.dtype
    scalars: Scalars | None
    has_gradient: bool


class Block(NamedTuple):
    """Elements that one call of torch's step works on."""

    key: Key
    pieces: Sequence[Piece]
    first: int
    """First element of the block, in element space."""

    stored: dict[str, torch.Tensor]
    """Stored values of the block, by state array."""

    starts: dict[str, int]
    """Index of the block's first stored value in the chunk, by state array."""


class ChunkUpdater:
    """Updates the chunks of one step.

    Args:
        rule: Update rule of the optimizer, which says which state torch's step keeps.
        pool: Threads that run the blocks.
        inputs: Everything that the step computes with.
        kernel: Kernel that steps the parameters that it can; None for torch's code only.
        traffic: Counter of the bytes that cross between the host and the parameters' device.
    """

    device = HOST
    """Device on which chunks are updated."""

    def __init__(
        self,
        rule: UpdateRule,
        pool: UpdatePool,
        inputs: StepInputs,
        *,
        kernel: UpdateKernel | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self._pool = pool
        self._class = rule.optimizer_class
        self._layout = layout = inputs.layout
        parameters, gradients = inputs.parameters, inputs.gradients
        # Copied by value: a scheduler may change a tensor in place while the step is in progress.
        self._hyper = [
            {k: _by_value(v) for k, v in g.items() if k not in ("params", "param_names")}
            for g in inputs.groups
        ]
        self._rules = [rule.rule(group) for group in self._hyper]
        exact = layout.state_dtype == "float32"
        self._fused = [None if exact else rule.fused(group) for group in self._hyper]
        self._keys = _keys(inputs)
        self._scalars_before = list(inputs.scalars)
        traffic = traffic or Traffic()
        self._live = flat_tensors(parameters, writable=True, traffic=traffic)
        self._gradients = FlatTensors(gradients, writable=False)
        self._staged: list[StagedTensors] = []
        if isinstance(self._live, StagedTensors):
            self._gradients = StagedTensors(gradients, writable=False, traffic=traffic)
            self._staged = [self._live, self._gradients]
        self._stepped: dict[Key, Scalars] = {}
        self._multiple = BLOCK_ELEMENTS if layout.state_dtype == "int8" else 1
        self._coder = StateCoder(layout, inputs.seed, inputs.step)
        self._factors = inputs.factors
        self._kernel: KernelStep | None = None
        self._reasons: list[str] = []
        """Why torch's code steps a group, for each group that the kernel cannot step."""
        self._kernel_keys: dict[Key, int] = {}
        """Number of each key's hyper-parameters in the calls of the kernel."""
        if kernel is not None and not (reason := self._why_no_kernel(inputs)):
            self._use(kernel, inputs)
        elif kernel is not None:
            self._reasons = [reason] * len(self._hyper)
        self._prepared_at_s: dict[int, float] = {}
        self._waiting_s = self._updating_s = 0.0
        self._num_updated = 0

    def set_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Set the gradient of a parameter that had none, before any of its chunks is updated."""
        self._gradients.replace(index, gradient)
        self._keys[index] = self._keys[index]._replace(has_gradient=True)
        self._give_to_kernel(index)

    def touched(self, chunk: int) -> bool:
        """Return whether any parameter in the chunk has a gradient."""
        pieces = self._layout.plans[chunk].pieces
        return any(self._keys[piece.parameter].has_gradient for piece in pieces)

    def update(
        self, chunk: int, arrays: Mapping[str, torch.Tensor], digests: Digests | None = None
    ) -> None:
        """Step one chunk.

        Args:
            chunk: Index of the chunk.
            arrays: The chunk's range of each state array, flat, in the stored dtype; updated in
                place. Ranges of parameters that have no state yet may hold anything, and are
                initialised.
            digests: Digests that are told of each block after its step.
        """

        def update(context: BlockContext, work: Block | KernelCall) -> None:
            """Step what one call takes, and report the bytes that are final."""
            if isinstance(work, KernelCall):
                work.run()
                return
            self._update(context, work)
            if digests is not None:
                for name, stored in work.stored.items():
                    start = work.starts[name] * stored.itemsize
                    digests.written(name, start, start + stored.nbytes)

        started = time.perf_counter()
        self._waiting_s += started - self._prepared_at_s.pop(chunk, started)
        num_threads = self._pool.threads.num_threads
        work: list[Block | KernelCall] = list(self._blocks(chunk, arrays))
        if self._kernel is not None:
            self._count_for_kernel()
            work += self._kernel.calls(chunk, arrays, digests, num_threads)
        self._pool.run(update, work, num_threads)
        if self._kernel is not None:
            self._kernel.done(chunk)
        self._updating_s += time.perf_counter() - started
        self._num_updated += 1
        for tensors in self._staged:
            tensors.leave(chunk)

    def prepare(self, chunk: int) -> bool:
        """Begin to copy the data that a chunk needs from its parameters' device to the host.

        The caller then waits for the chunk's state, and then calls `arrive` and `update`.

        Returns:
            Whether anything crosses, so that `arrive` must be called.
        """
        self._prepared_at_s[chunk] = time.perf_counter()
        if self._staged:
            pieces = self._layout.plans[chunk].pieces
            pieces = tuple(p for p in pieces if _is_updated(self._keys[p.parameter]))
            for tensors in self._staged:
                tensors.prepare(chunk, pieces, lambda index: self._keys[index].has_gradient)
        return bool(self._staged)

    def arrive(self, chunk: int) -> None:
        """Wait until the data that `prepare` requested is in host memory."""
        started = time.perf_counter()
        for tensors in self._staged:
            tensors.arrive(chunk)
        if chunk in self._prepared_at_s:  # only waits for the drive count, so this wait is left out
            self._prepared_at_s[chunk] += time.perf_counter() - started

    def fence(self) -> None:
        """Make the calling thread's current streams wait for the parameters updated so far."""
        for tensors in self._staged:
            tensors.fence()

    def finish(self) -> list[Scalars | None]:
        """Return the scalar state of each parameter after the step."""
        keys = {id(key): key for key in self._keys}  # most parameters share theirs
        missing = {k for k in keys.values() if k.has_gradient and k not in self._stepped}
        if missing:  # only empty parameters have these keys: torch counts their steps all the same
            self._pool.run_here(self._step_scalars, [Block(key, [], 0, {}, {}) for key in missing])
        if all(key.scalars is not None for key in keys.values() if key.has_gradient):
            # Otherwise torch has created state and nothing was read: such a pass is not typical.
            self._pool.threads.passed(self._num_updated, self._updating_s, self._waiting_s)
        stepped = {
            number: self._stepped[key] for number, key in keys.items() if key in self._stepped
        }
        return [
            stepped.get(id(key), before)
            for key, before in zip(self._keys, self._scalars_before, strict=True)
        ]

    def code(self, chosen: str) -> str:
        """Return which code takes this step, in words.

        Args:
            chosen: Code that was chosen for the class, as `ChosenCode.code`.
        """
        if not self._reasons:
            return chosen
        torchs = f"torch ({'; '.join(dict.fromkeys(self._reasons))})"
        return torchs if len(self._reasons) == len(self._hyper) else f"{chosen}, {torchs}"

    def _why_no_kernel(self, inputs: StepInputs) -> str:
        """Return why the kernel can step no group; empty if it may step some."""
        if self._layout.counts_from != "parameter":
            return "the state has the form of version 2 of the format"
        if len(inputs.factors) > MAX_FACTORS:
            return f"gradients are multiplied {len(inputs.factors)} times"
        return ""

    def _use(self, kernel: UpdateKernel, inputs: StepInputs) -> None:
        """Let the kernel step all parameters that it can."""
        self._kernel = KernelStep(kernel, inputs, self._live, self._gradients)
        reasons = [why_not(kernel.optimizer_class, group) for group in self._hyper]
        self._kernel_groups = [not reason for reason in reasons]
        self._reasons = [reason for reason in reasons if reason]
        for index, gradient in enumerate(inputs.gradients):
            if gradient is not None:
                self._give_to_kernel(index)

    def _give_to_kernel(self, index: int) -> None:
        """Let the kernel step a parameter, if there is one and it can."""
        key = self._keys[index]
        if self._kernel is None or key.scalars is None or not self._kernel_groups[key.group]:
            return
        number = self._kernel_keys.setdefault(key, len(self._kernel_keys))
        self._kernel.add(index, number)

    def _count_for_kernel(self) -> None:
        """Let torch count the step for all keys that the kernel steps."""
        keys = list(self._kernel_keys)  # backward passes may add others at the same time
        new = [key for key in keys if key not in self._stepped]
        if not new or self._kernel is None:
            return
        self._pool.run_here(self._step_scalars, [Block(key, [], 0, {}, {}) for key in new])
        self._kernel.set_groups(
            [group_values(self._class, self._hyper[key.group], self._stepped[key]) for key in keys]
        )

    def _block_elements(self) -> int:
        """Return the maximal number of elements in a block."""
        if self._pool.threads.num_threads == 1:
            return min(HOT_ELEMENTS, HOT_ELEMENTS_ONE_THREAD)
        return HOT_ELEMENTS

    def _blocks(self, chunk: int, arrays: Mapping[str, torch.Tensor]) -> Iterator[Block]:
        """Cut a chunk into runs, and each run into blocks."""
        plan = self._layout.plans[chunk]
        most = self._block_elements()
        keys = [self._keys[piece.parameter] for piece in plan.pieces]
        rest: Iterable[int] = range(len(keys))
        if self._kernel is not None:
            rest = self._kernel.others(chunk)
        # The place among the rest is subtracted, so that the numbers of a run are consecutive.
        for (key, _), run in groupby(enumerate(rest), lambda at: (keys[at[1]], at[1] - at[0])):
            if not _is_updated(key):
                continue  # no gradient: state that has been read is written back unchanged
            numbers = [number for _, number in run]
            for span in plan.cut(numbers, most=most, multiple=self._multiple):
                stored = {n: arrays[n][start:stop] for n, (start, stop) in span.values.items()}
                starts = {name: start for name, (start, _) in span.values.items()}
                first = plan.first + span.pieces[0].at
                yield Block(key, span.pieces, first, stored, starts)

    def _update(self, context: BlockContext, block: Block) -> None:
        key, stored = block.key, block.stored
        views = self._live.views(block.pieces)
        live = join(context, "live", views, key.dtype)
        master = master_of(context, live, stored, is_new=key.scalars is None)
        if not key.has_gradient:  # no state yet: begins with the live parameter and zeros
            for name in stored.keys() - {MASTER}:
                stored[name].zero_()
            self._live.finish(block.pieces)
            return
        state = self._coder.load(
            context,
            self._rules[key.group].arrays,
            stored,
            block.pieces,
            new=key.scalars is None,
        )
        gradient = join(
            context, "gradient", self._gradients.views(block.pieces), torch.float32, distinct=True
        )
        for factor in self._factors:  # in other memory: an FP32 gradient may be the user's own
            scaled = context.buffer("scaled", torch.float32, len(gradient))
            gradient = torch.mul(gradient, factor, out=scaled)
        self._step(context, block, master, gradient, state)
        self._coder.store(context, state, stored, block.pieces, block.first)
        if MASTER_LOW in stored:
            codecs.split_master(master, live, stored[MASTER_LOW], scratch=context.scratch)
        elif master is not live:
            live.copy_(master)
        if len(views) > 1:
            split_back(live, views)
        self._live.finish(block.pieces)
        self._gradients.finish(block.pieces)

    def _step_scalars(self, context: BlockContext, block: Block) -> None:
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        arrays = self._rules[block.key.group].arrays
        self._step(context, block, empty, empty.clone(), {a: empty.clone() for a in arrays})

    def _step(
        self,
        context: BlockContext,
        block: Block,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        views: Mapping[str, torch.Tensor],
    ) -> None:
        key = block.key
        group, fused = self._hyper[key.group], self._fused[key.group]
        # A new object for every block: otherwise torch's step would find the last block's .grad.
        parameter = parameter.view(-1)
        if key.scalars is None:
            state = context.stepper.create(parameter, gradient, group)
        elif fused is not None:
            state = step_fused(context, parameter, gradient, views, key.scalars, fused)
        else:
            state = {**views, **write_scalars(key.scalars)}
            context.stepper.apply(parameter, gradient, state, group)
        for name, view in views.items():
            value = state.get(name)
            if value is None:
                view.zero_()
            elif value is not view:
                view.copy_(value)
        if key not in self._stepped:  # every block of a key ends with the same scalars
            self._stepped[key] = read_scalars(state, self._rules[key.group])


def _keys(inputs: StepInputs) -> list[Key]:
    """Return the key of each parameter. Neighbours that have equal keys share one object."""
    keys: list[Key] = []
    last: Key | None = None
    given = zip(
        inputs.layout.parameters, inputs.parameters, inputs.gradients, inputs.scalars, strict=True
    )
    for spec, parameter, gradient, scalars in given:
        key = (spec.group, parameter.dtype, scalars, gradient is not None)
        if key != last:
            last = Key(*key)
        keys.append(last)
    return keys


def _is_updated(key: Key) -> bool:
    return key.scalars is None or key.has_gradient


def _by_value(value: object) -> object:
    # Every block reads the hyper-parameters. A read from a device would wait for the device's work.
    if isinstance(value, torch.Tensor) and is_on_device(value):
        return to_host(value)
    return copy.deepcopy(value)
