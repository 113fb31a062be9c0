"""Readers of a store that several ranks have made: on the node that sees everything, and on others.

The ranks have the model in a common file, or each its boxes of it in a shard file.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gds import Backend, LockHeldError, MemoryBackend, PosixBackend, WrapperBackend
from gds.contract import Stat
from offload import CheckpointError, DamagedError, list_checkpoints, load_parameters
from offload import open_checkpoint as opened
from offload.format import Layout
from offload.format.document import digest_of
from tests.command_line import Run
from tests.crash.fault_backend import FaultBackend
from tests.format.spec_reader import (
    check_model_boxes,
    model_of_shards,
    owned_state,
    owner_parts,
    read_manifest,
)
from tests.ranks_store import job
from tests.ranks_store.job import LAYOUTS, MODEL, SHAPES, Job, made
from tests.stores.files import flip_on_disk, remove_tree
from tests.stores.small import memory_store

NUM_ELEMENTS = sum(layout.num_elements for layout in LAYOUTS)
NEWEST = "step-00000002"
SHARD = "model/shard-{:05}-model-00001-of-00001.safetensors"


@pytest.fixture(params=[False, True], ids=["common file", "shard files"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The store of two ranks of one host, with checkpoints of steps 1 and 2."""
    return made(tmp_path / "run", tmp_path / "run", sharded=request.param)


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """The same, of two nodes that do not see each other's directory."""
    made(tmp_path / "run", tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rename(tmp_path / "other node")
    return tmp_path / "run", tmp_path / "other node"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model have a digest for each KiB, as large models have one for each 16 MiB."""
    for module in ("format.shares.owners", "checkpoint.sealed_slot"):
        monkeypatch.setattr(f"offload.{module}.MODEL_BLOCK_BYTES", 1024)


def part_of(store: Path, step: int = 2) -> Path:
    body = read_manifest(store / f"step-{step:08d}")
    return store / "owner-1" / str(body["owners"][0]["name"])


def files_of(store: Path) -> list[Path]:
    """Return all files of the newest checkpoint."""
    folders = (store / NEWEST, part_of(store))
    return [path for folder in folders for path in folder.rglob("*") if path.is_file()]


@pytest.mark.usefixtures("small_pieces")
def test_every_byte_of_all_owners_is_verified_and_counted(store: Path) -> None:
    with opened(store) as checkpoint:
        report = checkpoint.verify()
        assert report.ok
        assert report.not_seen == ()
        state = sum(layout.state_bytes for layout in LAYOUTS)
        assert report.bytes_checked == state + sum(tensor.nbytes for tensor in MODEL)
        assert checkpoint.num_parameters == NUM_ELEMENTS
        assert checkpoint.state_arrays == dict.fromkeys(job.ARRAYS, 4 * NUM_ELEMENTS)
        on_disk = sum(path.stat().st_size for path in files_of(store))
        assert sum(checkpoint.files.values()) == on_disk


@pytest.mark.usefixtures("small_pieces")
def test_a_flipped_bit_is_found_and_marked_wherever_it_is(store: Path, run: Run) -> None:
    """A marked part takes its checkpoint out of use, until it is found to be repaired."""
    files = [path for path in files_of(store) if re.search("exp_avg|model", path.name)]
    assert len(files) == (4 if (store / NEWEST / "model").exists() else 3)
    for path in files:
        flip_on_disk(path, path.stat().st_size - 5)
        with opened(store) as checkpoint:
            (problem,) = checkpoint.verify().problems
        assert str(path) in problem
        assert run("verify", store, "--quarantine")[0] == 1
        mark = next(at for at in (store / NEWEST, part_of(store)) if at in path.parents)
        assert [*store.rglob("damaged.txt")] == [mark / "damaged.txt"]
        with pytest.warns(RuntimeWarning, match="quarantined"), opened(store) as checkpoint:
            assert checkpoint.step == 1
        with pytest.raises(DamagedError):
            opened(store / NEWEST)
        flip_on_disk(path, path.stat().st_size - 5)
        with opened(store / NEWEST, even_quarantined=True) as checkpoint:
            assert checkpoint.quarantined
            assert checkpoint.verify().ok
        assert run("verify", store, "--quarantine")[0] == 0
        assert [*store.rglob("damaged.txt")] == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((40, 90), "the state .*'embed': the owners hold 2000 elements of 1800"),
        ((45, 85), r"the state .*'embed': .*\[0:50, 0:20\] and \[45:85, 0:20\] overlap"),
        ((60, 90), "the state .*'embed': the owners hold 1600 elements of 1800"),
        (None, "model.safetensors .*'head': the owners hold 0 elements of 1200"),
    ],
    ids=["overlap", "overlap and gap", "gap", "model"],
)
def test_boxes_that_overlap_or_leave_a_gap_are_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
    change: tuple[int, int] | None,
    reason: str,
) -> None:
    """Every digest is right, and the ranks have divided the tensors wrongly."""
    if change:
        wrong = Layout((job.rows("embed", *change), job.rows("head", 0, 40)), MODEL, 1024)
        monkeypatch.setattr(job, "LAYOUTS", (LAYOUTS[0], wrong))
    else:
        monkeypatch.setattr(job, "WHOLE", job.WHOLE[:2])
    made(tmp_path / "run", tmp_path / "run")
    with opened(tmp_path / "run") as checkpoint:
        (problem,) = checkpoint.verify().problems
    assert re.search(reason, problem)
    status, _, errors = run("verify", tmp_path / "run")
    assert status == 1
    assert "do not have each element once" in errors


def test_a_copy_marks_nothing_in_the_original(nodes: tuple[Path, Path], run: Run) -> None:
    one, other = nodes
    original = other.rename(one.parent / "elsewhere")
    for path in original.glob("owner-1/part-*/exp_avg.safetensors"):
        flip_on_disk(path, path.stat().st_size - 5)
    assert run("verify", one, "--quarantine")[0] == 1
    assert [*one.parent.rglob("damaged.txt")] == []
    assert run("verify", one, "--part", original, "--quarantine")[0] == 1
    assert len([*original.rglob("damaged.txt")]) == 2


def test_a_node_that_sees_one_owner_checks_it_and_names_the_others(
    nodes: tuple[Path, Path], run: Run
) -> None:
    one, other = nodes
    part = one.parent / "elsewhere/owner-1" / part_of(one).name
    for parts, not_seen, num in (([], (str(part),), LAYOUTS[0].num_elements), ([other], (), None)):
        with opened(one, parts=parts or None) as checkpoint:
            report = checkpoint.verify()
            assert report.ok
            assert report.not_seen == not_seen
            assert checkpoint.num_parameters == (num or NUM_ELEMENTS)
        listed = list_checkpoints(one, parts=parts or None)
        assert [(len(info.not_seen), info.valid) for info in listed] == [(len(not_seen), True)] * 2
        for command, words in (
            ("ls", "not counted"),
            ("verify", "not checked"),
            ("show", "owner 1"),
        ):
            code, out, _ = run(command, one, *(text for at in parts for text in ("--part", at)))
            assert code == 0
            assert ("not seen here" in out.replace("\n", "")) == bool(not_seen)
            assert words in out or not not_seen
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        opened(other)
    code, _, errors = run("ls", other)
    assert code == 1
    assert "not a store" in errors


def aborted(part: Path) -> None:
    """Have a part that was sealed for the same generation, and was not published."""
    document = json.loads((part / "table.json").read_text())
    document["body"]["scalars"][0][0][2] = "7.0"
    document["digest"] = digest_of(document["body"])
    size = (part / "table.json").stat().st_size
    (part / "table.json").write_text(json.dumps(document).ljust(size))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": shutil.rmtree,
    "aborted": aborted,
    "header": lambda part: flip_on_disk(part / "master.safetensors", 30),
    "size": lambda part: (part / "master.safetensors").write_bytes(b"x"),
    "shard gone": lambda part: (part / SHARD.format(2)).unlink(),
    "header of the shard": lambda part: flip_on_disk(part / SHARD.format(2), 40),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_part_that_is_not_that_of_the_checkpoint_refuses_it(damage: str, tmp_path: Path) -> None:
    store = made(tmp_path / "run", tmp_path / "run", sharded="shard" in damage)
    part = part_of(store)
    DAMAGE[damage](part)
    with (
        pytest.warns(RuntimeWarning, match=r"not using .*step-00000002") as warned,
        opened(store) as checkpoint,
    ):
        assert checkpoint.step == 1
    assert str(part) in str(warned[0].message)
    with pytest.raises(CheckpointError):
        opened(store / NEWEST)
    assert [info.valid for info in list_checkpoints(store)] == [True, False]
    assert (store / NEWEST / "manifest.json").exists()


@pytest.mark.parametrize("file", ["table.json", "exp_avg.safetensors"])
def test_what_cannot_be_read_is_not_called_damaged(store: Path, file: str) -> None:
    backend, path = FaultBackend(PosixBackend()), str(part_of(store) / file)
    with opened(store, backend=backend) as checkpoint:
        kind = "open" if file == "table.json" else "read"
        backend.fail_if(lambda one, at: (one, at) == (kind, path))
        report = checkpoint.verify()
    assert backend.num_failed == 1
    assert (report.problems, report.damaged_parts) == ((), ())
    (unreadable,) = report.unreadable
    assert str(part_of(store)) in unreadable


class Recycling(WrapperBackend):
    """Recycles the newest checkpoint, and removes its part, before a look at the part's table."""

    def __init__(self, inner: Backend, part: str, look: int) -> None:
        super().__init__(inner)
        self._part, self._look = part, look
        self.num_looks = 0

    def stat(self, path: str) -> Stat | None:
        if path == f"{self._part}/table.json":
            self.num_looks += 1
            if self.num_looks == self._look:
                self.inner.rename(f"{job.ONE}/{NEWEST}", f"{job.ONE}/.slot-9")
                remove_tree(self.inner, self._part)
        return super().stat(path)


def test_a_checkpoint_that_is_recycled_while_it_is_listed_is_left_out() -> None:
    for look in count(1):
        inner = MemoryBackend()
        with Job([inner, inner], keep=2, directories=(job.ONE, job.ONE)) as ranks:
            names = [ranks.seal(step).manifest.owners[0].name for step in (1, 2)]
        backend = Recycling(inner, f"{job.ONE}/owner-1/{names[-1]}", look)
        found = list_checkpoints(job.ONE, backend=backend)
        if backend.num_looks < look:
            break
        assert [(info.step, info.valid) for info in found] == [(1, True)], f"look {look}"
    assert look > 5
    assert [(info.step, info.valid) for info in found] == [(1, True), (2, True)]


def test_an_open_checkpoint_keeps_its_parts(store: Path) -> None:
    with PosixBackend() as backend:
        for path in map(str, (store / NEWEST, part_of(store))):
            with opened(store), pytest.raises(LockHeldError):
                backend.lock(path)
            backend.lock(path).release()


def test_parameters_are_loaded_if_the_digests_of_all_owners_are_there(store: Path) -> None:
    model = torch.nn.Module()
    for name, shape in SHAPES.items():
        empty = torch.zeros(shape, dtype=torch.bfloat16)
        model.register_parameter(name, torch.nn.Parameter(empty))
    assert load_parameters(model, store) == 2
    expected = model_in(store)
    for name, parameter in model.named_parameters():
        assert parameter.detach().view(torch.uint8).numpy().tobytes() == expected[name]
    shutil.rmtree(part_of(store))
    with pytest.raises(CheckpointError, match="part of owner 1"):
        load_parameters(model, store)


def model_in(store: Path) -> dict[str, bytes]:
    """Return the parameters of step 2, as the test has made them."""
    if (store / NEWEST / "model").exists():
        embed = job.shard_bytes(2, 0, "embed", 2000) + job.shard_bytes(2, 1, "embed", 1600)
        own = {
            "norm": job.shard_bytes(2, 0, "norm", 600),
            "head": job.shard_bytes(2, 1, "head", 2400),
        }
        return {"embed": embed, **own}
    header, data = Layout((), MODEL, 1024).model_header, job.model_bytes(2)
    return {name: data[entry.start : entry.stop] for name, entry in header.entries.items()}


def test_the_independent_reader_finds_every_box_of_every_owner(store: Path) -> None:
    """`tests/format/spec_reader.py` reads what `docs/format.md` says, without the library."""
    checkpoint = store / NEWEST
    body = read_manifest(checkpoint)
    ((_, part, table),) = owner_parts(checkpoint)
    shapes = {(array, name): shape for array in job.ARRAYS for name, shape in SHAPES.items()}
    whole = {key: np.full(shape, np.nan, np.float32) for key, shape in shapes.items()}
    covered = {key: np.zeros(shape, dtype=int) for key, shape in shapes.items()}
    for directory, described in ((checkpoint, body), (part, table)):
        for array, boxes in owned_state(directory, described).items():
            for (name, offsets), data in boxes.items():
                at = tuple(slice(o, o + n) for o, n in zip(offsets, data.shape, strict=True))
                whole[array, name][at] = data
                covered[array, name][at] += 1
    assert all((num == 1).all() for num in covered.values())
    chunks = (
        job.values(2, 0, "master", chunk, LAYOUTS[0].byte_range("master", chunk)[1])
        for chunk in range(LAYOUTS[0].num_chunks)
    )
    assert whole["master", "norm"].tobytes() == b"".join(chunks)[-4 * 300 :]
    if "model_file" not in body:
        assert check_model_boxes(checkpoint, body, table) == sum(t.nbytes for t in MODEL)
    else:
        found = model_of_shards(checkpoint, (part, table))
        assert {name: data.tobytes() for name, data in found.items()} == model_in(store)


def test_a_copy_is_read_without_the_original(store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    shutil.rmtree(store)
    with opened(copy) as checkpoint:
        assert [owner.path for owner in checkpoint.owners] == [str(part_of(copy))]
        assert checkpoint.verify().ok


def test_pruning_removes_parts_that_no_checkpoint_names(store: Path, run: Run) -> None:
    """Those of pinned checkpoints stay, and those of other owners."""
    other = store / "owner-3" / "part-1"
    shutil.copytree(part_of(store), other)
    old, new = part_of(store, 1), part_of(store)
    assert run("pin", store / "step-00000001", "first")[0] == 0
    for words in (("--dry-run",), (), ("--verify",)):
        assert run("prune", store, "--keep", "1", *words)[0] == 0
        assert old.exists()
    assert run("unpin", store, "first")[0] == 0
    assert run("prune", store, "--keep", "1", "--verify")[0] == 0
    assert [path.exists() for path in (old, new, other)] == [False, True, True]
    with opened(store) as checkpoint:
        assert checkpoint.verify().ok


def test_ls_names_parts_that_no_checkpoint_names(run: Run, tmp_path: Path) -> None:
    """Not the one that the next step is written to, and none if a checkpoint may name any."""
    store = made(tmp_path / "run", tmp_path / "run", last=3)
    newest, number = part_of(store, 3), "named by no checkpoint"
    assert len([*(store / "owner-1").glob("part-*")]) == 3
    assert number not in run("ls", store)[1]
    shutil.rmtree(store / "step-00000003")
    _, out, _ = run("ls", store)
    assert out.count(number) == 1
    assert f"{newest}: {number}" in out.replace("\n", " ")
    (store / NEWEST / "manifest.json").write_text("{{{")
    assert number not in run("ls", store)[1]


def test_nothing_is_pruned_if_what_is_kept_is_damaged_or_cannot_be_verified(
    nodes: tuple[Path, Path], run: Run
) -> None:
    one, other = nodes
    before = sorted(one.parent.rglob("*"))
    prune: list[Any] = ["prune", one, "--keep", "1", "--verify"]
    code, _, errors = run(*prune)
    assert code == 1
    assert "--part" in errors
    path = other / "owner-1" / part_of(one).name / "exp_avg.safetensors"
    flip_on_disk(path, path.stat().st_size - 5)
    assert run(*prune, "--part", other)[0] == 1
    assert sorted(one.parent.rglob("*")) == before
    flip_on_disk(path, path.stat().st_size - 5)
    assert run(*prune, "--part", other)[0] == 0
    assert sorted(one.parent.rglob("*")) != before


def test_a_store_that_one_process_began_and_ranks_went_on_with_is_read_as_a_whole() -> None:
    """The ranks have a directory each: the checkpoint before has no part in the second."""
    backend = memory_store(1, directory=job.ONE)
    with Job([backend, backend], keep=2) as ranks:
        ranks.seal(2)
    listed = list_checkpoints(job.ONE, parts=[job.TWO], backend=backend)
    assert [(info.step, info.valid) for info in listed] == [(1, True), (2, True)]
    for info in listed:
        with opened(info.path, parts=[job.TWO], backend=backend) as checkpoint:
            report = checkpoint.verify()
        assert report.ok
        assert report.not_seen == ()
