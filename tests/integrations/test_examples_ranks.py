"""The examples for libraries on two processes, as `torchrun` and `accelerate launch` start them."""

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
    return launch("torch.distributed.run", "--standalone", "--nproc-per-node=2", name, *arguments)


def launch(launcher: str, *arguments: str) -> str:
    """Run a launcher, a module, in the directory of examples, and return what it prints."""
    ended = subprocess.run(
        [sys.executable, "-m", launcher, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT / "docs/examples",
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


@pytest.mark.slow
def test_the_example_for_accelerate_as_accelerate_launch_starts_it(tmp_path: Path) -> None:
    """Without ``--multi_gpu`` it starts one process on a CPU, whatever the number says."""
    command = [
        "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
        "--mixed_precision=no", "--dynamo_backend=no", "accelerate_ddp.py", "--every=2",
    ]  # fmt: skip
    whole = launch(*command, f"--directory={tmp_path}/whole", "--steps=5")
    assert (tmp_path / "whole/store/owner-1").is_dir(), "there were two processes"
    parts = [launch(*command, f"--directory={tmp_path}/parts", f"--steps={n}") for n in (4, 5)]
    lines = [line for text in parts for line in text.splitlines() if line.startswith("step")]
    assert lines == [line for line in whole.splitlines() if line.startswith("step")]
