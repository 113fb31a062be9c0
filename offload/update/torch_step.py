"""One step of an optimizer by torch's own code, block by block. It can step every parameter.

There is one call of torch's step for each block: the master is taken, the gradient gathered, the
state decoded; after the step the state is encoded, the master cast back into the live parameter,
and the stored values are digested. Blocks are independent. The tensors are in host memory, or all
on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from offload.device.staging import FlatTensors
from offload.format.arrays import MASTER, MASTER_LOW
from offload.format.digests import Digests
from offload.update.coding import rounding
from offload.update.coding.coder import StateCoder, load_master
from offload.update.pool import BlockContext
from offload.update.step_code import Block, Call, LoadedChunk, PieceNumbers, StepCode, blocks, runs
from offload.update.step_keys import StepInputs, StepKeys


class TorchStep(StepCode):
    """The part of one step that torch's own code takes."""

    def __init__(
        self, keys: StepKeys, inputs: StepInputs, live: FlatTensors, gradients: FlatTensors
    ) -> None:
        self._keys = keys
        self._layout = inputs.layout
        self._live = live
        self._gradients = gradients
        self._coder = StateCoder(inputs.layout, inputs.seed, inputs.step)
        self._factors = inputs.factors

    def calls(
        self, chunk: LoadedChunk, numbers: PieceNumbers
    ) -> tuple[Sequence[Call], PieceNumbers]:
        """Take all pieces. Those whose state does not change need no call."""
        calls = [
            partial(self._step, block, chunk.digests)
            for key, run in runs(self._layout, chunk.number, self._keys.of, numbers)
            if key.is_updated  # otherwise, state that has been read is written back unchanged
            for block in blocks(self._layout, chunk, key, run)
        ]
        return calls, numbers[:0]

    def _step(self, block: Block, digests: Digests | None, context: BlockContext) -> None:
        """Step one block, and report the bytes that are final."""
        self._update(context, block)
        if digests is not None:
            for name, stored in block.stored.items():
                start = block.starts[name] * stored.itemsize
                digests.written(name, start, start + stored.nbytes)

    def _update(self, context: BlockContext, block: Block) -> None:
        """Step one block, or create its state if it has no gradient."""
        key, stored = block.key, block.stored
        views = self._live.views(block.pieces)
        live = join(context, "live", views, key.dtype)
        master = load_master(context, live, stored, new=key.is_new, in_place=True)
        if not key.has_gradient:  # no state yet: begins with the live parameter and zeros
            for name in stored.keys() - {MASTER}:
                stored[name].zero_()
            self._live.finish(block.pieces)
            return
        state = self._coder.load(
            context, self._keys.rules[key.group].arrays, stored, block.pieces, new=key.is_new
        )
        gradient = join(
            context, "gradient", self._gradients.views(block.pieces), torch.float32, distinct=True
        )
        for factor in self._factors:  # in other memory: an FP32 gradient may be the user's own
            scaled = context.buffer("scaled", torch.float32, len(gradient))
            gradient = torch.mul(gradient, factor, out=scaled)
        self._keys.step(context, key, master, gradient, state)
        self._coder.store(context, state, stored, block.pieces)
        if MASTER_LOW in stored:
            rounding.split_master(master, live, stored[MASTER_LOW], scratch=context.scratch)
        elif master is not live:
            live.copy_(master)
        if len(views) > 1:
            split_back(live, views)
        self._live.finish(block.pieces)
        self._gradients.finish(block.pieces)


def split_back(joined: torch.Tensor, views: list[torch.Tensor]) -> None:
    """Copy a flat tensor that `join` has returned back into the views it was made from."""
    sizes = [view.numel() for view in views]
    if any(view.is_neg() for view in views):  # torch's list operation does not take them
        for view, part in zip(views, torch.split(joined, sizes), strict=True):
            view.copy_(part)
    else:
        torch.split_with_sizes_copy(joined, sizes, out=views)


def join(
    context: BlockContext,
    name: str,
    views: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    distinct: bool = False,
) -> torch.Tensor:
    """Return flat views end to end: in a buffer, or the view itself if there is only one."""
    if len(views) == 1:
        (view,) = views
        # An expanded gradient is copied: torch's foreach code changes gradients in place.
        expanded = distinct and view.stride(0) == 0
        if view.dtype == dtype and not expanded:
            return view
    out = context.buffer(name, dtype, sum([view.numel() for view in views]))
    return torch.cat(views, out=out)
