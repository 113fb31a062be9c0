"""The state of a checkpoint as a whole, put together from the boxes of all its owners.

If several ranks made a checkpoint, each of them is an owner of boxes of parameters. `WholeState`
knows which owner has which box, and reads their bytes. It also describes the checkpoint as one
process would have made it. A checkpoint of one process is the case of one owner with whole
parameters.

This module does not import torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from types import TracebackType
from typing import Final

from offload.checkpoint.checked_reads import AT_ONCE, CheckedReads
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.sealed_slot import SealedOwner, SealedRange, SealedSlot
from offload.checkpoint.sharded_model import ShardedModel
from offload.checkpoint.state_owners import StateOwner, owner_of_part, stored_boxes
from offload.errors import CheckpointError
from offload.format._manifest_fields import ScalarValue
from offload.format.boxes import Box
from offload.format.layout import Layout, ParameterSpec
from offload.format.shares.owners import OwnerReference

_MAX_OPEN_OWNERS: Final = 32
"""Largest number of owners whose files are open at a time, besides owner 0."""

_KEPT_LEAVES: Final = 33
"""MiB of the model that are kept after they were read: two of its ranges, and one more."""


class WholeState:
    """All owners of a checkpoint's state, for reading; a ``with`` block closes all files.

    The files of an owner are opened when they are first needed. So a reader of a few boxes opens
    and reads those of few owners.

    Args:
        checkpoint: The checkpoint. The caller keeps it from being recycled.
        verify: Whether data is compared with its digests. If it is, whole chunks are read.

    Raises:
        CheckpointError: The part of an owner is damaged, is not the one that was sealed with the
            checkpoint, or contradicts another.
        UnreadableError: A part could not be read.
    """

    def __init__(self, checkpoint: Checkpoint, *, verify: bool = True) -> None:
        manifest = checkpoint.manifest
        self.path = checkpoint.path
        self._backend = checkpoint.backend
        found = checkpoint.owners if manifest.owners else []
        tables = [part.table for part in found if part.table is not None]
        self.slot = SealedSlot(self._backend, checkpoint.path, checkpoint.parts, manifest, tables)
        self.owners = (
            StateOwner(0, manifest, checkpoint.path, lambda: self.slot),
            *(
                owner_of_part(self._backend, part, part.table)
                for part in found
                if part.table is not None
            ),
        )
        """Owners that are seen here, owner 0 first."""
        self.missing: tuple[OwnerReference, ...] = tuple(
            part.reference for part in found if part.table is None
        )
        """References to the parts that are not seen here."""
        self.boxes = stored_boxes(self.owners)
        """Boxes of each parameter that are seen here, by the parameter's name."""
        self.layout = self._whole_layout() if manifest.owners else manifest.layout
        """Layout of whole parameters, as one process would have it. Its parameters are in the order
        of the model file. It places no byte if there are several owners."""
        self.scalars: tuple[tuple[ScalarValue, ...] | None, ...] = (
            self._whole_scalars() if manifest.owners else tuple(manifest.scalars)
        )
        """For each parameter of `layout`, its scalar state; None if it has no state yet."""
        self._opened: OrderedDict[int, StateOwner] = OrderedDict()
        self.verifies = verify
        """Whether data is compared with its digests."""
        self._reads = CheckedReads(keep=AT_ONCE, verify=verify)
        self._model_reads = CheckedReads(keep=_KEPT_LEAVES, verify=verify)
        self._sharded = self._sharded_model() if manifest.layout.shard else None
        in_one_file = [] if self._sharded is not None else self.slot.model_ranges()
        self._model_ranges = sorted(in_one_file, key=lambda one: one.offset)
        self._model_starts = [one.offset for one in self._model_ranges]

    @property
    def bytes_read(self) -> int:
        """Number of bytes of state and of the model that have been read so far."""
        return self._reads.bytes_read + self._model_reads.bytes_read

    def require_all(self) -> None:
        """Refuse to go on if a part is not seen here.

        Raises:
            CheckpointError: A part is not seen here. The message names the owner and the place.
        """
        if self.missing:
            raise CheckpointError(self.missing_text())

    def require_cover(self, name: str, box: Box) -> None:
        """Check that the owners that are seen here have all elements of a box of a parameter.

        Raises:
            CheckpointError: An element is missing. The message names the owners that are not seen
                here.
        """
        found = [one.box.intersection(box) for one in self.boxes.get(name, ())]
        if sum(common.num_elements for common in found if common) >= box.num_elements:
            return
        if self.missing:
            raise CheckpointError(f"{name!r} is not whole. {self.missing_text()}")
        raise CheckpointError(
            f"{self.path}: contradictory content: no owner has all of {box.notation()} of {name!r}"
        )

    def read_state(
        self, owner: StateOwner, array: str, chunk: int, start: int, stop: int
    ) -> memoryview:
        """Return stored values of a chunk of a state array, in memory of their own.

        Args:
            owner: Owner of the chunk.
            array: Name of the state array.
            chunk: Index of the chunk in the owner's layout.
            start: First value, counted from the chunk's first value in the array.
            stop: One past the last value.

        Raises:
            DamagedError: The chunk is not as it was written.
            CheckpointError: The chunk has no digest, although it has state.
            gds.StorageError: The chunk cannot be read.
        """
        files = self.files(owner)
        size = owner.layout.formats[array].nbytes
        offset, nbytes = owner.layout.byte_range(array, chunk)
        digest = files.digests[array][chunk]
        if digest is None:
            raise CheckpointError(
                f"{owner.path}: contradictory content: chunk {chunk} of {array!r} has no digest, "
                "and a parameter in it has state"
            )
        sealed = SealedRange(array, chunk, offset, nbytes, digest, owner.layout.drives[chunk])
        return self._reads.read(
            files.array(array, chunk), sealed, files.context, start * size, stop * size
        )

    def read_model(self, name: str, start: int, stop: int) -> memoryview:
        """Return bytes `start` to `stop` of one tensor of the model.

        Raises:
            DamagedError: A range is not as it was written.
            CheckpointError: A range, or its digest, is in a part that is not seen here.
            gds.StorageError: A range cannot be read.
        """
        if self._sharded is not None:
            return self._sharded.read(name, start, stop)
        header = self.slot.layout.model_header
        first = header.data_start + header.entries[name].start
        begin, end = first + start, first + stop
        if not self.verifies:
            self._model_reads.bytes_read += end - begin
            return memoryview(self.slot.model.read_bytes(begin, end - begin))
        out = memoryview(bytearray(end - begin))
        at = begin
        while at < end:
            number = bisect_right(self._model_starts, at) - 1
            one = self._model_ranges[number] if number >= 0 else None
            if one is None or at >= one.offset + one.nbytes:
                if self.missing:
                    raise CheckpointError(f"{name!r} cannot be checked. {self.missing_text()}")
                raise CheckpointError(
                    f"{self.path}: contradictory content: byte {at} of the model has no digest"
                )
            last = min(end, one.offset + one.nbytes)
            self._model_reads.copy(
                self.slot.model,
                one,
                self.slot.context,
                at - one.offset,
                last - one.offset,
                out[at - begin : last - begin],
            )
            at = last
        return out

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._reads.close()
        self._model_reads.close()
        self.slot.close()
        while self._opened:
            self._opened.popitem()[1].close()

    @property
    def is_sharded(self) -> bool:
        """Whether the model is in shard files of the owners, and not in one common file."""
        return self._sharded is not None

    def _sharded_model(self) -> ShardedModel:
        boxes = [(one.layout, one.model_boxes) for one in self.owners]
        return ShardedModel(
            self.path,
            boxes,
            lambda index: self.files(self.owners[index]),
            self._model_reads,
            lambda: self.missing_text() if self.missing else "",
        )

    def files(self, owner: StateOwner) -> SealedSlot | SealedOwner:
        """Return the files of an owner; they are closed when those of many others are opened."""
        if owner.number:
            self._opened[owner.number] = owner
            self._opened.move_to_end(owner.number)
            if len(self._opened) > _MAX_OPEN_OWNERS:
                self._opened.popitem(last=False)[1].close()
        return owner.files

    def missing_text(self) -> str:
        """Return what a reader is told of the parts that are not seen here."""
        named = ", ".join(f"owner {one.owner} (sealed at {one.path})" for one in self.missing[:4])
        more = f" and {len(self.missing) - 4} more" if len(self.missing) > 4 else ""
        return (
            f"{self.path}: parts of its state are not seen here: those of {named}{more}. Run this "
            "on a node that sees all of them, or copy them to one, and name the directories that "
            "they are in: open_checkpoint(path, parts=[...])"
        )

    def _whole_layout(self) -> Layout:
        first = self.owners[0].layout
        specs = []
        for tensor in first.model:
            found = self.boxes.get(tensor.name)
            if not found:
                continue
            spec = found[0].spec
            described = {(one.spec.dtype, one.spec.group, one.spec.arrays) for one in found}
            if len(described) > 1:
                raise CheckpointError(
                    f"{self.path}: contradictory content: the owners of {tensor.name!r} describe "
                    f"it as {sorted(map(str, described))}"
                )
            specs.append(
                ParameterSpec(tensor.name, spec.dtype, tensor.shape, spec.group, spec.arrays)
            )
        return Layout(tuple(specs), first.model, first.chunk_elements, first.state_dtype)

    def _whole_scalars(self) -> tuple[tuple[ScalarValue, ...] | None, ...]:
        out = []
        for spec in self.layout.parameters:
            found = {one.owner.scalars[one.index] for one in self.boxes[spec.name]}
            if len(found) > 1:
                raise CheckpointError(
                    f"{self.path}: the owners of {spec.name!r} have different scalar state: "
                    f"{sorted(map(str, found))}. It has no single value for the whole parameter"
                )
            out.append(found.pop())
        return tuple(out)

    def __enter__(self) -> WholeState:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
