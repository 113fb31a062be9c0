"""The example for the Trainer, and what its page shows, run as they stand."""

from __future__ import annotations

import json
import os
import re
import runpy
from pathlib import Path

import pytest

import offload
from tests.integrations.training import Sentences, arguments, make_model

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_goes_on_when_it_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in (4, 6):
        arguments = {"directory": tmp_path, "steps": steps, "save-steps": 2, "batch": 2}
        arguments["width"] = 16
        given = [str(part) for name, value in arguments.items() for part in (f"--{name}", value)]
        monkeypatch.setattr("sys.argv", ["trainer.py", *given])
        runpy.run_path(str(DOCS / "examples/trainer.py"), run_name="__main__")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["checkpoint-4", "checkpoint-6"]
    state = json.loads((tmp_path / "out/checkpoint-6/trainer_state.json").read_text())
    written = [entry["offload/bytes_written"] for entry in state["log_history"]]
    assert [entry["step"] for entry in state["log_history"]] == [1, 2, 3, 4, 5, 6]
    assert written == sorted(written), "counted since the training began, in both processes"
    pins = {c.step: c.pins for c in offload.list_checkpoints(tmp_path / "run")}
    assert {step: names for step, names in pins.items() if names} == {
        4: ("transformers-4",),
        6: ("transformers-6",),
    }


def test_the_code_of_the_page_runs_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    page = (DOCS / "transformers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names = {"model": make_model(), "data": Sentences()}
    for number, block in enumerate(blocks):
        names["args"] = arguments(tmp_path, max_steps=1 + number)
        exec(compile(block, f"docs/transformers.md, block {number}", "exec"), names)
    assert sorted(os.listdir("out")) == ["checkpoint-1", "checkpoint-2", "checkpoint_0"]
    names["optimizer"].optimizer.close()
