"""The examples of several ranks, run small by `torchrun`: to the end, and stopped and run again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks_training.launch import TIMEOUT_S

ROOT = Path(__file__).parents[2]
STEPS, EVERY, STOPPED_AT = 7, 2, 4


def torchrun(example: Path, directory: Path, *, stop_at: str | None = None) -> list[str]:
    """Return the lines that two ranks of an example print.

    Args:
        example: Path of the script.
        directory: Directory of its store.
        stop_at: Beginning of the line after which torchrun is told to stop all ranks.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(example), f"--directory={directory}", f"--steps={STEPS}", f"--every={EVERY}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    errors = directory.with_name(f"{directory.name}.errors")
    lines = []
    with (
        errors.open("a") as stderr,
        subprocess.Popen(
            ["timeout", f"--kill-after={TIMEOUT_S}", str(TIMEOUT_S), *command],
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


@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py"])
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


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_page_about_ranks_shows_the_scripts_that_are_run(name: str) -> None:
    """The page has the lines of the examples that concern ranks, as they are there."""
    page = (ROOT / "docs/ranks.md").read_text()
    assert f"(examples/{name}.py)" in page
