"""The example for the Trainer runs as it stands, and goes on when it is run again."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

import offload

EXAMPLE = Path(__file__).parents[2] / "docs/examples/trainer.py"


def test_the_example_goes_on_when_it_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in (4, 6):
        arguments = {"directory": tmp_path, "steps": steps, "save-steps": 2, "batch": 2}
        arguments["width"] = 16
        given = [str(part) for name, value in arguments.items() for part in (f"--{name}", value)]
        monkeypatch.setattr("sys.argv", ["trainer.py", *given])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["checkpoint-4", "checkpoint-6"]
    state = json.loads((tmp_path / "out/checkpoint-6/trainer_state.json").read_text())
    losses = {entry["step"]: entry["offload/steps"] for entry in state["log_history"]}
    assert losses == {1: 1, 2: 2, 3: 3, 4: 4, 5: 1, 6: 2}, "counted since the optimizer was made"
    pins = {c.step: c.pins for c in offload.list_checkpoints(tmp_path / "run")}
    assert {step: names for step, names in pins.items() if names} == {
        4: ("transformers-4",),
        6: ("transformers-6",),
    }
