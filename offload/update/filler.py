"""Filling the chunks of a store with state from elsewhere, as a step would have left them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from offload.device.boundary import HOST
from offload.device.staging import CrossingTensors, on_host
from offload.errors import MismatchError
from offload.format.arrays import MASTER, MASTER_LOW
from offload.format.digests import Digests
from offload.format.layout import Layout, Piece
from offload.update import codecs
from offload.update.coder import StateCoder
from offload.update.decoder import Live, cut_pieces, has_master, kept_arrays, stored_block
from offload.update.pool import BlockMemory
from offload.update.rules import Scalars


class TensorSource(Protocol):
    """A tensor that is read range by range, wherever it is."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of what `read` returns."""
        ...

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` in row-major order, flat, in host memory."""
        ...


class HeldTensor:
    """A tensor in memory, of any device; one that is not contiguous is copied when first read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._flat: torch.Tensor | None = None
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return a range, flat, in host memory."""
        if self._flat is None:
            self._flat = self._tensor.reshape(-1)
        out = self._flat[start:stop].cpu()
        if stop >= self._flat.numel():
            self._flat = None  # read in order, so a copy is not needed any more
        return out


@dataclass(slots=True)
class ParameterState:
    """What is known of one parameter's state."""

    scalars: Scalars | None = None
    """None for a parameter that has never been stepped."""

    arrays: Mapping[str, TensorSource] = field(default_factory=dict)
    """Every state array, by torch's names; none where there are no scalars."""

    master: TensorSource | None = None
    """The FP32 parameter, if it is known in more bits than the live one has."""


class StateFiller:
    """Fills chunks; the counterpart of `ChunkUpdater` for state that comes from elsewhere.

    Args:
        layout: Of the store.
        states: Of each parameter, in element-space order.
        live: The live parameters: 16-bit ones become what their master rounds to.
        step: Optimizer steps that the state has seen; seeds stochastic rounding with the next.
        seed: Of stochastic rounding, where state is stored so.
        progress: Called with the number of elements filled after each block.
    """

    device = HOST
    """Where chunks are filled."""

    def __init__(
        self,
        layout: Layout,
        states: Sequence[ParameterState],
        live: Live,
        *,
        step: int = 0,
        seed: int = 0,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self._layout = layout
        self._states = states
        self._live = live
        self._memory = BlockMemory()
        self._coder = StateCoder(layout, seed, step)
        self._progress = progress

    def touched(self, chunk: int) -> bool:  # noqa: ARG002
        """Return that every chunk is written."""
        return True

    def update(
        self,
        chunk: int,
        arrays: Mapping[str, torch.Tensor],
        digests: Digests | None = None,  # noqa: ARG002  (taken when the chunk is put)
    ) -> None:
        """Fill one chunk, given just its range of each state array, as it is stored."""
        with on_host(self._live, chunk, [*self._layout.pieces(chunk)]):
            for piece in cut_pieces(self._layout, chunk):
                stored = stored_block(self._layout, chunk, piece, arrays)
                first = self._layout.chunk_range(chunk)[0] + piece.at
                self._fill(piece, stored, first)
                if self._progress is not None:
                    self._progress(piece.stop - piece.start)

    def prepare(self, chunk: int) -> bool:  # noqa: ARG002
        """Return False: there is nothing that can be begun."""
        return False

    def arrive(self, chunk: int) -> None:
        """Do nothing."""

    def fence(self) -> None:
        """Let the calling thread's current streams wait for the parameters filled so far."""
        if isinstance(self._live, CrossingTensors):
            self._live.fence()

    def finish(self) -> list[Scalars | None]:
        """Return the scalar state of each parameter."""
        return [state.scalars for state in self._states]

    def _fill(self, piece: Piece, stored: Mapping[str, torch.Tensor], first: int) -> None:
        spec = self._layout.parameters[piece.parameter]
        state = self._states[piece.parameter]
        if has_master(spec):
            live = self._live.view(piece.parameter, piece.start, piece.stop)
            self._fill_master(spec.name, state, piece, live, stored)
            self._live.finish(piece.parameter, piece.stop - piece.start)
        if state.scalars is None:
            for name in stored.keys() - {MASTER, MASTER_LOW}:
                stored[name].zero_()
            return
        for name in kept_arrays(spec, self._layout):
            values = state.arrays[name].read(piece.start, piece.stop)
            if self._coder.is_exact:
                stored[name].copy_(values)
                continue
            exact = self._memory.buffer(name, torch.float32, len(values)).copy_(values)
            self._coder.store(self._memory, name, exact, stored, [piece], first)

    def _fill_master(
        self,
        name: str,
        state: ParameterState,
        piece: Piece,
        live: torch.Tensor,
        stored: Mapping[str, torch.Tensor],
    ) -> None:
        master = self._memory.buffer(MASTER, torch.float32, len(live))
        if state.master is None:
            master.copy_(live)
        else:
            master.copy_(state.master.read(piece.start, piece.stop))
        if state.scalars is None and state.master is not None:
            rounded = self._memory.buffer("rounded", live.dtype, len(live)).copy_(master)
            if not torch.equal(rounded.float().view(torch.int32), master.view(torch.int32)):
                raise MismatchError(
                    f"{name!r} has an FP32 value that {live.dtype} cannot hold, and no optimizer "
                    "state. A store keeps FP32 values of parameters that have been stepped only: "
                    "round it first, or give it state by stepping it once with a zero gradient"
                )
        if MASTER_LOW in stored:
            codecs.split_master(master, live, stored[MASTER_LOW], scratch=self._memory.scratch)
            return
        stored[MASTER].copy_(master)
        if state.master is not None:
            live.copy_(master)
