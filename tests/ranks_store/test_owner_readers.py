"""Readers of a store with several owners: on the node that sees everything, and on others."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gds import File, LockHeldError, MemoryBackend, PosixBackend, WrapperBackend
from offload import list_checkpoints, load_parameters, open_checkpoint
from offload.checkpoint.opening import open_for_parameters
from offload.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedError,
    UnreadableError,
)
from offload.format.document import digest_of
from offload.format.layout import Layout
from offload.retention.policy import LastK
from offload.store.maintenance.pruning import prune
from offload.store.poison import Poison
from offload.store.quarantine import verify_and_mark, write_quarantine
from tests.command_line import Run
from tests.format.spec_reader import (
    check_model_boxes,
    owned_state,
    owner_parts,
    read_manifest,
)
from tests.ranks_store import job
from tests.ranks_store.job import LAYOUTS, MODEL, ONE, SHAPES, TWO, Job, part_paths, values
from tests.stores.files import everything, flip, flip_on_disk
from tests.stores.small import memory_store

NUM_ELEMENTS = sum(layout.num_elements for layout in LAYOUTS)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The store of two ranks of one host, with checkpoints of steps 1 and 2."""
    return made(tmp_path / "run", tmp_path / "run")


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """The same, of two nodes that do not see each other's directory."""
    made(tmp_path / "run", tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rename(tmp_path / "other node")
    return tmp_path / "run", tmp_path / "other node"


def made(one: Path, two: Path, *, sharded: bool = False, last: int = 2) -> Path:
    """Seal steps 1 to `last`; return the store's first directory."""
    directories = (str(one), str(two))
    with (
        PosixBackend() as backend,
        Job([backend, backend], keep=2, directories=directories, sharded=sharded) as job,
    ):
        for step in range(1, last + 1):
            job.seal(step)
    return one


def part_of(store: Path, step: int = 2) -> Path:
    _, body = read_manifest(store / f"step-{step:08d}")
    return store / "owner-1" / str(body["owners"][0]["name"])


def test_every_byte_of_all_owners_is_verified(store: Path) -> None:
    with open_checkpoint(store) as opened:
        report = opened.verify()
        assert report.ok
        assert report.not_seen == ()
        state = sum(layout.state_bytes for layout in LAYOUTS)
        assert report.bytes_checked == state + sum(t.nbytes for t in MODEL)
        assert opened.num_parameters == NUM_ELEMENTS
        assert opened.state_arrays == dict.fromkeys(("master", "exp_avg"), 4 * NUM_ELEMENTS)
        on_disk = [*(store / "step-00000002").iterdir(), *part_of(store).iterdir()]
        assert sum(opened.files.values()) == sum(p.stat().st_size for p in on_disk)


@pytest.mark.parametrize(
    "place",
    ["step-00000002/master.safetensors", "step-00000002/model.safetensors", "owner-1"],
)
def test_a_flipped_bit_is_found_wherever_it_is(store: Path, place: str) -> None:
    path = part_of(store) / "exp_avg.safetensors" if place == "owner-1" else store / place
    flip_on_disk(path, path.stat().st_size - 5)
    with open_checkpoint(store) as opened:
        report = opened.verify()
        assert len(report.problems) == 1
        assert str(path) in report.problems[0]
        marked = verify_and_mark(opened)
    assert marked.quarantined
    mark = (part_of(store) if place == "owner-1" else store / "step-00000002") / "damaged.txt"
    assert [*store.rglob("damaged.txt")] == [mark]
    with pytest.warns(RuntimeWarning, match="quarantined"), open_checkpoint(store) as opened:
        assert opened.step == 1
    flip_on_disk(path, path.stat().st_size - 5)  # repaired
    with open_checkpoint(store / "step-00000002", even_quarantined=True) as opened:
        assert opened.quarantined
        assert not verify_and_mark(opened).quarantined
    assert [*store.rglob("damaged.txt")] == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"LAYOUTS": (40, 90)}, "the state .*'embed': the owners hold 2000 elements of 1800"),
        ({"LAYOUTS": (60, 90)}, "the state .*'embed': the owners hold 1600 elements of 1800"),
        ({"WHOLE": 2}, "model.safetensors .*'head': the owners hold 0 elements of 1200"),
    ],
    ids=["overlap", "gap", "model"],
)
def test_boxes_that_overlap_or_leave_a_gap_are_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
    change: dict[str, Any],
    reason: str,
) -> None:
    """Every digest is right, and the ranks have divided the tensors wrongly."""
    if "LAYOUTS" in change:
        cut = job.rows("embed", *change["LAYOUTS"])
        wrong = Layout((cut, job.rows("head", 0, 40)), MODEL, 1024)
        monkeypatch.setattr(job, "LAYOUTS", (LAYOUTS[0], wrong))
    else:
        monkeypatch.setattr(job, "WHOLE", job.WHOLE[: change["WHOLE"]])
    made(tmp_path / "run", tmp_path / "run")
    with open_checkpoint(tmp_path / "run") as checkpoint:
        (problem,) = checkpoint.verify().problems
    assert re.search(reason, problem)
    status, _, errors = run("verify", tmp_path / "run")
    assert status == 1
    assert "do not have each element once" in errors


def test_a_copy_marks_nothing_in_the_original(nodes: tuple[Path, Path]) -> None:
    one, other = nodes
    original = one.parent / "elsewhere"
    other.rename(original)
    for path in original.glob("owner-1/part-*/exp_avg.safetensors"):
        flip_on_disk(path, path.stat().st_size - 5)
    with open_checkpoint(one) as opened:
        report = verify_and_mark(opened)
        assert not report.ok
        assert not report.quarantined
    assert [*one.parent.rglob("damaged.txt")] == []
    with open_checkpoint(one, parts=[original]) as opened:
        assert verify_and_mark(opened).quarantined
    assert len([*original.rglob("damaged.txt")]) == 1


def test_a_node_that_sees_one_owner_checks_it_and_names_the_others(
    nodes: tuple[Path, Path],
) -> None:
    one, other = nodes
    sealed_as = one.parent / "elsewhere" / "owner-1" / part_of(other.parent / "run").name
    with open_checkpoint(one) as opened:
        report = opened.verify()
        assert report.ok
        assert report.not_seen == (str(sealed_as),)
        assert opened.num_parameters == LAYOUTS[0].num_elements
        assert [owner.table for owner in opened.owners] == [None]
    with open_checkpoint(one, parts=[other]) as opened:
        report = opened.verify()
        assert report.ok
        assert report.not_seen == ()
        assert opened.num_parameters == NUM_ELEMENTS
    assert [i.not_seen for i in list_checkpoints(one, parts=[other])] == [(), ()]
    assert all(len(info.not_seen) == 1 and info.valid for info in list_checkpoints(one))
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        open_checkpoint(other)


@pytest.mark.parametrize("damage", ["gone", "rewritten", "aborted", "header", "size", "marked"])
def test_a_part_that_is_not_that_of_the_checkpoint_refuses_it(store: Path, damage: str) -> None:
    part = part_of(store)
    if damage == "gone":
        shutil.rmtree(part)
    elif damage == "rewritten":
        shutil.copy(part_of(store, 1) / "table.json", part / "table.json")
    elif damage == "aborted":  # sealed for the same generation, and not the one that was published
        document = json.loads((part / "table.json").read_text())
        document["body"]["scalars"][0][0][2] = "7.0"
        document["digest"] = digest_of(document["body"])
        size = (part / "table.json").stat().st_size
        (part / "table.json").write_text(json.dumps(document).ljust(size))
    elif damage == "header":
        flip_on_disk(part / "master.safetensors", 30)
    elif damage == "size":
        (part / "master.safetensors").write_bytes(b"x")
    else:
        with PosixBackend() as backend:
            write_quarantine(backend, str(part), "read twice", Poison(str(part)))
    with (
        pytest.warns(RuntimeWarning, match=r"not using .*step-00000002") as warned,
        open_checkpoint(store) as opened,
    ):
        assert opened.step == 1
    assert str(part) in str(warned[0].message)
    with pytest.raises(CheckpointError, match=str(part)):
        open_checkpoint(store / "step-00000002")
    assert [info.valid for info in list_checkpoints(store)] == [True, False]
    assert (store / "step-00000002" / "manifest.json").exists()


class Recycling(WrapperBackend):
    """Recycles a checkpoint, and the part of an owner, before a look at the part's table."""

    def __init__(self, checkpoint: Path, part: Path, look: int) -> None:
        super().__init__(PosixBackend())
        self.look = look
        self.checkpoint, self.table = checkpoint, part / "table.json"
        self.num_looks = 0

    def open(self, path: str, *, writable: bool = False) -> File:
        if path == str(self.table):
            self.num_looks += 1
            if self.num_looks == self.look:
                self.checkpoint.rename(self.checkpoint.with_name(".slot-7"))
                self.table.write_bytes(b"{}".ljust(self.table.stat().st_size))
        return super().open(path, writable=writable)


@pytest.mark.parametrize("look", range(1, 5))
def test_a_checkpoint_that_is_recycled_while_it_is_listed_is_left_out(
    store: Path, look: int
) -> None:
    with Recycling(store / "step-00000002", part_of(store), look) as backend:
        found = list_checkpoints(store, backend=backend)
    assert backend.num_looks >= look
    assert [(info.step, info.valid) for info in found] == [(1, True)]


def test_a_marked_part_can_be_looked_at(store: Path) -> None:
    with PosixBackend() as backend:
        path = str(part_of(store))
        write_quarantine(backend, path, "read twice", Poison(path))
    with pytest.raises(DamagedError, match="read twice"):
        open_checkpoint(store / "step-00000002")
    with open_checkpoint(store / "step-00000002", even_quarantined=True) as opened:
        assert opened.verify().ok


def test_an_open_checkpoint_keeps_its_parts(store: Path) -> None:
    with PosixBackend() as backend:
        path = str(part_of(store))
        with open_checkpoint(store), pytest.raises(LockHeldError):
            backend.lock(path)
        backend.lock(path).release()


def test_parameters_are_not_loaded_without_the_digests_of_all_owners(store: Path) -> None:
    import torch

    model = torch.nn.Module()
    for name, shape in SHAPES.items():
        empty = torch.zeros(shape, dtype=torch.bfloat16)
        model.register_parameter(name, torch.nn.Parameter(empty))
    assert load_parameters(model, store) == 2
    assert any(parameter.any() for parameter in model.parameters())
    with open_for_parameters(store) as opened:
        assert opened.step == 2
    shutil.rmtree(part_of(store))
    with pytest.raises(CheckpointError, match="part of owner 1"):
        load_parameters(model, store)


def test_a_copy_is_read_without_the_original(store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    shutil.rmtree(store)
    with open_checkpoint(copy) as opened:
        assert [owner.path for owner in opened.owners] == [str(part_of(copy))]
        assert opened.verify().ok


def test_pruning_removes_parts_that_none_names(store: Path) -> None:
    extra = store / "owner-3" / "part-1"
    shutil.copytree(part_of(store), extra)  # of another owner: left alone
    old, new = part_of(store, 1), part_of(store)
    planned = prune(store, LastK(1), dry_run=True)
    assert old.exists()
    done = prune(store, LastK(1), verify=True)
    assert [*map(str, [old])] == [p.path for p in done.leftovers if "owner" in p.path]
    assert planned.leftovers == done.leftovers
    assert new.exists()
    assert extra.exists()
    assert not old.exists()
    with open_checkpoint(store) as opened:
        assert opened.verify().ok


class TestBegunByOneProcess:
    """Ranks with a directory each have gone on: the checkpoint before has no part in the second."""

    @pytest.fixture
    def backend(self) -> MemoryBackend:
        backend = memory_store(1, directory=ONE)
        with Job([backend, backend], keep=2) as job:
            job.seal(2)
        return backend

    def test_all_checkpoints_are_listed_and_opened_with_the_directories_of_the_newest(
        self, backend: MemoryBackend
    ) -> None:
        listed = list_checkpoints(ONE, parts=[TWO], backend=backend)
        assert [(info.step, info.valid) for info in listed] == [(1, True), (2, True)]
        for info in listed:
            with open_checkpoint(info.path, parts=[TWO], backend=backend) as opened:
                report = opened.verify()
            assert report.ok
            assert report.not_seen == ()

    def test_all_checkpoints_are_verified_before_any_is_pruned(
        self, backend: MemoryBackend
    ) -> None:
        kept = tuple(f"{ONE}/step-{step:08d}" for step in (1, 2))
        assert prune(ONE, verify=True, parts=[TWO], backend=backend).kept == kept
        (part,) = part_paths(backend)
        flip(backend, f"{part}/exp_avg.safetensors")
        with pytest.raises(DamagedError, match="step-00000002: damaged"):
            prune(ONE, verify=True, parts=[TWO], backend=backend)


def test_nothing_is_pruned_if_parts_of_what_is_kept_cannot_be_seen_to_verify_them() -> None:
    """The ranks have a directory each, and the second one is not named."""
    backend = MemoryBackend()
    with Job([backend, backend], keep=2) as job:
        job.seal(1)
        job.seal(2)
    before = everything(backend)
    with pytest.raises(UnreadableError, match=r"owner-1/part-\d+ is not in .*--part"):
        prune(ONE, LastK(1), verify=True, backend=backend)
    assert everything(backend) == before
    assert prune(ONE, LastK(1), verify=True, parts=[TWO], backend=backend).verified


class TestIndependentReader:
    """`tests/format/spec_reader.py` reads what `docs/format.md` says, without the library."""

    def test_it_reads_every_box_of_every_owner(self, store: Path) -> None:
        checkpoint = store / "step-00000002"
        _, body = read_manifest(checkpoint)
        ((_, part, table),) = owner_parts(checkpoint)
        whole = {
            (array, name): np.full(shape, np.nan, dtype=np.float32)
            for array in ("master", "exp_avg")
            for name, shape in SHAPES.items()
        }
        covered = {key: np.zeros(array.shape, dtype=int) for key, array in whole.items()}
        for directory, described in ((checkpoint, body), (part, table)):
            for array, boxes in owned_state(directory, described).items():
                for (name, offsets), data in boxes.items():
                    at = tuple(slice(o, o + n) for o, n in zip(offsets, data.shape, strict=True))
                    whole[array, name][at] = data
                    covered[array, name][at] += 1
        assert all((count == 1).all() for count in covered.values())
        # The values are those that were written, chunk by chunk.
        norm = b"".join(
            values(2, 0, "master", chunk, LAYOUTS[0].byte_range("master", chunk)[1])
            for chunk in range(LAYOUTS[0].num_chunks)
        )[-4 * 300 :]
        assert whole["master", "norm"].tobytes() == norm

    def test_it_finds_the_model_whole(self, store: Path) -> None:
        checkpoint = store / "step-00000002"
        _, body = read_manifest(checkpoint)
        ((_, _, table),) = owner_parts(checkpoint)
        assert check_model_boxes(checkpoint, body, table) == sum(t.nbytes for t in MODEL)

    def test_it_finds_parts_in_other_directories(self, nodes: tuple[Path, Path]) -> None:
        one, other = nodes
        checkpoint = one / "step-00000002"
        assert [*owner_parts(checkpoint)] == []
        ((_, part, _),) = owner_parts(checkpoint, other)
        assert part.parent == other / "owner-1"


class TestCommands:
    def test_they_say_which_owners_are_seen(self, run: Run, nodes: tuple[Path, Path]) -> None:
        one, other = nodes
        missing = "elsewhere/owner-1/part-"
        for command, words in (
            ("ls", "not counted"),
            ("verify", "not checked"),
            ("show", "owner 1"),
        ):
            code, out, _ = run(command, one)
            flat = out.replace("\n", "")
            assert code == 0
            assert words in out
            assert "not seen here" in flat
            assert missing in flat or command == "show"
            code, out, _ = run(command, one, "--part", other)
            assert code == 0
            assert "not seen here" not in out.replace("\n", "")
        _, out, _ = run("verify", one, "--json")
        assert [len(c["not_seen"]) for c in json.loads(out)["checkpoints"]] == [1, 1]
        _, out, _ = run("show", one, "--json")
        assert [o["seen"] for o in json.loads(out)["owners"]] == [False]

    def test_pins_and_pruning_work_as_before(self, run: Run, store: Path) -> None:
        code, _, _ = run("pin", store / "step-00000001", "first")
        assert code == 0
        code, out, _ = run("prune", store, "--keep", "1")
        assert code == 0, out
        assert part_of(store, 1).exists()
        code, _, _ = run("unpin", store, "first")
        assert code == 0
        old = part_of(store, 1)
        code, out, _ = run("prune", store, "--keep", "1")
        assert code == 0, out
        assert not old.exists()

    def test_parts_that_no_checkpoint_names_are_listed(self, run: Run, store: Path) -> None:
        code, out, _ = run("ls", store)
        assert code == 0
        assert "named by no checkpoint" not in out
        old = part_of(store, 1)
        shutil.rmtree(store / "step-00000001")
        code, out, _ = run("ls", store)
        assert code == 0
        assert f"{old}: named by no checkpoint" in out.replace("\n", " ")
        run("prune", store)
        assert not old.exists()

    def test_the_slot_that_the_next_step_is_written_to_is_not_listed(
        self, run: Run, tmp_path: Path
    ) -> None:
        store = made(tmp_path / "run", tmp_path / "run", last=3)
        assert len(list((store / "owner-1").iterdir())) == 4  # with LOCK
        assert "named by no checkpoint" not in run("ls", store)[1]
        newest = part_of(store, 3)
        shutil.rmtree(store / "step-00000003")
        _, out, _ = run("ls", store)
        assert out.count("named by no checkpoint") == 1
        assert f"{newest}: named by no checkpoint" in out.replace("\n", " ")

    def test_verify_below_takes_no_owner_for_a_store(self, run: Run, store: Path) -> None:
        code, out, _ = run("verify", "--all", store.parent, "--json")
        assert code == 0
        assert len(json.loads(out)["checkpoints"]) == 2

    def test_a_directory_with_owners_only_is_no_store(
        self, run: Run, nodes: tuple[Path, Path]
    ) -> None:
        code, _, err = run("ls", nodes[1])
        assert code == 1
        assert "not a store" in err


def test_a_path_that_does_not_exist_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(tmp_path / "nothing")
