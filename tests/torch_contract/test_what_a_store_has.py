"""What an optimizer says of its store: where it is, its checkpoints, its pins, what a dict names.

What it says is compared with what another process finds on the drive.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from gds import MemoryBackend
from offload import OffloadedOptimizer, Position, reference_of
from offload.engine.reference import REFERENCE_FORMAT
from offload.format.names import QUARANTINE_NAME
from tests.stores.small import make_model, make_optimizer, step


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
    """Return what ``offload ls --json`` prints in a process of its own."""
    command = [sys.executable, "-m", "offload.cli", "ls", str(directory), "--json"]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(found.stdout)


def as_listed(infos: Sequence[offload.CheckpointInfo]) -> Any:
    """Return values as they are in JSON, which has lists for tuples."""
    return json.loads(json.dumps([dataclasses.asdict(info) for info in infos]))


def pins_on_drive(directory: Path) -> dict[str, str]:
    """Read the files of pins without the library."""
    found = {}
    for file in (directory / "pins").iterdir():
        body = json.loads(file.read_bytes())["body"]
        found[file.name] = str(directory / body["checkpoint"])
    return found


@pytest.mark.parametrize("num_drives", [1, 2])
def test_its_checkpoints_are_what_another_process_lists(num_drives: int, tmp_path: Path) -> None:
    directories = [tmp_path / f"drive{number}" for number in range(num_drives)]
    with make(directories) as optimizer:
        assert optimizer.checkpoints() == []
        for number in range(3):
            seal(optimizer, loss=0.5 + number)
        optimizer.pin("best", 2)
        optimizer.pin("first", 1)
        mine = optimizer.checkpoints()
        assert as_listed(mine) == listed(directories[0])
        pins = [(info.step, info.pins) for info in mine]
        assert pins == [(1, ("first",)), (2, ("best",)), (3, ())]
        assert mine[1].metrics == {"loss": 1.5}
        assert optimizer.directories == tuple(map(str, directories))


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
        with pytest.raises(offload.MismatchError, match=r"has step 1 .*, step 2 .*withdrawn"):
            optimizer.find(positions[2])


class TestCheckpoints:
    def test_a_pin_of_another_process_is_seen_at_once(self, tmp_path: Path) -> None:
        with make(tmp_path) as optimizer:
            seal(optimizer)
            command = [sys.executable, "-m", "offload.cli", "pin"]
            subprocess.run([*command, str(tmp_path / "step-00000001"), "kept"], check=True)
            assert optimizer.checkpoints()[0].pins == ("kept",)
            assert optimizer.pins() == {"kept": str(tmp_path / "step-00000001")}
            assert optimizer.pins() == pins_on_drive(tmp_path)

    @pytest.mark.filterwarnings("ignore:not using .*step-00000002")
    def test_they_are_those_that_it_can_go_back_to(self, tmp_path: Path) -> None:
        """Not one that is damaged, nor one whose history `fresh` has given up."""
        with make(tmp_path) as optimizer:
            for _ in range(3):
                seal(optimizer)
        (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
        with make(tmp_path) as optimizer:
            assert [info.step for info in optimizer.checkpoints()] == [1, 3]
            restored = optimizer.restore(optimizer.checkpoints()[0], discard_newer=True)
            assert restored is not None
            assert restored.step == optimizer.num_steps == 1
            assert [info.step for info in optimizer.checkpoints()] == [1]
        with make(tmp_path, fresh=True) as optimizer:
            assert optimizer.checkpoints() == []
            assert listed(tmp_path), "on the drive until a new one is durable"

    def test_one_that_is_being_sealed_is_there_when_it_has_been_waited_for(
        self, tmp_path: Path
    ) -> None:
        with make(tmp_path) as optimizer:
            step(optimizer)
            optimizer.checkpoint()
            optimizer.synchronize()
            assert [info.path for info in optimizer.checkpoints()] == [
                str(tmp_path / "step-00000001")
            ]

    def test_it_moves_no_state(self, tmp_path: Path) -> None:
        with make(tmp_path) as optimizer:
            seal(optimizer)
            before = optimizer.stats()
            optimizer.checkpoints()
            after = optimizer.stats()
            assert (after.bytes_read, after.bytes_written) == (
                before.bytes_read,
                before.bytes_written,
            )

    def test_one_of_them_can_be_pinned(self, tmp_path: Path) -> None:
        with make(tmp_path) as optimizer:
            first, _ = seal(optimizer), seal(optimizer)
            optimizer.pin("old", optimizer.checkpoints()[0])
            assert optimizer.pins() == pins_on_drive(tmp_path) == {"old": first.path}
            optimizer.unpin("old")
            assert optimizer.pins() == pins_on_drive(tmp_path) == {}

    def test_a_pin_stays_known_when_its_checkpoint_is_not_usable(self, tmp_path: Path) -> None:
        with make(tmp_path) as optimizer:
            seal(optimizer)
            optimizer.pin("kept")
            seal(optimizer)
        (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
        with make(tmp_path) as optimizer:
            assert [info.step for info in optimizer.checkpoints()] == [2]
            assert optimizer.pins() == {"kept": str(tmp_path / "step-00000001")}

    @pytest.mark.parametrize("method", ["checkpoints", "pins"])
    def test_a_closed_optimizer_says_so(self, method: str, tmp_path: Path) -> None:
        optimizer = make(tmp_path)
        optimizer.close()
        with pytest.raises(offload.OffloadError, match="closed"):
            getattr(optimizer, method)()


class TestPosition:
    @pytest.mark.parametrize("overlap", [None, "forward", "backward"])
    def test_it_is_what_state_dict_names(self, overlap: str | None, tmp_path: Path) -> None:
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

    def test_a_sealed_one_names_what_is_on_the_drive(self, tmp_path: Path) -> None:
        with make(tmp_path) as optimizer:
            seal(optimizer)
            position = optimizer.position
            (info,) = listed(tmp_path)
            manifest = json.loads((tmp_path / "step-00000001" / "manifest.json").read_bytes())
            assert manifest["body"]["store_id"] == info["store"] == position.store
            assert (info["step"], info["generation"]) == (position.step, position.generation)
            with pytest.raises(dataclasses.FrozenInstanceError):
                position.step = 2  # type: ignore[misc]

    def test_going_back_goes_back(self, tmp_path: Path) -> None:
        with make(tmp_path) as optimizer:
            seal(optimizer)
            first = optimizer.position
            seal(optimizer)
            assert not optimizer.position.is_same_as(first)
            optimizer.restore(1, discard_newer=True)
            assert optimizer.position.is_same_as(first)

    def test_between_backward_and_step_it_is_refused_as_state_dict_is(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 20)
        options = offload.Options(allow_volatile=True, overlap="backward")
        with offload.AdamW(
            model.parameters(), directory=tmp_path, model=model, options=options
        ) as optimizer:
            model(torch.ones(2, 30)).sum().backward()
            with pytest.raises(offload.OverlapError, match="between backward"):
                _ = optimizer.position
            optimizer.step()
            assert optimizer.position.step == 1


class TestFind:
    def test_of_another_store_it_names_both(self, tmp_path: Path) -> None:
        with make(tmp_path / "one") as optimizer:
            seal(optimizer)
            position = optimizer.position
        with make(tmp_path / "two") as optimizer:
            seal(optimizer)
            with pytest.raises(offload.MismatchError, match=position.store) as refused:
                optimizer.find(position)
            assert optimizer.position.store in str(refused.value)

    def test_what_was_never_sealed_is_said_to_be(self, tmp_path: Path) -> None:
        with make(tmp_path) as optimizer:
            step(optimizer)
            position = optimizer.position
            with pytest.raises(offload.MismatchError, match="never sealed"):
                optimizer.find(position)


class TestReferenceOf:
    def test_a_dict_with_the_state_itself_names_none(self, tmp_path: Path) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        assert reference_of(torch.optim.AdamW([parameter]).state_dict()) is None
        with make(tmp_path) as optimizer:
            step(optimizer)
            assert reference_of(optimizer.full_state_dict()) is None
        assert reference_of({}) is None

    def test_of_another_version_it_is_refused(self, tmp_path: Path) -> None:
        with make(tmp_path) as optimizer:
            saved = optimizer.state_dict()
        assert isinstance(reference_of(saved), Position)
        for wrong in ({**saved, "format": "offload-reference-9"}, {"format": REFERENCE_FORMAT}):
            with pytest.raises(offload.MismatchError):
                reference_of(wrong)


class TestWarnUnsealed:
    def test_false_says_nothing_of_a_state_that_is_not_sealed(self, tmp_path: Path) -> None:
        with make(tmp_path) as optimizer:
            assert optimizer.warn_unsealed
            optimizer.warn_unsealed = False
            step(optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.state_dict()
            optimizer.warn_unsealed = True
            with pytest.warns(RuntimeWarning, match="cannot be resumed from"):
                optimizer.state_dict()


class TestVerifyBeforeResume:
    @pytest.fixture(params=[1, 2], ids=["one drive", "two drives"])
    def directories(self, request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
        found = [tmp_path / f"drive{number}" for number in range(request.param)]
        with make(found) as optimizer:
            for _ in range(3):
                seal(optimizer)
        return found

    def damage(self, directories: list[Path], number: int) -> Path:
        """Overwrite state of a checkpoint: with two drives, on the second one."""
        checkpoint = directories[0] / f"step-{number:08}"
        (info,) = [i for i in offload.list_checkpoints(directories[0]) if i.path == str(checkpoint)]
        with offload.open_checkpoint(info.path) as opened:
            place = Path(opened.parts[0]) if opened.parts else checkpoint
        (state,) = place.glob("exp_avg.*")
        with state.open("r+b") as file:
            file.seek(-16, os.SEEK_END)
            file.write(b"damaged state it")
        return checkpoint

    def verify(self, checkpoint: Path, directories: list[Path]) -> offload.VerifyReport:
        parts = directories[1:] or None
        with offload.open_checkpoint(checkpoint, parts=parts) as opened:
            return offload.verify_before_resume(opened)

    def test_one_is_marked_and_the_one_before_it_is_not(self, directories: list[Path]) -> None:
        newest, before = (self.damage(directories, number) for number in (3, 2))
        report = self.verify(newest, directories)
        assert report.problems
        assert report.quarantined
        assert (newest / QUARANTINE_NAME).exists()
        with pytest.raises(offload.DamagedError, match="two in a row") as refused:
            self.verify(before, directories)
        assert not (before / QUARANTINE_NAME).exists()
        command = f"offload verify {directories[0]} --quarantine"
        command += "".join(f" --part {part}" for part in directories[1:])
        assert f"`{command}`" in str(refused.value)
        assert str(newest) in str(refused.value)
        report = self.verify(directories[0] / "step-00000001", directories)
        assert report.ok
        assert not report.quarantined

    def test_one_that_is_older_than_the_damaged_one_is_no_reason(
        self, directories: list[Path]
    ) -> None:
        older, newest = (self.damage(directories, number) for number in (1, 3))
        assert self.verify(older, directories).quarantined
        assert self.verify(newest, directories).quarantined
        assert (newest / QUARANTINE_NAME).exists()

    def test_a_directory_of_others_that_is_no_checkpoint_is_passed_over(
        self, directories: list[Path]
    ) -> None:
        shutil.copytree(directories[0] / "step-00000003", directories[0] / "step-00000009")
        (directories[0] / "step-00000009" / "manifest.json").write_text("{}")
        assert self.verify(self.damage(directories, 2), directories).quarantined


@pytest.mark.parametrize("kind", ["info", "checkpoint"])
def test_a_checkpoint_that_another_of_its_step_replaced_is_not_taken_for_it(kind: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    options = offload.Options(backend=MemoryBackend(), allow_volatile=True)
    with offload.AdamW([parameter], directory="/run", options=options) as optimizer:
        for step in (1, 2):
            parameter.grad = torch.full((8,), float(step))
            optimizer.step()
            sealed = optimizer.checkpoint().result()
        named = optimizer.checkpoints()[-1] if kind == "info" else sealed
        assert optimizer.restore(named) is not None
        optimizer.restore(1, discard_newer=True)
        parameter.grad = torch.full((8,), 3.0)
        optimizer.step()
        other = optimizer.checkpoint().result()
        assert (other.step, other.path) == (named.step, named.path)
        for call in (optimizer.restore, lambda which: optimizer.pin("best", which)):
            with pytest.raises(offload.CheckpointNotFoundError, match="replaced by generation"):
                call(named)
        assert optimizer.pins() == {}
        found = optimizer.restore(named.path)
        assert found is not None
        assert found.generation == other.generation
