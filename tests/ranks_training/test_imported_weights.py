"""Ranks begin with imported weights, in every layout, with the bits of a new optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import offload
from tests.numerics.reference import assert_same_parameters
from tests.ranks_training.cases import SEAL, run_all
from tests.ranks_training.models import Masters, Setting, make_model, set_gradients
from tests.ranks_training.rank_server import Jobs


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_begin_with_imported_weights(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    alone = make_model(Setting(kind="one"), 1, seed=11)
    save_file(alone.state_dict(), tmp_path / "model.safetensors")
    offload.import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run")
    calls = [["open"], ["restore"], ["step", 2], *SEAL]
    ranks = run_all(jobs, tmp_path, [calls] * 2, kind=kind, given=True)
    assert [rank.of("restore")["value"] for rank in ranks] == [[0, None]] * 2
    masters = Masters("AdamW", [{"params": [*alone.parameters()]}], {"lr": 1e-2})
    for step in (1, 2):
        set_gradients(alone, step)
        masters.step()
    found = make_model(Setting(kind="one"), 1)
    assert offload.load_parameters(found, tmp_path / "run") == 2
    assert_same_parameters(found.named_parameters(), alone.named_parameters())
    assert not torch.equal(alone.maybe.weight, make_model(Setting(kind="one"), 1, 11).maybe.weight)
