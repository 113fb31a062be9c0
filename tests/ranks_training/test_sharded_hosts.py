"""FSDP2 over several hosts: each rank has its shard of the model on its own host.

The hosts are directories of one machine, as in `test_hosts`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import offload
from offload.errors import CheckpointError, DamagedError
from tests.numerics.reference import bits
from tests.ranks_training.calls import Model
from tests.ranks_training.rank_server import Jobs
from tests.ranks_training.test_hosts import ROUND, names, on, refused, run_all
from tests.ranks_training.test_readers import content

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WIDTHS = (5, 7, 3)
SHARD = "model/shard-{:05}-model-00001-of-00001.safetensors"


def flip(path: Path) -> None:
    """Change the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def newest_shard(folder: Path, owner: int) -> Path:
    """Return the shard file of the part that an owner on host b has written last."""
    tables = (folder / f"b/owner-{owner}").glob("part-*/table.json")
    return max(tables, key=lambda path: path.stat().st_mtime_ns).parent / SHARD.format(owner + 1)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Return whether tensors have the same names, dtypes and bits."""
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(bits(left[n]), bits(right[n])) for n in left
    )


@pytest.mark.parametrize(("hosts", "kind"), [("ab", "fsdp2"), ("aabb", "fsdp2"), ("ab", "mixed")])
def test_stopped_and_resumed_they_have_the_bits_of_memory(
    jobs: Jobs, tmp_path: Path, hosts: str, kind: str
) -> None:
    plain, several = tmp_path / "plain", tmp_path / "several"
    plain.mkdir()
    several.mkdir()
    size, setting = len(hosts), {"kind": kind, "given": kind == "mixed"}
    in_memory = [["open"], ["step"], ["step"], ["step"], ["write_values", "values.safetensors"]]
    expected = run_all(jobs, plain, [in_memory] * size, **setting, is_plain=True)
    begin, again = [*ROUND, *ROUND], [["restore"], *ROUND]
    run_all(jobs, several, [[*on(host), *begin] for host in hosts], **setting)
    found = run_all(jobs, several, [[*on(host), *again] for host in hosts], **setting)
    assert [rank.of("restore")["value"] for rank in found] == [
        [2, {"step": 2, "rank": number}] for number in range(size)
    ]
    wanted = [[o["value"] for o in rank.outcomes if o["call"] == "step"][-1] for rank in expected]
    assert [rank.of("step")["value"] for rank in found] == wanted
    assert names(several) == sorted(
        [f"{host}/owner-{rank}" for rank, host in enumerate(hosts) if rank]
        + ["a/step-00000002", "a/step-00000003"]
    )
    step = several / "a/step-00000003"
    assert not (step / "model.safetensors").exists()
    assert (step / SHARD.format(1)).exists()
    with offload.open_checkpoint(several / "a", parts=[several / "b"]) as checkpoint:
        report = checkpoint.verify()
        assert (report.ok, report.not_seen) == (True, ())
        assert checkpoint.train_states == [{"step": 3, "rank": rank} for rank in range(size)]
        offload.export_checkpoint(checkpoint, tmp_path / "hf", "hf")
    assert same(
        load_file(tmp_path / "hf/model.safetensors"), load_file(plain / "values.safetensors")
    )


def test_exports_are_byte_for_byte_those_of_one_host(jobs: Jobs, tmp_path: Path) -> None:
    """Also of copies of the directories, which one host sees; and the model is loaded from them."""
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    run_all(jobs, one, [[["open"], *ROUND]] * 2, kind="fsdp2")
    run_all(jobs, several, [[*on(host), *ROUND] for host in "ab"], kind="fsdp2")
    for name in "ab":
        shutil.copytree(several / name, tmp_path / "copies" / name)
    shutil.rmtree(several)
    store, parts = tmp_path / "copies/a", [tmp_path / "copies/b"]
    for kind in ("pt", "hf", "safetensors", "dcp"):
        found = []
        for path, given in ((one / "run", []), (store, parts)):
            with offload.open_checkpoint(path, parts=given) as checkpoint:
                offload.export_checkpoint(checkpoint, path.parent / kind, kind)
            found.append(content(path.parent / kind))
            found[-1].pop(".metadata", None)  # torch puts a random number into the file
        assert found[0] == found[1], kind
    values = load_file(one / "hf/model.safetensors")
    model = Model(WIDTHS).bfloat16()
    with pytest.raises(CheckpointError, match=r"the part of owner 1 .* not seen here"):
        offload.load_parameters(model, store)
    assert offload.load_parameters(model, store, parts=parts) == 1
    assert same(dict(model.state_dict()), values)
    lacking = pytest.raises(CheckpointError, match=r"owner 1 \(sealed at .*parts=")
    with offload.open_checkpoint(store) as checkpoint, lacking:
        offload.export_checkpoint(checkpoint, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_torch_reads_the_shard_files_if_they_are_in_one_folder(jobs: Jobs, tmp_path: Path) -> None:
    """With four ranks, some of them have no elements of a small parameter."""
    run_all(jobs, tmp_path, [[*on(host), *ROUND] for host in "aabb"], kind="fsdp2")
    folder = tmp_path / "joined"
    folder.mkdir()
    for path in [*tmp_path.glob("*/step-*/model/*"), *tmp_path.glob("*/owner-*/part-*/model/*")]:
        shutil.copy(path, folder)
    assert len([*folder.iterdir()]) == 4
    model = Model(WIDTHS).bfloat16()
    offload.load_parameters(model, tmp_path / "a", parts=[tmp_path / "b"])
    found = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert same(found, dict(model.state_dict()))


def test_a_flipped_byte_in_a_shard_file_is_found_and_named(jobs: Jobs, tmp_path: Path) -> None:
    """By verification, and by restore(), which goes on from the checkpoint before."""
    run_all(jobs, tmp_path, [[*on(host), *ROUND, *ROUND] for host in "ab"], kind="fsdp2")
    path = newest_shard(tmp_path, 1)
    flip(path)
    with offload.open_checkpoint(tmp_path / "a", parts=[tmp_path / "b"]) as checkpoint:
        report = checkpoint.verify()
        assert [str(path) in problem for problem in report.problems] == [True]
        assert [where for where, _ in report.damaged_parts] == [str(path.parent.parent)]
        with pytest.raises(DamagedError, match=str(path)):
            offload.export_checkpoint(checkpoint, tmp_path / "out", "hf")
    with pytest.raises(DamagedError, match=str(path)):
        offload.load_parameters(Model(WIDTHS).bfloat16(), tmp_path / "a", parts=[tmp_path / "b"])
    for rank in run_all(
        jobs, tmp_path, [[*on(host), ["restore"], *ROUND] for host in "ab"], kind="fsdp2"
    ):
        assert rank.of("restore")["value"][0] == 1
        assert rank.of("result")["value"] == 2
    with offload.open_checkpoint(tmp_path / "a", parts=[tmp_path / "b"]) as checkpoint:
        assert (checkpoint.step, checkpoint.verify().ok) == (2, True)


@pytest.mark.parametrize(
    ("victim", "kind", "text"),
    [
        (1, "sync", "b/owner-1/part-2/model"),
        (0, "rename", "step-"),
        pytest.param(1, "write_bytes", "b/owner-1/part-2/model", marks=pytest.mark.slow),
        pytest.param(1, "sync_dir", "b/owner-1/part-2/model", marks=pytest.mark.slow),
        pytest.param(1, "write_bytes", "b/owner-1/part-2/table.json", marks=pytest.mark.slow),
        pytest.param(0, "sync_dir", "model", marks=pytest.mark.slow),
        pytest.param(0, "sync_dir", "a", marks=pytest.mark.slow),
    ],
)
def test_a_rank_is_killed_in_a_seal_and_the_hosts_resume_one_step(
    jobs: Jobs, tmp_path: Path, victim: int, kind: str, text: str
) -> None:
    begun = [*ROUND, ["kill_at", kind, text], ["train", 9, 1]]
    calls = [
        on(host) + [one for one in begun if rank == victim or one[0] != "kill_at"]
        for rank, host in enumerate("ab")
    ]
    ranks = jobs.run(tmp_path, calls, kind="fsdp2")
    assert ranks[victim].status == -9
    assert ranks[1 - victim].has_come_to_its_end, ranks[1 - victim].errors
    durable = [one["value"] for rank in ranks for one in rank.outcomes if one["call"] == "sealed"]
    again = [["restore"], *ROUND, *ROUND]
    found = run_all(jobs, tmp_path, [[*on(host), *again] for host in "ab"], kind="fsdp2")
    (step,) = {rank.of("restore")["value"][0] for rank in found}
    assert step >= max(durable, default=1)
    with offload.open_checkpoint(tmp_path / "a", parts=[tmp_path / "b"]) as checkpoint:
        assert checkpoint.verify().ok
    expected = tmp_path / "plain"
    expected.mkdir()
    in_memory = [["open"], *[["step"]] * (step + 2)]
    plain = run_all(jobs, expected, [in_memory] * 2, kind="fsdp2", is_plain=True)
    last = [[o["value"] for o in rank.outcomes if o["call"] == "step"][-1] for rank in plain]
    assert [[o["value"] for o in r.outcomes if o["call"] == "step"][-1] for r in found] == last


def test_a_seal_that_fails_on_one_host_leaves_the_checkpoints_whole(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The next seal goes into the same part; no checkpoint named it."""
    calls = []
    for host in "ab":
        failing = [["fail", "sync", "owner-1/part-2/model", 1]] if host == "b" else []
        calls.append([*on(host), *ROUND, *failing, ["step"], ["checkpoint"], ["settle"], ["close"]])
    ranks = jobs.run(tmp_path, calls, kind="fsdp2")
    for rank in ranks:
        assert "owner-1/part-2/model" in rank.of("settle")["value"], rank.outcomes
    with offload.open_checkpoint(tmp_path / "a", parts=[tmp_path / "b"]) as checkpoint:
        assert (checkpoint.step, checkpoint.verify().ok) == (1, True)
    found = run_all(jobs, tmp_path, [[*on(h), ["restore"], *ROUND] for h in "ab"], kind="fsdp2")
    assert [rank.of("result")["value"] for rank in found] == [2, 2]


def test_parts_with_shard_files_are_used_again_and_pinned_ones_are_kept(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Each host keeps two checkpoints, a pinned one, and one part to write; unchanged: none."""
    calls = [*ROUND, ["pin", "first"], *ROUND, *ROUND, *ROUND, ["checkpoint"], ["result"]]
    run_all(jobs, tmp_path, [[*on(host), *calls] for host in "ab"], kind="fsdp2")
    steps = [1, 3, 4]
    assert [path.name for path in sorted((tmp_path / "a").glob("step-*"))] == [
        f"step-{step:08}" for step in steps
    ]
    for step in steps:
        path = tmp_path / f"a/step-{step:08}"
        with offload.open_checkpoint(path, parts=[tmp_path / "b"]) as checkpoint:
            assert checkpoint.verify().ok
    assert len([*(tmp_path / "b/owner-1").glob("part-*")]) <= 4
    restored = [["restore", 1], ["bits"], ["unpin", "first"], *ROUND, *ROUND]
    run_all(
        jobs,
        tmp_path,
        [[*on(host), ["restore", 1, {"discard_newer": True}], *restored[1:]] for host in "ab"],
        kind="fsdp2",
    )
    with offload.open_checkpoint(tmp_path / "a", parts=[tmp_path / "b"]) as checkpoint:
        assert (checkpoint.step, checkpoint.verify().ok) == (3, True)


def test_each_host_says_what_it_sees_of_a_sharded_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    run_all(jobs, tmp_path, [[*on(host), *ROUND] for host in "ab"], kind="fsdp2")
    part = str(tmp_path / "b/owner-1/part-1")
    (info,) = offload.list_checkpoints(tmp_path / "a", parts=[])
    assert (info.valid, info.not_seen) == (True, (part,))
    with offload.open_checkpoint(tmp_path / "a", parts=[]) as checkpoint:
        report = checkpoint.verify()
        assert (report.ok, report.not_seen) == (True, (part,))
        with pytest.raises(CheckpointError, match="owner 1"):
            offload.export_checkpoint(checkpoint, tmp_path / "out", "safetensors")
    with offload.open_checkpoint(tmp_path / "a", parts=[tmp_path / "b"]) as checkpoint:
        sizes = checkpoint.files
        assert sizes[SHARD.format(1)] == (Path(checkpoint.path) / SHARD.format(1)).stat().st_size
        assert sizes[f"{part}/{SHARD.format(2)}"] == Path(part, SHARD.format(2)).stat().st_size
    with pytest.raises(CheckpointError, match=r"owner-1/part-1 of generation 1\).*look there"):
        offload.open_checkpoint(tmp_path / "b")


def test_tensor_parallel_layers_over_hosts(jobs: Jobs, tmp_path: Path) -> None:
    """Columns of one host alternate with those of another; shard files have any box."""
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    setting = {"kind": "tp", "widths": (6, 8, 4), "given": True}
    run_all(jobs, one, [[["open"], *ROUND]] * 2, **setting)
    expected = run_all(jobs, one, [[["open"], ["restore"], *ROUND]] * 2, **setting)
    run_all(jobs, several, [[*on(host), *ROUND] for host in "ab"], **setting)
    again = [["restore"], *ROUND]
    found = run_all(jobs, several, [[*on(host), *again] for host in "ab"], **setting)
    assert [r.of("step")["value"] for r in found] == [r.of("step")["value"] for r in expected]
    for kind in ("hf", "safetensors"):
        for path, given in ((one / "run", []), (several / "a", [several / "b"])):
            with offload.open_checkpoint(path, parts=given) as checkpoint:
                assert checkpoint.verify().ok
                offload.export_checkpoint(checkpoint, path.parent / kind, kind)
        assert content(one / kind) == content(several / kind)


def test_a_sharded_checkpoint_goes_on_where_all_parts_are_seen(jobs: Jobs, tmp_path: Path) -> None:
    """In the same sharding, with other ranks, and by one process; then there is one model file."""
    run_all(jobs, tmp_path, [[*on(host), *ROUND] for host in "ab"], kind="fsdp2", given=True)
    shutil.move(tmp_path / "b/owner-1", tmp_path / "a/owner-1")
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "run")
    store = tmp_path / "run"
    go_on = [["open"], ["restore"], *ROUND, ["whole"], ["close"]]
    whole = [["open"], *[["step"]] * 5, ["whole"]]
    (tmp_path / "plain").mkdir()
    for step, (num, kind) in enumerate([(2, "fsdp2"), (3, "ddp"), (1, "one"), (2, "fsdp2")], 2):
        found = run_all(jobs, tmp_path, [go_on] * num, kind=kind, given=True)
        assert found[0].of("result")["value"] == step
        assert (store / f"step-{step:08}/model.safetensors").exists()
        with offload.open_checkpoint(store) as checkpoint:
            assert checkpoint.verify().ok
    (plain,) = run_all(jobs, tmp_path / "plain", [whole], kind="one", given=True, is_plain=True)
    assert found[0].of("whole")["value"] == plain.of("whole")["value"]


def test_other_ranks_on_the_hosts_are_refused_by_name(jobs: Jobs, tmp_path: Path) -> None:
    run_all(jobs, tmp_path, [[*on(host), *ROUND] for host in "ab"], kind="fsdp2")
    before = names(tmp_path)
    for message in refused_restores(jobs, tmp_path, "abb"):
        assert "several hosts" in message
    for message in refused(jobs, tmp_path, [on(host) for host in "ac"]):
        assert "has parts of owner 1, and no rank sees them" in message
    assert [name for name in names(tmp_path) if "step" in name] == [
        n for n in before if "step" in n
    ]
    found = run_all(jobs, tmp_path, [[*on(h), ["restore"], *ROUND] for h in "ab"], kind="fsdp2")
    assert [rank.of("result")["value"] for rank in found] == [2, 2]


def test_a_model_in_one_file_does_not_go_on_in_shards_of_several_hosts(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The state of both ranks would be seen; the model of the second one would not."""
    run_all(jobs, tmp_path, [[*on("a", "a"), *ROUND], [*on("a", "a"), *ROUND]], kind="fsdp2")
    (tmp_path / "b").mkdir()
    shutil.move(tmp_path / "a/owner-1", tmp_path / "b/owner-1")
    for message in refused_restores(jobs, tmp_path, "ab"):
        assert "has its model in one file on one host" in message


def refused_restores(jobs: Jobs, folder: Path, hosts: str) -> list[str]:
    """Let ranks with shards restore, which must fail on all of them; return the messages."""
    calls = [[*on(host), ["restore"]] for host in hosts]
    ranks = jobs.run(folder, calls, kind="fsdp2")
    assert all(rank.of("restore")["error"] for rank in ranks), [rank.outcomes for rank in ranks]
    return [rank.of("restore")["message"] for rank in ranks]
