"""What an optimizer says of its store: where it is, its checkpoints, its pins, what a dict names.

What it says is compared with what readers find on the drive.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload import OffloadedOptimizer, Position, reference_of
from tests.stores.small import make_model, make_optimizer, step
from tests.threads import one_thread

__all__ = ["one_thread"]  # a fixture: small tensors on many threads are slow


def make(directory: Path | Sequence[Path], **arguments: Any) -> OffloadedOptimizer:
    shares = None if isinstance(directory, Path) else (1,) * len(directory)
    settings = {
        "overlap": arguments.pop("overlap", None),
        "drives": offload.DriveTuning(shares=shares),
    }
    model = make_model(60, 50, dtype=torch.float32)
    return make_optimizer(model, directory=directory, settings=settings, **{"keep": 9, **arguments})


def seal(optimizer: OffloadedOptimizer, **metrics: float) -> offload.Checkpoint:
    step(optimizer)
    return optimizer.checkpoint(metrics=metrics or None).result()


def listed(directory: Path) -> Any:
    """Return what a reader finds on the drive, which knows no optimizer."""
    return as_listed(offload.list_checkpoints(directory))


def as_listed(infos: Sequence[offload.CheckpointInfo]) -> Any:
    """Return values as they are in JSON, which has lists for tuples."""
    return json.loads(json.dumps([dataclasses.asdict(info) for info in infos]))


def pins_on_drive(directory: Path) -> dict[str, str]:
    """Read the files of pins without the library."""
    bodies = {f.name: json.loads(f.read_bytes())["body"] for f in (directory / "pins").iterdir()}
    return {name: str(directory / body["checkpoint"]) for name, body in bodies.items()}


def test_its_checkpoints_are_what_readers_list(tmp_path: Path) -> None:
    directories = [tmp_path / f"drive{number}" for number in range(2)]
    with make(directories) as optimizer:
        assert optimizer.checkpoints() == []
        for number in range(3):
            seal(optimizer, loss=0.5 + number)
        optimizer.pin("best", 2)
        optimizer.pin("first", optimizer.checkpoints()[0])
        before = optimizer.stats()
        mine = optimizer.checkpoints()
        after = optimizer.stats()
        assert (after.bytes_read, after.bytes_written) == (before.bytes_read, before.bytes_written)
        assert as_listed(mine) == listed(directories[0])
        pins = [(info.step, info.pins) for info in mine]
        assert pins == [(1, ("first",)), (2, ("best",)), (3, ())]
        assert mine[1].metrics == {"loss": 1.5}
        assert optimizer.directories == tuple(map(str, directories))
        offload.pin(mine[2].path, "kept")
        assert optimizer.checkpoints()[2].pins == ("kept",)
        assert optimizer.pins() == pins_on_drive(directories[0])
        assert optimizer.pins()["first"] == mine[0].path
        for name in ("best", "first", "kept"):
            optimizer.unpin(name)
        assert optimizer.pins() == pins_on_drive(directories[0]) == {}
        step(optimizer)
        optimizer.checkpoint()
        optimizer.synchronize()
        assert [info.step for info in optimizer.checkpoints()] == [1, 2, 3, 4]


def test_it_finds_the_checkpoint_that_a_saved_dict_names(tmp_path: Path) -> None:
    with make(tmp_path / "run") as optimizer:
        for _ in range(3):
            seal(optimizer)
            torch.save(optimizer.state_dict(), tmp_path / f"{optimizer.num_steps}.pt")
    saved = [torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in (1, 2, 3)]
    with make(tmp_path / "run") as optimizer:
        positions = [position for one in saved if (position := reference_of(one))]
        found = [optimizer.find(position) for position in positions]
        assert as_listed(found) == listed(tmp_path / "run")
        optimizer.restore(found[1], discard_newer=True)
        assert optimizer.position.is_same_as(positions[1])
        assert not optimizer.position.is_same_as(positions[0])
        with pytest.raises(offload.MismatchError, match=r"has step 1 .*, step 2 .*withdrawn"):
            optimizer.find(positions[2])
        step(optimizer)
        with pytest.raises(offload.MismatchError, match="never sealed"):
            optimizer.find(optimizer.position)
    with make(tmp_path / "two") as optimizer:
        seal(optimizer)
        with pytest.raises(offload.MismatchError, match=positions[0].store) as refused:
            optimizer.find(positions[0])
        assert optimizer.position.store in str(refused.value)


@pytest.mark.filterwarnings("ignore:not using .*step-00000002")
def test_checkpoints_are_those_that_it_can_go_back_to(tmp_path: Path) -> None:
    """Not one that is damaged, nor one whose history `fresh` has given up; pins stay known."""
    with make(tmp_path) as optimizer:
        for _ in range(3):
            seal(optimizer)
        optimizer.pin("kept", 2)
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    with make(tmp_path) as optimizer:
        assert [info.step for info in optimizer.checkpoints()] == [1, 3]
        assert optimizer.pins() == {"kept": str(tmp_path / "step-00000002")}
        optimizer.unpin("kept")
        restored = optimizer.restore(optimizer.checkpoints()[0], discard_newer=True)
        assert restored is not None
        assert restored.step == optimizer.num_steps == 1
        assert [info.step for info in optimizer.checkpoints()] == [1]
    with make(tmp_path, fresh=True) as optimizer:
        assert optimizer.checkpoints() == []
        assert listed(tmp_path), "on the drive until a new one is durable"


def test_the_newest_is_last_whatever_its_step_is(tmp_path: Path) -> None:
    """Checkpoints are listed as they were made; one that cannot be read, where its step says."""
    steps, damaged, expected = [10, 2, 30, 20, 4], {30, 10}, [2, 10, 20, 4, 30]
    paths = []
    with make(tmp_path) as optimizer:
        for number in steps:
            step(optimizer)
            full = optimizer.full_state_dict()
            optimizer.load_state_dict({**full, "num_steps": number})
            paths.append(optimizer.checkpoint({"at": number}).result().path)
    found = offload.list_checkpoints(tmp_path)
    assert [info.path for info in found] == paths
    assert [info.generation for info in found] == sorted(info.generation for info in found)
    with offload.open_checkpoint(tmp_path) as newest:
        assert newest.path == paths[-1]
    for number in damaged:
        (tmp_path / f"step-{number:08}" / "manifest.json").write_text("{}")
    found = offload.list_checkpoints(tmp_path)
    assert [info.step for info in found] == expected
    assert {info.step for info in found if not info.valid} == damaged


@pytest.mark.parametrize("overlap", [None, "forward", "backward"])
def test_its_position_is_what_state_dict_names(overlap: str | None, tmp_path: Path) -> None:
    with make(tmp_path, overlap=overlap) as optimizer:
        optimizer.warn_unsealed = False
        for sealed in (False, True, False):
            step(optimizer)
            if sealed:
                optimizer.checkpoint()
            position, saved = optimizer.position, optimizer.state_dict()
            assert dataclasses.asdict(position) == {
                name: saved[name] for name in ("store", "step", "generation", "run", "sealed")
            }
            assert position.sealed == sealed
            assert reference_of(saved) == position
            if sealed:
                optimizer.synchronize()
                (info,) = listed(tmp_path)
                on_drive = (info["store"], info["step"], info["generation"])
                assert on_drive == (position.store, position.step, position.generation)
        optimizer.warn_unsealed = True
        with pytest.warns(RuntimeWarning, match="cannot be resumed from"):
            optimizer.state_dict()


def test_what_names_no_checkpoint(tmp_path: Path) -> None:
    with make(tmp_path) as optimizer:
        saved = optimizer.state_dict()
        step(optimizer)
        full = optimizer.full_state_dict()
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]).state_dict()
    assert [reference_of(one) for one in (plain, full, {})] == [None] * 3
    assert isinstance(reference_of(saved), Position)
    for wrong in ({**saved, "format": "offload-reference-9"}, {"format": saved["format"]}):
        with pytest.raises(offload.MismatchError):
            reference_of(wrong)


class TestVerifyBeforeResume:
    @pytest.fixture
    def directories(self, tmp_path: Path) -> list[Path]:
        found = [tmp_path / f"drive{number}" for number in range(2)]
        with make(found) as optimizer:
            for _ in range(3):
                seal(optimizer)
        return found

    def damage(self, directories: list[Path], number: int) -> Path:
        """Overwrite state of a checkpoint, on the second drive."""
        checkpoint = directories[0] / f"step-{number:08}"
        with offload.open_checkpoint(checkpoint) as opened:
            place = Path(opened.parts[0])
        (state,) = place.glob("exp_avg.*")
        with state.open("r+b") as file:
            file.seek(-16, os.SEEK_END)
            file.write(b"damaged state it")
        return checkpoint

    def verify(self, checkpoint: Path, directories: list[Path]) -> offload.VerifyReport:
        with offload.open_checkpoint(checkpoint, parts=directories[1:]) as opened:
            return offload.verify_before_resume(opened)

    def test_one_is_marked_and_the_one_before_it_is_not(self, directories: list[Path]) -> None:
        newest, before = (self.damage(directories, number) for number in (3, 2))
        files = [{p.name for p in place.iterdir()} for place in (newest, before)]
        report = self.verify(newest, directories)
        assert report.problems
        assert report.quarantined
        with pytest.raises(offload.DamagedError, match="two in a row") as refused:
            self.verify(before, directories)
        left = [{p.name for p in place.iterdir()} for place in (newest, before)]
        assert [len(after - files[n]) for n, after in enumerate(left)] == [1, 0]
        command = f"offload verify {directories[0]} --quarantine"
        command += "".join(f" --part {part}" for part in directories[1:])
        assert f"`{command}`" in str(refused.value)
        assert str(newest) in str(refused.value)
        report = self.verify(directories[0] / "step-00000001", directories)
        assert report.ok
        assert not report.quarantined


@pytest.mark.parametrize("kind", ["info", "checkpoint"])
def test_a_checkpoint_that_another_of_its_step_replaced_is_not_taken_for_it(kind: str) -> None:
    with make_optimizer(make_model(3, 2), MemoryBackend()) as optimizer:
        for _ in range(2):
            sealed = seal(optimizer)
        named = optimizer.checkpoints()[-1] if kind == "info" else sealed
        assert optimizer.restore(named) is not None
        optimizer.restore(1, discard_newer=True)
        step(optimizer, 7)
        other = optimizer.checkpoint().result()
        assert (other.step, other.path) == (named.step, named.path)
        for call in (optimizer.restore, lambda which: optimizer.pin("best", which)):
            with pytest.raises(offload.CheckpointNotFoundError, match="replaced by generation"):
                call(named)
        assert optimizer.pins() == {}
        found = optimizer.restore(named.path)
        assert found is not None
        assert found.generation == other.generation


@pytest.mark.parametrize(
    ("epoch", "loss", "replaced"),
    [
        (1, None, set()),
        (2, 0.5, {"train_state.safetensors"}),
        (1, 0.25, {"manifest.json"}),
        (2, 0.25, {"train_state.safetensors", "manifest.json"}),
    ],
    ids=["the same", "train state", "metrics", "both"],
)
def test_a_second_checkpoint_of_a_step_replaces_what_is_different(
    epoch: int, loss: float | None, replaced: set[str], tmp_path: Path
) -> None:
    drives = [tmp_path / "0", tmp_path / "1"]
    with make(drives) as optimizer:
        step(optimizer)
        first = Path(optimizer.checkpoint({"epoch": 1}, metrics={"loss": 0.5}).result().path)
        before = {file.name: file.stat().st_ino for file in first.iterdir()}
        metrics = None if loss is None else {"loss": loss}
        again = optimizer.checkpoint({"epoch": epoch}, metrics=metrics).result()
        after = {file.name: file.stat().st_ino for file in first.iterdir()}
        assert {name for name, inode in before.items() if after[name] != inode} == replaced
        with offload.open_checkpoint(drives[0]) as found:
            assert again.parts == found.parts != []
            assert again.train_state == found.train_state == {"epoch": epoch}
            assert again.metrics == found.metrics == (metrics or {"loss": 0.5})
        assert again.verify().ok
