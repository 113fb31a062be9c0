"""Checks for parameters that share memory: one of their two updates would be lost.

A step reads neighbouring parameters, updates them side by side, and writes them back. If two have
an element in common, the last one written wins. torch's own step applies both updates in sequence.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch

from offload.errors import UnsupportedParameterError

_Place: TypeAlias = int | tuple[int, tuple[int, ...]]


class MemoryCheck:
    """Refuses tensors that share memory, and remembers the places of tensors that do not."""

    def __init__(self) -> None:
        self._places: tuple[_Place, ...] | None = None

    def is_current(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether tensors are at the same places as those that the last `check` accepted.

        Fast enough for every step: 10,000 tensors take 2 to 4 ms.
        """
        return _places(tensors) == self._places

    def check(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Check that no memory is shared. Skipped for tensors for which `is_current` is true.

        Args:
            named: Tensors that are updated, with their names.

        Raises:
            UnsupportedParameterError: Two tensors have an element in common, or two elements of one
                tensor are at the same place; names the tensors.
        """
        tensors = [tensor for _, tensor in named]
        places = _places(tensors)
        if places == self._places:
            return
        found = find_overlap(tensors)
        if found is None:
            self._places = places
            return
        self._places = None
        (first, _), (second, tensor) = (named[number] for number in found)
        if first == second:
            raise UnsupportedParameterError(
                f"parameter {first!r} has several elements at the same place in memory (shape "
                f"{list(tensor.shape)}, strides {list(tensor.stride())}; expand() makes such "
                "tensors), so that their updates would overwrite each other. Give it memory of its "
                "own: torch.nn.Parameter(parameter.detach().clone())"
            )
        raise UnsupportedParameterError(
            f"parameters {first!r} and {second!r} share memory and are both trained: one of their "
            "updates would be lost. To tie them, assign the same Parameter object to both "
            "(decoder.weight = encoder.weight). To train them apart, give one its own memory "
            "(parameter.data = parameter.data.clone()). Alternatively, freeze one of them "
            "(requires_grad_(False))"
        )


def find_overlap(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the numbers of two tensors that have an element in common; None if there are none.

    The numbers are in ascending order. They are equal if one tensor has two elements at the same
    place. The result is exact to the byte: views of one storage whose elements interleave do not
    overlap. No element is read. If the address ranges of tensors cross, which is rare, the check
    takes host memory: at most a byte for each byte of the ranges, usually a byte for each element.
    """
    spans = []
    for number, tensor in enumerate(tensors):
        start = _address(tensor)
        if start and tensor.numel():
            if not _has_distinct_elements(tensor):
                return number, number
            spans.append((str(tensor.device), start, start + _span_bytes(tensor), number))
    for group in _crossing_groups(sorted(spans)):
        mask = _Mask([tensors[number] for number in group])
        for position, number in enumerate(group):
            if mask.add(tensors[number]):
                continue
            for other in group[:position]:
                pair = _Mask([tensors[other], tensors[number]])
                if not (pair.add(tensors[other]) and pair.add(tensors[number])):
                    return min(other, number), max(other, number)
    return None


class Spans:
    """Address ranges of some tensors, each from its first byte to its last.

    Addresses are read without announcing a use of the tensor (see `watch`), because a step may be
    running.

    Args:
        tensors: Tensors whose ranges are recorded.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        spans = sorted(span for tensor in tensors if (span := _span(tensor)))
        self._starts = [start for start, _ in spans]
        self._furthest = list(itertools.accumulate((stop for _, stop in spans), max))

    def touch(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's range has a byte in common with any recorded range."""
        span = _span(tensor)
        if span is None:
            return False
        before = bisect_left(self._starts, span[1])
        return before > 0 and self._furthest[before - 1] > span[0]


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    with torch._C.DisableTorchFunctionSubclass():
        start = _address(tensor)
        return (start, start + _span_bytes(tensor)) if start and tensor.numel() else None


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a nonempty tensor has memory. Some subclasses only wrap other tensors."""
    return _address(tensor) != 0


class _Mask:
    """Map of used memory, over the range of addresses that some tensors span together.

    Args:
        tensors: All tensors that will be added; none is empty.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        starts = [_address(tensor) for tensor in tensors]
        self._start = min(starts)
        # Largest number of bytes that divides all element sizes and all distances between tensors.
        self._unit = math.gcd(
            *(tensor.itemsize for tensor in tensors), *(start - self._start for start in starts)
        )
        stop = max(s + _span_bytes(tensor) for s, tensor in zip(starts, tensors, strict=True))
        num_units = (stop - self._start) // self._unit
        self._used = torch.zeros(num_units, dtype=torch.uint8, device="cpu")

    def add(self, tensor: torch.Tensor) -> bool:
        """Record a tensor's memory.

        Returns:
            False if some of the memory is already recorded; then nothing is recorded.
        """
        width = tensor.itemsize // self._unit
        view = self._used.as_strided(
            (*tensor.shape, width),
            (*(stride * width for stride in tensor.stride()), 1),
            (_address(tensor) - self._start) // self._unit,
        )
        if view.any().item():
            return False
        view.fill_(1)
        return True

    def count(self) -> int:
        """Return the number of recorded units."""
        return int(self._used.sum(dtype=torch.int64).item())


def _has_distinct_elements(tensor: torch.Tensor) -> bool:
    """Return whether no two elements of a tensor are at the same place."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            break  # a step along this dimension stays within the reach of the smaller strides
        reach += stride * (size - 1)
    else:
        return True
    mask = _Mask([tensor])
    mask.add(tensor)
    return mask.count() == tensor.numel()


def _crossing_groups(spans: Iterable[tuple[str, int, int, int]]) -> Iterator[list[int]]:
    """Yield the numbers of the tensors in each group of two or more crossing address ranges."""
    group: list[int] = []
    group_device, group_stop = "", 0
    for device, start, stop, number in spans:
        if device != group_device or start >= group_stop:
            if len(group) > 1:
                yield group
            group, group_device, group_stop = [], device, 0
        group.append(number)
        group_stop = max(group_stop, stop)
    if len(group) > 1:
        yield group


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last byte of a nonempty tensor."""
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def _places(tensors: Iterable[torch.Tensor]) -> tuple[_Place, ...]:
    """Return the address of each tensor, with its strides if it is not contiguous.

    Sizes and dtypes are checked with the layout.
    """
    return tuple(_address(t) if t.is_contiguous() else (_address(t), t.stride()) for t in tensors)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element; 0 if it has no memory of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # raised by some subclasses that only stand for other tensors
        return 0
