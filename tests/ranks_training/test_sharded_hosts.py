"""Ranks on several hosts stop and go on; with FSDP2, each has its shard of the model on its host.

The hosts are directories of one machine, as in `test_hosts`. Other ranks go on if each sees the
directories that it needs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import offload
from offload.errors import CheckpointError, DamagedError
from tests.numerics.reference import bits
from tests.ranks_training.cases import (
    ROUND,
    Calls,
    Case,
    contents,
    durable,
    errors,
    in_memory,
    names,
    newest,
    of_each,
    on,
    opened,
    refused,
    require_success,
    run_all,
    run_cases,
    values,
)
from tests.ranks_training.models import Model
from tests.ranks_training.rank_server import Jobs
from tests.ranks_training.test_readers import content
from tests.stores.files import flip_on_disk

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WIDTHS = (5, 7, 3)
SHARD = "model/shard-{:05}-model-00001-of-00001.safetensors"
AGAIN: Calls = [["restore"], *ROUND]
BEGUN = [[*on(host), *ROUND] for host in "ab"]
GO_ON = [[*on(host), *AGAIN] for host in "ab"]


def verified(first: Path, *parts: Path) -> int:
    """Return the step of a checkpoint, all of which is seen and whole."""
    with offload.open_checkpoint(first, parts=parts) as checkpoint:
        report = checkpoint.verify()
        assert (report.ok, report.not_seen) == (True, ())
        return int(checkpoint.step)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Return whether tensors have the same names, dtypes and bits."""
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(bits(left[n]), bits(right[n])) for n in left
    )


@pytest.mark.parametrize(
    ("hosts", "kinds"), [("ab", ["ddp", "fsdp2", "mixed", "tp"]), ("aabb", ["hybrid", "fsdp2"])]
)
def test_stopped_and_resumed_they_have_the_bits_of_memory(
    jobs: Jobs, tmp_path: Path, hosts: str, kinds: list[str]
) -> None:
    """With tensor parallelism, columns of one host alternate with those of another.

    A hybrid shards within each host, and replicates over the hosts: as with replicas, there is one
    model file.
    """
    size, write = len(hosts), ["write_values", "values.safetensors"]
    cases: dict[str, Case] = {}
    for kind in kinds:
        setting: dict[str, Any] = {"kind": kind, "given": kind in ("mixed", "tp")}
        if kind == "tp":
            setting["widths"] = (6, 8, 4)
        plain, how = in_memory(3, size, **setting)
        cases[f"memory-{kind}"] = ([[*calls, write] for calls in plain], how)
        cases[kind] = ([[*on(host), *ROUND, *ROUND] for host in hosts], setting)
        cases[f"{kind}/again"] = ([[*on(host), *AGAIN] for host in hosts], setting)
    played = run_cases(jobs, tmp_path, cases)
    for ranks in played.values():
        require_success(ranks)
    for kind in kinds:
        found, several = played[f"{kind}/again"], tmp_path / kind
        assert of_each(found, "restore") == [[2, {"step": 2, "rank": n}] for n in range(size)]
        assert of_each(found, "step") == of_each(played[f"memory-{kind}"], "step")
        assert names(several) == sorted(
            [f"{host}/owner-{rank}" for rank, host in enumerate(hosts) if rank]
            + ["a/step-00000002", "a/step-00000003"]
        )
        step = several / "a/step-00000003"
        is_whole = kind in ("ddp", "hybrid")
        assert (step / "model.safetensors").exists() is is_whole
        assert (step / SHARD.format(1)).exists() is not is_whole
        verified(several / "a", several / "b")
        with offload.open_checkpoint(several / "a", parts=[several / "b"]) as checkpoint:
            assert checkpoint.train_states == [{"step": 3, "rank": rank} for rank in range(size)]
            offload.export_checkpoint(checkpoint, several / "hf", "hf")
        expected = load_file(tmp_path / f"memory-{kind}/values.safetensors")
        assert same(load_file(several / "hf/model.safetensors"), expected), kind
    if size == 4:
        require_torch_reads_shard_files(several)


def require_torch_reads_shard_files(several: Path) -> None:
    """Let torch read the shard files in one folder; some ranks have none of a small parameter."""
    folder = several / "joined"
    folder.mkdir()
    step = several / "a/step-00000003"
    with offload.open_checkpoint(step, parts=[several / "b"]) as checkpoint:
        found = [step / "model", *[Path(owner.path) / "model" for owner in checkpoint.owners]]
    for path in found:
        shutil.copy(next(path.iterdir()), folder)
    assert len([*folder.iterdir()]) == 4
    model = Model(WIDTHS).bfloat16()
    offload.load_parameters(model, several / "a", parts=[several / "b"])
    read = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert same(read, dict(model.state_dict()))


def test_exports_are_byte_for_byte_those_of_one_host(jobs: Jobs, tmp_path: Path) -> None:
    """Also of copies of the directories, which one host sees; and the model is loaded from them.

    Each host says what it sees.
    """
    cases: dict[str, Case] = {"one": ([[["open"], *ROUND]] * 2, {}), "several": (BEGUN, {})}
    for ranks in run_cases(jobs, tmp_path, cases, kind="fsdp2").values():
        require_success(ranks)
    shutil.copytree(tmp_path / "several", tmp_path / "copies")
    store, other = tmp_path / "copies/a", tmp_path / "copies/b"
    shutil.rmtree(tmp_path / "several")
    for kind in ("pt", "hf", "safetensors", "dcp"):
        found = []
        for path, given in ((tmp_path / "one/run", []), (store, [other])):
            with offload.open_checkpoint(path, parts=given) as checkpoint:
                offload.export_checkpoint(checkpoint, path.parent / kind, kind)
            found.append(content(path.parent / kind))
            found[-1].pop(".metadata", None)  # torch puts a random number into the file
        assert found[0] == found[1], kind
    model = Model(WIDTHS).bfloat16()
    with pytest.raises(CheckpointError, match=r"the part of owner 1 .* not seen here"):
        offload.load_parameters(model, store)
    assert offload.load_parameters(model, store, parts=[other]) == 1
    assert same(dict(model.state_dict()), load_file(tmp_path / "one/hf/model.safetensors"))

    (info,) = offload.list_checkpoints(store, parts=[])
    assert info.valid
    (part,) = info.not_seen
    assert part.endswith("b/owner-1/part-1")
    lacking = pytest.raises(CheckpointError, match=r"owner 1 \(sealed at .*parts=")
    with offload.open_checkpoint(store, parts=[]) as checkpoint:
        assert (checkpoint.verify().ok, checkpoint.verify().not_seen) == (True, (part,))
        with lacking:
            offload.export_checkpoint(checkpoint, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()
    with offload.open_checkpoint(store, parts=[other]) as checkpoint:
        shards = [name for name in checkpoint.files if "shard-" in name]
        assert len(shards) == 2
    with pytest.raises(CheckpointError, match=r"owner-1/part-1 of generation 1\).*look there"):
        offload.open_checkpoint(other)


def test_a_flipped_byte_in_a_shard_file_is_found_and_named(jobs: Jobs, tmp_path: Path) -> None:
    """By verification, and by restore(), which goes on from the checkpoint before."""
    run_all(jobs, tmp_path, [[*on(host), *ROUND, *ROUND] for host in "ab"], kind="fsdp2")
    with offload.open_checkpoint(tmp_path / "a", parts=[tmp_path / "b"]) as checkpoint:
        path = Path(checkpoint.owners[0].path) / SHARD.format(2)
    flip_on_disk(path, path.stat().st_size - 1)
    with offload.open_checkpoint(tmp_path / "a", parts=[tmp_path / "b"]) as checkpoint:
        report = checkpoint.verify()
        assert [str(path) in problem for problem in report.problems] == [True]
        assert [where for where, _ in report.damaged_parts] == [str(path.parent.parent)]
        with pytest.raises(DamagedError, match=str(path)):
            offload.export_checkpoint(checkpoint, tmp_path / "out", "hf")
    with pytest.raises(DamagedError, match=str(path)):
        offload.load_parameters(Model(WIDTHS).bfloat16(), tmp_path / "a", parts=[tmp_path / "b"])
    ranks = run_all(jobs, tmp_path, GO_ON, kind="fsdp2")
    assert [step for step, _ in of_each(ranks, "restore")] == [1, 1]
    assert verified(tmp_path / "a", tmp_path / "b") == 2


def test_a_rank_is_killed_in_a_seal_and_the_hosts_resume_one_step(
    jobs: Jobs, tmp_path: Path
) -> None:
    kill = ["kill_at", "sync", "b/owner-1/part-2/model"]
    calls = [[*BEGUN[0], ["train", 9, 1]], [*BEGUN[1], kill, ["train", 9, 1]]]
    ranks = jobs.run(tmp_path, calls, kind="fsdp2")
    assert ranks[1].status == -9
    assert ranks[0].has_come_to_its_end, ranks[0].errors
    cases: dict[str, Case] = {"": (GO_ON, {}), "memory": in_memory(4)}
    played = run_cases(jobs, tmp_path, cases, kind="fsdp2")
    require_success(played[""])
    (step,) = {step for step, _ in of_each(played[""], "restore")}
    assert step >= durable(ranks)
    verified(tmp_path / "a", tmp_path / "b")
    plain = [values(rank, "step")[step] for rank in played["memory"]]
    assert of_each(played[""], "step") == plain


def test_a_failed_seal_leaves_the_checkpoint_before_and_the_next_run_goes_on(
    jobs: Jobs, tmp_path: Path
) -> None:
    fails = ["fail", "sync", "owner-1/part-2/model", 1]
    failed: Calls = [["step"], ["checkpoint"], ["settle"], ["close"]]
    calls = [[*BEGUN[0], *failed], [*BEGUN[1], fails, *failed]]
    played = run_cases(jobs, tmp_path, {"": (calls, {})}, kind="fsdp2")
    assert all("owner-1/part-2/model" in said for said in of_each(played[""], "settle"))
    assert verified(tmp_path / "a", tmp_path / "b") == 1
    ranks = run_all(jobs, tmp_path, GO_ON, kind="fsdp2")
    assert of_each(ranks, "result") == [2, 2]


def test_a_sharded_checkpoint_goes_on_where_all_parts_are_seen(jobs: Jobs, tmp_path: Path) -> None:
    """In the same sharding, with other ranks, and by one process; then there is one model file."""
    run_all(jobs, tmp_path, BEGUN, kind="fsdp2", given=True)
    shutil.move(tmp_path / "b/owner-1", tmp_path / "a/owner-1")
    shutil.rmtree(tmp_path / "b")
    store = (tmp_path / "a").rename(tmp_path / "run")
    go_on: Calls = [["open"], ["restore"], *ROUND, ["whole"], ["close"]]
    for step, (num, kind) in enumerate([(2, "fsdp2"), (3, "ddp"), (1, "one")], 2):
        found = run_all(jobs, tmp_path, [go_on] * num, kind=kind, given=True)
        assert found[0].of("result")["value"] == step
        assert (newest(store) / "model.safetensors").exists()
        assert verified(store) == step
    whole = [["open"], *[["step"]] * 4, ["whole"]]
    (plain,) = run_all(jobs, tmp_path / "plain", [whole], kind="one", given=True, is_plain=True)
    assert found[0].of("whole")["value"] == plain.of("whole")["value"]


FOUR = [on("a"), on("a"), on("b"), on("bc")]
"""Four ranks on three hosts."""

TWO = [on("a"), on("b", "b", "bc")]
"""Two ranks on two hosts; the drive of the third is mounted on the second."""

MORE = [on("a"), on("a"), on("b", "b", "bc"), on("b", "b", "bc")]
"""Four ranks on these two hosts."""

HERE = [opened("a", "b", "bc")]
"""A rank on a host that sees all directories."""

SETTING: dict[str, Any] = {
    "kind": "fsdp2",
    "given": True,
    "widths": (8, 16, 4),
    "frozen_elements": 4,
}
"""All sizes are multiples of 4, so two shards of four ranks are one of two ranks."""


def expected(jobs: Jobs, folder: Path, last: int) -> list[Any]:
    """Return what parameters are after each step in one process, in memory."""
    calls = [["open"], ["whole"], *[["step"], ["whole"]] * last]
    setting = {**SETTING, "kind": "one", "is_plain": True}
    (rank,) = run_all(jobs, folder, [calls], **setting)
    return values(rank, "whole")


def go_on(jobs: Jobs, folder: Path, hosts: list[Any], last: int, **setting: Any) -> Any:
    """Let ranks continue, take a step and seal it; return their parameters."""
    calls = [[*host, *AGAIN, ["whole"], ["close"]] for host in hosts]
    ranks = run_all(jobs, folder, calls, **{**SETTING, **setting})
    for rank in ranks:
        assert (rank.of("restore")["value"] or [0])[0] == last - 1
        assert rank.of("result")["value"] == last
        assert rank.of("whole")["value"] == ranks[0].of("whole")["value"]
    return ranks[0].of("whole")["value"]


def test_fewer_ranks_on_fewer_hosts_and_more_again(jobs: Jobs, tmp_path: Path) -> None:
    """Parts that no checkpoint names are removed from all hosts; then one host sees them all."""
    store = tmp_path / "hosts"
    steps = expected(jobs, tmp_path / "plain", 9)
    for last, hosts in enumerate([FOUR, TWO, TWO, MORE, TWO], 1):
        assert go_on(jobs, store, hosts, last) == steps[last], last
        verified(store / "a", store / "b", store / "bc")
        if last == 2:
            assert [*store.glob("bc/owner-3/part-*")], "the checkpoint of step 1 needs it"
            verified(store / "a/step-00000001", store / "b", store / "bc")
    calls = [[*host, ["restore"], *ROUND * 3, ["close"]] for host in TWO]
    run_all(jobs, store, calls, **SETTING)
    left = {path.parent for path in store.glob("*/owner-*/part-*")}
    assert len(left) == 1, "the writer has its state in the checkpoint itself"
    assert go_on(jobs, store, [HERE] * 3, 9) == steps[9]


def test_other_ranks_that_lack_what_they_need_are_named_and_nothing_changes(
    jobs: Jobs, tmp_path: Path
) -> None:
    """State of another rank, a frozen parameter, or a host that is lost for good."""
    store = tmp_path / "hosts"
    go_on(jobs, store, FOUR, 1, frozen_elements=5)
    before, setting = contents(store), {**SETTING, "frozen_elements": 5}
    three = [on("a"), on("b", "b", "bc"), on("b", "b", "bc")]
    for message in refused(jobs, store, [[*host, ["restore"]] for host in three], **setting):
        assert "of these" in message
        assert "name them in directory=" in message
    # All state is seen. Of five frozen elements, the second of two ranks needs the fourth.
    calls = [[*host, ["whole"], ["restore"], ["whole"], ["step"], ["close"]] for host in TWO]
    for rank in jobs.run(store, calls, **setting):
        restore, step = errors(rank)
        assert restore["error"] == "RanksError"
        assert (
            "this one needs 'frozen' [3:5,], and its host sees 1 of these 2" in (restore["message"])
        )
        assert "restore" in step["message"], "it would begin anew"
        first, last = values(rank, "whole")
        assert first == last
    assert contents(store) == before
    go_on(jobs, store, FOUR, 2, frozen_elements=5)
    shutil.rmtree(store / "bc")
    for message in refused(jobs, store, [on("a"), on("b")], **setting):
        assert "owner 3, and no rank sees them" in message


def test_a_model_in_one_file_does_not_go_on_in_shards_of_several_hosts(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The state of both ranks would be seen; the model of the second one would not."""
    run_all(jobs, tmp_path, [[*on("a"), *ROUND]] * 2, kind="fsdp2")
    (tmp_path / "b").mkdir()
    shutil.move(tmp_path / "a/owner-1", tmp_path / "b/owner-1")
    calls = [[*on(host), ["restore"]] for host in "ab"]
    for message in refused(jobs, tmp_path, calls, kind="fsdp2"):
        assert "has its model in one file on one host" in message


def test_a_rank_is_killed_while_the_new_cut_is_written(jobs: Jobs, tmp_path: Path) -> None:
    store = tmp_path / "hosts"
    steps = expected(jobs, tmp_path / "plain", 4)
    go_on(jobs, store, FOUR, 1)
    go_on(jobs, store, FOUR, 2)
    calls = [[*host, *AGAIN, ["close"]] for host in TWO]
    calls[1].insert(3, ["kill_at", "create", "owner-2"])
    ranks = jobs.run(store, calls, **SETTING)
    assert ranks[1].status == -9, ranks[1].outcomes
    first = int(newest(store / "a").name.removeprefix("step-"))
    assert first in (2, 3), "nothing that was sealed is lost"
    assert go_on(jobs, store, MORE, first + 1) == steps[first + 1]
    verified(store / "a", store / "b", store / "bc")
