"""Lightning on two processes, with DistributedDataParallel and with FSDP2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy

import offload
from offload.errors import OffloadError
from offload.integrations.ckpt_files import pin_name, positions_in
from offload.integrations.lightning_ranks import require_ranks_of
from tests.integrations.rank_jobs import RankJobs

KINDS = ["ddp", "shards", "whole"]
LAST = "epoch=2-step=12.ckpt"


@pytest.fixture(scope="module")
def jobs() -> Iterator[RankJobs]:
    """Return a server of processes that have imported Lightning."""
    server = RankJobs("tests.integrations.rank_lightning")
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


def files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "files").iterdir())


def require_pins(root: Path) -> None:
    """Check that each file names one sealed checkpoint, which has a pin for it, and no other."""
    infos = offload.list_checkpoints(root / "run")
    by_identity = {(info.store, info.step, info.generation): info for info in infos}
    expected = set()
    for name in files(root):
        path = str(root / "files" / name)
        (named,) = positions_in(path) or ()
        assert pin_name(path) in by_identity[named.store, named.step, named.generation].pins
        expected.add(pin_name(path))
    assert {pin for info in infos for pin in info.pins} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_and_resumed(
    kind: str, jobs: RankJobs, whole: dict[str, list[Any]], tmp_path: Path
) -> None:
    jobs.run(tmp_path, kind=kind, stop_after=10)
    ckpt = next(name for name in files(tmp_path) if re.search("step=8", name))
    resumed = jobs.run(tmp_path, kind=kind, ckpt=ckpt)
    for one, expected in zip(resumed, whole[kind], strict=True):
        later = {step: loss for step, loss in expected["losses"].items() if int(step) >= 8}
        assert one["losses"] == later
        assert one["parameters"] == expected["parameters"]
    require_pins(tmp_path)


@pytest.mark.parametrize("kind", ["ddp", "shards"])
def test_losses_are_those_of_torchs_own_optimizer(
    kind: str, jobs: RankJobs, whole: dict[str, list[Any]], tmp_path: Path
) -> None:
    assert jobs.run(tmp_path, kind=kind, in_memory=True) == whole[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_files_name_one_sealed_checkpoint_each(
    kind: str, whole: dict[str, list[Any]], roots: dict[str, Path]
) -> None:
    """`save_top_k` has removed a file, and with it a pin."""
    assert len(whole[kind]) == 2
    root = roots[kind]
    assert LAST in files(root)
    require_pins(root)
    for info in offload.list_checkpoints(root / "run"):
        assert "val_loss" in info.metrics
        with offload.open_checkpoint(info.path) as checkpoint:
            assert len(checkpoint.train_states) == 2
            assert not checkpoint.verify().problems


@pytest.mark.parametrize("kind", ["ddp", "shards", pytest.param("whole", marks=pytest.mark.slow)])
def test_killed_within_a_save(
    kind: str, jobs: RankJobs, whole: dict[str, list[Any]], tmp_path: Path
) -> None:
    """The file of step 8 was never written, and its checkpoint is withdrawn."""
    assert jobs.ask(tmp_path, kind=kind, kill_at=8) == [{}, {}]
    assert offload.list_checkpoints(tmp_path / "run")[-1].step == 8
    ckpt = next(name for name in files(tmp_path) if re.search("step=4", name))
    for one, expected in zip(jobs.run(tmp_path, kind=kind, ckpt=ckpt), whole[kind], strict=True):
        later = {step: loss for step, loss in expected["losses"].items() if int(step) >= 4}
        assert one["losses"] == later
    require_pins(tmp_path)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("shards", marks=pytest.mark.slow)])
def test_an_older_file_is_loaded_only_if_told_to(
    kind: str,
    jobs: RankJobs,
    whole: dict[str, list[Any]],
    tmp_path: Path,
) -> None:
    jobs.run(tmp_path, kind=kind)
    older = next(name for name in files(tmp_path) if name not in (LAST, "last.ckpt"))
    for one in jobs.ask(tmp_path, kind=kind, ckpt=older):
        assert one["error"] == "MismatchError", one
        assert "discard_newer=True" in one["message"]
    found = jobs.run(tmp_path, kind=kind, ckpt=older, discard_newer=True)
    for one, expected in zip(found, whole[kind], strict=True):
        assert one["losses"]
        assert one["losses"] == {step: expected["losses"][step] for step in one["losses"]}


@pytest.mark.slow
def test_16_bit_parameters(jobs: RankJobs, tmp_path: Path) -> None:
    case = {"settings": {"precision": "bf16-true", "gradient_clip_val": 0.5}}
    expected = jobs.run(tmp_path / "whole", **case)
    jobs.run(tmp_path / "cut", stop_after=10, **case)
    ckpt = next(name for name in files(tmp_path / "cut") if re.search("step=8", name))
    for one, other in zip(jobs.run(tmp_path / "cut", ckpt=ckpt, **case), expected, strict=True):
        assert one["losses"]
        assert one["losses"] == {step: other["losses"][step] for step in one["losses"]}
        assert one["parameters"] == other["parameters"]


def test_what_cannot_work_is_refused_by_the_callback(jobs: RankJobs, tmp_path: Path) -> None:
    for one in jobs.ask(tmp_path / "hosts", of_host=1):
        assert one["error"] == "OffloadError"
        assert "on 2 hosts" in one["message"]
    for one in jobs.ask(tmp_path / "separate", separate=True):
        assert one["error"] == "OffloadError"
        assert "leave out process_group=" in one["message"]


@pytest.mark.parametrize("strategy", [FSDPStrategy, SingleDeviceStrategy])
def test_strategies_that_are_not_supported_are_refused_by_name(strategy: Any) -> None:
    """Lightning itself refuses its FSDP1 strategy on a CPU, so there is no Trainer for it here."""
    has_it = SimpleNamespace(num_nodes=1, strategy=strategy())
    with pytest.raises(OffloadError, match=rf"{strategy.__name__} is not supported.*fully_shard"):
        require_ranks_of(cast(pl.Trainer, has_it))
