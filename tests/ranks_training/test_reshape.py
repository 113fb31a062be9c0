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
from tests.ranks_training.calls import Model
from tests.ranks_training.rank_server import Jobs, Rank
from tests.stores.files import flip_on_disk

STEPS = 2
"""Steps that each job of a chain takes."""

WIDTHS = (40, 60, 50, 30)
"""Layers of about 7,000 elements together, so that there are several chunks of 1024."""

CHAIN = [(4, "ddp"), (2, "ddp"), (1, "one"), (3, "ddp"), (4, "fsdp2"), (2, "fsdp2"), (1, "one")]
TENSORS = [(2, "tp"), (3, "ddp"), (2, "tp"), (2, "fsdp2"), (1, "one")]
GRID = [(4, "ddp"), (2, "fsdp2"), (1, "one"), (4, "grid"), (1, "one")]
SHARDS = [(2, "fsdp2"), (3, "ddp"), (1, "one")]
REPLICAS = [(3, "ddp"), (1, "one"), (2, "ddp"), (1, "one")]

GO_ON = [
    ["open"],
    ["restore"],
    ["step", STEPS],
    ["checkpoint"],
    ["result"],
    ["whole"],
    ["close"],
]


def job(jobs: Jobs, folder: Path, num: int, kind: str, calls: Any, **setting: Any) -> list[Rank]:
    """Run calls on some ranks."""
    return jobs.run(folder, [calls] * num, given=True, kind=kind, **{"widths": WIDTHS, **setting})


def succeeded(ranks: list[Rank]) -> list[Rank]:
    for rank in ranks:
        assert not rank.failed(), [one for one in rank.outcomes if one["error"]]
        assert rank.has_come_to_its_end, rank.errors
    return ranks


def go_on(jobs: Jobs, folder: Path, num: int, kind: str, first: int, **setting: Any) -> Any:
    """Let ranks continue from the newest checkpoint, step, and seal; return their parameters."""
    ranks = succeeded(job(jobs, folder, num, kind, GO_ON, **setting))
    for rank in ranks:
        restored = rank.of("restore")["value"]
        assert (restored and restored[0]) == (first or None)
        assert rank.of("result")["value"] == first + STEPS
        assert rank.of("whole")["value"] == ranks[0].of("whole")["value"]
    return ranks[0].of("whole")["value"]


def expected(jobs: Jobs, folder: Path, last: int, **setting: Any) -> list[Any]:
    """Return what parameters are after each step in one process, which is not interrupted."""
    folder.mkdir()
    calls = [["open"], *[["step"], ["whole"]] * last]
    if not setting.get("is_plain"):
        calls += [["checkpoint"], ["result"]]
    (rank,) = succeeded(job(jobs, folder, 1, "one", calls, **setting))
    return [one["value"] for one in rank.outcomes if one["call"] == "whole"]


@pytest.mark.parametrize(
    ("chain", "options"),
    [
        (CHAIN, {}),
        (TENSORS, {}),
        (GRID, {}),
        (SHARDS, {"master": "split"}),
        (SHARDS, {"state_dtype": "bfloat16"}),
        (REPLICAS, {"state_dtype": "int8"}),
    ],
    ids=["exact", "tensor-parallel", "tensor-parallel-and-fsdp2", "split", "bfloat16", "int8"],
)
def test_a_chain_has_the_bits_of_one_process_that_was_never_interrupted(
    jobs: Jobs, tmp_path: Path, chain: list[tuple[int, str]], options: dict[str, Any]
) -> None:
    last = STEPS * len(chain)
    is_plain = "state_dtype" not in options
    steps = expected(jobs, tmp_path / "whole", last, is_plain=is_plain, options=options)
    if is_plain:
        assert steps == expected(jobs, tmp_path / "offloaded", last, options=options)
    for number, (num, kind) in enumerate(chain):
        found = go_on(jobs, tmp_path, num, kind, STEPS * number, options=options)
        assert found == steps[STEPS * (number + 1) - 1], (number, num, kind)
        with offload.open_checkpoint(tmp_path / "run") as checkpoint:
            assert checkpoint.verify().ok
    assert_same_state(newest(tmp_path), newest(tmp_path / ("offloaded" if is_plain else "whole")))


def newest(folder: Path) -> Path:
    return max((folder / "run").glob("step-*"))


def assert_same_state(left: Path, right: Path) -> None:
    """Compare all state of two checkpoints of one process, by torch's own names."""
    names = {path.name for path in left.glob("*.safetensors")} - {"train_state.safetensors"}
    assert {"exp_avg.safetensors", "exp_avg_sq.safetensors", "model.safetensors"} <= names
    for name in names:
        one, other = load_file(left / name), load_file(right / name)
        assert one.keys() == other.keys()
        for key, tensor in one.items():
            assert bits(tensor).equal(bits(other[key])), (name, key)


def test_each_rank_gets_the_train_state_of_rank_0(jobs: Jobs, tmp_path: Path) -> None:
    go_on(jobs, tmp_path, 3, "ddp", 0)
    for num, kind in ((2, "ddp"), (1, "one")):
        for rank in succeeded(job(jobs, tmp_path, num, kind, [["open"], ["restore"]])):
            assert rank.of("restore")["value"] == [2, {"step": 2, "rank": 0}]
    with offload.open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.train_states == [{"step": 2, "rank": rank} for rank in range(3)]


def test_old_checkpoints_stay_and_parts_of_former_owners_go(jobs: Jobs, tmp_path: Path) -> None:
    go_on(jobs, tmp_path, 3, "ddp", 0)
    go_on(jobs, tmp_path, 3, "ddp", 2)
    go_on(jobs, tmp_path, 1, "one", 4)
    run = tmp_path / "run"
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000004", "step-00000006"]
    assert [*run.glob("owner-*/part-*/exp_avg.safetensors")], "step 4 has state of all ranks"
    with offload.open_checkpoint(run / "step-00000004") as checkpoint:
        assert checkpoint.verify().ok
    calls = [["open"], ["restore"], *[["step"], ["checkpoint"], ["result"]] * 3, ["close"]]
    succeeded(job(jobs, tmp_path, 1, "one", calls))
    assert not [*run.glob("owner-*/part-*")]
    assert len([*run.glob("step-*")]) == 2
    go_on(jobs, tmp_path, 2, "fsdp2", 9)


def test_a_checkpoint_before_any_step_stores_the_new_cut(jobs: Jobs, tmp_path: Path) -> None:
    before = go_on(jobs, tmp_path, 2, "fsdp2", 0)
    calls = [["open"], ["restore"], ["checkpoint"], ["result"], ["whole"], ["close"]]
    (rank,) = succeeded(job(jobs, tmp_path, 1, "one", calls))
    assert rank.of("whole")["value"] == before
    alone = tmp_path / "alone"
    alone.mkdir()
    go_on(jobs, alone, 1, "one", 0)
    assert_same_state(newest(tmp_path), newest(alone))


def test_int8_state_is_not_cut_within_a_block(jobs: Jobs, tmp_path: Path) -> None:
    options = {"options": {"state_dtype": "int8"}}
    go_on(jobs, tmp_path, 2, "fsdp2", 0, **options)
    before = {path: path.read_bytes() for path in newest(tmp_path).iterdir()}
    for rank in job(jobs, tmp_path, 3, "fsdp2", [["open"], ["restore"]], **options):
        found = rank.of("restore")
        assert found["error"] == "MismatchError"
        assert "8-bit state has one scale for 32" in found["message"]
        assert "call restore(reencode=True) on every rank" in found["message"]
    assert before == {path: path.read_bytes() for path in newest(tmp_path).iterdir()}
    go_on(jobs, tmp_path, 2, "fsdp2", 2, **options)


def test_a_part_that_is_missing_is_named(jobs: Jobs, tmp_path: Path) -> None:
    go_on(jobs, tmp_path, 3, "ddp", 0)
    shutil.rmtree(tmp_path / "run" / "owner-2")
    (rank,) = job(jobs, tmp_path, 1, "one", [["open"]])
    assert "owner-2" in rank.of("open")["message"]
    for rank in job(jobs, tmp_path, 2, "ddp", [["open"]]):
        assert "owner 2" in rank.of("open")["message"]


@pytest.mark.parametrize(("num", "kind"), [(2, "fsdp2"), (1, "one")])
def test_a_damaged_part_of_another_owner_is_found_in_the_first_step(
    jobs: Jobs, tmp_path: Path, num: int, kind: str
) -> None:
    for first in (0, 2):
        go_on(jobs, tmp_path, 3, "ddp", first)
    with offload.open_checkpoint(tmp_path / "run") as checkpoint:
        file = Path(checkpoint.owners[1].path) / "exp_avg.safetensors"
    assert file.parent.parent == tmp_path / "run/owner-2"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    ranks = job(jobs, tmp_path, num, kind, [["open"], ["restore"], ["step"]])
    said = [one["message"] for rank in ranks for one in rank.outcomes]
    assert any(f"{file}: bytes" in message and "damaged" in message for message in said), said
    with pytest.raises(offload.CheckpointError, match="quarantined"):
        offload.open_checkpoint(newest(tmp_path))
    again = succeeded(job(jobs, tmp_path, num, kind, GO_ON))
    assert all(rank.of("restore")["value"][0] == 2 for rank in again)


@pytest.mark.parametrize(("num", "kind"), [(2, "fsdp2"), (1, "one")])
def test_a_restore_into_another_cut_that_fails_leaves_no_file_open(
    jobs: Jobs, tmp_path: Path, num: int, kind: str
) -> None:
    """A lock on a part that stays would keep others from ever writing it again."""
    go_on(jobs, tmp_path, 3, "ddp", 0)
    file = newest(tmp_path) / "model.safetensors"
    flip_on_disk(file, file.stat().st_size - 100)
    calls: Any = [["open"], ["keep_error", "restore"], ["open_files", "owner-2"]]
    for rank in job(jobs, tmp_path, num, kind, calls):
        assert rank.of("keep_error")["value"] == "DamagedError"
        assert rank.of("open_files")["value"] == []


def test_a_full_drive_is_noticed_before_anything_is_written(jobs: Jobs, tmp_path: Path) -> None:
    go_on(jobs, tmp_path, 2, "ddp", 0)
    before = contents(tmp_path / "run")
    for num, kind in ((3, "ddp"), (1, "one")):
        calls = [["open"], ["fill_drive", 8192], ["restore"]]
        for rank in job(jobs, tmp_path, num, kind, calls):
            assert rank.of("restore")["error"] == "StoreFullError"
            assert "new slot of" in rank.of("restore")["message"]
        assert contents(tmp_path / "run") == before
    go_on(jobs, tmp_path, 1, "one", 2)


def contents(run: Path) -> dict[Path, bytes]:
    """Return all files of checkpoints and parts."""
    return {path: path.read_bytes() for path in run.rglob("*/*.*") if path.is_file()}


def test_memory_is_that_of_the_ring_and_a_constant(jobs: Jobs, tmp_path: Path) -> None:
    """The state is 192 MiB, the ring 18, and the chunks that are read have 2 leaves."""
    setting = {
        "widths": (2048, 4096, 2048),
        "options": {"chunk_bytes": 2 << 20, "ring_chunks": 3, "allow_volatile": True},
    }
    steps = expected(jobs, tmp_path / "whole", 4, is_plain=True, widths=setting["widths"])
    calls = [["open"], ["step"], ["checkpoint"], ["result"], ["close"]]
    succeeded(job(jobs, tmp_path, 2, "fsdp2", calls, **setting))
    grown = []
    for done, (num, kind) in enumerate([(1, "one"), (2, "ddp"), (2, "ddp")], 1):
        calls = [["open"], ["at", done], ["backward"], ["reset_peak"], ["restore"], ["update"]]
        calls += [["grown"], ["whole"], ["checkpoint"], ["result"], ["close"]]
        ranks = succeeded(job(jobs, tmp_path, num, kind, calls, **setting))
        grown.append(max(rank.of("grown")["value"] for rank in ranks))
        assert all(rank.of("whole")["value"] == steps[done] for rank in ranks)
    into_one, into_ranks, as_before = grown
    assert into_one < (18 + 64) << 20
    assert into_ranks < as_before + (64 << 20)


def test_load_parameters_reads_what_several_ranks_have_written(jobs: Jobs, tmp_path: Path) -> None:
    go_on(jobs, tmp_path, 3, "fsdp2", 0)
    torch.manual_seed(99)
    model = Model(WIDTHS).bfloat16()
    assert offload.load_parameters(model, tmp_path / "run") == 2
    found = load_file(newest(tmp_path) / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert bits(tensor).equal(bits(found[name])), name


@pytest.mark.parametrize(
    ("num", "kind", "what", "path", "nth"),
    [
        (1, "one", "create", "exp_avg.safetensors", 1),
        (2, "fsdp2", "write", "exp_avg.safetensors", 2),
        (1, "one", "sync", "exp_avg.safetensors", 1),
        (2, "fsdp2", "rename", "", 1),
        (1, "one", "rename", "", 2),
    ],
)
def test_a_rank_is_killed_while_the_new_cut_is_written(
    jobs: Jobs, tmp_path: Path, num: int, kind: str, what: str, path: str, nth: int
) -> None:
    steps = expected(jobs, tmp_path / "whole", 8, is_plain=True)
    go_on(jobs, tmp_path, 3, "ddp", 0)
    go_on(jobs, tmp_path, 3, "ddp", 2)
    calls = [["open"], ["restore"], ["kill_at", what, path, nth], *GO_ON[2:]]
    ranks = jobs.run(
        tmp_path,
        [calls, *[[*GO_ON]] * (num - 1)],
        given=True,
        kind=kind,
        widths=WIDTHS,
    )
    assert ranks[0].status == -9, ranks[0].outcomes
    first = int(newest(tmp_path).name.removeprefix("step-"))
    assert first in (4, 6), "nothing that was sealed is lost"
    assert go_on(jobs, tmp_path, 2, "ddp", first) == steps[first + 1]
    with offload.open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.verify().ok
