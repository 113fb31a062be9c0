"""`checkpoint()` twice after the same step: only what is different is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload import AdamW, open_checkpoint
from tests.stores.training import Model, backward, optimizer_for, options


def sealed(directory: Path, drives: int) -> tuple[Model, AdamW]:
    """Return an optimizer that has taken a step and sealed it."""
    model = Model()
    directories = [str(directory / f"{drive}") for drive in range(drives)]
    optimizer = optimizer_for(model, directories, options())
    backward(model, 1)
    optimizer.step()
    optimizer.checkpoint({"epoch": 1}, metrics={"loss": 0.5}).result()
    return model, optimizer


def inodes(directory: Path) -> dict[str, int]:
    """Return which file each name of the checkpoint refers to."""
    return {file.name: file.stat().st_ino for file in (directory / "0" / "step-00000001").iterdir()}


@pytest.mark.parametrize(
    ("epoch", "loss", "replaced"),
    [
        (1, 0.5, set()),
        (1, None, set()),
        (2, 0.5, {"train_state.safetensors"}),
        (1, 0.25, {"manifest.json"}),
        (2, 0.25, {"train_state.safetensors", "manifest.json"}),
    ],
    ids=["the same", "no metrics", "train state", "metrics", "both"],
)
def test_what_is_the_same_is_not_replaced(
    epoch: int, loss: float | None, replaced: set[str], tmp_path: Path
) -> None:
    _, optimizer = sealed(tmp_path, drives=1)
    before = inodes(tmp_path)
    metrics = None if loss is None else {"loss": loss}
    optimizer.checkpoint({"epoch": epoch}, metrics=metrics).result()
    after = inodes(tmp_path)
    assert {name for name, inode in before.items() if after[name] != inode} == replaced
    optimizer.close()


@pytest.mark.parametrize("metrics", [None, {"loss": 0.25}], ids=["train state", "metrics"])
def test_the_checkpoint_that_is_returned_is_whole_on_all_drives(
    metrics: dict[str, float] | None, tmp_path: Path
) -> None:
    _, optimizer = sealed(tmp_path, drives=2)
    again = optimizer.checkpoint({"epoch": 2}, metrics=metrics).result()
    with open_checkpoint(tmp_path / "0") as found:
        assert again.parts == found.parts != []
        assert again.train_state == found.train_state == {"epoch": 2}
        assert again.metrics == found.metrics == (metrics or {"loss": 0.5})
    assert again.verify().ok
    optimizer.close()
