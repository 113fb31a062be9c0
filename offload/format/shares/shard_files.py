"""Shard files as shares of ranks: which box lies where in an owner's file; see `model_shard`."""

from __future__ import annotations

from offload.errors import MismatchError
from offload.format.boxes import Cut
from offload.format.header import DTYPE_BYTES
from offload.format.layout import Layout
from offload.format.manifest import MODEL_BLOCK_BYTES
from offload.format.model_shard import ModelShard
from offload.format.shares.model_shares import ModelShare, ModelShares, ShareEntry


def model_shard(shares: ModelShares, rank: int, owner: int) -> ModelShard:
    """Return the boxes that a rank writes, as those of the shard file of an owner.

    Args:
        shares: Boxes of all ranks.
        rank: Index of the rank.
        owner: Number of the owner that the rank serves.

    Raises:
        MismatchError: The rank writes several boxes of one tensor, and a file has room for one.
    """
    boxes = tuple((one.name, one.box) for one in shares.boxes[rank])
    seen: set[str] = set()
    for name, box in boxes:
        if name in seen:
            raise MismatchError(
                f"rank {rank} writes several boxes of {name!r}, one of them {box.notation()}, and "
                "a shard file has one box of a tensor: shard the parameter in one dimension"
            )
        seen.add(name)
    return ModelShard(owner, boxes)


def shard_share(layout: Layout, *, piece_bytes: int = MODEL_BLOCK_BYTES) -> ModelShare:
    """Return the boxes of a layout's shard file, with their places in the file.

    Args:
        layout: Layout that has a shard file; see `Layout.shard`.
        piece_bytes: Largest size of a piece with one digest, in bytes.
    """
    if layout.shard is None:
        return ModelShare((), piece_bytes)
    header = layout.model_file_header
    shapes = {tensor.name: tensor.shape for tensor in layout.model}
    entries = []
    for name, box in layout.shard.boxes:
        entry = header.entries[name]
        start = header.data_start + entry.start
        entries.append(ShareEntry(name, entry.dtype, Cut(shapes[name], box), start))
        if entry.nbytes != box.num_elements * DTYPE_BYTES[entry.dtype]:
            raise RuntimeError(f"{name!r} has {entry.nbytes} bytes in the header of its shard file")
    return ModelShare(tuple(entries), piece_bytes)
