"""Shard file of one owner of state: a safetensors file with the owner's boxes of the model.

There are such files if a rank on another host holds a box that no rank beside the store's first
directory holds. torch's `HuggingFaceStorageReader` takes every safetensors file of a directory for
a part of the model. So a shard file has a folder of its own, `SHARD_FOLDER`, and the names of all
shard files differ, so that they can be put into one folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from offload.format.boxes import Box
from offload.format.header import Header, build_header
from offload.format.names import shard_name

OFFSETS_KEY: Final = "DCP_SHARDING_INFO"
"""Key of the metadata with the offsets of all boxes of a file, as torch names it."""

_SAVED_OFFSETS: Final = "saved_offsets"
_DCP_VERSION: Final = {"DCP_VERSION": "1.0"}


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The boxes of the model that one owner has in a shard file of its own."""

    owner: int
    """Number of the owner. The file of owner 0 also lists all tensors without elements."""

    boxes: tuple[tuple[str, Box], ...]
    """Names of tensors, each with the box that the owner has, in the order of their bytes. A tensor
    occurs once, and no box is empty."""

    @property
    def name(self) -> str:
        """Name of the file in the slot or part, with its folder."""
        return shard_name(self.owner)

    def header(
        self,
        tensors: Iterable[tuple[str, str, tuple[int, ...]]],
        metadata: Mapping[str, str],
    ) -> Header:
        """Return the header of the file.

        Args:
            tensors: Name, safetensors code and shape of each tensor of the model.
            metadata: Metadata of the whole model.

        Raises:
            TensorFileError: A tensor has a name that no header can hold, or occurs twice.
            KeyError: A box is of no tensor of the model.
        """
        known = {name: (dtype, shape) for name, dtype, shape in tensors}
        boxes = list(self.boxes)
        if self.owner == 0:
            empty = [(name, shape) for name, (_, shape) in known.items() if 0 in shape]
            boxes += [(name, Box.whole(shape)) for name, shape in empty]
        offsets = {name: {_SAVED_OFFSETS: list(box.offsets)} for name, box in boxes}
        return build_header(
            [(name, known[name][0], box.sizes) for name, box in boxes],
            {**metadata, **_DCP_VERSION, OFFSETS_KEY: json.dumps(offsets)},
        )
