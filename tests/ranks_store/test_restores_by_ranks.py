"""What several ranks restore together: each its part, all the same checkpoint, or none of them.

Each test has ranks of its own, which are processes; `tests.ranks_training.calls` has what they do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import offload
from tests.ranks_training.calls import Calls, Model
from tests.ranks_training.rank_server import Jobs, Rank
from tests.ranks_training.test_hosts import on, run_all
from tests.stores.files import flip_on_disk

WIDTHS = (40, 60, 30)
GIVEN: dict[str, Any] = {"given": True, "widths": WIDTHS}
SEAL: list[list[Any]] = [["step"], ["checkpoint"], ["result"]]
HERE = "tests.ranks_store.test_restores_by_ranks"


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """A server of ranks."""
    server = Jobs()
    yield server
    server.close()


def do(name: str, *arguments: Any) -> list[Any]:
    """Return the call of a function of this module on a rank."""
    return ["do", f"{HERE}:{name}", *arguments]


def of_each(ranks: list[Rank], call: str) -> list[Any]:
    """Return the last value of a call on each rank."""
    return [rank.of(call)["value"] for rank in ranks]


def anew(rank: Rank) -> list[str]:
    """Return what a rank has warned of state that is encoded anew."""
    return [said for one in rank.outcomes for said in one["warnings"] if "encoded anew" in said]


def test_other_ranks_get_all_parameters_and_the_first_of_them_warns(
    jobs: Jobs, tmp_path: Path
) -> None:
    setting = {**GIVEN, "options": {"state_dtype": "int8"}}
    calls: list[list[Any]] = [["open"], *SEAL, ["whole"], ["close"]]
    (trained, _) = of_each(run_all(jobs, tmp_path, [calls] * 2, kind="fsdp2", **setting), "whole")
    calls = [["open"], ["restore", {"reencode": True}], ["whole"], ["checkpoint"], ["result"]]
    ranks = run_all(jobs, tmp_path, [[*calls, ["close"]]] * 3, kind="ddp", **setting)
    assert of_each(ranks, "whole") == [trained] * 3
    assert [len(anew(rank)) for rank in ranks] == [1, 0, 0]
    again: list[list[Any]] = [["open"], ["restore"], ["whole"], ["verify"], ["close"]]
    ranks = run_all(jobs, tmp_path, [again] * 3, kind="ddp", **setting)
    assert of_each(ranks, "whole") == [trained] * 3
    assert of_each(ranks, "verify") == [[]] * 3


def hold_checkpoint(calls: Calls) -> None:
    """Keep the checkpoint that was made last, as it is now."""
    calls.held = calls.handle.result()


def restore_held(calls: Calls) -> None:
    calls.optimizer.restore(calls.held)


def damage_the_model(calls: Calls) -> None:
    """Change a byte of the newest checkpoint, before any rank goes on."""
    if calls.rank == 0:
        file = max(calls.directory.glob("step-*")) / "model.safetensors"
        flip_on_disk(file, file.stat().st_size - 1)
    dist.barrier()


def test_ranks_that_ask_for_different_checkpoints_change_nothing(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Also if they differ in what is to become of a damaged one, or one names a replaced one."""
    replaced = [do("hold_checkpoint"), ["set", {"lr": 0.5}], ["checkpoint"], ["result"]]
    begin = [["open"], *SEAL, *SEAL]
    end = [["restore"], ["close"]]
    first = [["restore", 1, {"discard_newer": True}], *replaced, ["restore"]]
    second = [["restore"], *replaced, do("restore_held")]
    damaged = do("damage_the_model")
    ranks = jobs.run(
        tmp_path,
        [
            [*begin, *first, damaged, ["restore"], *end],
            [*begin, *second, damaged, ["restore", 2], *end],
        ],
        kind="ddp",
    )
    errors = [
        [(one["error"], one["message"]) for one in rank.outcomes if one["error"]] for rank in ranks
    ]
    for number, found in enumerate(errors):
        (older, _), (gone, why), (older_still, what) = found
        assert older == older_still == "RanksError", found
        assert gone == ("CheckpointNotFoundError" if number else "RanksError")
        assert "replaced by generation" in why
        assert "rank 1 for no older one" in what
    assert "step-00000001 and rank 1 for" in errors[0][0][1]
    assert "rank 1" in errors[0][1][1]
    assert [step for step, _ in of_each(ranks, "restore")] == [1, 1]


def save_reference(calls: Calls) -> None:
    if calls.rank == 0:
        reference = json.dumps(calls.optimizer.state_dict())
        (calls.directory.parent / "reference.json").write_text(reference)


def load_reference(calls: Calls) -> int:
    """Load the state alone, as libraries do that load parameters themselves."""
    text = (calls.directory.parent / "reference.json").read_text()
    calls.optimizer.load_state_dict(json.loads(text))
    return int(calls.optimizer.num_steps)


def test_what_a_host_does_not_see_of_the_parameters_is_not_needed_for_the_state(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Of five frozen elements, the second of two ranks needs the fourth, which another host has."""
    setting = {**GIVEN, "kind": "fsdp2", "widths": (8, 16, 4), "frozen_elements": 5}
    four = [on("a"), on("a"), on("b"), on("bc")]
    sealed = [*SEAL, do("save_reference"), ["close"]]
    run_all(jobs, tmp_path, [[*host, *sealed] for host in four], **setting)
    two = [on("a"), on("b", "b", "bc")]
    restored = [["whole"], ["restore"], ["whole"], ["step"], do("load_reference"), ["close"]]
    for rank in jobs.run(tmp_path, [[*host, *restored] for host in two], **setting):
        assert rank.failed() == ["RanksError", "NotRestoredError"], rank.outcomes
        assert "this one needs 'frozen' [3:5,]" in rank.of("restore")["message"]
        first, last = (one["value"] for one in rank.outcomes if one["call"] == "whole")
        assert first == last
        assert rank.of("do")["value"] == 1


def test_a_part_that_one_rank_cannot_open_is_let_go_of_by_the_others(
    jobs: Jobs, tmp_path: Path
) -> None:
    """A lock on it that stays would keep all ranks from ever writing it again."""
    run_all(jobs, tmp_path, [[["open"], *SEAL, ["close"]]] * 3, kind="ddp", **GIVEN)
    part = "owner-2"
    first = [["open"], ["keep_error", "restore"], ["open_files", part]]
    second = [["open"], ["fail", "open", part], ["keep_error", "restore"], ["open_files", part]]
    end = [["restore"], ["close"]]
    ranks = jobs.run(tmp_path, [[*first, *end], [*second, *end]], kind="fsdp2", **GIVEN)
    for rank in ranks:
        assert rank.failed() == [], rank.outcomes
        assert rank.of("keep_error")["value"] != ""
        assert rank.of("open_files")["value"] == []
        assert rank.of("restore")["value"][0] == 1


def add_parameters(calls: Calls) -> None:
    """Add a layer to the model, and its parameters to the optimizer."""
    from tests.tiers.rank_program import grow  # which changes what this process logs

    assert calls.model is not None
    grow(calls.optimizer, calls.model)


@pytest.mark.parametrize("grows", [False, True], ids=["", "growing"])
def test_ranks_go_on_from_the_tier_as_from_their_own_directory(
    jobs: Jobs, tmp_path: Path, grows: bool
) -> None:
    kind = "fsdp2" if grows else "ddp"
    setting = {**GIVEN, "kind": kind, "widths": (40, 24, 24)}
    with_tier = {**setting, "options": {"tier": f"file://{tmp_path}/tier"}}
    more = [do("add_parameters")] if grows else []
    calls = [["open"], ["restore"], *more, *SEAL, ["whole"], ["verify"], ["close"]]
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    run_all(jobs, old, [[["open"], *SEAL, ["close"]]] * 2, **with_tier)
    expected = run_all(jobs, old, [calls] * 2, **setting)
    found = run_all(jobs, new, [calls] * 2, **with_tier)
    for call in ("restore", "whole", "verify"):
        assert of_each(found, call) == of_each(expected, call)
    assert of_each(found, "restore") == [[1, {"step": 1, "rank": rank}] for rank in range(2)]


def add_different_parameters(calls: Calls) -> str:
    """Add a layer that each rank has another name for; return the error, and remove the layer."""
    assert calls.model is not None
    name, layer = f"of_rank_{calls.rank}", torch.nn.Linear(3, 3).bfloat16()
    calls.model.add_module(name, layer)
    try:
        calls.optimizer.add_param_group({"params": [*layer.parameters()]})
    except offload.OffloadError as error:
        return type(error).__name__
    finally:
        delattr(calls.model, name)
    return ""


def test_parameters_that_are_refused_do_not_cost_the_state_that_arrives(
    jobs: Jobs, tmp_path: Path
) -> None:
    setting = {**GIVEN, "kind": "ddp", "widths": (40, 24)}
    with_tier = {**setting, "options": {"tier": f"file://{tmp_path}/tier"}}
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    run_all(jobs, old, [[["open"], *SEAL, ["close"]]] * 2, **with_tier)
    end = [*SEAL, ["whole"], ["verify"], ["close"]]
    expected = run_all(jobs, old, [[["open"], ["restore"], *end]] * 2, **setting)
    refused = [["open"], ["restore"], do("add_different_parameters"), *end]
    found = run_all(jobs, new, [refused] * 2, **with_tier)
    assert of_each(found, "do") == ["UnsupportedParameterError"] * 2
    assert of_each(found, "whole") == of_each(expected, "whole")
    assert of_each(found, "verify") == [[], []]


def open_before_sharding(calls: Calls) -> None:
    """Make the optimizer first, as some libraries do, which then give it the sharded parameters."""
    torch.manual_seed(7)
    model = Model(calls.setting.widths, calls.setting.frozen_elements).bfloat16()
    calls.model = model
    calls.open()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    (group,) = calls.optimizer.param_groups
    group["params"] = [*model.parameters()]


def test_a_model_may_be_sharded_between_the_optimizer_and_the_restore(
    jobs: Jobs, tmp_path: Path
) -> None:
    setting = {**GIVEN, "kind": "fsdp2"}
    sealed = [["open"], *SEAL, ["whole"], ["close"]]
    trained = of_each(run_all(jobs, tmp_path, [sealed] * 2, **setting), "whole")
    again = [do("open_before_sharding"), ["restore"], ["whole"], *SEAL, ["verify"], ["close"]]
    ranks = run_all(jobs, tmp_path, [again] * 2, **setting)
    assert of_each(ranks, "whole") == trained
    assert of_each(ranks, "result") == [2, 2]
    assert of_each(ranks, "verify") == [[], []]


def test_a_train_state_that_is_another_one_on_one_rank_only_is_replaced(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Also if that rank does not see what is stored, on another host."""
    other = ["checkpoint", {"train_state": {"another": 1}}]
    end = [["result"], ["close"]]
    first = [*on("a"), *SEAL, ["checkpoint"], *end]
    second = [*on("b"), *SEAL, other, *end]
    run_all(jobs, tmp_path, [first, second], kind="ddp")
    with offload.open_checkpoint(tmp_path / "a", parts=[tmp_path / "b"]) as checkpoint:
        assert checkpoint.train_states == [{"step": 1, "rank": 0}, {"another": 1}]
        assert checkpoint.verify().ok
