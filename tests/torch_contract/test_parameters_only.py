"""`ParametersOnly`: older checkpoints give up their state, stay readable, and are never resumed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import offload
from gds import MemoryBackend
from offload import (
    EverySteps,
    LastK,
    MismatchError,
    ParametersOnly,
    Retention,
    list_checkpoints,
    load_parameters,
    open_checkpoint,
)
from offload.cli import main
from offload.errors import DamagedError, SlotFullError
from tests.command_line import Run as RunCommand
from tests.command_line import runner
from tests.format.spec_reader import fp32_state, read_manifest
from tests.stores.files import flip_on_disk, tree
from tests.stores.small import STORE, make_model, make_optimizer, train
from tests.threads import one_thread
from tests.torch_contract.retention_run import Run, closed_runs, name_of, slot_bytes

__all__ = ["closed_runs", "one_thread"]  # fixtures: small tensors on many threads are slow

POLICY = LastK(2) | ParametersOnly(EverySteps(3))
STATE_FILES = {"master.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors"}


def with_state(run: Run) -> list[int]:
    infos = list_checkpoints(STORE, backend=run.backend)
    return [info.step for info in infos if info.valid and not info.parameters_only]


def without_state(run: Run) -> list[int]:
    infos = list_checkpoints(STORE, backend=run.backend)
    return [info.step for info in infos if info.parameters_only]


def test_every_third_step_keeps_its_parameters_beside_the_newest_two() -> None:
    run = Run(keep=POLICY)
    parameters = {}
    for step in range(1, 11):
        run.seal()
        parameters[step] = run.parameters()
        assert with_state(run) == [s for s in (step - 1, step) if s]
        assert without_state(run) == [*range(3, step - 1, 3)]
        assert len(run.slots()) <= len(run.steps()) + 1
    for step in (3, 6):
        path = f"{STORE}/{name_of(step)}"
        assert not STATE_FILES & {*run.backend.list_dir(path)}
        (model,) = make_model(60, 40, seed=1)
        assert load_parameters(model, path, backend=run.backend) == step
        assert all(map(torch.equal, model.parameters(), parameters[step]))
        with open_checkpoint(path, backend=run.backend) as found:
            assert found.parameters_only
            assert found.verify().ok
            assert found.train_state == {"at": step}
            assert found.state_arrays == {}


def test_what_is_given_up_is_what_the_next_steps_write() -> None:
    """No slot is made while there is one to be had: the store grows by parameters only."""
    backend = MemoryBackend()
    run = Run(backend, keep=LastK(1) | ParametersOnly(EverySteps(1)))
    run.seal()
    run.seal()
    node = backend.stat(f"{STORE}/{name_of(2)}/exp_avg.safetensors").inode
    run.seal()
    run.seal()
    assert without_state(run) == [1, 2, 3]
    assert backend.stat(f"{STORE}/{name_of(4)}/exp_avg.safetensors").inode == node
    whole, *reduced = [
        sum(
            backend.stat(f"{STORE}/{name_of(step)}/{name}").size_bytes
            for name in backend.list_dir(f"{STORE}/{name_of(step)}")
            if name.endswith(".safetensors") and name != "train_state.safetensors"
        )
        for step in (4, 1, 2, 3)
    ]
    elements = sum(p.numel() for p in run.model.parameters())
    assert [whole - each for each in reduced] == [12 * elements + 3 * 4096] * 3


def test_a_restore_takes_the_newest_with_state_and_refuses_the_others_by_name() -> None:
    run = Run(keep=POLICY)
    for _ in range(7):
        run.seal()
    before = run.parameters()
    run = run.next_process(keep=POLICY)
    assert run.at == 7
    assert all(map(torch.equal, run.parameters(), before))
    for which in (3, f"{STORE}/{name_of(3)}", run.optimizer.checkpoints()[0]):
        for discard in (False, True):
            with pytest.raises(MismatchError, match=r"parameters only.*load_parameters\(model"):
                run.optimizer.restore(which, discard_newer=discard)
    assert run.steps() == [3, 6, 7]
    run.seal()
    assert with_state(run) == [7, 8]


def test_without_any_state_a_restore_says_so_and_does_not_begin_from_nothing() -> None:
    run = Run(keep=POLICY)
    for _ in range(5):
        run.seal()
    run.optimizer.close()
    for step in (4, 5):
        path = f"{STORE}/{name_of(step)}"
        for name in run.backend.list_dir(path):
            run.backend.remove(f"{path}/{name}")
        run.backend.remove_dir(path)
    run = Run(run.backend.reopened(), keep=POLICY)
    with pytest.raises(MismatchError, match="parameters only"):
        run.optimizer.restore()
    with pytest.raises(offload.NotRestoredError):
        run.step()


def test_new_state_begins_from_the_parameters_if_it_is_asked_for() -> None:
    run = Run(keep=POLICY)
    for _ in range(5):
        run.seal()
    run.optimizer.close()
    (model,) = make_model(60, 40, seed=1)
    load_parameters(model, f"{STORE}/{name_of(3)}", backend=run.backend)
    plain = torch.optim.AdamW([p.detach().float() for p in model.parameters()], lr=1e-2)
    with make_optimizer(model, run.backend, lr=1e-2, directory="/other") as optimizer:
        train(optimizer, 1)
        masters = [p for group in plain.param_groups for p in group["params"]]
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        plain.step()
        assert all(
            torch.equal(m.to(p.dtype), p) for m, p in zip(masters, model.parameters(), strict=True)
        )


def test_going_back_gives_up_what_is_newer_and_a_fallback_does_not() -> None:
    policy = LastK(1) | EverySteps(4) | ParametersOnly(EverySteps(2))
    run = Run(keep=policy)
    for _ in range(7):
        run.seal()
    assert (with_state(run), without_state(run)) == ([4, 7], [2, 6])
    assert run.optimizer.restore(4, discard_newer=True).step == 4
    assert run.steps() == [2, 4]
    for _ in range(3):
        run.seal()
    assert (with_state(run), without_state(run)) == ([4, 7], [2, 6])
    run.optimizer.close()
    run.backend.remove(f"{STORE}/{name_of(7)}/manifest.json")
    run = Run(run.backend.reopened(), keep=policy)
    with pytest.warns(RuntimeWarning, match="step-00000007"):
        assert run.optimizer.restore().step == 4
    assert without_state(run) == [2, 6]
    run.optimizer.pin("newest")
    assert run.optimizer.pins() == {"newest": f"{STORE}/{name_of(4)}"}
    run.seal()
    run.seal()
    assert (with_state(run), without_state(run)) == ([4, 6], [2]), "6 is of the new history"


def test_a_pin_keeps_the_state_and_so_does_a_reader_until_it_is_closed() -> None:
    run = Run(keep=LastK(1) | ParametersOnly(EverySteps(1)))
    for step in range(1, 4):
        run.seal()
        if step == 1:
            run.optimizer.pin("whole")
    assert (with_state(run), without_state(run)) == ([1, 3], [2])
    reader = open_checkpoint(f"{STORE}/{name_of(3)}", backend=run.backend)
    run.seal()
    run.seal()
    assert (with_state(run), without_state(run)) == ([1, 3, 5], [2, 4])
    assert reader.verify().ok
    assert "exp_avg" in reader.state_arrays
    reader.close()
    run.optimizer.unpin("whole")
    run.seal()
    assert (with_state(run), without_state(run)) == ([6], [1, 2, 3, 4, 5])


def test_a_narrower_policy_takes_effect_with_the_next_seal_in_both_directions() -> None:
    run = Run(keep=6)
    for _ in range(6):
        run.seal()
    slots = len(run.slots())
    run = run.next_process(keep=LastK(1) | ParametersOnly(EverySteps(2)))
    run.seal()
    assert (with_state(run), without_state(run)) == ([7], [2, 4, 6])
    assert len(run.slots()) < slots
    run = run.next_process(keep=LastK(1) | EverySteps(4))  # what is left of step 4 stays
    run.seal()
    assert (with_state(run), without_state(run)) == ([8], [4])


def test_a_full_disk_is_named_before_any_state_is_given_up() -> None:
    policy = LastK(1) | ParametersOnly(EverySteps(1))
    run = Run(MemoryBackend(capacity_bytes=2 * slot_bytes() + 600), keep=policy)
    run.seal()
    run.seal()
    with pytest.raises(SlotFullError, match="Nothing has been changed"):
        run.step()
    assert (with_state(run), without_state(run)) == ([1, 2], [])
    for step in (1, 2):
        with open_checkpoint(f"{STORE}/{name_of(step)}", backend=run.backend) as found:
            assert found.verify().ok


def test_what_an_interruption_left_of_the_state_is_removed_before_the_next_step() -> None:
    run = Run(keep=POLICY)
    for _ in range(5):
        run.seal()
    run.optimizer.close()
    left = f"{STORE}/{name_of(3)}/exp_avg.safetensors"
    run.backend.create(left, 4096).close()
    mine = f"{STORE}/{name_of(3)}/notes.safetensors"
    run.backend.create(mine, 10).close()
    run = run.next_process(keep=POLICY)
    run.step()
    assert run.backend.stat(left) is None
    assert run.backend.stat(mine) is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"tier": "file:///elsewhere"}, "does not work with a tier yet")],
)
def test_what_does_not_work_together_is_refused_before_anything_is_made(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make_optimizer(make_model(), directory=tmp_path / "run", keep=POLICY, settings=arguments)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("rule", [3, None, ParametersOnly(LastK(1)), LastK(1) | POLICY])
def test_only_policies_of_whole_checkpoints_are_taken(rule: Retention) -> None:
    with pytest.raises(TypeError, match="ParametersOnly takes a policy"):
        ParametersOnly(rule)


# On the file system, and by the commands


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    return runner("offload", main, monkeypatch, capsys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store on two drives with steps 3 (parameters only), 5 and 6 (complete)."""
    root = tmp_path_factory.mktemp("only")
    settings = {"drives": offload.DriveTuning(shares=(1, 1), calibrate=False)}
    directories = [root / "run", root / "fast"]
    with make_optimizer(
        make_model(64, 40), directory=directories, keep=POLICY, settings=settings
    ) as optimizer:
        train(optimizer, 5)
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def test_a_backup_by_hard_links_is_not_written(root: Path) -> None:
    settings = {"drives": offload.DriveTuning(shares=(1, 1), calibrate=False)}
    directories = [root / "run", root / "fast"]
    with make_optimizer(
        make_model(64, 40), directory=directories, keep=POLICY, settings=settings
    ) as optimizer:
        optimizer.restore()
        (path,) = train(optimizer, 1)
        backup = Path(shutil.copytree(path, root / "backup", copy_function=os.link))
        before = tree(backup)
        train(optimizer, 4)
        assert [c.step for c in optimizer.checkpoints() if c.parameters_only] == [3, 6]
    assert tree(backup) == before


def test_commands_name_it_and_read_it(run_command: RunCommand, root: Path) -> None:
    store, reduced = root / "run", root / "run" / name_of(3)
    status, out, _ = run_command("ls", store, "--part", root / "fast")
    assert status == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("step-")}
    assert {name: line.rstrip().endswith("parameters only") for name, line in lines.items()} == {
        name_of(3): True, name_of(4): False, name_of(5): False,
    }  # fmt: skip
    assert "training cannot go on from it" in out
    status, out, _ = run_command("show", reduced)
    assert status == 0
    assert "parameters only" in out
    assert "exp_avg" not in out
    assert run_command("verify", reduced)[0] == 0
    status, out, _ = run_command("prune", store, "--part", root / "fast", "--keep", "1")
    assert status == 0
    assert f"kept: {name_of(5)}" in out
    assert len([*(root / "fast").glob("part-*")]) == 1


@pytest.mark.parametrize("to", ["pt", "hf", "safetensors", "dcp"])
def test_exports_have_the_parameters_and_no_optimizer(
    run_command: RunCommand, root: Path, to: str
) -> None:
    reduced, out = root / "run" / name_of(3), root / "out"
    assert run_command("export", reduced, out, "--to", to)[0] == 0
    expected = load_file(reduced / "model.safetensors")
    if to == "pt":
        exported = torch.load(out, weights_only=True)
        assert {*exported} == {"model", "step"}
        found = exported["model"]
    elif to == "dcp":
        value = {"model": {name: torch.empty_like(t) for name, t in expected.items()}}
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            torch.distributed.checkpoint.load(value, checkpoint_id=out, no_dist=True)
        found = value["model"]
    else:
        found = load_file(out / "model.safetensors")
        names = {path.name for path in out.iterdir()} - {"optimizer.json"}
        assert names == {"model.safetensors"}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_reader_written_from_the_specification_finds_the_parameters(root: Path) -> None:
    reduced = root / "run" / name_of(3)
    assert read_manifest(reduced)["dropped_arrays"] == ["master", "exp_avg", "exp_avg_sq"]
    for name, tensor in load_file(reduced / "model.safetensors").items():
        found = fp32_state(reduced, name)
        assert {*found} == {"master"}
        assert torch.equal(torch.from_numpy(found["master"]), tensor.float())


def test_a_flipped_bit_of_the_parameters_is_found(run_command: RunCommand, root: Path) -> None:
    reduced = root / "run" / name_of(3)
    flip_on_disk(reduced / "model.safetensors")
    status, out, err = run_command("verify", reduced)
    assert status == 1
    assert "model.safetensors" in out + err
    with pytest.raises(DamagedError, match=r"model\.safetensors"):
        load_parameters(make_model(64, 40), reduced)


def test_a_push_to_a_tier_is_refused_by_name(run_command: RunCommand, root: Path) -> None:
    status, _, err = run_command("push", root / "run" / name_of(3), f"file://{root}/tier")
    assert status != 0
    assert "parameters only, so it cannot be pushed to a tier" in err
