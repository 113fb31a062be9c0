"""The examples for libraries on two processes, as `torchrun` and `accelerate launch` start them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import offload
from tests.dying import dying

ROOT = Path(__file__).parents[2]


TWO = ("--standalone", "--nproc-per-node=2")
TIMEOUT_S = 200


def torchrun(name: str, *arguments: str) -> str:
    """Run an example on two processes, and return what they print."""
    return launch("torch.distributed.run", *TWO, name, *arguments)


def launch(launcher: str, *arguments: str) -> str:
    """Run a launcher, a module, in the directory of examples, and return what it prints."""
    with started(launcher, *arguments) as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    return printed


@contextmanager
def started(launcher: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher, a module, in the directory of examples; it is killed if it does not end."""
    script = next(n for n, argument in enumerate(arguments) if argument.endswith(".py"))
    # As launchers start it, but that it dies with its launcher.
    rank = dying([sys.executable, "-u", *arguments[script:]], parent=0)
    with subprocess.Popen(
        dying([sys.executable, "-m", launcher, *arguments[:script], "--no_python", *rank]),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT / "docs/examples",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            for pid in [*ranks_of(process.pid), process.pid] if process.poll() is None else []:
                os.kill(pid, signal.SIGKILL)


def ranks_of(pid: int) -> list[int]:
    """Return the processes that a launcher has started, which are in sessions of their own."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(one) for one in children.read_text().split()]


def steps_in(printed: str) -> Counter[tuple[int, str]]:
    """Return the steps and losses that all processes have printed, perhaps into the same line."""
    return Counter((int(n), loss) for n, loss in re.findall(r"step (\d+) loss (\d+\.\d+)", printed))


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
    """Killed in the last of three epochs, which have two steps each."""
    options = ["--epochs=3", "--steps=4", "--devices=2"]
    whole = steps_in(torchrun("lightning_loop.py", f"--directory={tmp_path}/whole", *options))
    command = ["torch.distributed.run", *TWO, "lightning_loop.py", f"--directory={tmp_path}/parts"]
    with started(*command, *options) as process:
        assert process.stdout is not None
        killed = []
        for line in process.stdout:
            killed.append(line)
            if "step 5 " in line:
                break
        for rank in ranks_of(process.pid):
            os.kill(rank, signal.SIGKILL)
        killed += [*process.stdout]
        assert process.wait(TIMEOUT_S) != 0
    again = steps_in(torchrun("lightning_loop.py", f"--directory={tmp_path}/parts", *options))
    first = min(step for step, _ in again)
    assert first in (3, 5), "it did not go on from a checkpoint"
    assert again == Counter({one: n for one, n in whole.items() if one[0] >= first})
    assert steps_in("".join(killed)) <= whole


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
