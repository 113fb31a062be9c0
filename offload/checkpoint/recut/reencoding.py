"""8-bit values in other blocks than those that they were stored in.

A block of 32 elements has one scale. If all elements of a new block are from one stored block, they
are copied with its scale. Otherwise the block is decoded, and encoded anew with a scale of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from offload.checkpoint.checked_reads import CheckedReads
from offload.checkpoint.recut.places import Place
from offload.format.arrays import BLOCK_ELEMENTS, scale_name
from offload.format.layout import Layout

if TYPE_CHECKING:
    import numpy as np  # at run time only where values are encoded: `offload ls` needs none

Values: TypeAlias = "np.ndarray[Any, Any]"

Recode: TypeAlias = Callable[[Values, Values], tuple[Values, Values]]
"""Function that encodes 8-bit values anew, in blocks that begin at the first of them.

It is given the codes (int8 for signed moments, uint8 for others) and the bits of the scale of each
(uint16). It returns the new codes, and the bits of the scale of each new block."""

WINDOW_ELEMENTS: Final = 64 << 10
"""Number of elements that are encoded at a time, a multiple of 32. They take about 2 MiB."""


class Reencoder:
    """Puts 8-bit values of several stored blocks into new blocks.

    Args:
        recode: Encodes values anew.
        leaves: Reader of stored values.
    """

    def __init__(self, recode: Recode, leaves: CheckedReads) -> None:
        self._recode = recode
        self._leaves = leaves

    def fill(
        self,
        array: str,
        layout: Layout,
        num: int,
        found: Iterable[tuple[int, Place]],
        arrays: Mapping[str, memoryview],
    ) -> None:
        """Write new blocks of an 8-bit array and their scales.

        Args:
            array: Name of the array with the codes.
            layout: Layout of the new blocks.
            num: Number of elements. The first one begins a block.
            found: Places of the elements, each with its position among the new elements. Elements
                that have none become zeros.
            arrays: Memory of the new codes and scales, by the names of their state arrays.

        Raises:
            DamagedError: A chunk of an owner is not as it was written.
            gds.StorageError: A chunk of an owner cannot be read.
        """
        import numpy as np

        is_signed = layout.formats[array].dtype == "I8"
        codes = np.zeros(num, np.int8 if is_signed else np.uint8)
        scales = np.zeros(num, np.uint16)
        blocks = np.zeros(num, np.int64)
        """For each element, a number of its stored block that no other block has."""
        num_blocks = 1
        for at, place in found:
            here = slice(at, at + place.num)
            if not place.read(array, self._leaves, codes[here].view(np.uint8).data):
                continue
            stored = np.empty(place.num_values(layout.formats[scale_name(array)]), np.uint16)
            place.read(scale_name(array), self._leaves, stored.view(np.uint8).data)
            numbers = (place.first + np.arange(place.num)) // BLOCK_ELEMENTS
            numbers -= numbers[0]
            scales[here], blocks[here] = stored[numbers], num_blocks + numbers
            num_blocks += len(stored)
        starts = np.arange(0, num, BLOCK_ELEMENTS)
        is_one = np.minimum.reduceat(blocks, starts) == np.maximum.reduceat(blocks, starts)
        new_codes, new_scales = self._recode(codes, scales)
        new_codes = np.where(np.repeat(is_one, BLOCK_ELEMENTS)[:num], codes, new_codes)
        new_scales = np.where(is_one, scales[starts], new_scales)
        _copy(new_codes, arrays[array])
        _copy(new_scales, arrays[scale_name(array)])


def _copy(values: Values, out: memoryview) -> None:
    import numpy as np

    out[: values.nbytes] = np.ascontiguousarray(values).view(np.uint8).data
