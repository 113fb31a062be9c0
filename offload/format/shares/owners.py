"""Owners of state: what a manifest says of them if several ranks write one store.

Owner 0 is the first directory: its slot has the manifest and the state of its own boxes. Each other
owner has its state in a part, with a table (see `part_table`) whose digest the manifest has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from offload.format import _manifest_fields as fields
from offload.format._layout_fields import box, encode_box
from offload.format.boxes import Box, first_overlap
from offload.format.digests import MODEL_BLOCK_BYTES, model_box_array
from offload.format.header import DTYPE_BYTES
from offload.format.layout import Layout, ModelTensor
from offload.format.model_shard import ModelShard
from offload.format.names import owner_name
from offload.format.strict_json import short

MAX_OWNERS = 4096
"""Largest number of owners of a store, the first directory included."""

_REFERENCE_RESERVE_BYTES = 200
"""Bytes reserved in a manifest for a reference to an owner's part, without its directory."""

_DIGEST_RESERVE_BYTES = 20
"""Bytes reserved for one digest."""


@dataclass(frozen=True, slots=True)
class OwnerReference:
    """A manifest's reference to the part of its checkpoint that an owner holds."""

    owner: int

    directory: str
    """Absolute path of the store's directory on the owner's node when the part was sealed. The part
    is in ``owner-<i>/`` below it."""

    name: str
    """Name of the part: ``part-<k>``."""

    generation: int

    digest: str
    """Digest of the part's table, as 32 hexadecimal digits."""

    @property
    def path(self) -> str:
        """Path of the part when it was sealed."""
        return self.path_in(self.directory)

    def path_in(self, directory: str) -> str:
        """Return the path that the part has in a directory of the store."""
        return f"{directory}/{owner_name(self.owner)}/{self.name}"


@dataclass(frozen=True, slots=True)
class ModelBox:
    """A box of a tensor of the model that one owner writes, with its digests."""

    name: str

    box: Box
    """Elements that the owner writes. They are one contiguous range of the tensor, unless they are
    in a shard file of the owner."""

    digests: tuple[str, ...]
    """Digest of each `MODEL_BLOCK_BYTES` of the box's bytes."""

    @property
    def digest_array(self) -> str:
        """Name that stands for the box in the context of its digests; see `DigestContext`."""
        return model_box_array(self.name, self.box)

    def num_bytes(self, tensor: ModelTensor) -> int:
        """Return the size of the box in bytes."""
        return self.box.num_elements * DTYPE_BYTES[tensor.dtype]

    def byte_range(self, tensor: ModelTensor) -> tuple[int, int]:
        """Return the first byte of the box in the tensor's data, and one past its last byte.

        Raises:
            ValueError: The box is not within the tensor, or is not one contiguous range of it.
        """
        found = self.box.contiguous_range(tensor.shape) if self.box.fits(tensor.shape) else None
        if found is None:
            raise ValueError(
                f"{short(self.name)}: the box {short(self.box.notation())} is not one contiguous "
                f"range of the shape {short(tensor.shape)}"
            )
        size = DTYPE_BYTES[tensor.dtype]
        return found[0] * size, found[1] * size


def num_pieces(nbytes: int) -> int:
    """Return the number of digests that cover a box of the model, given its size in bytes."""
    return -(-nbytes // MODEL_BLOCK_BYTES)


def encode_references(references: Iterable[OwnerReference]) -> list[dict[str, Any]]:
    """Return references as a manifest holds them."""
    return [asdict(reference) for reference in references]


def decode_references(value: object, generation: int) -> tuple[OwnerReference, ...]:
    """Return the references of a manifest, whose generation each of them must have."""
    found = fields.items(value)
    if not 1 <= len(found) < MAX_OWNERS:
        raise ValueError(f"{len(found)} owners besides the first, expected 1 to {MAX_OWNERS - 1}")
    references = tuple(_decode_reference(one, generation) for one in found)
    numbers = [reference.owner for reference in references]
    if not 1 <= numbers[0] <= numbers[-1] < MAX_OWNERS or any(a >= b for a, b in pairwise(numbers)):
        raise ValueError(f"the owners are {short(numbers)}, expected rising numbers from 1")
    return references


def _decode_reference(value: object, generation: int) -> OwnerReference:
    found = fields.mapping(value)
    part = fields.part(found, generation)
    return OwnerReference(
        fields.count(found["owner"]), part.directory, part.name, part.generation, part.digest
    )


def reference_bytes(directories: Iterable[str]) -> int:
    """Return the bytes to reserve for references in a manifest."""
    sizes = (6 * len(directory.encode(errors="replace")) for directory in directories)
    return sum(_REFERENCE_RESERVE_BYTES + size for size in sizes)


def encode_model_boxes(boxes: Iterable[ModelBox]) -> list[list[Any]]:
    """Return boxes of the model as a manifest or a table holds them."""
    return [[one.name, *encode_box(one.box), list(one.digests)] for one in boxes]


def decode_model_boxes(
    body: Mapping[str, Any], layout: Layout, owner: int
) -> tuple[Layout, tuple[ModelBox, ...]]:
    """Return the boxes of the model that an owner writes, and its layout with its shard file.

    A manifest or a table that names a shard file has its boxes there; any other has them in the
    common file, each as one contiguous range.
    """
    tensors = {tensor.name: tensor for tensor in layout.model}
    is_sharded = "model_file" in body
    boxes = tuple(
        _decode_model_box(fields.items(one), tensors, is_sharded)
        for one in fields.items(body["model_boxes"])
    )
    if len({(one.name, one.box) for one in boxes}) < len(boxes):
        raise ValueError("a box of the model occurs twice")
    if not is_sharded:
        return layout, boxes
    shard = ModelShard(owner, tuple((one.name, one.box) for one in boxes))
    if body["model_file"] != shard.name:
        raise ValueError(f"the shard file is {short(body['model_file'])}, expected {shard.name!r}")
    if len({one.name for one in boxes}) < len(boxes) or not all(
        one.box.num_elements for one in boxes
    ):
        raise ValueError("a shard file has two boxes of one tensor, or an empty box")
    layout = replace(layout, shard=shard)
    _ = layout.model_file_header  # refuses names that no header can hold
    return layout, boxes


def _decode_model_box(
    value: Sequence[Any], tensors: Mapping[str, ModelTensor], is_sharded: bool
) -> ModelBox:
    name, offsets, sizes, digests = value
    found = ModelBox(
        fields.text(name),
        box([offsets, sizes]),
        fields.each(fields.digest, digests),
    )
    tensor = tensors.get(found.name)
    if tensor is None:
        raise ValueError(f"{short(found.name)} is not a tensor of the model")
    if not is_sharded:
        found.byte_range(tensor)  # refuses a box that is not contiguous
    elif not found.box.fits(tensor.shape):
        raise ValueError(f"{short(found.name)}: the box {short(found.box.notation())} is outside")
    nbytes = found.num_bytes(tensor)
    if len(found.digests) != num_pieces(nbytes):
        raise ValueError(f"{len(found.digests)} digests for {nbytes} bytes of the model")
    return found


def parameter_boxes(layout: Layout) -> list[tuple[str, Box]]:
    """Return name and box of each parameter of a layout; the box of a whole parameter is whole."""
    return [(p.name, Box.whole(p.shape) if p.cut is None else p.cut.box) for p in layout.parameters]


def model_box_bytes(boxes: Iterable[tuple[str, Box, int]]) -> int:
    """Return the bytes to reserve for the boxes of the model that one owner writes."""
    total = 0
    for name, one, size in boxes:
        digests = _DIGEST_RESERVE_BYTES * num_pieces(one.num_elements * size)
        total += 6 * len(name.encode(errors="replace")) + 42 * len(one.sizes) + 16 + digests
    return total


def require_exact_cover(
    model: Iterable[ModelTensor],
    owned: Iterable[Sequence[tuple[str, Box]]],
    *,
    every: bool = False,
) -> None:
    """Check that owners together hold each element of the tensors that they name exactly once.

    Args:
        model: All tensors of the model.
        owned: For each owner, names and boxes of what it holds. A box need not be contiguous.
        every: Whether a tensor that no owner names is refused as well.

    Raises:
        ValueError: Boxes overlap, leave elements out, or are not within their tensor. The message
            names the tensor.
    """
    boxes: dict[str, list[Box]] = {}
    for owner in owned:
        for name, one in owner:
            boxes.setdefault(name, []).append(one)
    shapes = {tensor.name: tensor.shape for tensor in model}
    if every:
        boxes = {name: [] for name in shapes} | boxes
    for name, found in boxes.items():
        shape = shapes.get(name)
        if shape is None or not all(one.fits(shape) for one in found):
            raise ValueError(f"{short(name)}: a box is not within the tensor")
        total = sum(one.num_elements for one in found)
        if total != math.prod(shape):
            raise ValueError(
                f"{short(name)}: the owners hold {total} elements of {math.prod(shape)}"
            )
        overlap = first_overlap(one for one in found if one.num_elements)
        if overlap is not None:
            first, second = overlap
            raise ValueError(
                f"{short(name)}: the boxes {first.notation()} and {second.notation()} overlap"
            )
