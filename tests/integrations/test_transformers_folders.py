"""Checkpoints of the store follow the Trainer's folders: kept, removed, gone back to, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer
from transformers import TrainerCallback

import offload
from offload.errors import DamagedError, MismatchError, PinError
from offload.integrations.transformers import latest_checkpoint
from tests.integrations.training import Case, Run, steps

CASE = Case({"save_steps": 2, "lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2})
"""Saves steps 2, 4, 6 and 7."""


class Looking(TrainerCallback):
    """Notes what is there after each save."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seen: list[tuple[list[int], list[int]]] = []

    def on_save(self, args, state, control, **kwargs):
        self.seen.append((folders(self.root), pinned(self.root)))


def folders(root: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("checkpoint-")) for p in root.glob("out/checkpoint-*"))


def pinned(root: Path) -> list[int]:
    infos = offload.list_checkpoints(root / "run")
    return [info.step for info in infos if f"transformers-{info.step}" in info.pins]


def sealed(root: Path) -> list[int]:
    return [info.step for info in offload.list_checkpoints(root / "run")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Run]:
    """A whole run, and a copy of its files: folders are known by their paths."""
    root = tmp_path_factory.mktemp("trained")
    run = CASE.run(root / "work")
    shutil.copytree(root / "work", root / "copy")
    return root / "work", root / "copy", run


@pytest.fixture
def work(trained: tuple[Path, Path, Run]) -> Path:
    """The directory of the run, as it left it. It and ``out`` stay the directories they were."""
    root, copy, _ = trained
    for entry in [*root.glob("out/*"), root / "run"]:
        shutil.rmtree(entry)
    shutil.copytree(copy, root, dirs_exist_ok=True)
    return root


def test_save_total_limit_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_removal: list[list[int]] = []
    rotate = transformers.trainer.rotate_checkpoints

    def looking_first(*args: Any, **kwargs: Any) -> None:
        before_removal.append(pinned(tmp_path))
        rotate(*args, **kwargs)

    monkeypatch.setattr("transformers.trainer.rotate_checkpoints", looking_first)
    case = Case({**CASE.arguments, "save_steps": 1, "save_total_limit": 2})
    looking = Looking(tmp_path)
    case.run(tmp_path, looking)
    assert before_removal == [list(range(max(n - 2, 1), n + 1)) for n in range(1, 8)], (
        "an older folder is removed when the new one's checkpoint is durable"
    )
    assert looking.seen == [([max(n - 1, 1), n][-min(n, 2) :],) * 2 for n in range(1, 8)]
    slots = [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith((".slot", "step"))]
    assert len(slots) == 3, "what is kept, and one that the next step would write"


def test_the_best_model_stays(tmp_path: Path) -> None:
    settings = {"learning_rate": 0.5, "eval_strategy": "steps", "eval_steps": 2}
    best_model = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    case = Case({**CASE.arguments, **settings, **best_model, "save_total_limit": 1})
    run = case.run(tmp_path)
    best = int(run.trainer.state.best_model_checkpoint.rpartition("-")[2])
    assert best < 7
    assert folders(tmp_path) == pinned(tmp_path) == [best]
    assert best in sealed(tmp_path)


def test_the_store_keeps_the_best_by_what_the_evaluations_measured(tmp_path: Path) -> None:
    settings = {"learning_rate": 0.5, "eval_strategy": "steps", "eval_steps": 2}
    case = Case(
        {**CASE.arguments, **settings, "save_steps": 1, "save_total_limit": 1},
        optimizer={"keep": offload.BestBy("eval_loss")},
    )
    history = case.run(tmp_path).history
    measured = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    best = min(measured, key=measured.__getitem__)
    assert sorted(measured) == [2, 4, 6, 7]
    assert best < 6, "others must have been saved after it"
    assert sealed(tmp_path) == [best, 6, 7], "6 goes with the next one: its folder had to stay"
    assert folders(tmp_path) == pinned(tmp_path) == [7], "the Trainer has given the best one up"
    for info in offload.list_checkpoints(tmp_path / "run"):
        assert info.metrics == {"eval_loss": measured[info.step]}, "no runtime, rate or epoch"


def test_a_checkpoint_whose_folder_was_removed_is_given_up(
    work: Path, trained: tuple[Path, Path, Run]
) -> None:
    shutil.rmtree(work / "out/checkpoint-7")
    shutil.rmtree(work / "out/checkpoint-6")
    with pytest.raises(MismatchError, match=r"checkpoint-6, which is gone: .*offload unpin"):
        CASE.run(work, resume=True)
    for step in (6, 7):
        offload.unpin(work / "run", f"transformers-{step}")
    with pytest.warns(RuntimeWarning, match="the newer checkpoints are withdrawn: step-00000006"):
        found = CASE.run(work, resume=True)
    assert steps(found.history) == steps(trained[2].history)
    assert found.history == trained[2].history


def test_what_others_pinned_or_sealed_is_not_given_up(work: Path) -> None:
    offload.pin(work / "run/step-00000006", "mine")
    with pytest.raises(PinError, match="pinned as 'mine'"):
        CASE.run(work, resume=str(work / "out/checkpoint-4"), discard_newer=True)
    assert pinned(work) == [2, 4, 6, 7]

    with CASE.trainer(work) as trainer:
        trainer.optimizer.restore()
        trainer.model.lm_head.weight.grad = torch.ones_like(trainer.model.lm_head.weight)
        trainer.optimizer.step()
        trainer.optimizer.checkpoint({"mine": 1}).result()
    with pytest.raises(MismatchError, match="step-00000008, which was not made for a folder"):
        CASE.run(work, resume=True)
    assert sealed(work)[-1] == 8


def test_the_latest_checkpoint_is_one_that_can_be_gone_on_from(work: Path, tmp_path: Path) -> None:
    out, run = work / "out", work / "run"
    assert latest_checkpoint(tmp_path / "none", tmp_path / "none") is None
    with pytest.warns(RuntimeWarning, match=r"skipping .*checkpoint-7: .*/none has no checkpoint"):
        assert latest_checkpoint(out, tmp_path / "none") is None
    assert latest_checkpoint(out, [run]) == str(out / "checkpoint-7")
    state = out / "checkpoint-7/trainer_state.json"
    state.write_text(state.read_text()[:-20])  # killed while it was written
    with pytest.raises(json.JSONDecodeError):  # which is what the Trainer itself says
        CASE.run(work, resume=True)
    assert latest_checkpoint(out, run) == str(out / "checkpoint-6")
    (out / "checkpoint-6/optimizer.pt").unlink()  # save_only_model
    torch.save({"state": {}, "param_groups": []}, out / "checkpoint-4/optimizer.pt")
    (out / "checkpoint-best").mkdir()
    assert latest_checkpoint(out, run) == str(out / "checkpoint-2")
    shutil.rmtree(out / "checkpoint-2")
    with pytest.warns(RuntimeWarning, match=r"skipping .*checkpoint-4: .*torch's optimizer.*empty"):
        assert latest_checkpoint(out, run) == str(out / "checkpoint-2"), "written anew"
    for number in (6, 7):  # and where the store is new, that of a torch optimizer is gone on from
        shutil.rmtree(out / f"checkpoint-{number}")
    assert latest_checkpoint(out, tmp_path / "none") == str(out / "checkpoint-4")


def flip_a_bit_of_state(work: Path, step: int) -> None:
    path = work / f"run/step-{step:08d}/exp_avg.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def test_damaged_state_is_found_and_training_goes_on_before_it(
    work: Path, trained: tuple[Path, Path, Run]
) -> None:
    out, run = work / "out", work / "run"
    flip_a_bit_of_state(work, 7)
    case = Case({**CASE.arguments, "max_steps": 8})
    with pytest.raises(DamagedError, match=r"exp_avg\..*latest_checkpoint\(.*step-00000006"):
        case.run(work, resume=str(out / "checkpoint-7"))
    older = latest_checkpoint(out, run)
    assert older == str(out / "checkpoint-6")
    assert CASE.run(work, resume=older).history == trained[2].history


def test_one_damaged_checkpoint_is_passed_over_and_two_are_for_a_person(work: Path) -> None:
    out, run = work / "out", work / "run"
    flip_a_bit_of_state(work, 7)
    with pytest.warns(RuntimeWarning, match=r"skipping .*checkpoint-7: .*exp_avg.*damaged"):
        older = latest_checkpoint(out, run, verify=True)
    assert older == str(out / "checkpoint-6")
    assert latest_checkpoint(out, run, verify=True) == older, "it is marked"
    flip_a_bit_of_state(work, 6)
    for _ in range(2):  # nor does it mark another when it is started again
        with pytest.raises(DamagedError, match="two in a row"):
            latest_checkpoint(work / "out", work / "run", verify=True)
    assert not (work / "run/step-00000006/damaged.txt").exists()


def test_pins_are_made_and_removed_when_a_run_goes_on(work: Path) -> None:
    """A process may die between the seal and the pin; and a person may remove a folder."""
    offload.unpin(work / "run", "transformers-4")
    shutil.rmtree(work / "out/checkpoint-2")
    Case({**CASE.arguments, "max_steps": 8}).run(work, resume=True)
    assert pinned(work) == [4, 6, 7, 8]


def test_the_callers_own_train_state_stays(tmp_path: Path) -> None:
    class Sealing(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            optimizer.optimizer.checkpoint({"mine": state.global_step})  # in flight at the save

    Case({**CASE.arguments, "max_steps": 2}).run(tmp_path, Sealing())
    with offload.open_checkpoint(tmp_path / "run/step-00000002") as checkpoint:
        assert checkpoint.train_state["mine"] == 2
    assert pinned(tmp_path) == [2]
