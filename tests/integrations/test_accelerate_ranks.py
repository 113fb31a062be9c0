"""accelerate on two processes, with DistributedDataParallel and with FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.integrations.rank_jobs import RankJobs

KINDS = ["ddp", "SHARDED_STATE_DICT", "FULL_STATE_DICT"]


@pytest.fixture(scope="module")
def jobs() -> Iterator[RankJobs]:
    """Return a server of processes that have imported accelerate."""
    server = RankJobs("tests.integrations.rank_accelerate")
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
    return [info.step for info in infos if f"accelerate-{info.step}" in info.pins]


def folders(root: Path) -> list[Path]:
    return sorted((root / "out/checkpoints").iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_and_resumed(
    kind: str, jobs: RankJobs, whole: dict[str, list[Any]], tmp_path: Path
) -> None:
    cut = jobs.run(tmp_path, kind=kind, steps=[0, 5])  # the last save was of step 4
    resumed = jobs.run(tmp_path, kind=kind, steps=[4, 6], load=True)
    for rank, expected in enumerate(whole[kind]):
        assert cut[rank]["losses"] == expected["losses"][:10]
        assert resumed[rank]["losses"] == expected["losses"][8:]
        assert resumed[rank]["parameters"] == expected["parameters"]


@pytest.mark.parametrize("kind", ["ddp", "SHARDED_STATE_DICT"])
def test_losses_are_those_of_torchs_own_optimizer(
    kind: str, jobs: RankJobs, whole: dict[str, list[Any]], tmp_path: Path
) -> None:
    assert jobs.run(tmp_path, kind=kind, in_memory=True, save_every=9) == whole[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_folders_refer_to_one_sealed_checkpoint_each(
    kind: str, whole: dict[str, list[Any]], roots: dict[str, Path]
) -> None:
    assert len(whole[kind]) == 2
    root = roots[kind]
    infos = offload.list_checkpoints(root / "run")
    assert pinned(root) == [info.step for info in infos] == [2, 4, 6]
    assert len(folders(root)) == 3
    for info, folder in zip(infos, folders(root), strict=True):
        name = "optimizer.bin" if kind == "ddp" else "offload_reference.bin"
        saved = torch.load(folder / name, weights_only=True)
        position = offload.reference_of(saved)
        assert position is not None
        assert (position.sealed, position.step) == (True, info.step)
        assert position.generation == info.generation
        for written in folder.rglob("*optimizer*"):
            assert not written.is_file() or written.stat().st_size < 16384
        with offload.open_checkpoint(info.path) as checkpoint:
            assert len(checkpoint.train_states) == 2
            assert not checkpoint.verify().problems


@pytest.mark.parametrize(
    "kind", ["ddp", "SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.slow)]
)
def test_killed_within_a_save(
    kind: str, jobs: RankJobs, whole: dict[str, list[Any]], tmp_path: Path
) -> None:
    """The folder of step 4 was never finished, and its checkpoint is withdrawn."""
    assert jobs.ask(tmp_path, kind=kind, kill_at=4) == [{}, {}]
    assert [info.step for info in offload.list_checkpoints(tmp_path / "run")] == [2, 4]
    said = jobs.ask(tmp_path, kind=kind, steps=[2, 6], load=str(folders(tmp_path)[0]))
    for one, expected in zip(said, whole[kind], strict=True):
        assert one["result"]["losses"] == expected["losses"][4:], one
    warned = [any("checkpoints are withdrawn: step-00000004" in w for w in one["warnings"])
              for one in said]  # fmt: skip
    assert warned == [True, False], "the first rank decides, and says so"
    assert pinned(tmp_path) == [2, 4, 6]


@pytest.mark.parametrize(
    "kind", ["ddp", pytest.param("SHARDED_STATE_DICT", marks=pytest.mark.slow)]
)
def test_an_older_folder_is_loaded_only_if_told_to(
    kind: str,
    jobs: RankJobs,
    whole: dict[str, list[Any]],
    tmp_path: Path,
) -> None:
    jobs.run(tmp_path, kind=kind)
    older = {"kind": kind, "steps": [2, 6], "load": str(folders(tmp_path)[0]), "save_every": 9}
    for rank, one in enumerate(jobs.ask(tmp_path, **older)):
        assert one["error"] == "MismatchError", f"rank {rank}"
        assert "discard_newer=True" in one["message"]
    assert pinned(tmp_path) == [2, 4, 6]
    for one, expected in zip(
        jobs.run(tmp_path, discard_newer=True, **older), whole[kind], strict=True
    ):
        assert one["losses"] == expected["losses"][4:]


def test_folders_that_accelerate_removes_let_go(jobs: RankJobs, tmp_path: Path) -> None:
    jobs.run(tmp_path, steps=[0, 4], save_every=1, total_limit=2)
    assert [folder.name for folder in folders(tmp_path)] == ["checkpoint_2", "checkpoint_3"]
    assert pinned(tmp_path) == [3, 4]


def test_a_step_that_is_saved_again_with_another_learning_rate(
    jobs: RankJobs, tmp_path: Path
) -> None:
    jobs.run(tmp_path, steps=[0, 4], twice=True)
    assert pinned(tmp_path) == [2, 4]
    jobs.run(tmp_path, steps=[4, 6], load=True)


def test_without_follow_nothing_is_sealed_and_that_is_said(jobs: RankJobs, tmp_path: Path) -> None:
    said = jobs.ask(tmp_path, kind="SHARDED_STATE_DICT", follows=False)
    assert any("follow(accelerator, optimizer)" in text for text in said[0]["warnings"])
    said = jobs.ask(tmp_path / "ddp", follows=False, steps=[0, 2])
    assert any("follow(accelerator, optimizer)" in text for text in said[0]["warnings"])
    said = jobs.ask(tmp_path / "ddp", load=True)
    assert [one["error"] for one in said] == ["MismatchError"] * 2
    assert all("Call follow(" in one["message"] for one in said)


def test_what_cannot_work_is_refused_by_follow(jobs: RankJobs, tmp_path: Path) -> None:
    for one in jobs.ask(tmp_path / "separate", separate=True):
        assert one["error"] == "OffloadError"
        assert "leave out process_group=" in one["message"]
    for one in jobs.ask(tmp_path / "hosts", of_host=1):
        assert one["error"] == "OffloadError"
        assert "on 2 hosts" in one["message"]
