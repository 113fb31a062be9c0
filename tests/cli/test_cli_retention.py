"""`offload prune`, `pin` and `unpin`, and what `ls` and `show` tell of pins and metrics."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

import offload
from gds import File, PosixBackend, StorageError, WrapperBackend
from offload.errors import UnreadableError
from offload.retention.policy import LastK
from offload.store.pruning import prune
from tests.command_line import Run
from tests.stores.files import flip_on_disk, steps, tree
from tests.stores.small import make_model, make_optimizer, step, train

SIX = [f"step-{number:08d}" for number in range(1, 7)]
LOSSES = dict(enumerate([3.0, 1.0, 2.0, 5.0, 4.0, 6.0], 1))


def optimizer_in(directory: Path | list[Path], **changes: object) -> offload.OffloadedOptimizer:
    settings = {"drives": offload.DriveTuning(calibrate=False)}
    arguments = {"directory": directory, "keep": 6, **changes}
    return make_optimizer(make_model(64, 40), settings=settings, **arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the checkpoints of steps 1 to 6; the third is pinned as `mine`."""
    store = tmp_path_factory.mktemp("trained") / "store"
    with optimizer_in(store) as optimizer:
        train(optimizer, 6, losses=LOSSES)
        optimizer.pin("mine", 3)
    return store


def disk_bytes(store: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in store.rglob("*"))


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ([], [1, 2, 3, 4, 5, 6]),
        (["--keep", "2"], [3, 5, 6]),
        (["--keep", "1", "--every", "2"], [2, 3, 4, 6]),
        (["--every", "4"], [3, 4, 6]),
        (["--best", "loss"], [2, 3, 6]),
        (["--best", "loss:max:2", "--best", "loss:min"], [2, 3, 4, 6]),
        (["--every-seconds", "86400"], [1, 3, 6]),
    ],
    ids=lambda value: " ".join(map(str, value)) or "nothing",
)
def test_prune_leaves_what_the_options_keep_the_pinned_and_the_newest(
    run: Run, store: Path, options: list[str], left: list[int]
) -> None:
    before = tree(store)
    code, out, _ = run("prune", store, *options, "--dry-run")
    assert code == 0
    assert tree(store) == before, "a dry run changes nothing"
    gone = sorted(set(range(1, 7)) - set(left))
    for number in gone:
        assert f"{store}/step-{number:08d}: would be removed" in out
    size, blocks = sum(map(len, before.values())), disk_bytes(store)
    code, out, err = run("prune", store, *options, "--json")
    assert (code, err) == (0, "")
    assert steps(store) == left
    report = json.loads(out)
    assert [Path(c["path"]).name for c in report["checkpoints"]] == [SIX[s - 1] for s in gone]
    assert [Path(path).name for path in report["kept"]] == [SIX[s - 1] for s in left]
    assert report["bytes"] == size - sum(map(len, tree(store).values()))
    assert disk_bytes(store) <= blocks - report["bytes"], "the drive has the space back"
    for number in left:
        with offload.open_checkpoint(store / f"step-{number:08d}") as checkpoint:
            assert checkpoint.verify().ok
    before = tree(store)
    again = json.loads(run("prune", store, *options, "--json")[1])
    assert (again["bytes"], again["checkpoints"], again["leftovers"]) == (0, [], [])
    assert tree(store) == before
    with optimizer_in(store) as optimizer:
        assert optimizer.restore().step == 6


def test_prune_by_a_metric_that_no_checkpoint_has_is_refused_and_names_those_there_are(
    run: Run, store: Path, tmp_path: Path
) -> None:
    without = tmp_path / "without"
    with optimizer_in(without) as optimizer:
        step(optimizer)
    assert list(without.glob(".slot-*"))
    assert run("prune", without, "--best", "loss")[0] == 0, "it has no checkpoint"
    assert not list(without.glob(".slot-*"))
    with optimizer_in(without) as optimizer:
        step(optimizer)
        optimizer.checkpoint().result()
    for place, there in ((store, "theirs is 'loss'"), (without, "they have none")):
        before = tree(place)
        for dry in ([], ["--dry-run"]):
            code, out, err = run("prune", place, "--keep", "1", "--best", "los:max", *dry)
            assert (code, out, err.count("\n")) == (1, "", 1)
            assert f"{place}: no checkpoint has the metric 'los'; {there}" in err
            assert tree(place) == before
    with optimizer_in(store) as optimizer:
        optimizer.restore()
        step(optimizer)
        optimizer.checkpoint(metrics={"accuracy": 1.0}).result()
    assert run("prune", store, "--best", "loss")[0] == 0, "some have it"
    assert steps(store) == [2, 3, 7]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["really", "dry-run"])
@pytest.mark.parametrize("damaged", [6, 3], ids=["the newest", "a pinned one"])
def test_prune_verify_refuses_before_anything_is_removed_if_what_is_kept_is_damaged(
    run: Run, store: Path, damaged: int, dry: list[str]
) -> None:
    flip_on_disk(store / SIX[damaged - 1] / "exp_avg.safetensors")
    before = tree(store)
    code, out, err = run("prune", store, "--keep", "1", "--verify", *dry)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert f"{store / SIX[damaged - 1]}: damaged" in err
    assert "exp_avg.safetensors" in err
    assert f"nothing was removed: run `offload verify --quarantine {store}`" in err
    assert tree(store) == before


def test_after_the_step_that_prune_verify_names_a_whole_checkpoint_is_kept_instead(
    run: Run, store: Path
) -> None:
    flip_on_disk(store / SIX[5] / "exp_avg.safetensors")
    assert run("prune", store, "--keep", "1", "--verify")[0] == 1
    assert run("verify", "--quarantine", store)[0] == 1
    code, out, _ = run("prune", store, "--keep", "1", "--verify")
    assert code == 0
    assert steps(store) == [3, 5, 6]
    assert f"{SIX[5]}: not usable, and left alone" in out
    with optimizer_in(store) as optimizer, pytest.warns(RuntimeWarning, match="quarantined"):
        assert optimizer.restore().step == 5


def test_prune_verify_reads_what_is_kept_only_and_prune_says_that_it_has_not(
    run: Run, store: Path
) -> None:
    flip_on_disk(store / SIX[0] / "exp_avg.safetensors")
    for flags, verified in ([], False), (["--verify"], True):
        _, out, _ = run("prune", store, "--keep", "1", "--dry-run", "--json", *flags)
        assert json.loads(out)["verified"] is verified
    said = "the checkpoints that are kept were not read (offload prune --verify reads them first)"
    assert said in run("prune", store, "--keep", "5", "--dry-run")[1]
    assert said not in run("prune", store)[1], "no checkpoint goes"
    code, out, err = run("prune", store, "--keep", "1", "--verify")
    assert (code, err, said in out) == (0, "", False)
    assert steps(store) == [3, 6]


class Unreadable(WrapperBackend):
    """Cannot open one file of the newest checkpoint, once it is told so."""

    fails = False

    def open(self, path: str | os.PathLike[str], *, writable: bool = False) -> File:
        if self.fails and str(path).endswith(f"{SIX[5]}/exp_avg.safetensors"):
            raise StorageError(errno.EIO, "open", path)
        return super().open(path, writable=writable)


@pytest.mark.parametrize("when", ["it is opened", "it is read"])
def test_prune_verify_refuses_if_what_is_kept_cannot_be_read(store: Path, when: str) -> None:
    before = tree(store)
    backend = Unreadable(PosixBackend())
    seen: list[int] = []

    def progress(done: int, _: int) -> None:
        is_second = bool(seen) and done < seen[-1]  # of the two checkpoints that are kept
        backend.fails |= is_second or when == "it is opened"
        seen.append(done)

    with pytest.raises(
        UnreadableError, match=r"not known whether its content is damaged.*Nothing was rem"
    ):
        prune(store, LastK(1), verify=True, progress=progress, backend=backend)
    backend.close()
    assert tree(store) == before


def test_prune_removes_what_crashes_have_left_behind(run: Run, store: Path) -> None:
    (store / "step-00000005").rename(store / ".slot-1")  # as a withdrawal that was interrupted
    (store / ".slot-2").mkdir()
    (store / ".slot-2" / "master.safetensors").write_bytes(b"half a slot")
    (store / "pins" / ".mine.1-1.new").write_bytes(b"half a pin")
    (store / "step-00000004" / "exp_avg.safetensors").unlink()
    code, out, _ = run("prune", store, "--keep", "1")
    assert code == 0
    assert sorted(p.name for p in store.iterdir()) == [
        "LOCK", "history.jsonl", "pins", "status.json",
        "step-00000003", "step-00000004", "step-00000006",
    ]  # fmt: skip
    assert [p.name for p in (store / "pins").iterdir()] == ["mine"]
    assert f"{store}/.slot-1: removed" in out
    assert "step-00000004: not usable, and left alone" in out
    assert "exp_avg.safetensors: missing" in out


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["really", "dry-run"])
def test_prune_is_refused_while_a_process_trains(run: Run, store: Path, dry: list[str]) -> None:
    with optimizer_in(store) as optimizer:
        before = tree(store)
        code, out, err = run("prune", store, "--keep", "1", *dry)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1
        assert f"{store}: a process is training in this store" in err
        assert tree(store) == before
        optimizer.restore()
    assert run("prune", store, "--keep", "1", *dry)[0] == 0


def test_prune_leaves_what_somebody_reads(run: Run, store: Path) -> None:
    with offload.open_checkpoint(store / "step-00000002") as reader:
        _, out, _ = run("prune", store, "--keep", "1")
        assert f"{store}/step-00000002: not removed, because it is being read" in out
        assert steps(store) == [2, 3, 6]
        assert reader.verify().ok
    _, out, _ = run("prune", store, "--keep", "1")
    assert steps(store) == [3, 6]


def test_prune_of_several_drives(run: Run, tmp_path: Path) -> None:
    places = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    with optimizer_in(places) as optimizer:
        train(optimizer, 4, losses=LOSSES)
    (places[1] / "part-9").mkdir()
    (places[1] / "part-9" / "part.json").write_bytes(b" " * 4096)
    size = sum(map(len, tree(*places).values()))
    away = places[1].rename(tmp_path / "moved")
    code, _, err = run("prune", places[0], "--keep", "2", "--part", places[1])
    assert code == 1
    assert f"{places[1]}: this directory, given with --part, does not exist" in err
    assert not places[1].exists()
    assert steps(places[0]) == [1, 2, 3, 4]
    code, out, _ = run("prune", places[0], "--keep", "2", "--part", away, "--json")
    assert code == 0
    assert steps(places[0]) == [3, 4]
    assert len(list(away.glob("part-*"))) == 2
    assert json.loads(out)["bytes"] == size - sum(map(len, tree(places[0], away).values()))
    assert [run("verify", places[0], "--part", away)[0]] == [0]


@pytest.mark.parametrize("what", ["missing", "a checkpoint", "something else", "a file"])
def test_prune_of_what_is_no_store_makes_and_removes_nothing(
    run: Run, store: Path, tmp_path: Path, what: str
) -> None:
    path = tmp_path / "else"
    if what == "something else":
        path.mkdir()
    elif what == "a file":
        path.write_text("mine")
    elif what == "a checkpoint":
        path = store / "step-00000001"
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("prune", path, "--keep", "1")
    assert (code, out) == (1, "")
    assert str(path) in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "options",
    [["--keep", "0"], ["--every", "-1"], ["--every-seconds", "nan"], ["--best", "loss:best"],
     ["--best", "loss:min:0"], ["--best", "a:min:1:2"], ["--best", "loss:min:two"]],
    ids=" ".join,
)  # fmt: skip
def test_options_that_make_no_sense_are_status_2(run: Run, store: Path, options: list[str]) -> None:
    assert run("prune", store, *options)[0] == 2
    assert steps(store) == [1, 2, 3, 4, 5, 6]


def test_pin_and_unpin(run: Run, store: Path) -> None:
    code, out, _ = run("pin", store / "step-00000002", "lowest")
    assert (code, out) == (0, f"{store}/step-00000002: pinned as lowest\n")
    assert run("pin", store, "last")[1] == f"{store}/step-00000006: pinned as last\n"
    assert run("pin", store / "step-00000004", "mine")[0] == 0  # moves from step 3
    listed = json.loads(run("ls", store, "--json")[1])
    pins = {info["step"]: info["pins"] for info in listed if info["pins"]}
    assert pins == {2: ["lowest"], 4: ["mine"], 6: ["last"]}
    assert [info["metrics"]["loss"] for info in listed] == [*LOSSES.values()]
    assert "metric loss" in run("show", store / "step-00000004")[1]
    run("prune", store, "--keep", "1")
    assert steps(store) == [2, 4, 6]
    assert run("unpin", store, "mine")[:2] == (0, f"{store}: removed the pin mine\n")
    run("prune", store, "--keep", "1")
    assert steps(store) == [2, 6]
    code, _, err = run("unpin", store, "mine")
    assert code == 1
    assert "there is no pin 'mine' in this store (it has: last, lowest)" in err


def test_pin_beside_a_process_that_trains(run: Run, store: Path) -> None:
    with optimizer_in(store, keep=1) as optimizer:
        optimizer.restore()
        assert run("pin", store, "here")[0] == 0
        step(optimizer)
        optimizer.checkpoint().result()
        assert steps(store) == [3, 6, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pin", "step-00000009", "x"], "no checkpoint or store here"),
        (["pin", "step-00000002", "a/b"], "cannot be the name of a pin"),
        (["pin", "step-00000002", ".x"], "cannot be the name of a pin"),
        (["unpin", "nowhere", "x"], "there is no store here"),
        (["unpin", ".", ".."], "cannot be the name of a pin"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_pinned_is_one_line_and_status_1(
    run: Run, store: Path, arguments: list[str], message: str
) -> None:
    before = tree(store)
    code, out, err = run(arguments[0], store / arguments[1], *arguments[2:])
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1
    assert tree(store) == before


def test_ls_says_which_pins_are_of_nothing(run: Run, store: Path) -> None:
    shutil.rmtree(store / "step-00000003")
    (store / "pins" / "broken").write_text("?")
    code, out, err = run("ls", store, "--json")
    assert code == 0
    assert len(json.loads(out)) == 5
    assert "pin mine: its checkpoint step-00000003" in err
    assert "pins/broken: cannot be read as a pin" in err
    (store / "pins" / "broken").unlink()
    run("prune", store, "--keep", "1")
    assert steps(store) == [6]
