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
from offload.errors import CheckpointError, DamagedError, StoreError
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


def parts_of(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("part-*"))


def part_of(place: Path, step: int) -> str:
    manifest = json.loads((place / f"step-{step:08d}" / "manifest.json").read_bytes())
    name: str = manifest["body"]["parts"][0]["name"]
    return name


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
    into = tmp_path / "copy"
    return [Path(shutil.copytree(place, into / place.parent.name)) for place in original]


class TestPrune:
    def test_prune_of_a_copy_touches_nothing_before_it_is_told_where_its_drives_are(
        self, run: Run, original: Places, copy: Places
    ) -> None:
        go_on(original, 3, keep=3)  # the original goes on
        os.remove(original[1] / "LOCK")  # not even this is made anew
        before = tree(*original, *copy)
        for options in ([], ["--keep", "1"], ["--keep", "1", "--dry-run"]):
            code, out, err = run("prune", copy[0], *options)
            assert (code, out, err.count("\n")) == (1, "", 1)
            assert f"--part {original[1]}" in err
            assert "copy" in err
            assert tree(*original, *copy) == before
        assert newest_of(original) == 6
        before = tree(*original)
        code, _, err = run("prune", copy[0], "--keep", "1", "--part", copy[1])
        assert (code, err) == (0, "")
        assert tree(*original) == before
        assert steps(copy[0]) == [3]
        assert parts_of(copy[1]) == [part_of(copy[0], 3)]
        assert (newest_of(original), newest_of(copy)) == (6, 3)

    @pytest.mark.parametrize("kept", [2, 4])
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
        away = (original[0] / "step-00000004").rename(original[0].parent / "away")
        assert run("prune", original[0], "--keep", "1", "--part", original[1])[0] == 1
        away.rename(original[0] / "step-00000004")
        assert tree(*original, *copy) == before
        assert newest_of(original) == 4

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
        arguments = ["prune", original[0], "--keep", "1", "--part", original[1]]
        assert f"{part}: left alone" in run(*arguments, "--dry-run")[1]
        code, out, _ = run(*arguments, "--json")
        report = json.loads(out)
        assert code == 0
        assert [path for path, _ in report["unnamed"]] == [str(part)]
        assert "removed by hand" in report["unnamed"][0][1]
        assert tree(part) == before
        assert parts_of(original[1]) == sorted([part.name, part_of(original[0], 3)])
        assert str(torn) in [removed["path"] for removed in report["leftovers"]]
        away.rename(original[0] / "step-00000002")
        assert run("verify", original[0] / "step-00000002")[0] == 0

    def test_parts_of_what_is_hard_linked_or_half_withdrawn_go_with_it(
        self, run: Run, original: Places, tmp_path: Path
    ) -> None:
        """The former are not overwritten; and a process was killed while it withdrew the other."""
        linked = original[1] / part_of(original[0], 2) / "exp_avg.safetensors"
        (tmp_path / "backup").hardlink_to(linked)
        (original[0] / "step-00000001").rename(original[0] / ".slot-7")
        code, out, _ = run("prune", original[0], "--part", original[1], "--json")
        assert (code, json.loads(out)["unnamed"]) == (0, [])
        assert steps(original[0]) == [2, 3]
        assert parts_of(original[1]) == sorted(part_of(original[0], step) for step in (2, 3))
        code, out, _ = run("prune", original[0], "--keep", "1", "--part", original[1], "--json")
        assert (code, json.loads(out)["unnamed"]) == (0, [])
        assert parts_of(original[1]) == [part_of(original[0], 3)]


class TestVerify:
    def test_damage_of_the_original_marks_nothing_in_the_copy(
        self, run: Run, original: Places, copy: Places
    ) -> None:
        damaged = original[1] / part_of(original[0], 3) / "exp_avg.safetensors"
        flip_on_disk(damaged)
        flip_on_disk(copy[0] / "step-00000002" / "model.safetensors", 5000)
        code, out, err = run("verify", copy[0], "--quarantine")
        assert code == 1
        assert f"{damaged}: " in err, "it is not the copy that was read"
        assert f"{copy[0]}/step-00000003: damaged; not marked" in out
        assert "--part" in out
        marks = {path.parent.name: path.read_text() for path in copy[0].rglob("damaged.txt")}
        assert marks.keys() == {"step-00000002"}, "beside the manifest, wherever the parts are"
        assert "model.safetensors" in marks["step-00000002"]
        with pytest.warns(RuntimeWarning, match="step-00000002"):
            assert newest_of(copy) == 3
        code, found = verified(run, copy[0], "--quarantine", "--part", copy[1])
        assert (code, [bool(result["quarantined"]) for result in found]) == (
            1,
            [False, True, False],
        )
        code, _ = verified(run, original[0], "--quarantine", "--part", original[1])
        assert code == 1
        assert [p.parent.name for p in original[0].rglob("damaged.txt")] == ["step-00000003"]
        with pytest.warns(RuntimeWarning, match="step-00000003"):
            assert newest_of(original) == 2

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
        assert out.count(f"{original[1]}") >= 3, "it says where it has read"
        assert mark.read_bytes() == before
        flip_on_disk(own)
        assert run("verify", copy[0], "--quarantine", "--part", copy[1])[0] == 0
        assert not mark.exists()

    def test_in_python_the_same(self, original: Places, copy: Places) -> None:
        flip_on_disk(original[1] / part_of(original[0], 3) / "exp_avg.safetensors")
        newest = copy[0] / "step-00000003"
        with offload.open_checkpoint(newest) as opened:
            report = offload.verify_and_mark(opened)
        assert (report.ok, report.quarantined) == (False, "")
        assert report.not_marked == report.problems
        with offload.open_checkpoint(newest, parts=[original[1]]) as opened:
            assert offload.verify_and_mark(opened).quarantined


def test_no_use_of_a_copy_writes_where_only_a_manifest_says_that_a_drive_is(
    run: Run, original: Places, copy: Places, tmp_path: Path
) -> None:
    before = tree(*original)
    exported = tmp_path / "out.pt"
    for command, *more in (
        ["ls"], ["show"], ["pin", "name"], ["unpin", "name"], ["verify", "--quarantine"],
        ["export", exported, "--to", "pt"],
    ):  # fmt: skip
        assert run(command, copy[0], *more)[0] == 0
        assert tree(*original) == before, command
    for fresh in ([], ["--fresh"]):
        code, _, err = run("import", exported, copy[0], *fresh)
        assert (code, "2 directories" in err) == (1, True)
    assert offload.load_parameters(make_model(64, 200, seed=1), copy[0]) == 3
    with offload.open_checkpoint(copy[0]) as opened:
        state = offload.read_state(opened, "0.weight")
        assert opened.verify().ok
    with offload.open_checkpoint(copy[0], parts=[copy[1]]) as opened:
        assert same_bits(state, offload.read_state(opened, "0.weight"))
    go_on(copy, 4, keep=1)
    with pytest.raises(StoreError, match=r"spread over 2 directories"):
        optimizer_in(copy[:1])
    assert tree(*original) == before
    assert (newest_of(original), newest_of(copy)) == (3, 7)


class TestName:
    """A checkpoint whose directory is named for another step than its manifest is of."""

    @pytest.fixture
    def renamed(self, tmp_path: Path) -> Path:
        store = tmp_path / "run"
        go_on([store], 2)
        return (store / "step-00000002").rename(store / "step-00000005")

    @pytest.mark.parametrize("of", ["store", "checkpoint"])
    def test_verify_finds_what_restore_refuses(
        self, run: Run, renamed: Path, tmp_path: Path, of: str
    ) -> None:
        for options in ([], ["--quarantine"]):
            path = renamed.parent if of == "store" else renamed
            code, (*_, bad) = verified(run, path, *options)
            assert (code, bad["ok"], bad["path"]) == (1, False, str(renamed))
            assert "its manifest is of step 2, expected 5" in bad["problems"][0]
            assert bad["bytes_checked"] > 0, "and all of it is read"
            assert not (renamed / "damaged.txt").exists(), "its content is whole"
        with pytest.warns(RuntimeWarning, match="is of step 2, expected 5"):
            assert newest_of([renamed.parent]) == 1
        copy = shutil.copytree(renamed, tmp_path / "best")
        assert run("verify", copy)[0] == 0, "a name of its own is no other step"
        renamed.rename(renamed.parent / "step-00000002")
        assert verified(run, renamed.parent)[0] == 0
        assert newest_of([renamed.parent]) == 2

    def test_a_reader_that_names_the_step_gets_no_other(self, run: Run, renamed: Path) -> None:
        model = make_model(64, 200, seed=1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for call in (
            lambda: offload.load_parameters(model, renamed),
            lambda: offload.open_checkpoint(renamed),
            lambda: offload.pin(renamed, "mine"),
        ):
            with pytest.raises(CheckpointError, match="expected 5"):
                call()
        assert same_bits(before, dict(model.state_dict()))
        assert run("show", renamed)[0] == 1
        with offload.open_checkpoint(renamed, even_quarantined=True) as opened:
            assert opened.step == 2, "whoever wants to save something from it can"


def test_what_is_to_be_run_names_all_drives(run: Run, original: Places) -> None:
    """Two damaged in a row: a person has to look at them, and copies the command."""
    said = run("ls", original[1])[1]
    assert f"{original[1]}: no checkpoints; list the first directory of the store" in said
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
