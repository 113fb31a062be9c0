"""Model files that three ranks write together, beside those of the safetensors library."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from tests.ranks_training.rank_server import Jobs

NUM_RANKS = 3
_SEALS_PER_MODEL = 5
_MOST_ELEMENTS = 2047
"""Elements of the longest row: 4,094 bytes of bf16."""


def tensors_of(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return dtype, shape and bytes of every tensor of a safetensors file, by name."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {
        name: (one["dtype"], one["shape"], data[slice(*(start + n for n in one["data_offsets"]))])
        for name, one in header.items()
        if name != "__metadata__"
    }


def rows_of(chooser: random.Random) -> list[int]:
    """Return widths of layers, so that their rows have from 2 to 4,094 bytes."""
    widths = [chooser.randint(1, _MOST_ELEMENTS) for _ in range(2)]
    small = [chooser.randint(1, 40) for _ in range(3)]
    return [small[0], widths[0], small[1], widths[1], small[2]]


def compare_files(
    jobs: Jobs, folder: Path, kind: str, num_seals: int, seed: int
) -> tuple[Counter[str], list[str]]:
    """Seal models of random rows on three ranks, and compare every file; return counts, problems.

    Args:
        jobs: Server of ranks.
        folder: New folder for everything.
        kind: ``ddp`` or ``fsdp2``.
        num_seals: Number of seals.
        seed: Seed of the rows.
    """
    chooser = random.Random(f"{seed} {kind}")
    counts: Counter[str] = Counter()
    problems: list[str] = []
    while counts["seals"] < num_seals:
        number = min(_SEALS_PER_MODEL, num_seals - counts["seals"])
        # The first models have the shortest and the longest rows there are.
        extreme = [[1, _MOST_ELEMENTS, 1, 3, _MOST_ELEMENTS, 2], [_MOST_ELEMENTS, 1, 1, 5]]
        widths = extreme[counts["models"]] if counts["models"] < 2 else rows_of(chooser)
        own = folder / str(counts["models"])
        own.mkdir(parents=True)
        calls: list[list[Any]] = [["open", {"keep": number}]]
        for step in range(1, number + 1):
            calls += [["step"], ["write_values", f"expected-{step}.safetensors"]]
            calls += [["checkpoint"], ["result"]]
        ended = jobs.run(own, [calls] * NUM_RANKS, kind=kind, widths=widths, timeout_s=30.0)
        counts["models"] += 1
        counts["seals"] += number
        for rank, one in enumerate(ended):
            if one.status or one.failed():
                problems.append(f"{kind}, {widths}: rank {rank}: {one}")
        for step in range(1, number + 1):
            found = own / f"run/step-{step:08d}/model.safetensors"
            expected = own / f"expected-{step}.safetensors"
            if not found.exists() or not expected.exists():
                problems.append(f"{kind}, {widths}: there is no step {step}")
                continue
            ours, theirs = tensors_of(found), tensors_of(expected)
            counts["files compared"] += 1
            counts["tensors compared"] += len(theirs)
            counts["bytes compared"] += sum(len(data) for _, _, data in theirs.values())
            different = sorted(n for n in {*ours, *theirs} if ours.get(n) != theirs.get(n))
            if different:
                problems.append(f"{kind}, {widths}, step {step}: {different} differ")
    return counts, problems
