"""The examples for libraries on two processes, as `torchrun` and `accelerate launch` start them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import offload
from tests.dying import dying
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
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


def losses_in(printed: str) -> Counter[tuple[int, str]]:
    """Return the steps and losses that all processes have printed, perhaps into the same line."""
    found = re.findall(r"step (\d+) loss (\d+\.\d+)", printed)
    return Counter((int(step), loss) for step, loss in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "script", "settings", "lengths"),
    [
        (TORCHRUN, "lightning_loop.py", ["--steps=4", "--devices=2"], "--epochs={}"),
        (ACCELERATE, "accelerate_ddp.py", ["--every=2"], "--steps={}"),
    ],
    ids=["Lightning", "accelerate"],
)
def test_an_example_that_is_run_again_prints_the_same_losses(
    tmp_path: Path, launcher: list[str], script: str, settings: list[str], lengths: str
) -> None:
    def run(name: str, length: int) -> Counter[tuple[int, str]]:
        given = [f"--directory={tmp_path / name}", *settings, lengths.format(length)]
        return losses_in(launch(launcher, script, *given))

    whole, first, again = run("whole", 4), run("parts", 2), run("parts", 4)
    assert [*tmp_path.glob("whole/*/owner-1")], "there were two processes"
    assert min(step for step, _ in again) > 1, "it did not go on from a checkpoint"
    assert first + again == whole


@pytest.mark.slow
def test_the_example_for_the_trainer(tmp_path: Path) -> None:
    settings = ["--save-steps=2", "--batch=2", "--width=16"]
    for steps in (4, 6):
        given = [f"--directory={tmp_path}", f"--steps={steps}", *settings]
        launch(TORCHRUN, "trainer.py", *given)
    pins = {c.step: c.pins for c in offload.list_checkpoints(tmp_path / "run")}
    assert {step for step, names in pins.items() if names} == {4, 6}
