"""Flat views of gradients, some of which are on the drive, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard, cast

import torch

from offload.device.staging import StagedTensors, Traffic
from offload.format.chunk_plan import Piece
from offload.gradients.homes import DriveHome
from offload.gradients.outside import OutsideGradient
from offload.gradients.spill import Reading


def is_spilled(tensor: torch.Tensor | None) -> TypeGuard[OutsideGradient]:
    """Return whether a tensor is a gradient whose values are on the drive."""
    return isinstance(tensor, OutsideGradient) and isinstance(tensor.home, DriveHome)


class SpilledTensors(StagedTensors):
    """Gradients of which some are on the drive; what a chunk needs is read while another steps."""

    def __init__(
        self, tensors: Sequence[torch.Tensor | None], *, writable: bool, traffic: Traffic
    ) -> None:
        super().__init__(tensors, writable=writable, traffic=traffic)
        self._readings: dict[int, list[_Spilled]] = {}
        self._unread = {
            index: tensor.numel() for index, tensor in enumerate(tensors) if is_spilled(tensor)
        }
        """Number of elements of each gradient on the drive that `leave` has not handled yet."""

    def is_staged(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values come to host memory chunk by chunk."""
        return is_spilled(tensor) or super().is_staged(tensor)

    def prepare(self, chunk: int, pieces: Sequence[Piece], changes: Callable[[int], bool]) -> None:
        """Begin to read, and to fetch from devices, the data that a chunk needs."""
        if chunk in self._readings:
            return
        found, others = [], []
        for piece in pieces:
            tensor = self._tensors[piece.parameter]
            if not is_spilled(tensor):
                others.append(piece)
            elif piece.start < piece.stop:
                found.append(_Spilled(piece, tensor))
        self._readings[chunk] = found
        super().prepare(chunk, others, changes)

    def arrive(self, chunk: int) -> None:
        """Wait until all data that `prepare` requested for a chunk is in host memory."""
        for spilled in self._readings[chunk]:
            spilled.arrive()
        super().arrive(chunk)

    def leave(self, chunk: int) -> None:
        """Free a chunk's memory, and gradients that have been applied."""
        for spilled in self._readings.pop(chunk):
            spilled.release()
            index = spilled.piece.parameter
            self._unread[index] -= spilled.piece.stop - spilled.piece.start
            if not self._unread[index]:
                self._tensors[index] = None
        super().leave(chunk)

    def _staged(self, piece: Piece) -> torch.Tensor | None:
        if piece.parameter not in self._unread:
            return super()._staged(piece)
        for readings in self._readings.values():
            for spilled in readings:
                whole = spilled.piece
                if whole.parameter == piece.parameter and whole.start <= piece.start < whole.stop:
                    return spilled.values[piece.start - whole.start : piece.stop - whole.start]
        return None

    def finish(self, pieces: Sequence[Piece]) -> None:
        """Report that elements of pieces, which have been viewed, are not used any more."""
        super().finish([piece for piece in pieces if piece.parameter not in self._unread])


class _Spilled:
    """A piece of a gradient that is read from the drive."""

    def __init__(self, piece: Piece, gradient: OutsideGradient) -> None:
        home = cast(DriveHome, gradient.home)
        self.piece = piece
        self.values = torch.zeros(0, dtype=gradient.dtype, device="cpu")
        """The values, after `arrive`."""
        self._home = home
        self._dtype = gradient.dtype
        self._reading: Reading | None = None
        if not home.is_zero:
            start, stop = piece.start * gradient.itemsize, piece.stop * gradient.itemsize
            self._reading = home.region.begin_read(start, stop)

    def arrive(self) -> None:
        """Wait until the values are in memory."""
        if len(self.values):
            return
        if self._reading is None:
            num = self.piece.stop - self.piece.start
            values = torch.zeros(num, dtype=self._dtype, device="cpu")
        else:
            values = self._reading.wait().view(self._dtype)
        self.values = self._home.scaled(values)

    def release(self) -> None:
        """Free the memory of the values."""
        if self._reading is not None:
            self._reading.release()
