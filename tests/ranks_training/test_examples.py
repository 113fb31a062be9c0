"""The examples of several ranks, run small: to the end, and stopped and run again.

`test_elastic` runs one under torchrun; here the ranks are forked, with what torchrun tells them.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.eventually import eventually
from tests.ranks_training.rank_server import Jobs

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
STEPS, EVERY = 7, 2

STOPPED_AT = 5
"""Step after which a run is stopped. The second checkpoint was begun before it, and so the first is
durable: a checkpoint waits for the one before it."""


def run_calls(folder: Path, rank: int, size: int, calls: Sequence[str], setting: Any) -> None:
    """Run an example: its name, and its arguments."""
    del folder, rank, setting
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    sys.argv[:] = [*calls]
    runpy.run_path(str(EXAMPLES / calls[0]), run_name="__main__")


def run(jobs: Jobs, folder: Path, name: str, *how: str, stop_at: str = "") -> list[str]:
    """Return the lines that rank 0 of two prints.

    Args:
        jobs: Server of ranks.
        folder: Folder of the test.
        name: Name of the example.
        how: Its arguments.
        stop_at: Beginning of the line after which all ranks are told to stop.
    """
    job = jobs.start(folder, [[name, *how]] * 2, program="tests.ranks_training.test_examples")
    printed = folder / f"errors-{job.pids[0]}"

    def has_come() -> bool:
        return printed.exists() and f"\n{stop_at}" in printed.read_text()

    if stop_at:
        assert eventually(has_come), printed.read_text()
        for rank in range(2):
            job.kill(rank)
    for rank in job.wait():
        assert rank.status == (-signal.SIGKILL if stop_at else 0), rank.errors
    return printed.read_text().splitlines()


def losses(lines: list[str]) -> dict[int, str]:
    """Return the printed loss of each step."""
    found = [re.fullmatch(r"step (\d+) loss (\S+)", line) for line in lines]
    return {int(match[1]): match[2] for match in found if match}


@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py", "accelerate_ddp.py"])
def test_an_example_that_is_stopped_and_run_again_prints_the_same_losses(
    jobs: Jobs, tmp_path: Path, name: str
) -> None:
    how = [f"--steps={STEPS}", f"--every={EVERY}"]
    whole = losses(run(jobs, tmp_path, name, f"--directory={tmp_path / 'whole'}", *how))
    assert list(whole) == list(range(1, STEPS + 1))
    parts = [f"--directory={tmp_path / 'parts'}", *how]
    stopped = losses(run(jobs, tmp_path, name, *parts, stop_at=f"step {STOPPED_AT} "))
    assert stopped == {step: whole[step] for step in stopped}
    lines = run(jobs, tmp_path, name, *parts)
    again = losses(lines)
    first = STEPS + 1 - len(again)
    assert f"continuing after step {first - 1}" in lines
    assert first > EVERY
    assert again == {step: whole[step] for step in range(first, STEPS + 1)}


def test_the_example_of_plain_torch_goes_on_from_the_masters(jobs: Jobs, tmp_path: Path) -> None:
    """Two ranks of the example have the losses of one process that goes on in torch."""
    example, store = EXAMPLES / "dcp_load.py", tmp_path / "run"
    found: dict[str, Any] = {}
    exec(compile(example.read_text(), str(example), "exec"), found)
    torch.manual_seed(3)
    live = found["make_model"]().bfloat16()
    options = offload.Options(drives=offload.DriveTuning(calibrate=False))
    with offload.AdamW(
        live.named_parameters(), lr=1e-3, directory=store, model=live, options=options
    ) as optimizer:
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
    lines = run(jobs, tmp_path, "dcp_load.py", f"--directory={store}", "--steps=3")
    assert "loaded step 3" in lines
    found_losses = losses(lines)
    assert list(found_losses) == [4, 5, 6]
    assert [float(loss) for loss in found_losses.values()] == pytest.approx(expected, rel=1e-5)
