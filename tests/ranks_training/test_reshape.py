"""What some ranks have stored is used by any other number of ranks, in any sharding.

Gradients are given, so that they do not depend on the number of ranks. So a chain of jobs must have
the bits of one process that was never interrupted: of torch's own optimizer on FP32 masters, or of
this one if the state is compressed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import offload
from tests.numerics.reference import bits
from tests.ranks_training.cases import (
    SEAL,
    Calls,
    Case,
    contents,
    do,
    errors,
    newest,
    of_each,
    on,
    opened,
    require_success,
    run_all,
    run_cases,
    values,
)
from tests.ranks_training.models import Model
from tests.ranks_training.rank_server import Jobs, Rank
from tests.stores.files import flip_on_disk

WIDTHS = (40, 60, 50, 30)
"""Layers of about 7,000 elements together, so that there are several chunks of 1024."""

RUN: dict[str, Any] = {"given": True, "widths": WIDTHS}
STEPS = 2
"""Steps that each job of a chain takes."""

Link = tuple[int, str, list[str]]
"""Number of ranks, kind, and directories."""

ONE: list[str] = []
CHAIN: list[Link] = [
    (4, "ddp", ONE), (2, "fsdp2", ONE), (3, "ddp", ONE), (1, "one", ONE),
]  # fmt: skip
TENSORS: list[Link] = [(2, "fsdp2", ONE), (4, "grid", ONE), (2, "tp", ONE), (1, "one", ONE)]
REPLICAS: list[Link] = [(3, "ddp", ONE), (1, "one", ONE), (2, "ddp", ONE), (1, "one", ONE)]
DRIVES: list[Link] = [
    (3, "ddp", ["a", "b", "c"]), (1, "one", ["a", "c", "b"]),
    (2, "fsdp2", ["c", "b", "a"]),
]  # fmt: skip
CHAINS: dict[str, tuple[list[Link], dict[str, Any]]] = {
    "exact": (CHAIN, {}),
    "tensor parallel": (TENSORS, {}),
    "int8, split": (REPLICAS, {"state_dtype": "int8", "master": "split"}),
    "drives, bfloat16": (DRIVES, {"state_dtype": "bfloat16"}),
}


def go_on(num_steps: int = STEPS, directories: list[str] = ONE) -> Calls:
    """Return the calls of a rank that goes on from the newest checkpoint, steps, and seals."""
    here = opened(*directories) if directories else ["open"]
    return [here, ["restore"], ["step", num_steps], *SEAL, ["whole"], ["close"]]


def seals(number: int) -> Calls:
    """Return the calls of a rank that begins, and seals so many times after `STEPS` steps."""
    return [["open"], *[["step", STEPS], *SEAL] * number, ["whole"], ["close"]]


def expected(jobs: Jobs, folder: Path, last: int, **setting: Any) -> list[Any]:
    """Return what parameters are after each step in one process, which is not interrupted."""
    calls: Calls = [["open"], *[["step"], ["whole"]] * last]
    if not setting.get("is_plain"):
        calls += SEAL
    (rank,) = run_all(jobs, folder, [calls], kind="one", **RUN, **setting)
    return values(rank, "whole")


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_has_the_bits_of_one_process_that_was_never_interrupted(
    jobs: Jobs, tmp_path: Path, name: str
) -> None:
    chain, options = CHAINS[name]
    is_plain = "state_dtype" not in options
    last = STEPS * len(chain)
    steps = expected(jobs, tmp_path / "whole", last, is_plain=is_plain, options=options)
    for number, (num, kind, drives) in enumerate(chain):
        calls, first = go_on(directories=drives), STEPS * number
        ranks = run_all(jobs, tmp_path, [calls] * num, kind=kind, options=options, **RUN)
        for rank in ranks:
            assert (rank.of("restore")["value"] or [None])[0] == (first or None)
            assert rank.of("result")["value"] == first + STEPS
            assert rank.of("whole")["value"] == steps[first + STEPS - 1], (number, num, kind)
        others = [tmp_path / drive for drive in drives if drive != "a"]
        with offload.open_checkpoint(tmp_path / ("a" if drives else "run"), parts=others) as one:
            assert one.verify().ok
    if not options:
        expected(jobs, tmp_path / "offloaded", last)
        assert_same_state(newest(tmp_path / "run"), newest(tmp_path / "offloaded/run"))


def assert_same_state(left: Path, right: Path) -> None:
    """Compare all state of two checkpoints of one process, by torch's own names."""
    names = {path.name for path in left.glob("*.safetensors")} - {"train_state.safetensors"}
    assert {"exp_avg.safetensors", "exp_avg_sq.safetensors", "model.safetensors"} <= names
    for name in names:
        one, other = load_file(left / name), load_file(right / name)
        assert one.keys() == other.keys()
        for key, tensor in one.items():
            assert bits(tensor).equal(bits(other[key])), (name, key)


def play(
    jobs: Jobs, folder: Path, size: int, cases: dict[str, tuple[Calls, str]], **setting: Any
) -> dict[str, list[Rank]]:
    """Let ranks play cases: calls of all of them, and the kind."""
    made: dict[str, Case] = {
        name: ([calls] * size, {"kind": kind}) for name, (calls, kind) in cases.items()
    }
    if size == 1:
        setting["kind"] = "one"
    return run_cases(jobs, folder, made, **RUN, **setting)


def test_train_states_models_and_old_parts(jobs: Jobs, tmp_path: Path) -> None:
    """Other ranks get the train state of rank 0; old checkpoints stay, parts of former owners go.

    A checkpoint before any step stores the new cut.
    """
    listed, drives = do("odd_calls:listed"), ["a", "b"]
    played = play(
        jobs,
        tmp_path,
        3,
        {"states": (seals(1), "fsdp2"), "old": (seals(2), "ddp"), "cut": (seals(1), "fsdp2")},
    )
    for ranks in played.values():
        require_success(ranks)
    model = Model(WIDTHS).bfloat16()
    with torch.no_grad():
        model.layers[0].weight.zero_()
    assert offload.load_parameters(model, tmp_path / "states/run") == 2
    found = load_file(newest(tmp_path / "states/run") / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert bits(tensor).equal(bits(found[name])), name

    look: Calls = [["open"], ["restore"], ["close"]]
    unstepped: Calls = [["open"], ["restore"], *SEAL, ["whole"], ["close"]]
    one = {
        "states": (look, "one"),
        "old": (go_on(), "one"),
        "cut": (unstepped, "one"),
        "alone": (seals(1), "one"),
        "drives": (go_on(directories=drives), "one"),
        "more drives": (go_on(directories=["a"]), "one"),
    }
    alone = play(jobs, tmp_path, 1, one)
    for ranks in alone.values():
        require_success(ranks)
    assert alone["cut"][0].of("whole")["value"] == played["cut"][0].of("whole")["value"]
    assert_same_state(newest(tmp_path / "cut/run"), newest(tmp_path / "alone/run"))
    run = tmp_path / "old/run"
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000004", "step-00000006"]
    assert [*run.glob("owner-*/part-*/exp_avg.safetensors")], "step 4 has state of all ranks"
    with offload.open_checkpoint(run / "step-00000004") as checkpoint:
        assert checkpoint.verify().ok

    seen: Calls = [opened("b", "a"), ["restore"], listed, ["step"], *SEAL, listed, ["close"]]
    more_drives: Calls = go_on(directories=drives)  # they get their parts with the first step
    cases = {"states": (look, "ddp"), "drives": (seen, "ddp"), "more drives": (more_drives, "ddp")}
    two = play(jobs, tmp_path, 2, cases)
    assert [step for step, _ in of_each(two["more drives"], "restore")] == [2, 2]
    assert (tmp_path / "more drives/b/owner-1").is_dir()
    states = [*two["states"], *alone["states"]]
    assert of_each(states, "restore") == [[2, {"step": 2, "rank": 0}]] * 3
    for rank in two["drives"]:  # ranks list what one process has spread over the drives
        lists = values(rank, "do")
        assert [[step for step, _ in each] for each in lists] == [[2], [2, 3]]
        assert all(nbytes for each in lists for _, nbytes in each)
    more: Calls = [["open"], ["restore"], *[["step"], *SEAL] * 3, ["close"]]
    spread: Calls = [opened("a", "b"), ["restore"], *[["step"], *SEAL] * 3, ["close"]]
    for ranks in play(
        jobs, tmp_path, 1, {"old": (more, "one"), "drives": (spread, "one")}
    ).values():
        require_success(ranks)
    assert not [*run.glob("owner-*/part-*")]
    assert not [*(tmp_path / "drives").glob("*/owner-*/part-*")]
    assert [*(tmp_path / "drives").glob("b/part-*")]


def test_what_is_missing_damaged_or_too_large_is_an_error_before_anything_is_lost(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Damage in the part of another owner is found in the first step.

    A restore that fails leaves no file open: a lock on a part that stays would keep others from
    ever writing it again.
    """
    begun = {name: (seals(1), "ddp") for name in ("missing", "full", "model 1", "model 2")}
    begun["full drives"] = (go_on(directories=["a", "b"]), "ddp")
    begun |= {name: (seals(2), "ddp") for name in ("damaged", "damaged in one")}
    for ranks in play(jobs, tmp_path, 3, begun).values():
        require_success(ranks)
    shutil.rmtree(tmp_path / "missing/run/owner-2")
    for name in ("model 1", "model 2"):
        file = newest(tmp_path / name / "run") / "model.safetensors"
        flip_on_disk(file, file.stat().st_size - 100)
    flipped = {}
    for name in ("damaged", "damaged in one"):
        with offload.open_checkpoint(tmp_path / name / "run") as checkpoint:
            path = flipped[name] = Path(checkpoint.owners[1].path) / "exp_avg.safetensors"
        assert path.parent.parent == tmp_path / name / "run/owner-2"
        flip_on_disk(path, path.stat().st_size - 100)
    before = {name: contents(tmp_path / name) for name in ("full", "full drives")}
    # What ranks need on one drive is added up: there is room for each of them, and not for both.
    rooms = {1: 4096, 2: sum(map(len, before["full"].values())) * 9 // 10}
    calls: dict[str, Calls] = {
        "missing": [["open"]],
        "full drives": [opened("a", "b"), ["fill_drive", 4096], ["restore"]],
    }
    model: Calls = [["open"], ["keep_error", "restore"], ["open_files", "owner-2"]]
    damaged: Calls = [["open"], ["restore"], ["step"]]
    kinds = ((2, "fsdp2", "damaged"), (1, "one", "damaged in one"))
    for size, kind, name in kinds:
        own_calls = calls | {name: damaged, f"model {size}": model}
        own_calls["full"] = [["open"], ["fill_drive", rooms[size]], ["restore"]]
        cases = {case: (own, kind) for case, own in own_calls.items()}
        played = play(jobs, tmp_path, size, cases)
        for rank in played["missing"]:
            assert (
                "owner-2" in rank.of("open")["message"] or "owner 2" in rank.of("open")["message"]
            )
        for case, where in (("full", "run"), ("full drives", "")):
            for rank in played[case]:
                assert rank.of("restore")["error"] == "StoreFullError"
                assert "new slot of" in rank.of("restore")["message"]
                assert f"{tmp_path / case / where}" in rank.of("restore")["message"]
            assert contents(tmp_path / case) == before[case]
        assert of_each(played[f"model {size}"], "keep_error") == ["DamagedError"] * size
        assert of_each(played[f"model {size}"], "open_files") == [[]] * size
        said = [one["message"] for rank in played[name] for one in rank.outcomes]
        file = flipped[name]
        assert any(f"{file}: bytes" in message and "damaged" in message for message in said), said
        with pytest.raises(offload.CheckpointError, match="quarantined"):
            offload.open_checkpoint(newest(tmp_path / name / "run"))
    for size, kind, name in kinds:
        again = play(jobs, tmp_path, size, {name: (go_on(), kind)})[name]
        require_success(again)
        assert [step for step, _ in of_each(again, "restore")] == [2] * size
    ranks = play(jobs, tmp_path, 1, {"full": (go_on(), "one")})["full"]
    require_success(ranks)


def test_a_full_drive_of_any_host_is_noticed_before_anything_is_written(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The directories are on one drive of the machine; on one of two hosts, it says it is full."""
    setting: dict[str, Any] = {"kind": "fsdp2", "given": True, "widths": (8, 16, 4)}
    setting["frozen_elements"] = 4
    four = [on("a"), on("a"), on("b"), on("b")]
    run_all(jobs, tmp_path, [[*host, ["step"], *SEAL] for host in four], **setting)
    before = contents(tmp_path)
    two = [on("a"), on("b")]
    for full in (0, 1):
        calls = [
            [*host, *[["fill_drive", 100]] * (n == full), ["restore"]] for n, host in enumerate(two)
        ]
        for rank in jobs.run(tmp_path, calls, **setting):
            (failed,) = errors(rank)
            assert failed["error"] == "StoreFullError"
            assert "new slot of" in failed["message"]
            assert f"{tmp_path}/{'ab'[full]}" in failed["message"]
    assert contents(tmp_path) == before
    run_all(jobs, tmp_path, [[*host, ["restore"], ["step"], *SEAL] for host in two], **setting)


def test_a_directory_that_is_missing_or_damaged_is_named(jobs: Jobs, tmp_path: Path) -> None:
    """One process goes on from two ranks."""
    both = ["a", "b"]
    calls: Calls = [opened(*both), ["step", STEPS], *SEAL, ["step"], *SEAL, ["close"]]
    require_success(play(jobs, tmp_path, 2, {"run": (calls, "ddp")})["run"])
    lists: Calls = [opened("a"), opened("b", "a")]
    for rank in play(jobs, tmp_path, 1, {"run": (lists, "one")})["run"]:
        missing, order = errors(rank)
        assert missing["error"] == "StoreError"
        assert "owner-1" in missing["message"] or "/b" in missing["message"]
        assert "put that one first" in order["message"]
    first_drive, other = (tmp_path / "run" / name for name in both)
    with offload.open_checkpoint(first_drive, parts=[other]) as checkpoint:
        (part,) = [Path(owner.path) for owner in checkpoint.owners]
    file = part / "exp_avg.safetensors"
    flip_on_disk(file, file.stat().st_size - 5)
    damaged: Calls = [opened(*both), ["restore"], ["step"]]
    ranks = play(jobs, tmp_path, 1, {"run": (damaged, "one")})["run"]
    said = [one["message"] for rank in ranks for one in errors(rank)]
    assert any(str(file) in message and "damaged" in message for message in said), said
    again = play(jobs, tmp_path, 1, {"run": (go_on(directories=both), "one")})["run"]
    require_success(again)
    assert [step for step, _ in of_each(again, "restore")] == [STEPS]


def test_memory_is_that_of_the_ring_and_a_constant(jobs: Jobs, tmp_path: Path) -> None:
    """The state is 96 MiB, the ring 18, and the chunks that are read have 2 leaves."""
    setting: dict[str, Any] = {
        "given": True,
        "widths": (2048, 2048, 2048),
        "options": {"chunk_bytes": 2 << 20, "ring_chunks": 3},
    }
    calls: Calls = [["open"], ["step"], *SEAL, ["close"]]
    run_all(jobs, tmp_path, [calls] * 2, kind="fsdp2", **setting)
    calls = [["open"], ["backward"], ["reset_peak"], ["restore"], ["update"], ["grown"]]
    (rank,) = run_all(jobs, tmp_path, [[*calls, *SEAL, ["close"]]], kind="one", **setting)
    assert rank.of("grown")["value"] < (18 + 48) << 20
