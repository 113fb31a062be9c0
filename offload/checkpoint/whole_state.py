"""The state of a checkpoint as a whole, put together from the boxes of all its owners.

If several ranks made a checkpoint, each of them is an owner of boxes of parameters. `WholeState`
knows which owner has which box, and reads their bytes. It also describes the checkpoint as one
process would have made it. A checkpoint of one process is the case of one owner with whole
parameters.

This module does not import torch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from offload.checkpoint.checked_reads import AT_ONCE, CheckedReads
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.recut.layout import stretches
from offload.checkpoint.sealed_slot import ModelFile, SealedSlot, model_file
from offload.checkpoint.state_owners import StateOwner, stored_boxes
from offload.errors import CheckpointError
from offload.format._manifest_fields import ScalarValue
from offload.format.boxes import Box, cut_range
from offload.format.header import DTYPE_BYTES
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
        found = checkpoint.owners if manifest.owners else []
        tables = [part.table for part in found if part.table is not None]
        self.slot = checkpoint.open_slot(tables)
        self.owners = (
            StateOwner(0, manifest, self.slot),
            *(
                StateOwner.of_part(checkpoint.backend, part, part.table)
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
        self.is_sharded = manifest.layout.shard is not None
        """Whether the model is in shard files of the owners, and not in one common file."""
        self._model = [
            (owner, model_file(owner.sealed, tables))
            for owner in (self.owners if self.is_sharded else self.owners[:1])
        ]

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
        raise self._incomplete(
            f"{name!r} is not whole", f"no owner has all of {box.notation()} of {name!r}"
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
        files, size = self.files(owner), owner.layout.formats[array].nbytes
        sealed = files.state_range(array, chunk)
        if sealed is None:
            raise CheckpointError(
                f"{files.path}: contradictory content: chunk {chunk} of {array!r} has no digest, "
                "and a parameter in it has state"
            )
        out = memoryview(bytearray((stop - start) * size))
        self._reads.copy(files.file(sealed), sealed, files.context, start * size, stop * size, out)
        return out

    def read_model(self, name: str, start: int, stop: int) -> memoryview:
        """Return bytes `start` to `stop` of one tensor of the model.

        Raises:
            DamagedError: A range is not as it was written.
            CheckpointError: A range, or its digest, is in a part that is not seen here.
            gds.StorageError: A range cannot be read.
        """
        out, done = memoryview(bytearray(stop - start)), 0
        for owner, model in self._model:
            for entry in model.by_name.get(name, ()):
                size, whole = DTYPE_BYTES[entry.dtype], Box.whole(entry.cut.shape)
                part_of = cut_range(entry.cut.shape, start // size, -(-stop // size))
                for part in part_of if start < stop else ():
                    for one in stretches(entry.box, whole, part):
                        low, high = one.target * size, (one.target + one.num) * size
                        begin, end = max(low, start), min(high, stop)
                        at = entry.start + one.source * size + begin - low
                        into = out[begin - start : end - start]
                        self._copy_model(name, self.files(owner), model, at, into)
                        done += end - begin
        if done < stop - start:
            what = f"all bytes from {start} to {stop} of {name!r}"
            raise self._incomplete(f"{name!r} is not whole", f"no owner has {what}")
        return out

    def _copy_model(
        self, name: str, files: SealedSlot, model: ModelFile, at: int, into: memoryview
    ) -> None:
        """Copy neighbouring bytes of a file of the model."""
        if not self.verifies:
            into[:] = files.model.read_bytes(at, len(into))
            self._model_reads.bytes_read += len(into)
            return
        stop = at + len(into)
        try:
            numbers = model.ranges_with(at, stop)
        except LookupError as error:
            raise self._incomplete(f"{name!r} cannot be checked", str(error)) from error
        for one in (model.ranges[number] for number in numbers):
            first, last = max(at, one.offset), min(stop, one.stop)
            part = into[first - at : last - at]
            first, last = first - one.offset, last - one.offset
            self._model_reads.copy(files.model, one, files.context, first, last, part)

    def _incomplete(self, what: str, contradiction: str) -> CheckpointError:
        """Return the error for data that no owner which is seen here has."""
        if self.missing:
            return CheckpointError(f"{what}. {self.missing_text()}")
        return CheckpointError(f"{self.path}: contradictory content: {contradiction}")

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._reads.close()
        self._model_reads.close()
        self.slot.close()
        while self._opened:
            self._opened.popitem()[1].files.close()

    def files(self, owner: StateOwner) -> SealedSlot:
        """Return the files of an owner; they are closed when those of many others are opened."""
        if owner.number:
            self._opened[owner.number] = owner
            self._opened.move_to_end(owner.number)
            if len(self._opened) > _MAX_OPEN_OWNERS:
                self._opened.popitem(last=False)[1].files.close()
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

    def __exit__(self, *_: object) -> None:
        self.close()
