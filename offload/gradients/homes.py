"""Homes of gradients: memory of the host, or a range of a file on the drive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeAlias

import torch

from offload.ambient import flushes_denormals
from offload.device.boundary import is_on_device, to_host
from offload.errors import UnsupportedParameterError
from offload.gradients.spill import Region

Adding: TypeAlias = Callable[[torch.Tensor, Callable[[torch.Tensor], object]], None]
"""Function that brings a tensor of a device to host memory, and gives it to another function."""


class Home(Protocol):
    """Where the values of one gradient are."""

    is_taken: bool
    """Whether a step that runs beside the model has taken the values, so that none are here."""

    def opened(self, *, changes: bool) -> AbstractContextManager[torch.Tensor]:
        """Return a block with the values in host memory; changes in it are kept if announced."""
        ...

    def norm(self) -> torch.Tensor | None:
        """Return the 2-norm as torch computes it; None if it is not known without the values."""
        ...

    def add(self, other: torch.Tensor) -> bool:
        """Add a tensor of the same shape and dtype; return False if that is not possible here."""
        ...

    def multiply(self, factor: torch.Tensor | float) -> bool:
        """Multiply all values by a number; return False if that is not possible here."""
        ...

    def clear(self) -> bool:
        """Set all values to zero; return False if that is not possible here."""
        ...

    def for_step(self) -> torch.Tensor | None:
        """Return the values for a step if they are in host memory, otherwise None.

        Raises:
            gds.StorageError: The values could not be written, or are gone.
        """
        ...


def _nothing() -> None:
    pass


@contextmanager
def _same_form(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield values to a block, which may change them but not their shape or strides."""
    before = values.shape, values.stride()
    yield values
    if (values.shape, values.stride()) != before:
        raise UnsupportedParameterError(
            "the shape of a gradient that is outside of its device cannot be changed in place: "
            "assign a new tensor to p.grad"
        )


class MemoryHome:
    """Values in host memory.

    Args:
        values: The values; they may still be arriving from a device.
        settle: Function that waits until they have arrived.
        norm: Their 2-norm, if it was computed on the device.
        add: Function that begins to add a tensor of a device to the values; None if none can come.
    """

    def __init__(
        self,
        values: torch.Tensor,
        settle: Callable[[], None] = _nothing,
        *,
        norm: torch.Tensor | None = None,
        add: Adding | None = None,
    ) -> None:
        self.is_taken = False
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
        with _same_form(self._values.detach()) as values:
            yield values

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
        self.is_taken = False
        self.region = region
        self.factors: list[torch.Tensor | float] = []
        """Factors that the values in the file are multiplied by in turn, each with one rounding."""
        self._shape = tuple(shape)
        self._dtype = dtype
        self._settle = settle
        self._norm = norm
        self._norm_modes = _modes()
        self._add = add
        self.is_zero = False
        """Whether all values are zero before the factors, whatever the file has."""

    def write(self, values: torch.Tensor) -> None:
        """Begin to write all values, and take their norm."""
        if self._norm is None:
            self._norm_modes = _modes()
            self._norm = torch.linalg.vector_norm(values, 2.0)
        self.region.write(values)
        self.factors.clear()
        self.is_zero = False

    def read(self) -> torch.Tensor:
        """Return the values in new memory."""
        return self._fill(torch.empty(self._shape, dtype=self._dtype, device="cpu"))

    def _fill(self, values: torch.Tensor) -> torch.Tensor:
        if self.is_zero:
            values.zero_()
        else:
            self.region.read(values)
        return self.scaled(values)

    @contextmanager
    def _rewriting(self) -> Iterator[torch.Tensor]:
        """Yield the values in memory that is kept for this, and write them after the block.

        In new memory for each gradient, the heap would fall to pieces and grow with the model.
        """
        with self.region.memory() as memory:
            values = self._fill(memory.view(self._dtype).view(self._shape))
            yield values
            self._norm = None
            self.write(values)

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """Multiply values that were read by the factors, in place."""
        flushes = bool(self.factors) and flushes_denormals()
        if flushes:  # the factors are of a thread that did not flush
            torch.set_flush_denormal(False)
        try:
            for factor in self.factors:
                values.mul_(factor)
        finally:
            if flushes:
                torch.set_flush_denormal(True)
        return values

    @contextmanager
    def opened(self, *, changes: bool) -> Iterator[torch.Tensor]:
        """Yield the values in new memory; if they change, they are written after the block."""
        self._settle()
        if changes:
            with self._rewriting() as values, _same_form(values) as same:
                yield same
        else:
            with _same_form(self.read()) as values:
                yield values

    def norm(self) -> torch.Tensor | None:
        """Return the norm of the values, unless factors wait or it may have other bits by now."""
        self._settle()
        is_known = not self.factors and not self.is_zero and self._norm_modes == _modes()
        return self._norm if is_known else None

    def add(self, other: torch.Tensor) -> bool:
        """Begin to add a tensor of a device."""
        if self._add is None or not is_on_device(other):
            return False
        self._add(other, self._added)
        return True

    def _added(self, other: torch.Tensor) -> None:
        # If the read fails, the sum is lost.
        with self.region.replacing(), self._rewriting() as values:
            values.add_(other)

    def multiply(self, factor: torch.Tensor | float) -> bool:
        """Note a factor for the next read. Raises what torch raises for a factor of its kind."""
        self._settle()
        if flushes_denormals():
            return False  # each thread has its own setting, so the bits depend on the cut
        if isinstance(factor, torch.Tensor):  # whose value may change after this
            factor = to_host(factor) if is_on_device(factor) else factor.detach().clone()
        torch.empty(0, dtype=self._dtype, device="cpu").mul_(factor)
        self.factors.append(factor)
        return True

    def clear(self) -> bool:
        """Note that all values are zero."""
        self._settle()
        self.is_zero = True
        self.factors.clear()
        return True

    def for_step(self) -> torch.Tensor | None:
        """Return None when all values are in the file, which the step reads chunk by chunk."""
        self._settle()
        if not self.is_zero:
            self.region.settle()
        return None


class ViewHome:
    """A view of values that have another home. It is taken anew for each operation.

    Args:
        base: Home of all values.
        view: Function that takes the view.
    """

    def __init__(self, base: Home, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._base = base
        self._view = view

    @property
    def is_taken(self) -> bool:
        """Whether a step has taken all values."""
        return self._base.is_taken

    @is_taken.setter
    def is_taken(self, is_taken: bool) -> None:
        self._base.is_taken = is_taken

    @contextmanager
    def opened(self, *, changes: bool) -> Iterator[torch.Tensor]:
        """Yield the view; with a base on the drive, all of the base is read."""
        with (
            self._base.opened(changes=changes) as values,
            _same_form(self._view(values)) as view,
        ):
            yield view

    def norm(self) -> torch.Tensor | None:
        """Return None: only the norm of all values is known."""
        return None

    def add(self, other: torch.Tensor) -> bool:  # noqa: ARG002
        """Do nothing: `opened` can do it."""
        return False

    def multiply(self, factor: torch.Tensor | float) -> bool:  # noqa: ARG002
        """Do nothing: `opened` can do it."""
        return False

    def clear(self) -> bool:
        """Do nothing: `opened` can do it."""
        return False

    def for_step(self) -> torch.Tensor | None:
        """Return a copy of the view."""
        with self.opened(changes=False) as view:
            return view.clone()


def _modes() -> tuple[int, bool]:
    """Return what the bits of a sum on this thread depend on, apart from its terms."""
    return torch.get_num_threads(), flushes_denormals()
