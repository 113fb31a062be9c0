"""The examples for the Trainer and Lightning on two processes, as `torchrun` starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import offload

ROOT = Path(__file__).parents[2]


def torchrun(name: str, *arguments: str) -> str:
    """Run an example on two processes, and return what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, str(ROOT / "docs/examples" / name), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_example_for_the_trainer(tmp_path: Path) -> None:
    for steps in (4, 6):
        torchrun(
            "trainer.py", f"--directory={tmp_path}", f"--steps={steps}", "--save-steps=2",
            "--batch=2", "--width=16",
        )  # fmt: skip
    pins = {c.step: c.pins for c in offload.list_checkpoints(tmp_path / "run")}
    assert {step for step, names in pins.items() if names} == {4, 6}


@pytest.mark.slow
def test_the_example_for_lightning(tmp_path: Path) -> None:
    whole = torchrun(
        "lightning_loop.py", f"--directory={tmp_path}/whole", "--epochs=3", "--steps=4",
        "--devices=2",
    )  # fmt: skip
    parts = [
        torchrun(
            "lightning_loop.py", f"--directory={tmp_path}/parts", f"--epochs={epochs}",
            "--steps=4", "--devices=2",
        )
        for epochs in (2, 3)
    ]  # fmt: skip
    lines = [line for text in parts for line in text.splitlines() if line.startswith("step")]
    assert sorted(lines) == sorted(line for line in whole.splitlines() if line.startswith("step"))
