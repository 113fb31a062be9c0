"""The Trainer on two processes, with DistributedDataParallel and with FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import offload
from tests.integrations.rank_jobs import RankJobs
from tests.integrations.training import STEPS

KINDS = ["ddp", "FULL_STATE_DICT", "SHARDED_STATE_DICT"]


@pytest.fixture(scope="module")
def jobs() -> Iterator[RankJobs]:
    """Return a server of processes that have imported the Trainer."""
    server = RankJobs("tests.integrations.rank_transformers")
    yield server
    server.close()


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directories of runs that are not interrupted, for each kind."""
    return {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def whole(jobs: RankJobs, roots: dict[str, Path]) -> dict[str, list[Any]]:
    """Return what each rank says of these runs."""
    return {kind: jobs.run(root, kind=kind) for kind, root in roots.items()}


def pinned(root: Path) -> list[int]:
    infos = offload.list_checkpoints(root / "run")
    return [info.step for info in infos if f"transformers-{info.step}" in info.pins]


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_and_resumed(
    kind: str, jobs: RankJobs, whole: dict[str, list[Any]], tmp_path: Path
) -> None:
    cut = jobs.run(tmp_path, kind=kind, stop_before=6)  # the last save was of step 3
    assert [one["stopped"] for one in cut] == [True, True]
    resumed = jobs.run(tmp_path, kind=kind, resume=True)
    for one, expected in zip(resumed, whole[kind], strict=True):
        assert one["resumed"] == "checkpoint-3"
        assert [entry["step"] for entry in one["history"]] == [*range(1, STEPS + 1)]
        assert one["history"] == expected["history"]
        assert one["parameters"] == expected["parameters"]


@pytest.mark.parametrize("kind", ["ddp", "FULL_STATE_DICT"])
def test_losses_are_those_of_torchs_own_optimizer(
    kind: str, jobs: RankJobs, tmp_path: Path
) -> None:
    """FP32 parameters are their own masters, so that plain torch can be compared with."""
    case = {"kind": kind, "dtype": "float32"}
    found = jobs.run(tmp_path / "run", **case)
    assert found == jobs.run(
        tmp_path / "plain", how="memory", settings={"save_strategy": "no"}, **case
    )


@pytest.mark.parametrize("kind", KINDS)
def test_folders_refer_to_one_sealed_checkpoint_each(
    kind: str, whole: dict[str, list[Any]], roots: dict[str, Path]
) -> None:
    assert len(whole[kind]) == 2
    root = roots[kind]
    names = sorted(folder.name for folder in (root / "out").glob("checkpoint-*"))
    assert names == ["checkpoint-6", "checkpoint-7"], "save_total_limit"
    assert pinned(root) == [6, 7]
    for info in offload.list_checkpoints(root / "run")[-2:]:
        folder = root / f"out/checkpoint-{info.step}"
        if kind != "SHARDED_STATE_DICT":
            name = "optimizer.pt" if kind == "ddp" else "optimizer.bin"
            position = offload.reference_of(torch.load(folder / name, weights_only=True))
            assert position is not None
            assert (position.sealed, position.generation) == (True, info.generation)
        for written in folder.rglob("*optimizer*"):
            assert not written.is_file() or written.stat().st_size < 16384
        with offload.open_checkpoint(info.path) as checkpoint:
            assert len(checkpoint.train_states) == 2
            assert not checkpoint.verify().problems
        assert len([*Path(info.path).glob("*.safetensors")]) >= 1
        assert (Path(info.path) / "config.json").exists() is (kind != "SHARDED_STATE_DICT")
        if kind == "SHARDED_STATE_DICT":
            continue  # the Trainer saves no model that could be compared with
        opened = AutoModelForCausalLM.from_pretrained(info.path, dtype=torch.bfloat16)
        kept = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for (name, tensor), wanted in zip(
            opened.state_dict().items(), kept.state_dict().values(), strict=True
        ):
            assert torch.equal(tensor.view(torch.int16), wanted.view(torch.int16)), name


@pytest.mark.parametrize(
    "kind", ["ddp", pytest.param("SHARDED_STATE_DICT", marks=pytest.mark.slow)]
)
def test_killed_within_a_save(
    kind: str, jobs: RankJobs, whole: dict[str, list[Any]], tmp_path: Path
) -> None:
    said = jobs.ask(tmp_path, kind=kind, kill_at=6)
    assert not any("result" in one for one in said)
    assert [info.step for info in offload.list_checkpoints(tmp_path / "run")] == [3, 6]
    said = jobs.ask(tmp_path, kind=kind, resume=True)
    for one, expected in zip(said, whole[kind], strict=True):
        assert one["result"]["resumed"] == "checkpoint-3", one
        assert one["result"]["history"] == expected["history"]
    assert any("withdrawn: step-00000006" in text for text in said[0]["warnings"])
    assert pinned(tmp_path) == [6, 7]


@pytest.mark.slow
def test_evaluations_and_a_given_optimizer(jobs: RankJobs, tmp_path: Path) -> None:
    case = {
        "how": "given",
        "settings": {
            "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True,
            "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss",
        },
    }  # fmt: skip
    expected = jobs.run(tmp_path / "whole", **case)
    jobs.run(tmp_path / "cut", stop_before=6, **case)
    found = jobs.run(tmp_path / "cut", resume=True, **case)
    assert [one["history"] for one in found] == [one["history"] for one in expected]
    infos = offload.list_checkpoints(tmp_path / "cut/run")
    assert [("eval_loss" in info.metrics) for info in infos if info.step in (3, 6)] == [True, True]


def test_a_step_beside_the_forward(
    jobs: RankJobs, whole: dict[str, list[Any]], tmp_path: Path
) -> None:
    assert jobs.run(tmp_path, overlap="forward") == whole["ddp"]


def test_only_models_are_saved(jobs: RankJobs, tmp_path: Path) -> None:
    jobs.run(tmp_path, settings={"save_only_model": True})
    assert pinned(tmp_path) == []


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"kind": "fsdp1", "how": "given"}, "FSDP1 is not supported"),
        ({"settings": {"enable_jit_checkpoint": True}}, "enable_jit_checkpoint=True"),
        ({"settings": {"enable_jit_checkpoint": True}, "how": "given"}, "enable_jit_checkpoint=T"),
        ({"of_host": 1}, "on 2 hosts"),
        ({"kind": "FULL_STATE_DICT", "how": "class"}, "optimizer_cls_and_kwargs=offloading"),
    ],
    ids=["FSDP1", "jit", "jit-given", "hosts", "class-FSDP2"],
)
def test_what_cannot_work_is_refused(
    job: dict[str, Any], message: str, jobs: RankJobs, tmp_path: Path
) -> None:
    for one in jobs.ask(tmp_path, **job):
        assert one.get("error") == "OffloadError", one
        assert message in one["message"]
    assert not (tmp_path / "run").exists() or job.get("how") == "class", "before anything is made"
