"""Which parameters share memory: two over one element would both be updated, and one update lost.

A step reads neighbouring parameters, updates them side by side, and writes them back. Where two
have an element in common, the one that is written last wins; torch's own step applies both updates,
one after the other.
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
    """Refuses tensors that share memory, and remembers where they were when they did not."""

    def __init__(self) -> None:
        self._places: tuple[_Place, ...] | None = None

    def is_current(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether tensors are where the last ones were that `check` let pass.

        Quick, for every step: 10,000 tensors take 2 to 4 ms.
        """
        return _places(tensors) == self._places

    def check(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Look closely, unless nothing has changed.

        Args:
            named: Tensors that are updated, with their names.

        Raises:
            UnsupportedParameterError: Two of them have an element in common, or two elements of one
                are at the same place; names them.
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
            "(parameter.data = parameter.data.clone()). One of them may also be frozen "
            "(requires_grad_(False))"
        )


def find_overlap(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return two tensors that have an element in common, by number, in order; None if none have.

    Exact to the byte: views of one storage whose elements lie between each other are apart. Twice
    the same number stands for a tensor that has two elements at one place. Reads no element. Where
    the ranges of tensors cross, which is rare, it takes a byte of host memory for each element.
    """
    spans = []
    for number, tensor in enumerate(tensors):
        start = _address(tensor)
        if start and tensor.numel():
            if not _is_apart(tensor):
                return number, number
            spans.append((str(tensor.device), start, start + _span_bytes(tensor), number))
    for group in _crossing(sorted(spans)):
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
    """Where some tensors lie, each from its first byte to its last.

    Asks parameters without asking their class, as a step may be running on them.

    Args:
        tensors: Of which the spans are noted.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        spans = sorted(span for tensor in tensors if (span := _span(tensor)))
        self._starts = [start for start, _ in spans]
        self._furthest = list(itertools.accumulate((stop for _, stop in spans), max))

    def touch(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's span has a byte in common with any of them."""
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
    """Return whether a tensor that is not empty has memory; some subclasses only wrap others."""
    return _address(tensor) != 0


class _Mask:
    """Notes which memory in the range of some tensors is used.

    Args:
        tensors: All that will be added; none of them empty.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        starts = [_address(tensor) for tensor in tensors]
        self._start = min(starts)
        # What all elements, and where they begin, are multiples of.
        self._unit = math.gcd(
            *(tensor.itemsize for tensor in tensors), *(start - self._start for start in starts)
        )
        stop = max(s + _span_bytes(tensor) for s, tensor in zip(starts, tensors, strict=True))
        num_units = (stop - self._start) // self._unit
        self._used = torch.zeros(num_units, dtype=torch.uint8, device="cpu")

    def add(self, tensor: torch.Tensor) -> bool:
        """Note a tensor's memory; False, and nothing is noted, if some of it is used already."""
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
        """Return how many units are used."""
        return int(self._used.sum(dtype=torch.int64).item())


def _is_apart(tensor: torch.Tensor) -> bool:
    """Return whether no two elements of a tensor are at one place."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            break  # a step along this dimension stays within what the others reach
        reach += stride * (size - 1)
    else:
        return True
    mask = _Mask([tensor])
    mask.add(tensor)
    return mask.count() == tensor.numel()


def _crossing(spans: Iterable[tuple[str, int, int, int]]) -> Iterator[list[int]]:
    """Group ranges of memory that cross; yields the numbers of groups of more than one.

    Args:
        spans: Device, first byte, one past the last, and number of each; sorted.
    """
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
    """Return the bytes from the first to the last of a tensor, which is not empty."""
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def _places(tensors: Iterable[torch.Tensor]) -> tuple[_Place, ...]:
    """Return where tensors are. Sizes and dtypes are not in it: the layout notices those."""
    return tuple(_address(t) if t.is_contiguous() else (_address(t), t.stride()) for t in tensors)


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's first element is; 0 if it has no memory of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of some subclasses that only stand for tensors
        return 0
