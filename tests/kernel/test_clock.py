"""The clock jumps by years, both ways: what is newest does not depend on it, and nothing waits."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.kernel.trainee import Plan, Report, Trainees

ROOT: Final = Path(__file__).parents[2]
YEAR_S: Final = 365 * 86400

PROGRAM: Final = """
import ctypes, json, sys, time
import torch
from tests.stores.training import Model, backward, optimizer_for, options
from offload import open_checkpoint

torch.set_num_threads(1)
jump = ctypes.CDLL(None).jump
created, began = [], time.time()
model = Model()
optimizer = optimizer_for(model, sys.argv[1], options(), keep=3)
for step, years in enumerate(json.loads(sys.argv[2]), 1):
    jump(ctypes.c_long(years * 31536000))
    backward(model, step)
    optimizer.step()
    handle = optimizer.checkpoint({"step": step})
    jump(ctypes.c_long(-years * 31536000 // 2))
    created.append(handle.result().path)
    with open_checkpoint(sys.argv[1]) as newest:
        assert newest.step == step
jump(ctypes.c_long(-40 * 31536000))
optimizer.close()
optimizer = optimizer_for(Model(), sys.argv[1], options(), keep=3)
print(json.dumps({"restored": optimizer.restore().step, "moved": time.time() - began}))
optimizer.close()
"""


def test_a_process_whose_clock_jumps(trainees: Trainees, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or pytest.skip("no C compiler, to make a clock that can be set")
    library = tmp_path / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    store = tmp_path / "child" / "run"
    years = [-10, 30, -25, 12, -40]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(store), json.dumps(years)],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["moved"] < -30 * YEAR_S, "the clock must have jumped"
    assert result["restored"] == len(years)
    stamps = [
        json.loads(path.read_text())["body"]["created"]
        for path in sorted(store.glob("step-*/manifest.json"))
    ]
    assert stamps != sorted(stamps), "newer checkpoints must have older times"
    assert trainees.resume(tmp_path / "child", Plan(keep=3), len(years)) == len(years)


@pytest.mark.parametrize("order", ["past", "shuffled"])
def test_times_of_files_mean_nothing(order: str, trainees: Trainees, tmp_path: Path) -> None:
    trainees.run(tmp_path, Plan(keep=3, last_step=4))
    Report(tmp_path).put_aside()
    paths = [*sorted((tmp_path / "run").rglob("*")), tmp_path / "run"]
    if order == "shuffled":
        random.Random(7).shuffle(paths)
    for number, path in enumerate(paths):
        time_s = 1000.0 - number if order == "past" else 1e9 * (number % 4)
        os.utime(path, (time_s, time_s))
    assert trainees.resume(tmp_path, Plan(keep=3), 4) == 4
