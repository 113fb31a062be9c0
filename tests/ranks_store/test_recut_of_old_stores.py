"""8-bit state of stores of version 2, whose blocks end where chunks end, in another cut."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import offload
from gds import PosixBackend
from offload.checkpoint.recut.source import RecutSource
from offload.format.boxes import Box, Cut
from offload.format.manifest import Manifest
from offload.update.coding.recoder import BlockRecoder
from tests.format.old_stores import SHAPES, unpack
from tests.format.spec_reader import widened
from tests.ranks_training.blocks_of import Elements, Key, eight_bit_state, encoded_anew


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return max(unpack("int8", tmp_path).glob("step-*"))


def boxes(row: int, column: int) -> list[dict[str, Cut]]:
    """Return what ranks step that divide ``large`` at a row and a column, and the rest by rows."""
    found: list[dict[str, Cut]] = [{}, {}]
    for name, shape in SHAPES.items():
        dim, at = (1, column) if name == "large" else (0, min(row, shape[0]))
        for rank, (first, last) in enumerate(((0, at), (at, shape[dim]))):
            offsets = tuple(first if d == dim else 0 for d in range(len(shape)))
            sizes = tuple(last - first if d == dim else size for d, size in enumerate(shape))
            found[rank][name] = Cut(shape, Box(offsets, sizes))
    return found


def manifest_of(checkpoint: Path) -> Manifest:
    with offload.open_checkpoint(checkpoint) as opened:
        return opened.manifest


def read(
    checkpoint: Path, cuts: Mapping[str, Cut] | None
) -> tuple[frozenset[str], dict[Key, tuple[np.ndarray, np.ndarray]]]:
    """Return which parameters are encoded anew in a cut, and codes and scales of their boxes."""
    manifest = manifest_of(checkpoint)
    source = RecutSource(PosixBackend(), str(checkpoint), manifest, cuts, recode=BlockRecoder())
    layout = source.layout
    arrays: dict[str, bytes] = defaultdict(bytes)
    for chunk, plan in enumerate(layout.plans):
        memory = {name: bytearray(share.nbytes) for name, share in plan.arrays.items()}
        source.fill(chunk, {name: memoryview(data) for name, data in memory.items()})
        for name, data in memory.items():
            arrays[name] += data
    source.close()
    found = {}
    for name, dtype in (("exp_avg", np.int8), ("exp_avg_sq", np.uint8)):
        codes = np.frombuffer(arrays[name], dtype)
        scales = np.frombuffer(arrays[f"{name}_scale"], np.uint16)
        for spec in layout.parameters:
            num = math.prod(spec.shape)
            blocks = -(-num // 32)
            found[name, spec.name] = codes[:num], scales[:blocks]
            codes, scales = codes[num:], scales[blocks:]
        assert not codes.size + scales.size
    return source.reencoded, found


def put_together(
    old: Mapping[Key, Elements], cuts: list[dict[str, Cut]], checkpoint: Path
) -> tuple[dict[Key, Elements], set[str]]:
    """Return the state of all ranks of a cut, and what they say is encoded anew."""
    whole = {key: Elements(*(np.zeros_like(a) for a in vars(e).values())) for key, e in old.items()}
    reported: set[str] = set()
    num_blocks = 0
    for own in cuts:
        names, found = read(checkpoint, own)
        reported |= names
        for (array, name), (codes, scales) in found.items():
            cut, element = own[name], whole[array, name]
            ends = zip(cut.box.offsets, cut.box.sizes, strict=True)
            box = tuple(slice(o, o + s) for o, s in ends)
            of_each = np.repeat(widened("BF16", scales), 32)[: len(codes)]
            c = codes.astype(np.float32)
            values = (of_each * (c / np.float32(255))) ** 2
            if array == "exp_avg":
                values = c / (np.float32(254) - np.abs(c)) * of_each
            numbers = num_blocks + np.arange(len(codes)) // 32
            num_blocks += len(scales)
            for out, new in zip(
                vars(element).values(), (codes, of_each, values, numbers), strict=True
            ):
                out.reshape(cut.shape)[box] = new.reshape(cut.box.sizes)
    return whole, reported


@pytest.mark.parametrize(("row", "column"), [(3, 300), (0, 0), (4, 320)])
def test_blocks_begin_anew_at_each_parameter_of_each_rank(
    checkpoint: Path, row: int, column: int
) -> None:
    """At 0 all elements are on one rank, so only blocks that chunks have cut are new."""
    old = eight_bit_state(checkpoint)
    whole, reported = put_together(old, boxes(row, column), checkpoint)
    changed = encoded_anew(old, whole)
    assert "large" in changed
    assert changed == reported


def test_it_is_refused_unless_asked_for(checkpoint: Path) -> None:
    manifest = manifest_of(checkpoint)
    with pytest.raises(offload.MismatchError, match=r"'large' .* restore\(reencode=True\)"):
        RecutSource(PosixBackend(), str(checkpoint), manifest, boxes(3, 300)[0])
