"""Filler of a store's chunks: state from other sources, stored as a step would have left it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from offload.device.boundary import HOST
from offload.device.filed import NewValues
from offload.device.staging import StagedTensors, on_host
from offload.errors import MismatchError
from offload.format.arrays import MASTER, MASTER_LOW
from offload.format.chunk_plan import Piece
from offload.format.digests import Digests
from offload.format.layout import Layout
from offload.update.coding import rounding
from offload.update.coding.coder import StateCoder
from offload.update.coding.decoder import (
    ParameterViews,
    copy_values,
    cut_by_parameter,
    has_master,
    kept_arrays,
    stored_block,
)
from offload.update.kept_state import Scalars
from offload.update.pool import BlockMemory


class TensorSource(Protocol):
    """A tensor of any origin that is read range by range."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements per dimension."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensors that `read` returns."""
        ...

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` in row-major order, flat, in host memory."""
        ...


class HeldTensor:
    """A tensor in memory of any device. If it is not contiguous, the first `read` copies it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._flat: torch.Tensor | None = None
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` in row-major order, flat, in host memory."""
        if self._flat is None:
            self._flat = self._tensor.reshape(-1)
        out = self._flat[start:stop].cpu()
        if stop >= self._flat.numel():
            self._flat = None  # ranges are read in order, so a copy is not needed any more
        return out


@dataclass(slots=True)
class ParameterState:
    """State of one parameter; the source may lack some of it."""

    scalars: Scalars | None = None
    """Scalar state; None for a parameter that has never been stepped."""

    arrays: Mapping[str, TensorSource] = field(default_factory=dict)
    """Every state array, by torch's names; empty if `scalars` is None."""

    master: TensorSource | None = None
    """FP32 values of the parameter, if the source has more bits than the live parameter."""


class StateFiller:
    """Fills chunks with state from other sources; the counterpart of `ChunkUpdater`.

    Args:
        layout: Layout of the store.
        states: State of each parameter, in element-space order.
        live: Live parameters. A 16-bit parameter becomes its rounded master.
        step: Number of optimizer steps that the state has seen. It seeds stochastic rounding
            together with `seed`.
        seed: Seed of stochastic rounding, for state that is stored with it.
        progress: Called after each block with the number of elements in it.
    """

    device = HOST
    """Device on which chunks are filled."""

    stages = False
    """Whether `prepare` and `arrive` do anything."""

    def __init__(
        self,
        layout: Layout,
        states: Sequence[ParameterState],
        live: ParameterViews,
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
        """Return True: every chunk is written."""
        return True

    def update(
        self,
        chunk: int,
        arrays: Mapping[str, torch.Tensor],
        digests: Digests | None = None,  # noqa: ARG002  (taken when the chunk is put)
        model: NewValues = (),
    ) -> None:
        """Fill one chunk, and `model` with the values of its parameters."""
        plan = self._layout.plans[chunk]
        with on_host(self._live, chunk, plan.pieces):
            for span in cut_by_parameter(plan):
                (piece,) = span.pieces
                self._fill(piece, stored_block(span, arrays))
                if self._progress is not None:
                    self._progress(piece.stop - piece.start)
            copy_values(self._live, model)

    def prepare(self, chunk: int) -> None:
        """Do nothing: nothing can begin before `update`."""

    def arrive(self, chunk: int) -> None:
        """Do nothing: `prepare` begins nothing."""

    def fence(self) -> None:
        """Make the calling thread's current streams wait for the parameters filled so far."""
        if isinstance(self._live, StagedTensors):
            self._live.fence()

    def finish(self) -> list[Scalars | None]:
        """Do what `fence` does, and return the scalar state of each parameter."""
        self.fence()
        return [state.scalars for state in self._states]

    def _fill(self, piece: Piece, stored: Mapping[str, torch.Tensor]) -> None:
        spec = self._layout.parameters[piece.parameter]
        state = self._states[piece.parameter]
        if has_master(spec):
            (live,) = self._live.views([piece])
            self._fill_master(spec.name, state, piece, live, stored)
            self._live.finish([piece])
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
            self._coder.store(self._memory, {name: exact}, stored, [piece])

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
                    "state. A store keeps FP32 values only of parameters that have been stepped: "
                    "round it first, or give it state by stepping it once with a zero gradient"
                )
        if MASTER_LOW in stored:
            rounding.split_master(master, live, stored[MASTER_LOW], scratch=self._memory.scratch)
            return
        stored[MASTER].copy_(master)
        if state.master is not None:
            live.copy_(master)
