"""The arithmetic of one chunk: torch's own step, run on flat views while they are in cache.

A chunk is cut into runs (neighbouring parameters with the same hyper-parameters, dtype and scalar
state), a run into blocks of `HOT_ELEMENTS`. For each block: take the master (or make it from the
live parameter), gather and upcast the gradient, decode the state, run torch's step, encode the
state, cast back into the live parameter. One call of torch's step per block, never one per
parameter.

The live parameter wins: where it is not what the master rounds to, somebody has edited it since
(clamped it, loaded weights, swapped an average in), and the edited value becomes the master for
those elements, as if the parameter had been FP32 all along. Where the live parameter *is* the upper
half of the master (``master="split"``), that needs no comparison; an edited value keeps the lower
half, which is less than half a step of bf16.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from offload import codecs
from offload.formats import BLOCK_ELEMENTS, MASTER, MASTER_LOW
from offload.layout import Layout, Piece
from offload.rules import Scalars, UpdateRule, read_scalars, write_scalars
from offload.stored_state import HotBuffers, StateCoder

HOT_ELEMENTS = 256 << 10
"""Elements of one call of torch's step: about 5 MiB of state, gradient and parameter."""


class _Key(NamedTuple):
    """What two neighbouring parameters must share to be stepped in one call."""

    group: int
    dtype: torch.dtype
    scalars: Scalars | None
    has_gradient: bool


class FlatTensors:
    """Flat views of tensors, through a contiguous copy where a tensor has no flat view.

    A copy lives until all elements are done, and is then written back if it may have been changed.
    Tensors that are only read are let go of at that moment.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None], *, writable: bool) -> None:
        self._tensors = list(tensors)
        self._writable = writable
        self._flat: dict[int, torch.Tensor] = {}
        self._num_left: dict[int, int] = {}

    def view(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` of a tensor, in row-major order."""
        flat = self._flat.get(index)
        if flat is None:
            tensor = self._tensors[index]
            if tensor is None:
                raise RuntimeError(f"tensor {index} is asked for, but there is none")
            # reshape is a view where one exists and a copy elsewhere
            flat = self._flat[index] = tensor.detach().reshape(-1)
        return flat[start:stop]

    def replace(self, index: int, tensor: torch.Tensor) -> None:
        """Set a tensor that has not been viewed yet."""
        self._tensors[index] = tensor

    def finish(self, index: int, num_elements: int) -> None:
        """Say that so many more elements of a tensor, which has been viewed, are done."""
        flat = self._flat[index]
        left = self._num_left.get(index, flat.numel()) - num_elements
        self._num_left[index] = left
        if left:
            return
        tensor = self._tensors[index]
        if not self._writable:
            self._tensors[index] = None
        elif tensor is not None and flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))
        del self._flat[index], self._num_left[index]


class ChunkUpdater:
    """Updates the chunks of one step.

    Args:
        rule: Runs torch's step.
        layout: Where every parameter lies.
        groups: ``param_groups`` at this step.
        parameters: Live parameters in element-space order; updated in place.
        gradients: Their gradients, of any floating-point dtype; None where there is none.
        scalars: Their scalar state; None for a parameter that has no state yet.
        step: Number of this step, from 1.
        seed: Of stochastic rounding, where state is stored so.
    """

    def __init__(
        self,
        rule: UpdateRule,
        layout: Layout,
        groups: Sequence[Mapping[str, Any]],
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        scalars: Sequence[Scalars | None],
        *,
        step: int,
        seed: int = 0,
    ) -> None:
        self._rule = rule
        self._layout = layout
        # By value: a scheduler may change a tensor in place while the step is still going on.
        self._hyper = [
            {k: copy.deepcopy(v) for k, v in g.items() if k not in ("params", "param_names")}
            for g in groups
        ]
        self._rules = [rule.rule(group) for group in self._hyper]
        self._keys = [
            _Key(spec.group, p.dtype, s, g is not None)
            for spec, p, g, s in zip(layout.parameters, parameters, gradients, scalars, strict=True)
        ]
        self._live = FlatTensors(parameters, writable=True)
        self._gradients = FlatTensors(gradients, writable=False)
        self._stepped: dict[_Key, Scalars] = {}
        self._buffers = HotBuffers(min(HOT_ELEMENTS, layout.num_elements))
        self._scratch = codecs.Scratch()
        self._multiple = BLOCK_ELEMENTS if layout.state_dtype == "int8" else 1
        self._coder = StateCoder(layout.state_dtype, seed, step, self._buffers)

    def give(self, index: int, gradient: torch.Tensor) -> None:
        """Set the gradient of a parameter that had none, before any of its chunks is updated."""
        self._gradients.replace(index, gradient)
        self._keys[index] = self._keys[index]._replace(has_gradient=True)

    def touched(self, chunk: int) -> bool:
        """Return whether any parameter in the chunk has a gradient."""
        return any(self._keys[p.parameter].has_gradient for p in self._layout.pieces(chunk))

    def update(self, chunk: int, arrays: Mapping[str, torch.Tensor]) -> None:
        """Step one chunk.

        Args:
            chunk: Its index.
            arrays: Tensors with just the chunk's range of each state array, in the dtype that it
                is stored in, updated in place. Ranges of parameters that have no state yet may
                hold anything; they are initialised.
        """
        layout = self._layout
        origin = layout.chunk_range(chunk)[0]
        bases = {name: layout.array_range(name, origin, origin)[0] for name in arrays}
        for key, run in groupby(layout.pieces(chunk), lambda p: self._keys[p.parameter]):
            if key.scalars is not None and not key.has_gradient:
                continue  # nothing to do: its state, if it was read, is written back unchanged
            for block in _blocks(run, self._multiple):
                first = origin + block[0].at
                last = origin + block[-1].at + block[-1].stop - block[-1].start
                stored = {}
                for name in layout.parameters[block[0].parameter].arrays:
                    start, stop = layout.array_range(name, first, last)
                    stored[name] = arrays[name][start - bases[name] : stop - bases[name]]
                self._block(key, block, stored, first)

    def finish(self) -> list[Scalars | None]:
        """Return the scalar state of each parameter after the step."""
        for key in self._keys:
            if key.has_gradient and key not in self._stepped:
                # only empty parameters have it: torch counts their steps all the same
                empty = torch.empty(0, dtype=torch.float32)
                arrays = self._rules[key.group].arrays
                self._step(key, empty, empty.clone(), {name: empty.clone() for name in arrays})
        return [self._stepped.get(key, key.scalars) for key in self._keys]

    def _block(
        self, key: _Key, block: list[Piece], stored: dict[str, torch.Tensor], first: int
    ) -> None:
        live = self._gather(self._live, block, "live", key.dtype)
        master = self._master(key, live, stored)
        if not key.has_gradient:  # new to the target: it begins with the live parameter and zeros
            for name in stored.keys() - {MASTER}:
                stored[name].zero_()
            for piece in block:
                self._live.finish(piece.parameter, _length(piece))
            return
        new = key.scalars is None
        views = {
            name: self._coder.load(name, stored, block, new=new)
            for name in self._rules[key.group].arrays
        }
        gradient = self._gather(self._gradients, block, "gradient", torch.float32)
        self._step(key, master, gradient, views)
        for name, view in views.items():
            self._coder.store(name, view, stored, block, first)
        if MASTER_LOW in stored:
            codecs.split_master(master, live, stored[MASTER_LOW], scratch=self._scratch)
        elif master is not live:
            live.copy_(master)
        self._scatter(live, block)

    def _master(
        self, key: _Key, live: torch.Tensor, stored: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the FP32 parameter of a block, to be stepped in place."""
        if MASTER_LOW in stored:
            master = self._buffers.get(MASTER, torch.float32, len(live))
            if key.scalars is None:
                return master.copy_(live)
            codecs.join_master(live, stored[MASTER_LOW], master, scratch=self._scratch)
            return master
        if MASTER not in stored:
            return live  # an FP32 parameter is its own master
        master = stored[MASTER]
        if key.scalars is None:
            return master.copy_(live)
        rounded = self._buffers.get("rounded", live.dtype, len(live)).copy_(master)
        _take_edits(master, live, rounded)
        return master

    def _step(
        self,
        key: _Key,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        views: Mapping[str, torch.Tensor],
    ) -> None:
        group = self._hyper[key.group]
        # A fresh object for every block: torch's step would otherwise find the .grad of the last.
        parameter = parameter.view(-1)
        if key.scalars is None:
            state = self._rule.create(parameter, gradient, group)
        else:
            state = {**views, **write_scalars(key.scalars)}
            self._rule.apply(parameter, gradient, state, group)
        for name, view in views.items():
            value = state.get(name)
            if value is None:
                view.zero_()
            elif value is not view:
                view.copy_(value)
        self._stepped[key] = read_scalars(state, self._rules[key.group])

    def _gather(
        self, tensors: FlatTensors, block: list[Piece], name: str, dtype: torch.dtype
    ) -> torch.Tensor:
        if len(block) == 1:
            piece = block[0]
            view = tensors.view(piece.parameter, piece.start, piece.stop)
            # Not of an expanded gradient: torch's foreach code changes gradients in place.
            expanded = tensors is self._gradients and view.stride(0) == 0
            if view.dtype == dtype and not expanded:
                return view
        start = block[0].at
        out = self._buffers.get(name, dtype, block[-1].at + _length(block[-1]) - start)
        for piece in block:
            at = piece.at - start
            out[at : at + _length(piece)].copy_(
                tensors.view(piece.parameter, piece.start, piece.stop)
            )
        return out

    def _scatter(self, live: torch.Tensor, block: list[Piece]) -> None:
        for piece in block:
            if len(block) > 1:
                at = piece.at - block[0].at
                view = self._live.view(piece.parameter, piece.start, piece.stop)
                view.copy_(live[at : at + _length(piece)])
            self._live.finish(piece.parameter, _length(piece))
            self._gradients.finish(piece.parameter, _length(piece))


def _length(piece: Piece) -> int:
    return piece.stop - piece.start


def _blocks(run: Iterator[Piece], multiple: int) -> Iterator[list[Piece]]:
    """Cut a run into blocks of at most `HOT_ELEMENTS`, pieces only at a multiple of elements."""
    block: list[Piece] = []
    room = HOT_ELEMENTS
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
                block, room = [], HOT_ELEMENTS
    if block:
        yield block


def _take_edits(master: torch.Tensor, live: torch.Tensor, rounded: torch.Tensor) -> None:
    # Compared as bits: NaN equals itself, and 0.0 differs from -0.0. Eight bytes at a time where
    # the memory allows it, which takes a third of the time of a cast.
    wide = len(live) % 4 == 0 and live.data_ptr() % 8 == 0 and live.storage_offset() % 4 == 0
    bits = torch.int64 if wide else torch.int16
    if not torch.equal(rounded.view(bits), live.view(bits)):
        edited = rounded.view(torch.int16) != live.view(torch.int16)
        master.copy_(torch.where(edited, live.float(), master))
