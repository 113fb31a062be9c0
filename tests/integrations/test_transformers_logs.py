"""The optimizer's numbers in the logs of a Trainer, and in what it reports them to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback

import offload
from offload.integrations.transformers import OffloadCallback
from tests.integrations.training import Case, StopBefore, StoppedError

CASE = Case({"save_steps": 2, "max_steps": 6})

MAIN = {
    "offload/step_seconds",
    "offload/read_gb_per_s",
    "offload/write_gb_per_s",
    "offload/io_wait_fraction",
    "offload/bytes_written",
}


class Reporter(TrainerCallback):
    """Notes the logs as a callback of ``report_to`` gets them."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.logged.append({**logs, "step": state.global_step})


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the log entries with a loss that the Trainer has kept in a folder."""
    state = json.loads((folder / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def ours(entry: dict[str, Any]) -> set[str]:
    return {name for name in entry if name.startswith("offload/")}


def test_the_log_has_five_numbers_of_the_time_since_the_last_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the folder, the console, TensorBoard, and callbacks that precede ours."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    case = Case({**CASE.arguments, "report_to": "tensorboard"}, callback={"close": True})
    with case.trainer(tmp_path) as trainer:
        own = trainer.pop_callback(OffloadCallback)
        reporter = Reporter()
        trainer.add_callback(reporter)
        trainer.add_callback(own)
        trainer.train()
        with pytest.raises(offload.OffloadError, match="closed"):
            trainer.optimizer.optimizer.checkpoints()
        stats = trainer.optimizer.optimizer.stats()
    logged = history(tmp_path / "out/checkpoint-6")
    assert reporter.logged == logged
    assert [entry["step"] for entry in logged] == [1, 2, 3, 4, 5, 6]
    for entry in logged:
        assert ours(entry) <= MAIN
        assert all(type(value) in (int, float) for value in entry.values())
        assert 0 <= entry["offload/io_wait_fraction"] <= 1
    assert set().union(*map(ours, logged)) == MAIN
    seconds = [entry["offload/step_seconds"] for entry in logged]
    assert sum(seconds) == pytest.approx(stats.step_s), "each step is in one log"
    lines = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
    assert len(lines) == 6
    assert max(map(len, lines)) < 300
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert {f"train/{name}" for name in MAIN} <= set(events.Tags()["scalars"])
    shown = [(e.step, e.value) for e in events.Scalars("train/offload/bytes_written")]
    assert shown == [(e["step"], pytest.approx(e["offload/bytes_written"])) for e in logged]


def test_totals_go_on_through_a_resume_and_a_second_training_without_zeros(
    tmp_path: Path,
) -> None:
    """If all numbers are asked for; and none are logged if that is asked for."""
    case = Case(CASE.arguments, callback={"log_stats": "all"})
    with pytest.raises(StoppedError):
        case.run(tmp_path, StopBefore(4))
    with case.trainer(tmp_path) as trainer:
        trainer.train(resume_from_checkpoint=True)
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert {e["step"]: e["offload/steps"] for e in logged} == {n: n for n in range(1, 7)}
        written = [e["offload/bytes_written"] for e in history(tmp_path / "out/checkpoint-6")]
        assert len(written) == 6
        assert written == sorted(written)
        scalars = trainer.optimizer.optimizer.stats().scalars(all=True)
        assert all(ours(entry) <= MAIN | scalars.keys() for entry in logged)
        assert set().union(*map(ours, logged)) > MAIN, "a read ahead may leave a step without any"
        assert scalars["offload/to_device_bytes"] == 0
        assert "offload/to_device_bytes" not in logged[-1]
        trainer.train()
        again = [e["offload/steps"] for e in trainer.state.log_history if "loss" in e]
        assert again == [7, 8, 9, 10, 11, 12]
    run = Case(CASE.arguments, callback={"log_stats": False}).run(tmp_path / "silent")
    assert not any(ours(entry) for entry in run.trainer.state.log_history)
    with pytest.raises(ValueError, match=r"log_stats must be True, False or \"all\", got 'five'"):
        OffloadCallback(log_stats="five")  # type: ignore[arg-type]
