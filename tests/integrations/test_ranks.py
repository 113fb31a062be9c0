"""accelerate, Lightning and the Trainer on two processes, with replicas and with FSDP2."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from offload.integrations.lightning_files import pin_name, positions_in, require_ranks_of
from tests.integrations import rank_jobs
from tests.integrations.rank_jobs import RankJobs
from tests.ranks_training.rank_server import Jobs

Positions = dict[str, tuple[int, int]]
"""By name of a folder or file, the step and the generation of the checkpoint that it refers to."""


@dataclass
class Library:
    """What a program of ranks does, and what one finds of it afterwards."""

    name: str
    kinds: tuple[str, str, str]
    """DistributedDataParallel, and two ways in which files have the model of FSDP2."""

    compared: str
    """Kind whose losses are compared with those of torch's own optimizer, with FP32 parameters."""

    settings: dict[str, dict[str, Any]]
    """Further arguments of the runs of a kind."""

    kept: list[int]
    """Steps of the folders or files that are there at the end."""

    stop_after: int
    resume: int
    """Step of the newest folder when it has been stopped."""

    kill_at: int
    """Step within whose save the processes are killed; the folder before it is of `before`."""

    before: int
    references: Callable[[Path, str], Positions]


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
IN_16_BITS = {"settings": {"precision": "bf16-true", "gradient_clip_val": 0.5}}
LIBRARIES = {
    library.name: library
    for library in (
        Library("accelerate", FSDP, "ddp", {}, [2, 4, 6], 5, 4, 4, 2, of_accelerate),
        Library(
            "lightning", ("ddp", "shards", "whole"), "shards", {"ddp": IN_16_BITS}, [8, 12],
            10, 8, 8, 4, of_lightning,
        ),
        Library(
            "transformers", FSDP, "ddp", {"ddp": {"dtype": "float32"}}, [6, 7],
            5, 3, 6, 3, of_trainer,
        ),
    )
}  # fmt: skip


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    return LIBRARIES[request.param]


@pytest.fixture(scope="module")
def server() -> Iterator[Jobs]:
    """Return a server of processes that have imported all libraries, which takes long."""
    programs = [f"tests.integrations.rank_{name}" for name in LIBRARIES]
    server = Jobs(rank_jobs.__name__, *programs)
    yield server
    server.close()


@pytest.fixture(scope="module")
def jobs(server: Jobs, library: Library) -> RankJobs:
    return RankJobs(server, f"tests.integrations.rank_{library.name}")


@pytest.fixture(scope="module", params=[0, 1])
def kind(request: pytest.FixtureRequest, library: Library) -> str:
    return library.kinds[request.param]


@pytest.fixture(scope="module")
def case(library: Library, kind: str) -> dict[str, Any]:
    """Return the arguments of all runs of a kind."""
    return {"kind": kind, **library.settings.get(kind, {})}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, library: Library, kind: str) -> Path:
    """Return the directory of a run that is not interrupted."""
    return tmp_path_factory.mktemp(f"{library.name}-{kind}")


@pytest.fixture(scope="module")
def whole(jobs: RankJobs, root: Path, case: dict[str, Any]) -> list[Any]:
    """Return what each rank says of it."""
    return jobs.run(root, **case)


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
    library: Library,
    case: dict[str, Any],
    jobs: RankJobs,
    root: Path,
    whole: list[Any],
    tmp_path: Path,
) -> None:
    """Losses are those of torch's own optimizer; what was removed has let go of its checkpoint."""
    kind = case["kind"]
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
                AutoModelForCausalLM.from_pretrained(path).state_dict()
                for path in (info.path, root / f"out/checkpoint-{info.step}")
            )
            assert opened.keys() == kept.keys()
            assert all(torch.equal(opened[name], kept[name]) for name in kept)
    if kind == library.compared:
        assert jobs.run(tmp_path / "plain", in_memory=True, **case) == whole


def test_killed_within_a_save(
    library: Library, case: dict[str, Any], jobs: RankJobs, whole: list[Any], tmp_path: Path
) -> None:
    """The folder or file was never finished, and its checkpoint is withdrawn."""
    killed = jobs.ask(tmp_path, kill_at=library.kill_at, **case)
    assert not any("result" in one for one in killed)
    assert sealed(tmp_path)[-2:] == [library.before, library.kill_at]
    said = jobs.ask(tmp_path, resume=library.before, **case)
    assert_goes_on([one["result"] for one in said], whole, library.before)
    text = f"withdrawn: step-{library.kill_at:08}"
    warned = [any(text in warning for warning in one["warnings"]) for one in said]
    assert warned == [library.name != "lightning", False], "the first rank decides, and says so"
    require_references(tmp_path, library, case["kind"])


@pytest.mark.parametrize("kind", [1], indirect=True)
def test_interrupted_and_resumed_where_files_have_the_model_in_another_way(
    library: Library, jobs: RankJobs, whole: list[Any], tmp_path: Path
) -> None:
    kind = library.kinds[2]
    jobs.run(tmp_path, kind=kind, stop_after=library.stop_after)
    resumed = jobs.run(tmp_path, kind=kind, resume=library.resume)
    assert_goes_on(resumed, whole, library.resume)
    require_references(tmp_path, library, kind)


@pytest.mark.parametrize("kind", [0], indirect=True)
def test_an_older_folder_is_loaded_only_if_told_to(
    library: Library, case: dict[str, Any], jobs: RankJobs, whole: list[Any], root: Path
) -> None:
    """The last test of the run that is not interrupted."""
    older = {**case, "resume": library.kept[0]}
    for one in jobs.ask(root, **older):
        assert one["error"] == "MismatchError", one
        assert "discard_newer=True" in one["message"]
    require_references(root, library, case["kind"])
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
def test_a_loop_of_accelerate_that_does_not_follow(
    library: Library, jobs: RankJobs, tmp_path: Path
) -> None:
    """Its first save says what is missing, and so does loading."""
    said = jobs.ask(tmp_path, follows=False, stop_after=2)
    assert any("follow(accelerator, optimizer)" in text for text in said[0]["warnings"])
    said = jobs.ask(tmp_path, resume=2)
    assert [one["error"] for one in said] == ["MismatchError"] * 2
    assert all("Call follow(" in one["message"] for one in said)


@pytest.mark.parametrize("library", ["accelerate"], indirect=True)
def test_one_process_of_accelerate(library: Library, jobs: RankJobs, tmp_path: Path) -> None:
    """Losses are those of torch's own optimizer, also when it is killed within a save."""
    whole = jobs.run(tmp_path / "whole", num_ranks=1)
    assert jobs.run(tmp_path / "plain", num_ranks=1, in_memory=True) == whole
    root = tmp_path / "killed"
    assert jobs.ask(root, num_ranks=1, kill_at=4) == [{}]
    assert_goes_on(jobs.run(root, num_ranks=1, resume=2), whole, 2)
    require_references(root, library, "ddp")


@pytest.mark.parametrize("library", ["transformers"], indirect=True)
def test_one_process_of_the_trainer_is_killed_between_saves_and_within_a_save(
    library: Library, jobs: RankJobs, tmp_path: Path
) -> None:
    root = tmp_path / "killed"
    (expected,) = jobs.run(tmp_path / "whole", num_ranks=1)
    assert jobs.ask(root, num_ranks=1, kill_after=4) == [{}]
    assert jobs.ask(root, num_ranks=1, kill_at=6, resume=True) == [{}]
    (said,) = jobs.ask(root, num_ranks=1, resume=True)
    assert said["result"] == {**expected, "resumed": "checkpoint-3"}
    assert any("withdrawn: step-00000006" in warning for warning in said["warnings"])
    assert [c.step for c in offload.list_checkpoints(root / "run") if c.pins] == [6, 7]


@pytest.mark.parametrize("library", ["transformers"], indirect=True)
def test_settings_of_the_trainer(library: Library, jobs: RankJobs, tmp_path: Path) -> None:
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


EXAMPLES: dict[str, dict[str, tuple[int, list[str]]]] = {
    # Number of processes, and arguments; each prints the losses of 12 steps.
    "accelerate": {"accelerate_ddp.py": (2, ["--steps=12", "--every=4"])},
    "lightning": {
        "plain_loop.py": (1, ["--steps=12", "--every=4", "--batch=2"]),
        "nanogpt_loop.py": (1, ["--steps=12", "--every=4", "--dtype=float16", "--scale=1e7"]),
        "lightning_loop.py": (1, ["--epochs=3", "--steps=4"]),
        "ddp.py": (2, ["--steps=12", "--every=4"]),
        "fsdp2.py": (2, ["--steps=12", "--every=4"]),
    },
}


@pytest.mark.parametrize(
    ("library", "example"),
    [(library, one) for library, examples in EXAMPLES.items() for one in examples],
    indirect=["library"],
)
def test_an_example_that_is_killed_and_run_again_prints_the_same_losses(
    library: Library, example: str, jobs: RankJobs, tmp_path: Path
) -> None:
    num_ranks, settings = EXAMPLES[library.name][example]
    lines, losses = {}, {}
    for name, store, how in (
        ("whole", "whole", {}),
        ("killed", "parts", {"kill_after": "step 9 "}),
        ("again", "parts", {}),
    ):
        arguments = [f"--directory={tmp_path / store}", *settings]
        said = jobs.ask(tmp_path, num_ranks=num_ranks, example=example, arguments=arguments, **how)
        lines[name] = jobs.printed[0].splitlines()
        assert ("result" in said[0]) is (name != "killed"), lines[name]
        found = [re.fullmatch(r"step (\d+) loss (\S+)", line) for line in lines[name]]
        losses[name] = {int(match[1]): match[2] for match in found if match}
    assert list(losses["whole"]) == list(range(1, 13))
    assert list(losses["killed"]) == list(range(1, 10))
    first = min(losses["again"])
    assert list(losses["again"]) == list(range(first, 13))
    assert 1 < first <= 9, "it did not go on from a checkpoint"
    for name in ("killed", "again"):
        assert losses[name] == {step: losses["whole"][step] for step in losses[name]}
    if example == "nanogpt_loop.py":
        (said,) = [line for line in lines["again"] if line.startswith("continuing")]
        counted = re.fullmatch(r"continuing at iteration (\d+), optimizer step (\d+)", said)
        assert counted is not None, said
        assert 0 < int(counted[2]) < int(counted[1]), "the scaler has skipped steps"
