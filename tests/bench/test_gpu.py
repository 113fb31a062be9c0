"""Everything that needs a GPU, in order: steps that fail, hang or print nonsense stop no other."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from bench import beside_training, device, gpu, gpu_training, kernel
from bench.gpu import Step
from gds import cli

LEAVES_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600 if sys.argv[1] == "hang" else 0)
"""


def python(name: str, code: str, *arguments: str, **settings: Any) -> Step:
    return Step(name, ("-c", code, *arguments), settings.pop("limit_s", 600.0), **settings)


def performed(tmp_path: Path, *listed: Step) -> tuple[list[gpu.Outcome], dict[str, Any]]:
    directory = tmp_path / "drive"
    directory.mkdir()
    output = tmp_path / "results"
    outcomes = gpu.perform_all(listed, output, "x", str(directory), quick=True)
    (path,) = output.glob("*.json")
    assert path.name.endswith("-gpu-x.json")
    assert (output / path.stem).is_dir()
    return outcomes, json.loads(path.read_text())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_what_fails_stops_nothing_after_it(tmp_path: Path) -> None:
    outcomes, summary = performed(
        tmp_path,
        python("fails", "import sys; print('one'); sys.exit('two')"),
        python("finding", "raise SystemExit(3)", accepted=(0, 3)),
        python("crashes", "import os; os.abort()"),
        python("works", "print('three')"),
    )
    assert [(o.name, o.status, o.succeeded) for o in outcomes] == [
        ("fails", 1, False),
        ("finding", 3, True),
        ("crashes", -6, False),
        ("works", 0, True),
    ]
    assert outcomes[0].last_lines == ["one", "two"]
    assert [step["name"] for step in summary["steps"]] == [o.name for o in outcomes]
    assert (tmp_path / "results" / outcomes[0].output).read_text() == "one\ntwo\n"
    assert summary["steps"][3]["last_lines"] == ["three"]
    assert summary["machine"]["cores"] >= 1


@pytest.mark.parametrize("ending", ["hang", "leave"])
def test_a_step_ends_with_its_children(tmp_path: Path, ending: str) -> None:
    printed = ""
    # Where the machine stands still, a process needs more than two seconds to print a number.
    for limit_s in (2.0, 120.0) if ending == "hang" else (600.0,):
        step = python("stuck", LEAVES_A_CHILD, ending, limit_s=limit_s)
        outcome = gpu.perform(step, tmp_path, {})
        assert outcome.status == (None if ending == "hang" else 0)
        assert outcome.succeeded is (ending == "leave")
        printed = (tmp_path / "stuck.txt").read_text()
        if printed:
            break
    child = int(printed)
    deadline = time.monotonic() + 120  # it has been killed; how soon it is gone is not ours to say
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def test_json_is_kept_as_such_and_nonsense_is_a_failure(tmp_path: Path) -> None:
    outcomes, summary = performed(
        tmp_path,
        python("json", "print('{\"a\": [1]}')", is_json=True),
        python("noise", "print('no json')", is_json=True),
        python("refused", "import sys; sys.exit('error: no GPU')", is_json=True),
        python("may-refuse", "import sys; sys.exit('no GDS')", is_json=True, accepted=(0, 1)),
    )
    assert [o.succeeded for o in outcomes] == [True, False, False, True]
    assert summary["steps"][0]["found"] == {"a": [1]}
    assert summary["steps"][0]["last_lines"] == []
    assert summary["steps"][2]["last_lines"] == ["error: no GPU"]


def test_no_path_of_the_user_is_recorded(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.getcwd())"
    drive, output = str(tmp_path / "drive"), str(tmp_path / "results")
    _, summary = performed(tmp_path, python("paths", code, drive, f"{output}/x"))
    assert str(tmp_path) not in json.dumps(summary)
    (step,) = summary["steps"]
    assert step["command"].endswith("DIRECTORY OUTPUT/x")
    assert step["last_lines"] == ["['DIRECTORY', 'OUTPUT/x'] ROOT"]


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_every_command_takes_its_arguments(quick: bool) -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for step in gpu.steps("/data", "/out", quick=quick):
        dash, module, *arguments = step.arguments
        assert dash == "-m"
        if module == "gds.cli":
            name, *arguments = arguments
            context = commands[name].make_context(name, arguments)
            assert "/data" in (context.params.get("directory"), *context.params.get("places", ()))
        elif module == "pytest":
            assert arguments[:3] == ["-q", "-m", "gpu"]
        else:
            scripts = (kernel, device, gpu_training, beside_training)
            (script,) = (script for script in scripts if script.__name__ == module)
            args = script._arguments(arguments)
            assert (args.directory, args.output, args.quick) == ("/data", "/out", quick)


def test_all_tests_of_a_gpu_are_run_within_half_an_hour() -> None:
    tests = Path(__file__).parent.parent
    marked = {
        path.relative_to(tests).parts[0]
        for path in tests.rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text()
    }
    listed = gpu.steps("/data", "/out", quick=False)
    named = [Path(a).name for step in listed for a in step.arguments if a.startswith(str(tests))]
    assert sorted(named) == sorted(marked) == sorted(gpu.TESTS)
    assert sum(step.limit_s for step in listed) <= 1800


LOGS = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + ' ')"
SLEEPS = LOGS + "; import time; time.sleep(600)"


def test_a_second_call_goes_on_where_the_time_of_the_first_was_over(tmp_path: Path) -> None:
    """A step that was interrupted is run again; others that have ended or failed are not."""
    log, output = str(tmp_path / "log"), tmp_path / "results"
    listed = [
        python("fails", LOGS + "; sys.exit('one')", log, "fails"),
        python("long", SLEEPS, log, "long", limit_s=1000),
        python("last", LOGS, log, "last"),
    ]

    def call(listed: list[Step], seconds: float) -> list[gpu.Outcome]:
        return gpu.perform_all(listed, output, "x", str(tmp_path), quick=True, seconds=seconds)

    first: list[gpu.Outcome] = []
    # Where the machine stands still, a process needs more than a few seconds to begin.
    for seconds in (gpu._LEAST_S + 3, 120.0):
        first = call(listed, seconds)
        if len(first) == 2:
            break
    assert [(o.name, o.was_interrupted) for o in first] == [("fails", False), ("long", True)]
    listed[1] = python("long", LOGS, log, "again")
    second = call(listed, 600)
    assert [o.name for o in second] == ["fails", "long", "last"]
    assert [o.succeeded for o in second] == [False, True, True]
    assert (tmp_path / "log").read_text().split() == ["fails", "long", "again", "last"]
    assert call(listed, 600) == second
    (summary,) = output.glob("*.json")
    assert [step["name"] for step in json.loads(summary.read_text())["steps"]] == [
        "fails",
        "long",
        "last",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--directory", str(tmp_path), "--output", str(tmp_path / "out"), "--what", "x"]
    assert gpu.main(arguments) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
