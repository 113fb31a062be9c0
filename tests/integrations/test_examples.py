"""The examples for libraries: under real launchers, and the Trainer's; and the code of its page.

`test_ranks` stops examples and runs them again.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import offload
from tests.dying import dying
from tests.integrations.training import Sentences, arguments, make_model
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ACCELERATE = [
    # Without ``--multi_gpu`` it starts one process on a CPU, whatever the number says.
    "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no",
]  # fmt: skip


def launch(launcher: list[str], script: str, *arguments: str) -> str:
    """Run an example on two processes, each of which dies with its launcher; return its output."""
    rank = dying([sys.executable, "-u", script, *arguments], parent=0)
    with subprocess.Popen(
        dying([sys.executable, "-m", *launcher, "--no_python", *rank]),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT / "docs/examples",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=HANG_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
    assert process.returncode == 0, errors
    return printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "script", "settings"),
    [
        (TORCHRUN, "lightning_loop.py", ["--steps=4", "--epochs=1", "--devices=2"]),
        (TORCHRUN, "trainer.py", ["--steps=2", "--save-steps=2", "--batch=2", "--width=16"]),
        (ACCELERATE, "accelerate_ddp.py", ["--steps=2", "--every=2"]),
    ],
    ids=["Lightning", "the Trainer", "accelerate"],
)
def test_an_example_on_two_processes(
    tmp_path: Path, launcher: list[str], script: str, settings: list[str]
) -> None:
    launch(launcher, script, f"--directory={tmp_path}", *settings)
    (part,) = tmp_path.glob("**/owner-1/part-*")  # of the second process
    assert [info.step for info in offload.list_checkpoints(part.parents[1])] == [2]


def test_a_bridge_is_imported_only_when_it_is_used() -> None:
    heavy = "{'torch', 'lightning', 'pytorch_lightning'}"
    code = f"import sys, offload.integrations; print(sorted({heavy} & {{*sys.modules}}))"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (found.stdout, found.stderr) == ("[]\n", "")
