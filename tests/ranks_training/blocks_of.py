"""8-bit state of a checkpoint, element by element, decoded with numpy as docs/format.md says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.format.spec_reader import blocks, owner_parts, read_manifest, read_tensor, widened

Key = tuple[str, str]
"""State array and parameter."""


@dataclass
class Elements:
    """All elements of a parameter in one array, flat."""

    codes: np.ndarray
    scales: np.ndarray
    """FP32: the scale of the block that each element is in."""
    values: np.ndarray
    """FP32: what the codes stand for."""
    blocks: np.ndarray
    """Number of the block that each element is in."""


def eight_bit_state(checkpoint: Path) -> dict[Key, Elements]:
    """Return the 8-bit state of all owners of a checkpoint."""
    body = read_manifest(checkpoint)
    owners = [(checkpoint, body)]
    if "owners" in body:
        owners += [(part, table) for _, part, table in owner_parts(checkpoint)]
    found: dict[Key, Elements] = {}
    num_blocks = 0
    for directory, described in owners:
        for name, _, shape, _, arrays, *cut in described["parameters"]:
            offsets, sizes = cut[0] if cut else ([0] * len(shape), shape)
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            for array in arrays:
                if f"{array}_scale" not in arrays:
                    continue
                new = Elements(
                    np.zeros(shape, np.int16),
                    *(np.full(shape, np.nan, np.float32) for _ in range(2)),
                    np.full(shape, -1),
                )
                whole = found.setdefault((array, name), new)
                num = math.prod(sizes)
                codes, scales, values, numbers = _decoded(
                    directory, array, _stored_name(name, cut), [*blocks(num)]
                )
                whole.codes[box] = codes.reshape(sizes)
                whole.scales[box] = scales.reshape(sizes)
                whole.values[box] = values.reshape(sizes)
                whole.blocks[box] = (numbers + num_blocks).reshape(sizes)
                num_blocks += num
    return {
        key: Elements(*(a.reshape(-1) for a in (e.codes, e.scales, e.values, e.blocks)))
        for key, e in found.items()
    }


def _decoded(directory: Path, array: str, name: str, edges: list[tuple[int, int]]) -> Any:
    """Return codes, scales, values and block numbers of a parameter or a box."""
    dtype, _, codes = read_tensor(directory / f"{array}.safetensors", name)
    _, _, of_blocks = read_tensor(directory / f"{array}_scale.safetensors", name)
    lengths = [stop - start for start, stop in edges]
    assert len(lengths) == len(of_blocks)
    scales = np.repeat(widened("BF16", of_blocks), lengths)
    c = codes.astype(np.float32)
    if dtype == "I8":
        values = c / (np.float32(254) - np.abs(c)) * scales
    else:
        values = (scales * (c / np.float32(255))) ** 2
    return codes, scales, values, np.repeat(np.arange(len(lengths)), lengths)


def _stored_name(name: str, cut: list[Any]) -> str:
    if not cut:
        return name
    parts = [f"{o}:{o + s}" for o, s in zip(*cut[0], strict=True)]
    return f"{name}[{parts[0]},]" if len(parts) == 1 else f"{name}[{', '.join(parts)}]"


def encoded_anew(old: dict[Key, Elements], new: dict[Key, Elements]) -> set[str]:
    """Compare two divisions of one state; return the parameters with blocks that are new.

    A block whose elements were in one block must have the same values. Every other block must be
    the rounding of the old values, with a scale that fits them, as docs/format.md has it.
    """
    assert old.keys() == new.keys()
    found = set()
    for (array, name), was in old.items():
        now = new[array, name]
        assert not np.isnan(was.values).any(), (array, name)
        of_block, first = np.unique(now.blocks, return_inverse=True)
        lowest = np.full(len(of_block), np.iinfo(np.int64).max)
        highest = np.full(len(of_block), -1)
        np.minimum.at(lowest, first, was.blocks)
        np.maximum.at(highest, first, was.blocks)
        is_kept = (lowest == highest)[first]
        same = was.values[is_kept].view(np.int32) == now.values[is_kept].view(np.int32)
        assert same.all(), (array, name)
        if is_kept.all():
            continue
        found.add(name)
        is_root = array == "exp_avg_sq"
        magnitudes = np.sqrt(was.values.astype(float)) if is_root else np.abs(was.values)
        largest = np.zeros(len(of_block))
        np.maximum.at(largest, first, magnitudes)
        largest, scales = largest[first][~is_kept], now.scales[~is_kept].astype(float)
        assert (scales >= largest * (1 - 2**-20)).all(), (array, name)
        assert (scales <= largest * (1 + 2**-6)).all(), (array, name)
        v, c = was.values[~is_kept].astype(float), now.codes[~is_kept].astype(float)
        ratios = np.divide(v if not is_root else np.sqrt(v), scales, where=scales > 0, out=0 * v)
        exact = 255 * ratios if is_root else 254 * ratios / (1 + np.abs(ratios))
        off = np.abs(exact - c)
        if is_root:  # a second moment that is not zero does not become zero
            off[(c == 1) & (v > 0) & (exact < 1)] = 0
        assert off.max() <= 0.5 + 1e-3, (array, name, off.max())
    return found
