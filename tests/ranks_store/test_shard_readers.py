"""Readers of a store of several owners whose model is in shard files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from offload import load_parameters, open_checkpoint
from offload.checkpoint.whole_state import WholeState
from offload.errors import CheckpointError, DamagedError
from offload.format.document import digest_of
from offload.retention.policy import LastK
from offload.store.maintenance.pruning import prune
from offload.store.quarantine import verify_and_mark
from tests.format.spec_reader import model_of_shards, owner_parts, read_manifest
from tests.ranks_store.job import LAYOUTS, MODEL, SHAPES, shard_bytes
from tests.ranks_store.test_owner_readers import made, part_of
from tests.stores.files import flip_on_disk

SHARD = "model/shard-{:05}-model-00001-of-00001.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The store of two ranks, with checkpoints of steps 1 and 2."""
    return made(tmp_path / "run", tmp_path / "run", sharded=True)


def test_the_independent_reader_finds_the_model_whole(store: Path) -> None:
    checkpoint = store / "step-00000002"
    ((_, part, table),) = owner_parts(checkpoint)
    found = model_of_shards(checkpoint, (part, table))
    assert found["head"].tobytes() == shard_bytes(2, 1, "head", 2400)
    assert found["embed"].tobytes() == (
        shard_bytes(2, 0, "embed", 2 * 50 * 20) + shard_bytes(2, 1, "embed", 2 * 40 * 20)
    )
    with open_checkpoint(store) as opened, WholeState(opened) as state:
        for name, values in found.items():
            assert bytes(state.read_model(name, 0, values.nbytes)) == values.tobytes()
            for start in range(0, values.nbytes, 13):  # ranges need not be of whole elements
                stop = min(start + 77, values.nbytes)
                expected = values.tobytes()[start:stop]
                assert bytes(state.read_model(name, start, stop)) == expected


def test_every_byte_is_verified_and_counted(store: Path) -> None:
    with open_checkpoint(store) as opened:
        report = opened.verify()
        assert report.ok
        state = sum(layout.state_bytes for layout in LAYOUTS)
        assert report.bytes_checked == state + sum(t.nbytes for t in MODEL)
        on_disk = [
            path
            for folder in (store / "step-00000002", part_of(store))
            for path in folder.rglob("*")
            if path.is_file()
        ]
        assert sum(opened.files.values()) == sum(p.stat().st_size for p in on_disk)
        assert not (store / "step-00000002/model.safetensors").exists()


@pytest.mark.parametrize("owner", [0, 1])
def test_a_flipped_bit_is_found_and_marks_what_has_it(store: Path, owner: int) -> None:
    folder = part_of(store) if owner else store / "step-00000002"
    path = folder / SHARD.format(owner + 1)
    flip_on_disk(path, path.stat().st_size - 5)
    with open_checkpoint(store) as opened:
        (problem,) = opened.verify().problems
        assert str(path) in problem
        last = "head" if owner else "norm"
        with WholeState(opened) as state, pytest.raises(DamagedError, match=str(path)):
            state.read_model(last, 0, math.prod(SHAPES[last]) * 2)
        assert verify_and_mark(opened).quarantined
    assert [*store.rglob("damaged.txt")] == [folder / "damaged.txt"]
    with pytest.warns(RuntimeWarning, match="quarantined"), open_checkpoint(store) as opened:
        assert opened.step == 1


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("how", ["missing", "shorter", "of another owner", "header"])
def test_a_shard_file_that_is_not_as_it_was_written_refuses_the_checkpoint(
    store: Path, owner: int, how: str
) -> None:
    path = (part_of(store) if owner else store / "step-00000002") / SHARD.format(owner + 1)
    if how == "missing":
        path.unlink()
    elif how == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "of another owner":
        path.rename(path.with_name("shard-00009-model-00001-of-00001.safetensors"))
    else:
        flip_on_disk(path, 40)
    with pytest.raises(CheckpointError, match=str(path)):
        open_checkpoint(store / "step-00000002")


def test_a_part_of_the_other_kind_is_refused(store: Path) -> None:
    """A manifest of version 5 refers to tables of version 2 only."""
    table = part_of(store) / "table.json"
    document = json.loads(table.read_text())
    del document["body"]["model_file"]
    document |= {"format": 1, "digest": digest_of(document["body"])}
    # Its boxes are contiguous, so it is a good table of version 1.
    size = table.stat().st_size
    table.write_text(json.dumps(document).ljust(size - 1) + "\n")
    manifest = store / "step-00000002/manifest.json"
    body = json.loads(manifest.read_text())
    body["body"]["owners"][0]["digest"] = document["digest"]
    body["digest"] = digest_of(body["body"])
    manifest.write_text(json.dumps(body).ljust(manifest.stat().st_size - 1) + "\n")
    with pytest.raises(CheckpointError, match="differ in whether the model is in shard files"):
        open_checkpoint(store / "step-00000002")


def test_parts_are_pruned_with_their_shard_files(store: Path) -> None:
    old, new = part_of(store, 1), part_of(store)
    done = prune(store, LastK(1))
    assert [path.path for path in done.leftovers if "owner" in path.path] == [str(old)]
    assert (old.exists(), new.exists()) == (False, True)
    assert [path.name for path in store.glob("step-*")] == ["step-00000002"]
    with open_checkpoint(store) as opened:
        assert opened.verify().ok


def test_the_parameters_are_loaded(store: Path) -> None:
    import torch

    model = torch.nn.Module()
    for name, shape in SHAPES.items():
        empty = torch.zeros(shape, dtype=torch.bfloat16)
        model.register_parameter(name, torch.nn.Parameter(empty))
    assert load_parameters(model, store) == 2
    ((_, part, table),) = owner_parts(store / "step-00000002")
    expected = model_of_shards(store / "step-00000002", (part, table))
    for name, parameter in model.named_parameters():
        found = parameter.detach().view(torch.int16).numpy().view(np.uint16)
        assert (found == expected[name]).all()


def test_the_version_is_5_and_the_tables_2(store: Path) -> None:
    version, body = read_manifest(store / "step-00000002")
    table = json.loads((part_of(store) / "table.json").read_text())
    assert (version, table["format"]) == (5, 2)
    assert body["model_file"] == SHARD.format(1)
    assert table["body"]["model_file"] == SHARD.format(2)
