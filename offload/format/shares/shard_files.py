"""Shard files of a model: one file for each rank, as torch.distributed.checkpoint writes them.

They are needed if a parameter is cut in another dimension than the first, or if the ranks have no
common directory. Each file is a valid safetensors file. A tensor in it is a box of the tensor with
the same name, and the metadata has the box's offsets in torch's notation. So torch's
`HuggingFaceStorageReader` reads the files, if all of them are in one directory and nothing else is
in it: it takes every safetensors file of a directory for a part of the model. For this reason shard
files have a folder of their own, `SHARD_FOLDER`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from offload.format.boxes import Box, Cut
from offload.format.header import Header, build_header
from offload.format.shares.model_shares import ModelShare, ModelShares, ShareEntry, TensorBox

SHARD_FOLDER: Final = "model"
"""Name of the folder, in a slot or a part, that holds shard files and nothing else."""

OFFSETS_KEY: Final = "DCP_SHARDING_INFO"
"""Key of the metadata with the offsets of all boxes of a file, as torch names it."""

_SAVED_OFFSETS: Final = "saved_offsets"
_DCP_VERSION: Final = {"DCP_VERSION": "1.0"}


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One shard file of a rank."""

    name: str
    """Name of the file."""

    header: Header
    """Header of the file, which its rank writes."""

    share: ModelShare
    """Boxes of the rank, with their places in the file."""


def shard_files(shares: ModelShares, rank: int) -> tuple[ShardFile, ...]:
    """Return the shard files of a rank.

    A file has one box of a tensor. So a rank has as many files as it has boxes of one tensor: one
    as a rule, and none if it writes nothing.

    Args:
        shares: Boxes of all ranks. Tensors without elements are in the writer's first file.
        rank: Index of the rank.

    Raises:
        TensorFileError: A tensor has a name that no header can hold.
    """
    files: list[list[TensorBox]] = []
    counts: dict[str, int] = {}
    boxes = list(shares.boxes[rank])
    if rank == shares.writer:
        entries = shares.header.entries.values()
        boxes += [TensorBox(e.name, Box.whole(e.shape)) for e in entries if not e.nbytes]
    for one in boxes:
        number = counts[one.name] = counts.get(one.name, -1) + 1
        if number == len(files):
            files.append([])
        files[number].append(one)
    return tuple(
        _shard_file(shares, f"shard-{rank + 1:05}-model-{number:05}-of-{len(files):05}", held)
        for number, held in enumerate(files, start=1)
    )


def _shard_file(shares: ModelShares, name: str, boxes: list[TensorBox]) -> ShardFile:
    whole = shares.header.entries
    offsets = {one.name: {_SAVED_OFFSETS: list(one.box.offsets)} for one in boxes}
    metadata = {**shares.header.metadata, **_DCP_VERSION, OFFSETS_KEY: json.dumps(offsets)}
    header = build_header(
        [(one.name, whole[one.name].dtype, one.box.sizes) for one in boxes], metadata
    )
    entries = tuple(
        ShareEntry(
            one.name,
            whole[one.name].dtype,
            Cut(whole[one.name].shape, one.box),
            header.data_start + header.entries[one.name].start,
        )
        for one in boxes
        if one.box.num_elements
    )
    return ShardFile(f"{name}.safetensors", header, ModelShare(entries, shares.piece_bytes))
