"""What steps, checkpoints and restores move, by the kernel's count and by our own.

The least of four counts of the kernel's, and the average of ours, in a process that is warm: each
has happened before, and everything in flight has ended when a count begins and when it ends.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forking import Children
from tests.numerics.measure import (
    MIB,
    NUM_SLOTS,
    count_bytes,
    count_bytes_on_drive,
    count_frozen,
)

NUM_ARRAYS = 3
EDGE_BYTES = 2 * 4096
"""What a range that begins and ends inside a block can cost beyond itself."""


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    server = Children("tests.numerics.measure")
    yield server
    server.close()


def measured_by(children: Children, work: Callable[[str], None], directory: Path) -> dict[str, Any]:
    """Return what a process of its own has measured."""
    ended = children.run(work, directory)
    assert ended.status == 0, ended.output
    found = json.loads(ended.output.splitlines()[-1])
    if "skip" in found:
        pytest.skip(found["skip"])
    return found


@pytest.fixture(scope="module")
def measured(children: Children, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("bytes")
    try:
        return measured_by(children, count_bytes, directory)
    finally:
        shutil.rmtree(directory)  # hundreds of megabytes


def test_a_checkpoint_reads_nothing_and_writes_what_no_step_has_written(measured):
    moved = measured["checkpoint"]
    assert moved["read"] == 0
    fresh = measured["parameters"] + measured["buffers"] + measured["train_state"]
    assert measured["parameters"] <= moved["written"] <= fresh + MIB


def test_a_restore_reads_the_parameters_and_writes_nothing(measured):
    moved = measured["restore"]
    assert moved["written"] == 0
    assert measured["parameters"] <= moved["read"] <= measured["parameters"] + MIB


@pytest.mark.parametrize("kind", ["step", "first_step"], ids=["later", "first-after-a-seal"])
def test_a_step_reads_and_writes_the_state_once(measured, kind):
    edges = NUM_ARRAYS * measured["num_chunks"] * EDGE_BYTES
    most = 12 * measured["num_parameters"] + edges
    for direction in ("read", "written"):
        # Blocks that ranges share may be in the page cache, and cost nothing.
        assert measured["state"] - edges <= measured[kind][direction] <= most


@pytest.mark.parametrize("kind", ["step", "first_step", "checkpoint", "restore"])
def test_the_optimizers_own_counts_agree_with_the_kernels(measured, kind):
    for direction in ("read", "written"):
        difference = measured[kind][direction] - measured[kind][f"stats_{direction}"]
        assert abs(difference) <= MIB


@pytest.fixture(scope="module")
def on_drive(children: Children, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("drive")
    try:
        return measured_by(children, count_bytes_on_drive, directory)
    finally:
        shutil.rmtree(directory)


@pytest.mark.parametrize("kind", ["step", "first_step"], ids=["later", "first-after-a-seal"])
def test_a_step_that_writes_parameters_writes_each_once_and_reads_none(on_drive, kind):
    edges = (NUM_ARRAYS + 1) * on_drive["num_chunks"] * EDGE_BYTES
    moved, state = on_drive[kind], on_drive["state"]
    assert state - edges <= moved["read"] <= state + edges
    written = state + on_drive["parameters"]
    assert written - edges <= moved["written"] <= written + edges
    assert abs(moved["written"] - moved["stats_written"]) <= MIB


def test_a_checkpoint_writes_no_parameter_that_a_step_has_written(on_drive):
    """It reads back what two chunks share, or a chunk and a buffer: at most 1 MiB for each."""
    moved = on_drive["checkpoint"]
    assert moved["written"] <= on_drive["train_state"] + MIB // 2
    assert moved["stats_read"] <= (on_drive["num_chunks"] + 3) * MIB


@pytest.fixture(scope="module")
def mostly_frozen(
    children: Children, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What two processes have measured, the second of which resumes."""
    directory = tmp_path_factory.mktemp("frozen")
    try:
        return [measured_by(children, count_frozen, directory) for _ in range(2)]
    finally:
        shutil.rmtree(directory)


def test_what_is_frozen_is_written_once_for_each_slot_and_never_after_a_resume(mostly_frozen):
    first, resumed = mostly_frozen
    assert resumed["resumed_from"] == len(first["seals"])
    assert first["trained_bytes"] == MIB
    later = [*first["seals"][NUM_SLOTS:], *resumed["seals"]]
    written = [seal["written_bytes"] for seal in later]
    assert min(written) >= first["trained_bytes"], "the kernel counts what it is asked to write"
    assert max(written) <= first["trained_bytes"] + 4 * MIB
    assert first["seals"][0]["written_bytes"] >= first["frozen_bytes"]


def test_what_is_frozen_is_read_once_for_each_slot_after_a_resume_at_most(mostly_frozen):
    first, resumed = mostly_frozen
    once = first["frozen_bytes"] + first["trained_bytes"]
    read = sorted(seal["read_bytes"] for seal in resumed["seals"])
    # A program's own pages count as well, and more where memory is short.
    assert sum(read) <= (NUM_SLOTS - 1) * once + 16 * MIB
    assert read[0] == 0
    assert min(seal["read_bytes"] for seal in first["seals"]) == 0
