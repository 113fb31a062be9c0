"""The examples of several ranks, run small by `torchrun`: to the end, and stopped and run again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.dying import dying
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 7, 2

STOPPED_AT = 5
"""Step after which a run is stopped. The second checkpoint was begun before it, and so the first is
durable: a checkpoint waits for the one before it."""


def launched(example: Path, *arguments: str) -> list[str]:
    """Return the command that runs an example on two ranks, which die with their torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    rank = dying([sys.executable, "-u", str(example), *arguments], parent=0)
    return [*command, "--no-python", *rank]


def torchrun(example: Path, directory: Path, *, stop_at: str | None = None) -> list[str]:
    """Return the lines that two ranks of an example print.

    Args:
        example: Path of the script.
        directory: Directory of its store.
        stop_at: Beginning of the line after which torchrun is told to stop all ranks.
    """
    command = launched(example, f"--directory={directory}", f"--steps={STEPS}", f"--every={EVERY}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    errors = directory.with_name(f"{directory.name}.errors")
    lines = []
    with (
        errors.open("a") as stderr,
        subprocess.Popen(
            dying(["timeout", f"--kill-after={HANG_S}", str(HANG_S), *dying(command, 0)]),
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=stderr,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if stop_at is not None and line.startswith(stop_at):
                process.send_signal(signal.SIGTERM)  # `timeout` and torchrun pass it on
    assert (process.returncode == 0) is (stop_at is None), errors.read_text()
    return lines


def losses(lines: list[str]) -> dict[int, str]:
    """Return the printed loss of each step."""
    found = [re.fullmatch(r"step (\d+) loss (\S+)", line) for line in lines]
    return {int(match[1]): match[2] for match in found if match}


@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py", "accelerate_ddp.py"])
def test_an_example_that_is_stopped_and_run_again_prints_the_same_losses(
    name: str, tmp_path: Path
) -> None:
    example = ROOT / "docs/examples" / name
    whole = losses(torchrun(example, tmp_path / "whole"))
    assert list(whole) == list(range(1, STEPS + 1))
    stopped = losses(torchrun(example, tmp_path / "parts", stop_at=f"step {STOPPED_AT} "))
    assert stopped == {step: whole[step] for step in stopped}
    lines = torchrun(example, tmp_path / "parts")
    again = losses(lines)
    first = STEPS + 1 - len(again)
    assert f"continuing after step {first - 1}" in lines
    assert first > EVERY
    assert again == {step: whole[step] for step in range(first, STEPS + 1)}


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "elastic"])
def test_the_page_about_ranks_shows_the_scripts_that_are_run(name: str) -> None:
    """The page has the lines of the examples that concern ranks, as they are there."""
    page = (ROOT / "docs/ranks.md").read_text()
    assert f"(examples/{name}.py)" in page


def test_the_example_of_plain_torch_goes_on_from_the_masters(tmp_path: Path) -> None:
    """Two ranks of the example have the losses of one process that goes on in torch."""
    example = ROOT / "docs/examples/dcp_load.py"
    found: dict[str, Any] = {}
    exec(compile(example.read_text(), str(example), "exec"), found)
    torch.manual_seed(3)
    live = found["make_model"]().bfloat16()
    drives = offload.DriveTuning(calibrate=False)
    with offload.AdamW(
        live.named_parameters(), lr=1e-3, directory=tmp_path / "run", model=live,
        options=offload.Options(drives=drives),
    ) as optimizer:  # fmt: skip
        for _ in range(3):
            live(torch.randn(16, found["WIDTH"]).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.checkpoint().result()
        state = optimizer.full_state_dict()
    model = found["make_model"]()
    masters = dict(zip(dict(model.named_parameters()), state["master"].values(), strict=True))
    model.load_state_dict(masters)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain.load_state_dict(state)
    expected = []
    torch.manual_seed(1)
    for _ in range(3):
        x = torch.randn(16, found["WIDTH"])
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        plain.step()
        plain.zero_grad()
        expected.append(loss.item())
    ended = subprocess.run(
        dying(launched(example, f"--directory={tmp_path / 'run'}", "--steps=3")),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True, capture_output=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "loaded step 3"
    found_losses = losses(ended.stdout.splitlines())
    assert list(found_losses) == [4, 5, 6]
    assert [float(loss) for loss in found_losses.values()] == pytest.approx(expected, rel=1e-5)
