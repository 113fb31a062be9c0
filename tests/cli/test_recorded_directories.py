"""A manifest says where the other drives of a store were: such directories are read, no more.

A copy of a store on several drives names the drives of the original. So nothing may be removed in
them, and no verdict about the copy may last that only they have led to.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import offload
from gds import PosixBackend
from offload.checkpoint.reading import decode_manifest
from offload.errors import CheckpointError, DamagedError, StoreError
from offload.retention.policy import LastK
from offload.store.maintenance.pruning import prune
from tests.command_line import Run
from tests.stores.files import flip_on_disk, steps, tree
from tests.stores.small import make_model, make_optimizer, train
from tests.stores.training import same_bits

Places = list[Path]


def optimizer_in(places: Places, keep: int = 2) -> offload.OffloadedOptimizer:
    settings = {"drives": offload.DriveTuning(calibrate=False)}
    return make_optimizer(make_model(64, 200), directory=places, keep=keep, settings=settings)


def go_on(places: Places, num_steps: int, keep: int = 2) -> None:
    """Go on for some steps, and seal after each of them."""
    with optimizer_in(places, keep) as optimizer:
        optimizer.restore()
        train(optimizer, num_steps)


def newest_of(places: Places) -> int:
    with optimizer_in(places) as optimizer:
        return optimizer.restore().step


def copy_of(places: Places, into: Path) -> Places:
    return [Path(shutil.copytree(place, into / place.parent.name)) for place in places]


def parts_of(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("part-*"))


def part_of(place: Path, step: int) -> str:
    backend = PosixBackend()
    try:
        return decode_manifest(backend, f"{place}/step-{step:08d}").parts[0].name
    finally:
        backend.close()


def verified(run: Run, *arguments: str | Path) -> tuple[int, list[dict[str, Any]]]:
    code, out, _ = run("verify", *arguments, "--json")
    return code, json.loads(out)["checkpoints"]


@pytest.fixture
def original(tmp_path: Path) -> Places:
    """A store on two drives, with the checkpoints of steps 1 to 3."""
    places = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    go_on(places, 3, keep=3)
    return places


@pytest.fixture
def copy(original: Places, tmp_path: Path) -> Places:
    """A copy of it; the manifests in it still name the drives of the original."""
    return copy_of(original, tmp_path / "copy")


class TestPrune:
    @pytest.mark.parametrize("options", [[], ["--keep", "1"], ["--keep", "1", "--dry-run"]])
    def test_prune_of_a_copy_touches_nothing_before_it_is_told_where_its_drives_are(
        self, run: Run, original: Places, copy: Places, options: list[str]
    ) -> None:
        go_on(original, 3, keep=3)  # the original goes on
        os.remove(original[1] / "LOCK")  # not even this is made anew
        before = tree(*original, *copy)
        code, out, err = run("prune", copy[0], *options)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1
        assert f"--part {original[1]}" in err
        assert "copy" in err
        assert tree(*original, *copy) == before
        assert newest_of(original) == 6

    def test_prune_of_a_copy_that_is_told_works_in_the_copy_only(
        self, run: Run, original: Places, copy: Places
    ) -> None:
        go_on(original, 3, keep=3)
        before = tree(*original)
        code, _, err = run("prune", copy[0], "--keep", "1", "--part", copy[1])
        assert (code, err) == (0, "")
        assert tree(*original) == before
        assert steps(copy[0]) == [3]
        assert parts_of(copy[1]) == [part_of(copy[0], 3)]
        assert (newest_of(original), newest_of(copy)) == (6, 3)

    @pytest.mark.parametrize("kept", [2, 3, 4])
    def test_the_drives_of_a_store_that_has_gone_on_are_refused(
        self, run: Run, original: Places, copy: Places, kept: int
    ) -> None:
        """Whoever copies the line of the error, and has a copy, names the wrong directories."""
        go_on(original, 1, keep=kept)
        before = tree(*original, *copy)
        for dry in ([], ["--dry-run"]):
            code, out, err = run("prune", copy[0], "--keep", "1", "--part", original[1], *dry)
            assert (code, out) == (1, "")
            assert f"{original[1]}/{part_of(original[0], 4)}" in err
            assert "generation 4" in err
            assert "--part" in err
        assert tree(*original, *copy) == before
        assert newest_of(original) == 4

    def test_so_they_are_if_only_the_newest_is_gone(self, run: Run, original: Places) -> None:
        part = original[1] / part_of(original[0], 3)
        away = (original[0] / "step-00000003").rename(original[0].parent / "away")
        before = tree(*original)
        code, _, err = run("prune", original[0], "--keep", "1", "--part", original[1])
        assert code == 1
        assert f"{part}: this part is of generation 3" in err
        assert tree(*original) == before
        away.rename(original[0] / "step-00000003")
        assert newest_of(original) == 3

    def test_nothing_is_refused_while_a_manifest_cannot_be_read(
        self, run: Run, original: Places
    ) -> None:
        """The part that seems too new may be of that checkpoint: it is left alone."""
        part = original[1] / part_of(original[0], 3)
        before = tree(part)
        (original[0] / "step-00000003" / "manifest.json").write_bytes(b"damaged")
        code, out, _ = run("prune", original[0], "--keep", "1", "--part", original[1], "--json")
        assert (code, json.loads(out)["unnamed"]) == (0, [])
        assert steps(original[0]) == [2, 3]
        assert tree(part) == before

    def test_a_sealed_part_that_no_manifest_names_is_left_alone_and_reported(
        self, run: Run, original: Places
    ) -> None:
        """Somebody has taken the checkpoint away by hand, and may put it back."""
        part = original[1] / part_of(original[0], 2)
        away = (original[0] / "step-00000002").rename(original[0].parent / "away")
        torn = original[1] / "part-9"
        torn.mkdir()
        (torn / "part.json").write_bytes(b" " * 4096)
        before = tree(part)
        code, out, _ = run("prune", original[0], "--keep", "1", "--part", original[1], "--json")
        report = json.loads(out)
        assert code == 0
        assert [path for path, _ in report["unnamed"]] == [str(part)]
        assert "removed by hand" in report["unnamed"][0][1]
        assert tree(part) == before
        assert parts_of(original[1]) == sorted([part.name, part_of(original[0], 3)])
        assert str(torn) in [removed["path"] for removed in report["leftovers"]]
        away.rename(original[0] / "step-00000002")
        assert run("verify", original[0] / "step-00000002")[0] == 0

    def test_it_is_said_to_people_as_well(self, run: Run, original: Places) -> None:
        part = original[1] / part_of(original[0], 2)
        (original[0] / "step-00000002").rename(original[0].parent / "away")
        for dry in (["--dry-run"], []):
            _, out, _ = run("prune", original[0], "--part", original[1], *dry)
            assert f"{part}: left alone" in out

    def test_parts_of_hard_linked_checkpoints_go_with_them(
        self, run: Run, original: Places, tmp_path: Path
    ) -> None:
        """Their part.json is not overwritten, so it still says that it is sealed."""
        linked = original[1] / part_of(original[0], 1) / "exp_avg.safetensors"
        (tmp_path / "backup").hardlink_to(linked)
        code, out, _ = run("prune", original[0], "--keep", "1", "--part", original[1], "--json")
        assert (code, json.loads(out)["unnamed"]) == (0, [])
        assert parts_of(original[1]) == [part_of(original[0], 3)]

    def test_what_a_withdrawal_has_left_half_done_is_removed_on_every_drive(
        self, run: Run, original: Places
    ) -> None:
        """A process was killed between the rename of a checkpoint and the end of its manifest."""
        (original[0] / "step-00000001").rename(original[0] / ".slot-7")
        code, out, _ = run("prune", original[0], "--part", original[1], "--json")
        assert (code, json.loads(out)["unnamed"]) == (0, [])
        assert steps(original[0]) == [2, 3]
        assert parts_of(original[1]) == sorted(part_of(original[0], step) for step in (2, 3))

    def test_in_python_the_parts_are_asked_for_as_well(self, original: Places) -> None:
        before = tree(*original)
        with pytest.raises(StoreError, match="--part"):
            prune(original[0], LastK(1))
        assert tree(*original) == before
        report = prune(original[0], LastK(1), parts=[original[1]])
        assert (steps(original[0]), report.unnamed) == ([3], ())


class TestVerify:
    def test_damage_of_the_original_marks_nothing_in_the_copy(
        self, run: Run, original: Places, copy: Places
    ) -> None:
        damaged = original[1] / part_of(original[0], 3) / "exp_avg.safetensors"
        flip_on_disk(damaged)
        code, out, err = run("verify", copy[0], "--quarantine")
        assert code == 1
        assert f"{damaged}: " in err
        assert f"{copy[0]}/step-00000003: damaged; not marked" in out
        assert "--part" in out
        assert not list(copy[0].rglob("damaged.txt"))
        assert newest_of(copy) == 3
        code, found = verified(run, copy[0], "--quarantine", "--part", copy[1])
        assert (code, [result["quarantined"] for result in found]) == (0, [""] * 3)

    def test_damage_in_the_drives_that_were_given_is_marked(
        self, run: Run, original: Places
    ) -> None:
        flip_on_disk(original[1] / part_of(original[0], 3) / "exp_avg.safetensors")
        code, _ = verified(run, original[0], "--quarantine", "--part", original[1])
        assert code == 1
        assert [p.parent.name for p in original[0].rglob("damaged.txt")] == ["step-00000003"]
        with pytest.warns(RuntimeWarning, match="step-00000003"):
            assert newest_of(original) == 2

    def test_damage_beside_the_manifest_is_marked_wherever_the_parts_are(
        self, run: Run, original: Places, copy: Places
    ) -> None:
        flip_on_disk(original[1] / part_of(original[0], 3) / "exp_avg.safetensors")
        flip_on_disk(copy[0] / "step-00000003" / "model.safetensors", 5000)
        flip_on_disk(copy[0] / "step-00000002" / "model.safetensors", 5000)
        assert run("verify", copy[0], "--quarantine")[0] == 1
        marks = {p.parent.name: p.read_text() for p in copy[0].rglob("damaged.txt")}
        assert sorted(marks) == ["step-00000002", "step-00000003"]
        assert all("model.safetensors" in text for text in marks.values())
        assert not any(str(original[1]) in text for text in marks.values())

    def test_a_mark_is_not_lifted_because_the_original_is_whole(
        self, run: Run, original: Places, copy: Places
    ) -> None:
        own = copy[1] / part_of(copy[0], 3) / "exp_avg.safetensors"
        flip_on_disk(own)
        assert run("verify", copy[0], "--quarantine", "--part", copy[1])[0] == 1
        mark = copy[0] / "step-00000003" / "damaged.txt"
        before = mark.read_bytes()
        code, out, _ = run("verify", copy[0], "--quarantine")
        assert code == 0, "what was read is whole"
        assert "quarantined" in out
        assert "--part" in out
        assert mark.read_bytes() == before
        flip_on_disk(own)
        assert run("verify", copy[0], "--quarantine", "--part", copy[1])[0] == 0
        assert not mark.exists()

    def test_verify_says_in_which_directories_it_has_read(
        self, run: Run, original: Places, copy: Places
    ) -> None:
        _, out, _ = run("verify", copy[0])
        assert out.count(f"{original[1]}") == 3, "it is not the copy that was read"
        _, out, _ = run("verify", copy[0], "--part", copy[1])
        assert str(original[1]) not in out

    def test_in_python_the_same(self, original: Places, copy: Places) -> None:
        flip_on_disk(original[1] / part_of(original[0], 3) / "exp_avg.safetensors")
        newest = copy[0] / "step-00000003"
        with offload.open_checkpoint(newest) as opened:
            report = offload.verify_and_mark(opened)
        assert (report.ok, report.quarantined) == (False, "")
        assert report.not_marked == report.problems
        with offload.open_checkpoint(newest, parts=[original[1]]) as opened:
            assert offload.verify_and_mark(opened).quarantined


@pytest.mark.parametrize(
    "command",
    [["ls"], ["show"], ["pin", "name"], ["pin", "name", "unpin"], ["verify", "--quarantine"],
     ["export"]],
    ids="-".join,
)  # fmt: skip
def test_no_command_writes_where_only_a_manifest_says_that_a_drive_is(
    run: Run, original: Places, copy: Places, tmp_path: Path, command: list[str]
) -> None:
    before = tree(*original)
    name, *rest = command
    if name == "export":
        assert run("export", copy[0], tmp_path / "out.pt", "--to", "pt")[0] == 0
    else:
        assert run(name, copy[0], *rest[:1])[0] == 0
    if rest[1:]:
        assert run("unpin", copy[0], "name")[0] == 0
    assert tree(*original) == before
    assert (newest_of(original), newest_of(copy)) == (3, 3)


def test_nor_does_python(original: Places, copy: Places) -> None:
    before = tree(*original)
    model = make_model(64, 200, seed=1)
    assert offload.load_parameters(model, copy[0]) == 3
    assert [info.valid for info in offload.list_checkpoints(copy[0])] == [True] * 3
    with offload.open_checkpoint(copy[0]) as opened:
        state = offload.read_state(opened, "0.weight")
        assert opened.verify().ok
    offload.pin(copy[0], "mine")
    offload.unpin(copy[0], "mine")
    assert tree(*original) == before
    with offload.open_checkpoint(copy[0], parts=[copy[1]]) as opened:
        assert same_bits(state, offload.read_state(opened, "0.weight"))


def test_training_a_copy_leaves_the_original_as_it_is(original: Places, copy: Places) -> None:
    before = tree(*original)
    go_on(copy, 4, keep=1)
    assert tree(*original) == before
    assert (newest_of(original), newest_of(copy)) == (3, 7)
    with pytest.raises(StoreError, match=r"spread over 2 directories"):
        optimizer_in(copy[:1])
    assert tree(*original) == before


def test_an_import_over_a_copy_leaves_the_original_as_it_is(
    run: Run, original: Places, copy: Places, tmp_path: Path
) -> None:
    assert run("export", original[0], tmp_path / "out.pt", "--to", "pt")[0] == 0
    before = tree(*original)
    for fresh in ([], ["--fresh"]):
        code, _, err = run("import", tmp_path / "out.pt", copy[0], *fresh)
        assert code == 1
        assert "2 directories" in err
        assert tree(*original) == before


class TestName:
    """A checkpoint whose directory is named for another step than its manifest is of."""

    @pytest.fixture
    def renamed(self, tmp_path: Path) -> Path:
        store = tmp_path / "run"
        go_on([store], 2)
        return (store / "step-00000002").rename(store / "step-00000005")

    @pytest.mark.parametrize("of", ["store", "checkpoint"])
    @pytest.mark.parametrize("options", [[], ["--quarantine"]])
    def test_verify_finds_what_restore_refuses(
        self, run: Run, renamed: Path, of: str, options: list[str]
    ) -> None:
        code, found = verified(run, renamed.parent if of == "store" else renamed, *options)
        bad = found[-1]
        assert (code, bad["ok"], bad["path"]) == (1, False, str(renamed))
        assert "its manifest is of step 2, expected 5" in bad["problems"][0]
        assert bad["bytes_checked"] > 0, "and all of it is read"
        assert not (renamed / "damaged.txt").exists(), "its content is whole: a name can be mended"
        with pytest.warns(RuntimeWarning, match="is of step 2, expected 5"):
            assert newest_of([renamed.parent]) == 1
        renamed.rename(renamed.parent / "step-00000002")
        assert verified(run, renamed.parent)[0] == 0
        assert newest_of([renamed.parent]) == 2

    def test_a_reader_that_names_the_step_gets_no_other(self, run: Run, renamed: Path) -> None:
        model = make_model(64, 200, seed=1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError, match="expected 5"):
            offload.load_parameters(model, renamed)
        assert same_bits(before, dict(model.state_dict()))
        with pytest.raises(CheckpointError, match="expected 5"):
            offload.open_checkpoint(renamed)
        with pytest.raises(CheckpointError, match="expected 5"):
            offload.pin(renamed, "mine")
        assert run("show", renamed)[0] == 1
        with offload.open_checkpoint(renamed, even_quarantined=True) as opened:
            assert opened.step == 2, "whoever wants to save something from it can"

    def test_a_copy_under_a_name_of_its_own_is_whole(
        self, run: Run, renamed: Path, tmp_path: Path
    ) -> None:
        copy = shutil.copytree(renamed, tmp_path / "best")
        assert run("verify", copy)[0] == 0


def test_what_is_to_be_run_names_all_drives(original: Places) -> None:
    """Two damaged in a row: a person has to look at them, and copies the command."""
    for step in (2, 3):
        flip_on_disk(original[0] / f"step-{step:08d}" / "model.safetensors", 5000)
    with (
        optimizer_in(original) as optimizer,
        pytest.warns(RuntimeWarning),
        pytest.raises(DamagedError) as caught,
    ):
        optimizer.restore()
    command = f"offload verify {original[0]} --quarantine --part {original[1]}`"
    assert command in str(caught.value)


def test_ls_of_a_further_directory_names_the_first_one(run: Run, tmp_path: Path) -> None:
    places = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    go_on(places, 1)
    code, out, _ = run("ls", places[1])
    assert code == 0
    assert f"{places[1]}: no checkpoints; list the first directory of the store" in out
    empty = tmp_path / "empty"
    optimizer_in([empty]).close()
    assert run("ls", empty)[1] == f"{empty}: no checkpoints\n"
