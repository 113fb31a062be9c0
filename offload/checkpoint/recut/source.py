"""Source of a step that reads the state of a checkpoint in another cut than it was stored in.

The stored values of an element do not depend on the cut: only their places do. So the bytes are
copied as they are, and a step that reads this source computes what it would have computed from a
slot of its own cut.

8-bit values are the exception: 32 of them have one scale, and are copied together. If the new cut
divides them otherwise, they can only be encoded anew, with a rounding; see `Reencoder`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gds import Backend
from offload.checkpoint.checked_reads import CheckedReads
from offload.checkpoint.file_check import PartDirectories
from offload.checkpoint.recut.layout import Recut, recut, stretches
from offload.checkpoint.sealed_slot import SlotFiles
from offload.checkpoint.state_owners import Reach, StoredBox, open_owners
from offload.format.arrays import BLOCK_ELEMENTS, MASTER, MASTER_LOW, ArrayFormat, scale_name
from offload.format.boxes import Cut, cut_range
from offload.format.chunk_plan import ChunkPlan, Piece
from offload.format.digests import DigestContext
from offload.format.layout import Layout
from offload.format.manifest import Manifest

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

    A block of 32 elements has one scale. If all elements of a new block are from one stored block,
    they are copied with its scale. Otherwise the block is decoded, and encoded anew with a scale of
    its own.

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


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Neighbouring elements of a stored box that are in one chunk."""

    stored: StoredBox
    """The stored box."""

    chunk: int
    """Index of the chunk in the layout of the box's owner."""

    number: int
    """Number of the box's piece in the chunk."""

    first: int
    """First element, counted from the first element of the piece."""

    num: int
    """Number of elements."""

    @property
    def plan(self) -> ChunkPlan:
        """Plan of the chunk."""
        return self.stored.owner.layout.plans[self.chunk]

    def num_values(self, form: ArrayFormat) -> int:
        """Return the number of values that stand for the elements."""
        return -(-(self.first + self.num) // form.block) - self.first // form.block

    def read(self, array: str, leaves: CheckedReads, out: memoryview) -> bool:
        """Read the values of a state array that stand for the elements.

        Args:
            array: Name of the state array, which the parameter has.
            leaves: Reader that compares all bytes with the digests.
            out: Memory of `num_values` values.

        Returns:
            False if nothing has been read, because no parameter of the chunk has state.

        Raises:
            DamagedError: The chunk is not as it was written.
            gds.StorageError: The chunk cannot be read.
        """
        layout, files = self.stored.owner.layout, self.stored.owner.files
        sealed = files.state_range(array, self.chunk)
        if sealed is None:
            return False
        form, share = layout.formats[array], self.plan.arrays[array]
        start = (share.starts[self.number] + self.first // form.block) * form.nbytes
        stop = start + self.num_values(form) * form.nbytes
        leaves.copy(files.file(sealed), sealed, files.context, start, stop, out)
        return True


def places(stored: StoredBox, first: int, num: int) -> Iterator[Place]:
    """Yield where neighbouring elements of a stored box are, in order.

    Args:
        stored: The stored box.
        first: First element, counted from the first element of the box.
        num: Number of elements.
    """
    layout, stop = stored.owner.layout, first + num
    chunks = layout.chunks_of(stored.index)
    while first < stop:
        element = layout.starts[stored.index] + first
        chunk = chunks[bisect_right(chunks, element, key=lambda one: layout.plans[one].first) - 1]
        pieces = layout.plans[chunk].pieces
        number = next(n for n, p in enumerate(pieces) if p.parameter == stored.index)
        piece = pieces[number]
        last = min(stop, piece.stop)
        yield Place(stored, chunk, number, first - piece.start, last - first)
        first = last


class RecutSource(SlotFiles):
    """State of a checkpoint in the cut of one rank, for reading chunk by chunk.

    To the streamer it is a slot whose chunks are not read but filled. Each chunk that is needed is
    compared with its digest when it is first read. The memory is that of `CheckedReads`.

    Args:
        backend: Storage backend of the checkpoint.
        path: Directory of the checkpoint.
        manifest: Manifest of the checkpoint, as it is on the drive.
        cuts: Box of each parameter that the rank steps, by name; None for whole parameters.
        parts: Directories of the store on other drives, or directories to search for owners.
        recode: Function that encodes 8-bit state anew where the cut divides its blocks; None if
            that is not allowed.
        reach: What is seen here of the checkpoint, if its ranks are on several hosts; None if all
            of it has to be seen.
        shares: Shares of the drives in this cut; see `Layout.shares`.

    Raises:
        RanksError: The rank needs state that is not seen on its host.
        MismatchError: The cut is not possible with this state; names the parameter.
        CheckpointError: The part of an owner is missing or damaged, or contradicts another one.
        StoreBusyError: A rank is about to rewrite a part.
        UnreadableError: A part could not be read.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        manifest: Manifest,
        cuts: Mapping[str, Cut] | None,
        parts: PartDirectories = None,
        *,
        recode: Recode | None = None,
        reach: Reach | None = None,
        shares: Sequence[int] = (1,),
    ) -> None:
        self.path = path
        self._resources = ExitStack()
        try:
            owners = open_owners(
                backend, path, manifest, parts, resources=self._resources, reach=reach
            )
            self._recut: Recut = recut(
                path,
                manifest,
                owners,
                cuts,
                reencode=recode is not None,
                reach=reach,
                shares=shares,
            )
        except BaseException:
            self._resources.close()
            raise
        super().__init__(self._recut.layout, {})
        self._context = DigestContext(manifest.store_id, manifest.generation)
        self._leaves = CheckedReads()
        self._resources.callback(self._leaves.close)
        self._reencoder = None if recode is None else Reencoder(recode, self._leaves)
        self.manifest = replace(
            manifest,
            layout=self._recut.layout,
            scalars=self._recut.scalars,
            digests={},
            model_boxes=(),
            model_digests=(),
        )
        """Manifest of the checkpoint with the layout and the scalar state of this cut. It has no
        digests, and is never written."""

    @property
    def bytes_read(self) -> int:
        """Number of bytes of state that have been read so far."""
        return self._leaves.bytes_read

    @property
    def reencoded(self) -> frozenset[str]:
        """Names of the parameters whose 8-bit state is encoded anew, at least in part."""
        return self._recut.split_blocks

    def fill(self, chunk: int, arrays: Mapping[str, memoryview]) -> None:
        """Write the stored values of a chunk to memory. Values that nobody has stored are left.

        Args:
            chunk: Index of the chunk in `layout`.
            arrays: Bytes of the chunk in each state array, by name.

        Raises:
            DamagedError: A chunk of an owner is not as it was written.
            gds.StorageError: A chunk of an owner cannot be read.
        """
        plan = self.layout.plans[chunk]
        for array, out in arrays.items():  # one array after the other: fewer leaves are needed
            form, share = self.layout.formats[array], plan.arrays[array]
            for number, piece in enumerate(plan.pieces):
                if array not in plan.kept[number]:
                    continue
                if self._is_8bit(array):
                    if self._recut.scalars[piece.parameter] is None:
                        start, stop = (at * form.nbytes for at in share.starts[number : number + 2])
                        out[start:stop] = bytes(stop - start)  # it has no state: blocks may not fit
                        continue
                    if self._is_split(piece):
                        continue
                for first, place in self._places(piece):
                    at = (share.starts[number] + (first - piece.start) // form.block) * form.nbytes
                    nbytes = place.num_values(form) * form.nbytes
                    place.read(array, self._leaves, out[at : at + nbytes])
        if self._reencoder is not None:
            for number, piece in enumerate(plan.pieces):
                if self._is_split(piece):
                    self._reencode(self._reencoder, plan, number, arrays)

    def close(self) -> None:
        """Close all files, and release the locks and the memory. Idempotent."""
        self._resources.close()

    def _is_split(self, piece: Piece) -> bool:
        return self.layout.parameters[piece.parameter].name in self._recut.split_blocks

    def _is_8bit(self, array: str) -> bool:
        return self.layout.state_dtype == "int8" and array not in (MASTER, MASTER_LOW)

    def _reencode(
        self,
        reencoder: Reencoder,
        plan: ChunkPlan,
        number: int,
        arrays: Mapping[str, memoryview],
    ) -> None:
        """Write the 8-bit state of a piece in blocks of this cut."""
        piece = plan.pieces[number]
        for array in plan.kept[number]:
            if scale_name(array) not in plan.kept[number]:
                continue
            for start in range(piece.start, piece.stop, WINDOW_ELEMENTS):
                stop = min(start + WINDOW_ELEMENTS, piece.stop)
                values = plan.part(number, start, stop).values
                window = replace(piece, start=start, stop=stop)
                out = {}
                for name in (array, scale_name(array)):
                    first, last = (at * self.layout.formats[name].nbytes for at in values[name])
                    out[name] = arrays[name][first:last]
                found = ((at - start, place) for at, place in self._places(window))
                reencoder.fill(array, self.layout, stop - start, found, out)

    def _places(self, piece: Piece) -> Iterator[tuple[int, Place]]:
        """Yield where the elements of a piece are stored."""
        spec = self.layout.parameters[piece.parameter]
        box = spec.box
        for part in cut_range(box.sizes, piece.start, piece.stop):
            whole = part.shifted(box.offsets)
            for stored in self._recut.stored[spec.name]:
                for run in stretches(stored.box, box, whole):
                    first = run.target
                    for place in places(stored, run.source, run.num):
                        yield first, place
                        first += place.num
