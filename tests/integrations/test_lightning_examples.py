"""The scripts in `docs/examples`, run small: killed in the middle, and run again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.dying import dying
from tests.integrations.example_runs import ARGUMENTS, KILLED_AT, STEPS

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 240


def losses(lines: list[str]) -> dict[int, str]:
    found = [re.fullmatch(r"step (\d+) loss (\S+)", line) for line in lines]
    return {int(match[1]): match[2] for match in found if match}


def test_an_example_that_is_killed_and_run_again_prints_the_same_losses(tmp_path: Path) -> None:
    examples = [str(ROOT / "docs/examples" / name) for name in ARGUMENTS]
    command = [sys.executable, "-m", "tests.integrations.example_runs", str(tmp_path), *examples]
    with subprocess.Popen(
        dying(command), cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    printed = json.loads(output.splitlines()[-1])
    assert list(printed) == examples
    for example, lines in printed.items():
        runs = {name: losses(run) for name, run in lines.items()}
        assert list(runs["whole"]) == list(range(1, STEPS + 1)), example
        assert list(runs["killed"]) == list(range(1, KILLED_AT + 1)), example
        again = runs["again"]
        assert list(again) == list(range(min(again), STEPS + 1)), example
        assert 1 < min(again) <= KILLED_AT, f"{example} did not go on from a checkpoint"
        for run in (runs["killed"], again):
            assert run == {step: runs["whole"][step] for step in run}, example
    (said,) = [line for line in printed[examples[1]]["again"] if line.startswith("continuing")]
    counted = re.fullmatch(r"continuing at iteration (\d+), optimizer step (\d+)", said)
    assert counted is not None, said
    assert 0 < int(counted[2]) < int(counted[1]), "the scaler has skipped steps"


def test_a_bridge_is_imported_only_when_it_is_used() -> None:
    heavy = "{'torch', 'lightning', 'pytorch_lightning'}"
    code = f"import sys, offload.integrations; print(sorted({heavy} & {{*sys.modules}}))"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (found.stdout, found.stderr) == ("[]\n", "")
