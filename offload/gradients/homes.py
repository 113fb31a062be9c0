"""Homes of gradients: memory of the host, or a range of a file on the drive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch

from offload.device.boundary import is_on_device, to_host
from offload.gradients.spill import Region

Adding: TypeAlias = Callable[[torch.Tensor, Callable[[torch.Tensor], object]], None]
"""Function that brings a tensor of a device to host memory, and gives it to another function."""


def _nothing() -> None:
    pass


class MemoryHome:
    """Values in host memory.

    Args:
        values: The values; they may still be arriving from a device.
        settle: Function that waits until they have arrived.
        norm: Their 2-norm, if it was computed on the device.
        add: Function that begins to add a tensor of a device to the values; None if none can come.
    """

    allows_views = True

    def __init__(
        self,
        values: torch.Tensor,
        settle: Callable[[], None] = _nothing,
        *,
        norm: torch.Tensor | None = None,
        add: Adding | None = None,
    ) -> None:
        self._values = values
        self._settle = settle
        self._norm = norm
        self._add = add

    @contextmanager
    def opened(self, *, changes: bool) -> Iterator[torch.Tensor]:
        """Yield the values themselves."""
        self._settle()
        if changes:
            self._norm = None
        yield self._values

    def norm(self) -> torch.Tensor | None:
        """Return the norm that the device computed, while it is that of the values."""
        return self._norm

    def add(self, other: torch.Tensor) -> bool:
        """Begin to add a tensor of a device."""
        self._norm = None
        if self._add is None or not is_on_device(other):
            return False
        self._add(other, self._values.add_)
        return True

    def multiply(self, factor: torch.Tensor | float) -> bool:  # noqa: ARG002
        """Do nothing: the values are at hand."""
        return False

    def clear(self) -> bool:
        """Do nothing: the values are at hand."""
        return False

    def for_step(self) -> torch.Tensor | None:
        """Return the values."""
        self._settle()
        return self._values


class DriveHome:
    """Values in a range of a file.

    A gradient is written once, and read once by the step. Its norm is taken while it is in memory,
    and factors wait for the next read, so clipping and unscaling by a number move no byte.

    Args:
        region: Range of the file.
        shape: Shape of the gradient.
        dtype: Its dtype.
        settle: Function that waits until the values are on their way to the file.
        add: As in `MemoryHome`.
    """

    allows_views = False

    def __init__(
        self,
        region: Region,
        shape: Sequence[int],
        dtype: torch.dtype,
        settle: Callable[[], None] = _nothing,
        *,
        norm: torch.Tensor | None = None,
        add: Adding | None = None,
    ) -> None:
        self.region = region
        self.factors: list[torch.Tensor | float] = []
        """Factors that the values in the file are multiplied by in turn, each with one rounding."""
        self._shape = tuple(shape)
        self._dtype = dtype
        self._settle = settle
        self._norm = norm
        self._add = add
        self.is_zero = False
        """Whether all values are zero, whatever the file has."""

    def write(self, values: torch.Tensor) -> None:
        """Begin to write all values, and take their norm."""
        if self._norm is None:
            self._norm = torch.linalg.vector_norm(values, 2.0)
        self.region.write(values)
        self.factors.clear()
        self.is_zero = False

    def read(self) -> torch.Tensor:
        """Return the values in new memory."""
        if self.is_zero:
            return torch.zeros(self._shape, dtype=self._dtype, device="cpu")
        values = torch.empty(self._shape, dtype=self._dtype, device="cpu")
        self.region.read(values)
        return self.scaled(values)

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """Multiply values that were read by the factors, in place."""
        for factor in self.factors:
            values.mul_(factor)
        return values

    @contextmanager
    def opened(self, *, changes: bool) -> Iterator[torch.Tensor]:
        """Yield the values in new memory; if they change, they are written after the block."""
        self._settle()
        values = self.read()
        yield values
        if changes:
            self._norm = None
            self.write(values)

    def norm(self) -> torch.Tensor | None:
        """Return the norm of the values, unless factors wait."""
        self._settle()
        return None if self.factors or self.is_zero else self._norm

    def add(self, other: torch.Tensor) -> bool:
        """Begin to add a tensor of a device."""
        if self._add is None or not is_on_device(other):
            return False
        self._add(other, self._added)
        return True

    def _added(self, other: torch.Tensor) -> None:
        values = self.read().add_(other)
        self._norm = None
        self.write(values)

    def multiply(self, factor: torch.Tensor | float) -> bool:
        """Note a factor for the next read."""
        self._settle()
        self.factors.append(
            to_host(factor.detach()) if isinstance(factor, torch.Tensor) else factor
        )
        return True

    def clear(self) -> bool:
        """Note that all values are zero."""
        self._settle()
        self.is_zero = True
        self.factors.clear()
        return True

    def for_step(self) -> torch.Tensor | None:
        """Return None: the step reads the file chunk by chunk."""
        self._settle()
        return None
