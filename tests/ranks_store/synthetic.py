"""Manifests and tables of stores with several owners, made without a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offload.format import Layout, Manifest, ModelTensor, ParameterSpec
from offload.format.boxes import Box, Cut
from offload.format.model_shard import ModelShard
from offload.format.shares.owners import ModelBox, OwnerReference, num_pieces, parameter_boxes
from offload.format.shares.part_table import OwnerTable

STORE_ID = "0123456789abcdef" * 2
GENERATION = 5
ARRAYS = ("master", "exp_avg", "exp_avg_sq")
SHAPES = {"embed": (12, 5), "norm": (7,), "scale": (), "head": (5, 12)}
MODEL = tuple(ModelTensor(name, "BF16", shape) for name, shape in SHAPES.items())
DIRECTORY = "/data/run"


def rows(name: str, start: int, stop: int) -> ParameterSpec:
    """Return rows of a parameter."""
    shape = SHAPES[name]
    box = Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))
    return ParameterSpec(name, "BF16", box.sizes, 0, ARRAYS, Cut(shape, box))


def whole(name: str) -> ParameterSpec:
    """Return a whole parameter."""
    return ParameterSpec(name, "BF16", SHAPES[name], 0, ARRAYS)


def layout_of(*parameters: ParameterSpec) -> Layout:
    """Return the layout of one owner."""
    return Layout(parameters, MODEL, 1024)


OWN = layout_of(rows("embed", 0, 6), whole("norm"))
OTHER = layout_of(rows("embed", 6, 12), whole("scale"), rows("head", 0, 2), rows("head", 2, 5))


def sharded(layout: Layout, owner: int = 0) -> Layout:
    """Return a layout whose owner has its boxes of the model in a shard file."""
    return replace(layout, shard=ModelShard(owner, tuple(parameter_boxes(layout))))


def model_boxes(layout: Layout) -> tuple[ModelBox, ...]:
    """Return the boxes of the model that an owner writes, if it writes what it steps."""
    return tuple(
        ModelBox(name, box, ("0" * 16,) * num_pieces(2 * box.num_elements))
        for name, box in parameter_boxes(layout)
    )


def digests_of(layout: Layout) -> dict[str, tuple[str | None, ...]]:
    """Return a digest for each chunk of each array."""
    return dict.fromkeys(layout.array_names, ("f" * 16,) * layout.num_chunks)


def table_of(owner: int = 1, layout: Layout = OTHER) -> OwnerTable:
    """Return the table of an owner."""
    return OwnerTable(
        store_id=STORE_ID,
        generation=GENERATION,
        owner=owner,
        layout=layout,
        scalars=((("step", "f32", 3.0),),) * len(layout.parameters),
        digests=digests_of(layout),
        model_boxes=model_boxes(layout),
    )


def reference_to(owner: int, digest: str = "a" * 32, directory: str = DIRECTORY) -> OwnerReference:
    """Return a reference to a part of an owner."""
    return OwnerReference(owner, directory, "part-1", GENERATION, digest)


def manifest_of(owners: Sequence[OwnerReference], layout: Layout = OWN) -> Manifest:
    """Return the manifest of a store with owners."""
    return Manifest(
        store_id=STORE_ID,
        generation=GENERATION,
        step=3,
        created="2026-01-01T00:00:00+00:00",
        torch_version="2.13.0",
        optimizer="torch.optim.adamw.AdamW",
        groups=({"lr": 0.1},),
        layout=layout,
        scalars=((("step", "f32", 3.0),),) * len(layout.parameters),
        digests=digests_of(layout),
        model_digests=(),
        owners=tuple(owners),
        model_boxes=model_boxes(layout),
    )
