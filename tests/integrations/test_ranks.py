"""accelerate, Lightning and the Trainer on two processes, with replicas and with FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from transformers import AutoModelForCausalLM

import offload
from offload.errors import OffloadError
from offload.integrations.ckpt_files import pin_name, positions_in
from offload.integrations.lightning_ranks import require_ranks_of
from tests.integrations.rank_jobs import RankJobs

Positions = dict[str, tuple[int, int]]
"""By name of a folder or file, the step and the generation of the checkpoint that it refers to."""


@dataclass
class Library:
    """What a program of ranks does, and what one finds of it afterwards."""

    name: str
    kinds: tuple[str, ...]
    """DistributedDataParallel, and how files have the model of FSDP2."""

    kept: list[int]
    """Steps of the folders or files that are there at the end."""

    stop_after: int
    resume: int
    """Step of the newest folder when it has been stopped."""

    kill_at: int
    """Step within whose save the processes are killed; the folder before it is of `before`."""

    before: int
    references: Callable[[Path, str], Positions]
    own: dict[str, Any] = field(default_factory=dict)
    """What lets torch's own optimizer have the same losses."""


def of_accelerate(root: Path, kind: str) -> Positions:
    name = "optimizer.bin" if kind == "ddp" else "offload_reference.bin"
    written = (root / "out/checkpoints").glob(f"*/{name}")
    # A save that was killed may have left a folder too, whose checkpoint has been withdrawn since.
    found = sorted(in_dict(path.parent, name) for path in written)
    return {f"accelerate-{step}": (step, generation) for step, generation in found}


def of_lightning(root: Path, kind: str) -> Positions:
    found = {}
    for path in sorted((root / "files").iterdir()):
        (named,) = positions_in(str(path)) or ()
        found[pin_name(str(path))] = (named.step, named.generation)
    return found


def of_trainer(root: Path, kind: str) -> Positions:
    name = "optimizer.pt" if kind == "ddp" else "optimizer.bin"
    folders = sorted((root / "out").glob("checkpoint-*"))
    assert [folder.name for folder in folders] == ["checkpoint-6", "checkpoint-7"]
    if kind == "SHARDED_STATE_DICT":  # which is a folder of torch's checkpoints
        infos = offload.list_checkpoints(root / "run")[-2:]
        return {f"transformers-{info.step}": (info.step, info.generation) for info in infos}
    return {f"transformers-{f.name.partition('-')[2]}": in_dict(f, name) for f in folders}


def in_dict(folder: Path, name: str) -> tuple[int, int]:
    """Return the step and generation of a state dict that was saved instead of the state."""
    for written in folder.rglob("*optimizer*"):
        assert not written.is_file() or written.stat().st_size < 16384
    position = offload.reference_of(torch.load(folder / name, weights_only=True))
    assert position is not None
    assert position.sealed
    return position.step, position.generation


FSDP = ("ddp", "SHARDED_STATE_DICT", "FULL_STATE_DICT")
LIBRARIES = {
    library.name: library
    for library in (
        Library("accelerate", FSDP, [2, 4, 6], 5, 4, 4, 2, of_accelerate),
        Library("lightning", ("ddp", "shards", "whole"), [8, 12], 10, 8, 8, 4, of_lightning),
        Library(
            "transformers", FSDP, [6, 7], 5, 3, 6, 3, of_trainer, {"dtype": "float32"}
        ),
    )
}  # fmt: skip


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    return LIBRARIES[request.param]


@pytest.fixture(scope="module")
def jobs(library: Library) -> Iterator[RankJobs]:
    """Return a server of processes that have imported the library."""
    server = RankJobs(f"tests.integrations.rank_{library.name}")
    yield server
    server.close()


@pytest.fixture(scope="module", params=range(3))
def kind(request: pytest.FixtureRequest, library: Library) -> str:
    return library.kinds[request.param]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, library: Library, kind: str) -> Path:
    """Return the directory of a run that is not interrupted."""
    return tmp_path_factory.mktemp(f"{library.name}-{kind}")


@pytest.fixture(scope="module")
def whole(jobs: RankJobs, root: Path, kind: str) -> list[Any]:
    """Return what each rank says of it."""
    return jobs.run(root, kind=kind)


def sealed(root: Path) -> list[int]:
    return [info.step for info in offload.list_checkpoints(root / "run")]


def assert_goes_on(found: list[Any], expected: list[Any], after: int) -> None:
    """Check that ranks have computed the steps after one, and the same in them as others."""
    for one, other in zip(found, expected, strict=True):
        assert one["losses"].items() <= other["losses"].items()
        assert {int(step) for step in one["losses"]} >= {
            int(step) for step in other["losses"] if int(step) > after
        }
        assert one["parameters"] == other["parameters"]


def require_references(root: Path, library: Library, kind: str) -> None:
    """Check that each folder or file refers to one sealed checkpoint, which has a pin for it."""
    found = library.references(root, kind)
    assert {step for step, _ in found.values()} >= {*library.kept}
    infos = offload.list_checkpoints(root / "run")
    pins = {pin: (info.step, info.generation) for info in infos for pin in info.pins}
    assert pins == found


def test_a_run_and_its_folders(
    library: Library, kind: str, jobs: RankJobs, root: Path, whole: list[Any], tmp_path: Path
) -> None:
    """Losses are those of torch's own optimizer; what was removed has let go of its checkpoint."""
    assert len(whole) == 2
    require_references(root, library, kind)
    assert {step for step, _ in library.references(root, kind).values()} == {*library.kept}
    for info in offload.list_checkpoints(root / "run"):
        assert library.name != "lightning" or "val_loss" in info.metrics
        with offload.open_checkpoint(info.path) as checkpoint:
            assert len(checkpoint.train_states) == 2
            assert not checkpoint.verify().problems
        if library.name != "transformers" or info.step not in library.kept:
            continue
        has_model = kind != "SHARDED_STATE_DICT"  # else the Trainer saves none to compare with
        assert (Path(info.path) / "config.json").exists() is has_model
        if has_model:
            opened, kept = (
                AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
                for path in (info.path, root / f"out/checkpoint-{info.step}")
            )
            assert opened.keys() == kept.keys()
            assert all(torch.equal(opened[name], kept[name]) for name in kept)
    case = {"kind": kind, **library.own}
    ours = jobs.run(tmp_path / "ours", **case) if library.own else whole
    if kind != library.kinds[2]:
        assert jobs.run(tmp_path / "plain", in_memory=True, **case) == ours


def test_interrupted_and_resumed(
    library: Library, kind: str, jobs: RankJobs, whole: list[Any], tmp_path: Path
) -> None:
    jobs.run(tmp_path, kind=kind, stop_after=library.stop_after)
    resumed = jobs.run(tmp_path, kind=kind, resume=library.resume)
    assert_goes_on(resumed, whole, library.resume)
    require_references(tmp_path, library, kind)


@pytest.mark.parametrize("kind", [0, 1], indirect=True)
def test_killed_within_a_save(
    library: Library, kind: str, jobs: RankJobs, whole: list[Any], tmp_path: Path
) -> None:
    """The folder or file was never finished, and its checkpoint is withdrawn."""
    assert not any(
        "result" in one for one in jobs.ask(tmp_path, kind=kind, kill_at=library.kill_at)
    )
    assert sealed(tmp_path)[-2:] == [library.before, library.kill_at]
    said = jobs.ask(tmp_path, kind=kind, resume=library.before)
    assert_goes_on([one["result"] for one in said], whole, library.before)
    text = f"withdrawn: step-{library.kill_at:08}"
    warned = [any(text in warning for warning in one["warnings"]) for one in said]
    assert warned == [library.name != "lightning", False], "the first rank decides, and says so"
    require_references(tmp_path, library, kind)


@pytest.mark.parametrize("kind", [0], indirect=True)
def test_an_older_folder_is_loaded_only_if_told_to(
    library: Library, kind: str, jobs: RankJobs, whole: list[Any], root: Path
) -> None:
    """The last test of the run that is not interrupted."""
    older = {"kind": kind, "resume": library.kept[0]}
    for one in jobs.ask(root, **older):
        assert one["error"] == "MismatchError", one
        assert "discard_newer=True" in one["message"]
    require_references(root, library, kind)
    assert_goes_on(jobs.run(root, discard_newer=True, **older), whole, library.kept[0])


REFUSED = {
    "accelerate": [
        ({"separate": True}, "leave out process_group="),
        ({"of_host": 1}, "on 2 hosts"),
    ],
    "lightning": [({"separate": True}, "leave out process_group="), ({"of_host": 1}, "on 2 hosts")],
    "transformers": [
        ({"of_host": 1}, "on 2 hosts"),
        ({"kind": "fsdp1", "how": "given"}, "FSDP1 is not supported"),
        ({"settings": {"enable_jit_checkpoint": True}}, "enable_jit_checkpoint=True"),
        ({"settings": {"enable_jit_checkpoint": True}, "how": "given"}, "enable_jit_checkpoint=T"),
        ({"kind": "FULL_STATE_DICT", "how": "class"}, "optimizer_cls_and_kwargs=offloading"),
    ],
}


def test_what_cannot_work_is_refused(library: Library, jobs: RankJobs, tmp_path: Path) -> None:
    for number, (job, message) in enumerate(REFUSED[library.name]):
        root = tmp_path / str(number)
        for one in jobs.ask(root, **job):
            assert one.get("error") == "OffloadError", one
            assert message in one["message"]
        if library.name == "transformers" and job.get("how") != "class":
            assert not (root / "run").exists(), "before anything is made"


@pytest.mark.parametrize("strategy", [FSDPStrategy, SingleDeviceStrategy])
def test_strategies_that_are_not_supported_are_refused_by_name(strategy: Any) -> None:
    """Lightning itself refuses its FSDP1 strategy on a CPU, so there is no Trainer for it here."""
    has_it = SimpleNamespace(num_nodes=1, strategy=strategy())
    with pytest.raises(OffloadError, match=rf"{strategy.__name__} is not supported.*fully_shard"):
        require_ranks_of(cast(pl.Trainer, has_it))


@pytest.mark.parametrize("library", ["accelerate"], indirect=True)
def test_saves_of_accelerate(library: Library, jobs: RankJobs, tmp_path: Path) -> None:
    """Folders that it removes, a step that is saved again, and a loop that does not follow."""
    jobs.run(tmp_path / "few", stop_after=4, save_every=1, total_limit=2)
    pins = [info.pins for info in offload.list_checkpoints(tmp_path / "few/run") if info.pins]
    assert pins == [("accelerate-3",), ("accelerate-4",)]
    jobs.run(tmp_path / "twice", stop_after=4, twice=True)
    jobs.run(tmp_path / "twice", resume=4, save_every=1, stop_after=6)
    for number, kind in enumerate(library.kinds[:2]):
        root = tmp_path / str(number)
        said = jobs.ask(root, kind=kind, follows=False, stop_after=2)
        assert any("follow(accelerator, optimizer)" in text for text in said[0]["warnings"])
    said = jobs.ask(tmp_path / "0", resume=2)
    assert [one["error"] for one in said] == ["MismatchError"] * 2
    assert all("Call follow(" in one["message"] for one in said)


@pytest.mark.parametrize("library", ["transformers"], indirect=True)
def test_settings_of_the_trainer(library: Library, jobs: RankJobs, tmp_path: Path) -> None:
    jobs.run(tmp_path / "models", settings={"save_only_model": True})
    assert not [info for info in offload.list_checkpoints(tmp_path / "models/run") if info.pins]
    more = {
        "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True,
        "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss",
    }  # fmt: skip
    expected = jobs.run(tmp_path / "whole", how="given", settings=more)
    case = {"how": "given", "settings": more, "overlap": "forward"}
    jobs.run(tmp_path / "cut", stop_after=5, **case)
    assert_goes_on(jobs.run(tmp_path / "cut", resume=True, **case), expected, 3)
    infos = offload.list_checkpoints(tmp_path / "cut/run")
    assert [("eval_loss" in info.metrics) for info in infos if info.step in (3, 6)] == [True, True]


@pytest.mark.parametrize("library", ["lightning"], indirect=True)
def test_16_bit_parameters_of_lightning(library: Library, jobs: RankJobs, tmp_path: Path) -> None:
    case = {"settings": {"precision": "bf16-true", "gradient_clip_val": 0.5}}
    expected = jobs.run(tmp_path / "whole", **case)
    jobs.run(tmp_path / "cut", stop_after=10, **case)
    assert_goes_on(jobs.run(tmp_path / "cut", resume=8, **case), expected, 8)
