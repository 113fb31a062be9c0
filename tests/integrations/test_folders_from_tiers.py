"""A run that comes back from a tier, without the folders of its library, goes on as before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import offload
import offload.tiers
from offload.errors import NotRestoredError
from offload.integrations.transformers import latest_checkpoint
from tests.integrations import test_moved_folders as moved_folders
from tests.integrations.training import (
    Case,
    Run,
    StopBefore,
    StoppedError,
    steps,
)
from tests.numerics.reference import assert_same_bits

ARGUMENTS = {"save_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 7}
CASE = Case(ARGUMENTS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return CASE.run(tmp_path_factory.mktemp("whole"))


def stopped(root: Path, **settings: object) -> None:
    """Train until the machine is lost, after the save of step 4."""
    case = Case(ARGUMENTS, optimizer={"options": offload.Options(chunk_bytes=4096, **settings)})
    with pytest.raises(StoppedError):
        case.run(root, StopBefore(6))


def assert_goes_on(root: Path, whole: Run) -> None:
    found = CASE.run(root, resume=latest_checkpoint(root / "out", root / "run"))
    assert found.history == whole.history, "losses, norms, learning rates, and the log before"
    assert steps(found.history)
    for name, parameter in whole.parameters.items():
        assert_same_bits(found.parameters[name], parameter, name)


def uploaded_in_training(root: Path, tier: str) -> None:
    stopped(root, tier=tier)
    copies = offload.tiers.list_tier(tier)
    assert [copy.marker.step for copy in copies if copy.marker] == [2, 4], "each one once"
    assert len(copies) == 2


def test_the_trainer_goes_on_from_a_pull(whole: Run, tmp_path: Path) -> None:
    uploaded_in_training(tmp_path / "a", f"file://{tmp_path}/tier")
    (tmp_path / "b").mkdir()
    offload.tiers.pull(f"file://{tmp_path}/tier", tmp_path / "b/run")
    assert_goes_on(tmp_path / "b", whole)
    folders = sorted(path.name for path in (tmp_path / "b/out").iterdir())
    assert folders == ["checkpoint-4", "checkpoint-6", "checkpoint-7"]
    pins = [info.pins for info in offload.list_checkpoints(tmp_path / "b/run")]
    assert pins == [("transformers-4",), ("transformers-6",), ("transformers-7",)]


def test_damage_is_not_trained_on(whole: Run, tmp_path: Path) -> None:
    stopped(tmp_path)
    model = tmp_path / "run/step-00000004/model.safetensors"
    content = bytearray(model.read_bytes())
    content[-5] ^= 1
    model.write_bytes(content)
    shutil.rmtree(tmp_path / "out")
    with pytest.warns(RuntimeWarning, match=r"skipping .*step-00000004: .*model.*damaged"):
        older = latest_checkpoint(tmp_path / "out", tmp_path / "run")
    assert older == str(tmp_path / "out/checkpoint-2")
    assert CASE.run(tmp_path, resume=older).history == whole.history


def test_files_that_have_no_room_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped(tmp_path, train_state_bytes=8192)
    (said,) = {r.getMessage() for r in caplog.records if "checkpoint-4" in r.getMessage()}
    assert "too large: keep it, or raise Options(train_state_bytes=" in said
    needed = int(said.rpartition("=")[2].rstrip(")"))
    (tmp_path / "out").rename(tmp_path / "away")
    with pytest.warns(
        RuntimeWarning, match=r"step-00000004: it has no files of .*out/checkpoint-4"
    ):
        assert latest_checkpoint(tmp_path / "out", tmp_path / "run") is None
    with pytest.raises(NotRestoredError):
        CASE.run(tmp_path)
    stopped(tmp_path / "again", train_state_bytes=needed)
    shutil.rmtree(tmp_path / "again/out")
    assert latest_checkpoint(tmp_path / "again/out", tmp_path / "again/run") is not None


def test_accelerate_goes_on_from_a_pull(tmp_path: Path) -> None:
    first = moved_folders.Run(tmp_path / "a").save("out/a", "out/b")
    expected = [parameter.detach().clone() for parameter in first.model.parameters()]
    assert first.close() == [1, 2]
    offload.tiers.push(tmp_path / "a/store", f"file://{tmp_path}/tier")
    (tmp_path / "b").mkdir()
    offload.tiers.pull(f"file://{tmp_path}/tier", tmp_path / "b/store")
    again = moved_folders.Run(tmp_path / "b")
    again.accelerator.load_state(str(tmp_path / "b/out/b"))
    for found, value in zip(again.model.parameters(), expected, strict=True):
        assert_same_bits(found, value, "a parameter")
    assert (tmp_path / "b/out/b/optimizer.bin").exists(), "the folder has been written"
    assert again.save("out/c").close() == [2, 3], "the folder that was written keeps its checkpoint"
