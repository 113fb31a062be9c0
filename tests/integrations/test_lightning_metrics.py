"""Statistics arrive where metrics go: TensorBoard's own writer and reader, Lightning's loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import offload
from offload.integrations.lightning import OffloadCallback
from tests.integrations.lightning_runs import BATCHES, OPTIONS, fit, logged, on_ssd


def events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return by name what TensorBoard would show: steps and values."""
    found = EventAccumulator(str(directory))
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def test_statistics_are_written_to_tensorboard_from_a_plain_loop(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(10_000))
    optimizer = offload.AdamW([parameter], directory=tmp_path / "run", options=OPTIONS)
    given = []
    with SummaryWriter(str(tmp_path / "log")) as writer:
        for step in range(3):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            given.append(optimizer.stats().scalars(all=True))
            for name, value in given[-1].items():
                writer.add_scalar(name, value, step)
    optimizer.close()
    shown = events(tmp_path / "log")
    assert shown.keys() == given[-1].keys()
    for name, values in shown.items():
        expected = [scalars[name] for scalars in given if name in scalars]
        assert [value for _, value in values] == pytest.approx(expected, rel=1e-6)  # FP32
    assert shown["offload/steps"] == [(0, 1.0), (1, 2.0), (2, 3.0)]


@pytest.mark.parametrize("log_stats", [True, "all"])
def test_lightnings_loggers_get_statistics_where_they_get_losses(
    tmp_path: Path, log_stats: Literal[True, "all"]
) -> None:
    loggers = [CSVLogger(tmp_path, name=""), TensorBoardLogger(tmp_path, name="", version="board")]
    fit(
        tmp_path, on_ssd(tmp_path / "run"), callback=OffloadCallback(log_stats=log_stats),
        max_epochs=2, logger=loggers, log_every_n_steps=3, save=False,
    )  # fmt: skip
    losses, seconds = logged(tmp_path), logged(tmp_path, "offload/step_seconds")
    assert list(losses) == list(seconds) == list(range(2, 2 * BATCHES, 3))
    shown = events(tmp_path / "board")
    names = {name for name in shown if name.startswith("offload/")}
    if log_stats == "all":
        assert shown["offload/steps"] == [(n, n + 1.0) for n in losses]
    else:
        assert len(names) == 5
    assert [n for n, _ in shown["train_loss"]] == list(losses)
    written = [value for _, value in shown["offload/bytes_written"]]  # once they have been: behind
    assert written == sorted(written)
    assert written[-1] > written[0]
