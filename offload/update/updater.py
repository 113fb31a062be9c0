"""The arithmetic of one chunk: torch's own step, run on flat views while they are in cache.

A chunk is cut into runs: neighbouring parameters with the same hyper-parameters, dtype and scalar
state. A run is cut into blocks of `HOT_ELEMENTS`. For each block:

1. Take the master, or make it from the live parameter.
2. Gather the gradient, upcast it, and decode the state.
3. Run torch's step.
4. Encode the state, and cast the master back into the live parameter.
5. Digest the values to be stored.

There is one call of torch's step per block, never one per parameter. Blocks are independent and run
on several threads.

The live parameter wins. If it differs from its rounded master, somebody has edited it since then
(clamped it, loaded weights, swapped an average in). The edited elements then replace those of the
master, as if the parameter had been FP32 all along. If the live parameter *is* the upper half of
the master (``master="split"``), no comparison is needed. An edited value then keeps the lower half
of the old master, which is less than half a step of bf16.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import torch

from offload.device.boundary import HOST, is_on_device, to_host
from offload.device.flat_tensors import FlatTensors
from offload.device.staging import CrossingTensors, Traffic, flat_tensors
from offload.format.arrays import BLOCK_ELEMENTS, MASTER, MASTER_LOW
from offload.format.digests import LEAF_BYTES, Digests
from offload.format.layout import Piece
from offload.update import codecs
from offload.update.coder import StateCoder
from offload.update.pool import BlockContext, UpdatePool
from offload.update.rules import FUSED_MULTIPLE, Scalars, UpdateRule, read_scalars, write_scalars
from offload.update.step_inputs import StepInputs

HOT_ELEMENTS = 512 << 10
"""Maximal number of elements in one call of torch's step: about 15 MiB with temporary values.

Half of that would stay in a cache for longer. But several threads take turns with the interpreter,
so there must be few calls.
"""

HOT_ELEMENTS_ALONE = LEAF_BYTES // 4
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
    pieces: list[Piece]
    first: int
    """First element of the block, in element space."""

    stored: dict[str, torch.Tensor]
    """Stored values of the block, by state array."""

    starts: dict[str, int]
    """Index of the block's first stored value in the chunk, by state array."""


class ChunkUpdater:
    """Updates the chunks of one step.

    Args:
        rule: Update rule of the optimizer; tells which state torch's step keeps.
        pool: Threads that run the blocks.
        inputs: Everything that the step computes with.
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
        traffic: Traffic | None = None,
    ) -> None:
        self._pool = pool
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
        self._keys = [
            Key(spec.group, p.dtype, s, g is not None)
            for spec, p, g, s in zip(
                layout.parameters, parameters, gradients, inputs.scalars, strict=True
            )
        ]
        traffic = traffic or Traffic()
        self._live = flat_tensors(parameters, writable=True, traffic=traffic)
        self._gradients = FlatTensors(gradients, writable=False)
        self._crossing: list[CrossingTensors] = []
        if isinstance(self._live, CrossingTensors):
            self._gradients = CrossingTensors(gradients, writable=False, traffic=traffic)
            self._crossing = [self._live, self._gradients]
        self._stepped: dict[Key, Scalars] = {}
        self._multiple = BLOCK_ELEMENTS if layout.state_dtype == "int8" else 1
        self._coder = StateCoder(layout, inputs.seed, inputs.step)
        self._factors = inputs.factors
        self._asked_s: dict[int, float] = {}
        self._waiting_s = self._updating_s = 0.0
        self._num_updated = 0

    def give(self, index: int, gradient: torch.Tensor) -> None:
        """Set the gradient of a parameter that had none, before any of its chunks is updated."""
        self._gradients.replace(index, gradient)
        self._keys[index] = self._keys[index]._replace(has_gradient=True)

    def touched(self, chunk: int) -> bool:
        """Return whether any parameter in the chunk has a gradient."""
        return any(self._keys[p.parameter].has_gradient for p in self._layout.pieces(chunk))

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

        def update(context: BlockContext, block: Block) -> None:
            self._update(context, block)
            if digests is not None:
                for name, stored in block.stored.items():
                    start = block.starts[name] * stored.itemsize
                    digests.written(name, start, start + stored.nbytes)

        started = time.perf_counter()
        self._waiting_s += started - self._asked_s.pop(chunk, started)
        blocks = list(self._blocks(chunk, arrays))
        self._pool.run(update, blocks, self._pool.threads.num_threads)
        self._updating_s += time.perf_counter() - started
        self._num_updated += 1
        for tensors in self._crossing:
            tensors.leave(chunk)

    def prepare(self, chunk: int) -> bool:
        """Begin to copy the data that a chunk needs from its parameters' device to the host.

        The caller then waits for the chunk's state, and then calls `arrive` and `update`.

        Returns:
            Whether anything crosses, so that `arrive` must be called.
        """
        self._asked_s[chunk] = time.perf_counter()
        if self._crossing:
            pieces = [p for p in self._layout.pieces(chunk) if _is_used(self._keys[p.parameter])]
            for tensors in self._crossing:
                tensors.prepare(chunk, pieces, lambda index: self._keys[index].has_gradient)
        return bool(self._crossing)

    def arrive(self, chunk: int) -> None:
        """Wait until the data that `prepare` requested is in host memory."""
        started = time.perf_counter()
        for tensors in self._crossing:
            tensors.arrive(chunk)
        if chunk in self._asked_s:  # only waits for the drive count, so leave this one out
            self._asked_s[chunk] += time.perf_counter() - started

    def fence(self) -> None:
        """Make the calling thread's current streams wait for the parameters updated so far."""
        for tensors in self._crossing:
            tensors.fence()

    def finish(self) -> list[Scalars | None]:
        """Return the scalar state of each parameter after the step."""
        missing = {k for k in self._keys if k.has_gradient and k not in self._stepped}
        # Only empty parameters have these keys. torch counts their steps all the same.
        self._pool.run(self._update_nothing, [Block(key, [], 0, {}, {}) for key in missing])
        if all(key.scalars is not None for key in self._keys if key.has_gradient):
            # If not, torch has created state and nothing was read: such a pass is not typical.
            self._pool.threads.passed(self._num_updated, self._updating_s, self._waiting_s)
        return [self._stepped.get(key, key.scalars) for key in self._keys]

    def _block_elements(self) -> int:
        """Return the maximal number of elements in a block."""
        if self._pool.threads.num_threads == 1:
            return min(HOT_ELEMENTS, HOT_ELEMENTS_ALONE)
        return HOT_ELEMENTS

    def _blocks(self, chunk: int, arrays: Mapping[str, torch.Tensor]) -> Iterator[Block]:
        """Cut a chunk into runs, and each run into blocks."""
        layout = self._layout
        origin = layout.chunk_range(chunk)[0]
        bases = {name: layout.array_range(name, origin, origin)[0] for name in arrays}
        for key, run in groupby(layout.pieces(chunk), lambda p: self._keys[p.parameter]):
            if not _is_used(key):
                continue  # no gradient: state that has been read is written back unchanged
            for pieces in _cut(run, self._multiple, self._block_elements()):
                first = origin + pieces[0].at
                last = origin + pieces[-1].at + _length(pieces[-1])
                stored, starts = {}, {}
                for name in layout.parameters[pieces[0].parameter].arrays:
                    start, stop = layout.array_range(name, first, last)
                    stored[name] = arrays[name][start - bases[name] : stop - bases[name]]
                    starts[name] = start - bases[name]
                yield Block(key, pieces, first, stored, starts)

    def _update(self, context: BlockContext, block: Block) -> None:
        key, stored = block.key, block.stored
        live = self._gather(context, self._live, block, "live", key.dtype)
        master = _master(context, key, live, stored)
        if not key.has_gradient:  # new to the target: begins with the live parameter and zeros
            for name in stored.keys() - {MASTER}:
                stored[name].zero_()
            for piece in block.pieces:
                self._live.finish(piece.parameter, _length(piece))
            return
        new = key.scalars is None
        views = {
            name: self._coder.load(context, name, stored, block.pieces, new=new)
            for name in self._rules[key.group].arrays
        }
        gradient = self._gather(context, self._gradients, block, "gradient", torch.float32)
        for factor in self._factors:  # in other memory: an FP32 gradient may be the user's own
            scaled = context.buffer("scaled", torch.float32, len(gradient))
            gradient = torch.mul(gradient, factor, out=scaled)
        self._step(context, block, master, gradient, views)
        for name, view in views.items():
            self._coder.store(context, name, view, stored, block.pieces, block.first)
        if MASTER_LOW in stored:
            codecs.split_master(master, live, stored[MASTER_LOW], scratch=context.scratch)
        elif master is not live:
            live.copy_(master)
        self._scatter(live, block.pieces)

    def _update_nothing(self, context: BlockContext, block: Block) -> None:
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
        # A new object for every block: otherwise torch's step would find the .grad of the last.
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

    def _gather(
        self,
        context: BlockContext,
        tensors: FlatTensors,
        block: Block,
        name: str,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        pieces = block.pieces
        if len(pieces) == 1:
            piece = pieces[0]
            view = tensors.view(piece.parameter, piece.start, piece.stop)
            # An expanded gradient is copied: torch's foreach code changes gradients in place.
            expanded = tensors is self._gradients and view.stride(0) == 0
            if view.dtype == dtype and not expanded:
                return view
        start = pieces[0].at
        out = context.buffer(name, dtype, pieces[-1].at + _length(pieces[-1]) - start)
        for piece in pieces:
            at = piece.at - start
            out[at : at + _length(piece)].copy_(
                tensors.view(piece.parameter, piece.start, piece.stop)
            )
        return out

    def _scatter(self, live: torch.Tensor, pieces: list[Piece]) -> None:
        for piece in pieces:
            if len(pieces) > 1:
                at = piece.at - pieces[0].at
                view = self._live.view(piece.parameter, piece.start, piece.stop)
                view.copy_(live[at : at + _length(piece)])
            self._live.finish(piece.parameter, _length(piece))
            self._gradients.finish(piece.parameter, _length(piece))


def step_fused(
    context: BlockContext,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    views: Mapping[str, torch.Tensor],
    scalars: Scalars,
    group: Mapping[str, Any],
) -> dict[str, Any]:
    """Run torch's fused step in whole vectors, so that the cuts between blocks do not matter.

    Args:
        context: Memory of the calling thread.
        parameter: Flat FP32 values, updated in place. The tensor object must be new.
        gradient: Flat FP32 values of the same length; unchanged.
        views: State arrays of the same length, FP32, updated in place.
        scalars: Scalar state.
        group: Hyper-parameters that `UpdateRule.fused` returned.

    Returns:
        The state that torch left: the same views, and scalars.
    """
    length = len(parameter)
    rest = length % FUSED_MULTIPLE
    if not rest:
        state = {**views, **write_scalars(scalars)}
        context.stepper.apply(parameter, gradient, state, group)
        return state

    def padded(name: str, values: torch.Tensor) -> torch.Tensor:
        out = context.buffer(f"padded {name}", torch.float32, length + FUSED_MULTIPLE - rest)
        out[:length] = values
        out[length:] = 0
        return out

    stepped = padded("parameter", parameter).view(-1)
    arrays = {name: padded(name, view) for name, view in views.items()}
    state = {**arrays, **write_scalars(scalars)}
    context.stepper.apply(stepped, padded("gradient", gradient), state, group)
    parameter.copy_(stepped[:length])
    for name, view in views.items():
        view.copy_(arrays[name][:length])
    return {**state, **views}


def _master(
    context: BlockContext, key: Key, live: torch.Tensor, stored: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the FP32 parameter of a block, to be stepped in place."""
    if MASTER_LOW in stored:
        master = context.buffer(MASTER, torch.float32, len(live))
        if key.scalars is None:
            return master.copy_(live)
        codecs.join_master(live, stored[MASTER_LOW], master, scratch=context.scratch)
        return master
    if MASTER not in stored:
        return live  # an FP32 parameter is its own master
    master = stored[MASTER]
    if key.scalars is None:
        return master.copy_(live)
    rounded = context.buffer("rounded", live.dtype, len(live)).copy_(master)
    _take_edits(master, live, rounded)
    return master


def _is_used(key: Key) -> bool:
    return key.scalars is None or key.has_gradient


def _by_value(value: object) -> object:
    # Every block reads the hyper-parameters. A read from a device would wait for its work.
    if isinstance(value, torch.Tensor) and is_on_device(value):
        return to_host(value)
    return copy.deepcopy(value)


def _length(piece: Piece) -> int:
    return piece.stop - piece.start


def _cut(run: Iterator[Piece], multiple: int, most: int) -> Iterator[list[Piece]]:
    """Cut a run into blocks of at most `most` elements, and pieces only at multiples."""
    block: list[Piece] = []
    room = most
    for piece in run:
        start, at = piece.start, piece.at
        while start < piece.stop:
            length = piece.stop - start
            if length > room:
                length = room // multiple * multiple
            if length:
                block.append(Piece(piece.parameter, start, start + length, at))
            room -= length
            at += length
            start += length
            if room == 0 or start < piece.stop:
                yield block
                block, room = [], most
    if block:
        yield block


def _take_edits(master: torch.Tensor, live: torch.Tensor, rounded: torch.Tensor) -> None:
    # The comparison is one of bits: NaN equals itself, and 0.0 differs from -0.0. It takes eight
    # bytes at a time if the memory allows it, which takes a third of the time of a cast.
    if is_on_device(master):  # torch.equal would wait for the device
        edited = rounded.view(torch.int16) != live.view(torch.int16)
        master.copy_(torch.where(edited, live.float(), master))
        return
    wide = len(live) % 4 == 0 and live.data_ptr() % 8 == 0 and live.storage_offset() % 4 == 0
    bits = torch.int64 if wide else torch.int16
    if not torch.equal(rounded.view(bits), live.view(bits)):
        edited = rounded.view(torch.int16) != live.view(torch.int16)
        master.copy_(torch.where(edited, live.float(), master))
